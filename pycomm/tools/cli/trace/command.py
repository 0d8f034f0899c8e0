"""``pycomm trace``: runs a script on local ranks, or reads the files of an earlier run, and draws one step."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.collectives.recorder import TRACE_FOLDER
from pycomm.collectives.recorder.traces import DEFAULT_STEP, STEP
from pycomm.tools.cli.arguments import complain, integer, say

_DESCRIPTION = f"""\
Draws one training step of all ranks: forward, backward, buckets on the communication thread, collectives, waiting. Runs
a script that calls pycomm.attach under torchrun on this host. For several hosts, start the script yourself with
{TRACE_FOLDER}=FOLDER and {STEP}=N in its environment, then give this command the folder.
"""


_SUFFIXES = (".png", ".json")
_INTERRUPTED = 130
_PATIENCE = 40.0
"""Seconds to wait for torchrun to end its ranks: it kills them after 30."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="draw one training step of a script, of all ranks",
        description=_DESCRIPTION,
        epilog="Exit code: 0 success, 1 the script failed or wrote no step, 2 wrong arguments, 130 interrupted.",
    )
    add = parser.add_argument
    add("--ranks", type=integer(1), default=2, help="processes to start (default 2)")
    add(
        "--step",
        type=integer(1),
        default=DEFAULT_STEP,
        help=f"number of the step, counted in reductions (default {DEFAULT_STEP})",
    )
    add(
        "-o",
        "--out",
        type=Path,
        default=Path("pycomm_trace"),
        help="name of the picture, with or without suffix (default pycomm_trace)",
    )
    add("script", type=Path, help="the script, or a folder of files that ranks have written")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.script.exists():
        complain(f"pycomm trace: there is no {arguments.script}")
        return 2
    try:  # before the script runs, which may take long
        pictures = _outputs(arguments.out)
    except (OSError, ValueError) as error:
        complain(f"pycomm trace: cannot write to {arguments.out}: {error}")
        return 2
    try:
        from pycomm.tools.cli.trace import timeline
    except ImportError:
        complain("pycomm trace requires matplotlib: pip install 'pycomm-torch[demo]'")
        return 2
    code = 0
    with tempfile.TemporaryDirectory(prefix="pycomm_trace_") as temporary:
        folder = arguments.script
        if not folder.is_dir():
            folder = Path(temporary)
            code = _run_script(arguments.script, arguments.arguments, arguments.ranks, arguments.step, folder)
            if code != 0:  # the step may have been traced before
                print(f"pycomm trace: the script ended with exit code {code}", file=sys.stderr)
        try:
            traces = timeline.read_traces(folder.glob("rank*.json"))
        except timeline.NoTraceError as error:
            complain(f"pycomm trace: {error}")
            return 2
    if not traces:
        print(f"pycomm trace: no rank reached step {arguments.step} of an attached optimizer", file=sys.stderr)
        return _INTERRUPTED if code == _INTERRUPTED else 1
    picture, events = pictures
    try:
        timeline.save_picture(traces, picture)
        timeline.save_json(traces, events)
    except OSError as error:
        complain(f"pycomm trace: {error}")
        return 2
    say("\n".join(timeline.summary(traces)))
    print(f"written: {picture}, {events} (for chrome://tracing or ui.perfetto.dev)")
    return code if code in (0, _INTERRUPTED) else 1


def _outputs(out: Path) -> tuple[Path, Path]:
    """Return the paths of the picture and the JSON file; make their folder. ``out`` may have either suffix."""
    name = out.stem if out.suffix in _SUFFIXES else out.name
    picture, events = (out.with_name(name + suffix) for suffix in _SUFFIXES)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise PermissionError(f"{out.parent} is not writable")
    return picture, events


def _run_script(script: Path, arguments: Sequence[str], ranks: int, step: int, folder: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {TRACE_FOLDER: str(folder), STEP: str(step)}
    with subprocess.Popen([*command, str(script), *arguments], env=environment) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # torchrun was interrupted, too, and is ending the ranks. Killed now, it would leave them running.
            try:
                process.wait(_PATIENCE)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.terminate()
            return _INTERRUPTED
