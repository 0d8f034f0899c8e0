"""``pycomm trace``: runs a script on local ranks, or reads what its ranks have written, and draws one step."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.cli.arguments import integer
from pycomm.reducer.step_trace import DEFAULT_STEP, FOLDER, STEP

_DESCRIPTION = f"""\
Draws one training step of a script that calls pycomm.attach: forward, backward, buckets on the communication thread,
collectives, waiting, of all ranks. Runs the script under torchrun on this host; or, given a folder, draws what ranks of
several hosts have written there, started with {FOLDER}=FOLDER and {STEP}=N in their environment.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="draw one training step of a script, of all ranks",
        description=_DESCRIPTION,
        epilog="Exit code: 0 done, 1 the script failed or has written no step, 2 wrong arguments.",
    )
    add = parser.add_argument
    add("--ranks", type=integer(1), default=2, help="processes to start (default 2)")
    add("--step", type=integer(1), default=DEFAULT_STEP, help=f"number of the reduction (default {DEFAULT_STEP})")
    add("-o", "--out", type=Path, default=Path("pycomm_trace"), help="begin of the files' names (default pycomm_trace)")
    add("script", type=Path, help="the script, or a folder of files that ranks have written")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        from pycomm.cli.trace import timeline
    except ImportError:
        print("pycomm trace wants matplotlib: pip install 'pycomm-torch[demo]'", file=sys.stderr)
        return 2
    if not arguments.script.exists():
        print(f"pycomm trace: there is no {arguments.script}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="pycomm_trace_") as temporary:
        folder = arguments.script
        if not folder.is_dir():
            folder = Path(temporary)
            code = _run_script(arguments.script, arguments.arguments, arguments.ranks, arguments.step, folder)
            if code != 0:
                print(f"pycomm trace: the script ended with exit code {code}", file=sys.stderr)
                return 1
        try:
            traces = timeline.read_traces(folder.glob("rank*.json"))
        except timeline.NoTraceError as error:
            print(f"pycomm trace: {error}", file=sys.stderr)
            return 2
    if not traces:
        print(f"pycomm trace: no rank has come to step {arguments.step} of an attached optimizer", file=sys.stderr)
        return 1
    picture, events = (arguments.out.with_name(arguments.out.name + suffix) for suffix in (".png", ".json"))
    timeline.save_picture(traces, picture)
    timeline.save_json(traces, events)
    print("\n".join(timeline.summary(traces)))
    print(f"written: {picture}, {events} (for chrome://tracing or ui.perfetto.dev)")
    return 0


def _run_script(script: Path, arguments: Sequence[str], ranks: int, step: int, folder: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {FOLDER: str(folder), STEP: str(step)}
    return subprocess.run([*command, str(script), *arguments], env=environment, check=False).returncode
