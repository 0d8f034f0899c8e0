"""``pycomm demo``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

# Nothing here takes torch at import, and so `pycomm demo --help` does not: the functions below import what does.
from pycomm.cli.arguments import integer, later
from pycomm.cli.demo.messages import Message, Progress, Results
from pycomm.cli.demo.settings import COMPRESSIONS, HEAD_WIDTH, MIN_STEPS, Settings, methods_for, ranks_of

_RATIO = 0.01
_MAX_CONTEXT = 4096  # far less than the validation text has, anywhere
_DESCRIPTION = """\
Trains a byte-level language model on the Python standard library's own source text, on local ranks: the same model,
data, seed and steps with torch's DistributedDataParallel over Gloo, with pycomm, and with pycomm and compression. Shows
what that changed in a table and a plot. Takes about a minute on two cores.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small language model on local ranks and compare with torch's DDP",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=integer(1), default=2, help="processes, each with one thread")
    add("--compression", nargs="+", choices=COMPRESSIONS, default=["topk"], help="one run each, besides the dense ones")
    add(
        "--ratio",
        type=_ratio,
        default=argparse.SUPPRESS,
        help=f"of the entries that topk sends (default: {_RATIO})",
    )
    add("--steps", type=integer(MIN_STEPS), default=350, help=f"steps of each run, at least {MIN_STEPS}")
    add("--seed", type=integer(0), default=0, help="seed of the initial weights and of the order of the text")
    add("--output", type=_writable, default=Path("pycomm_demo.png"), help="file for the plot, a PNG")
    size = parser.add_argument_group("size", "a larger batch has more to compute for the same gradients")
    size.add_argument("--width", type=integer(HEAD_WIDTH, multiple_of=HEAD_WIDTH), default=256, help="of the model")
    size.add_argument("--layers", type=integer(1), default=2, help="of the model")
    size.add_argument(
        "--context", type=integer(8, largest=_MAX_CONTEXT), default=64, help="bytes of text that the model sees"
    )
    size.add_argument("--batch", type=integer(1), default=2, help="windows of text per rank and step")
    parser.set_defaults(run=later(__name__, whole=True), parser=parser)


def run(arguments: argparse.Namespace) -> int:
    from pycomm.cli.demo.corpus import source_files

    ratio = getattr(arguments, "ratio", None)  # None if it was not given
    if ratio is not None and "topk" not in arguments.compression:
        arguments.parser.error("argument --ratio: only --compression topk has one")
    missing = _missing_extra()
    if missing is not None:
        return _fail(f"{missing} is not installed; the demo needs it: pip install 'pycomm-torch[demo]'")
    try:
        source_files()
    except FileNotFoundError as error:
        return _fail(str(error))
    names = ("ranks", "steps", "seed", "batch", "context", "width", "layers", "output")
    methods = methods_for(arguments.compression, _RATIO if ratio is None else ratio)
    settings = Settings(methods=methods, **{name: getattr(arguments, name) for name in names})
    return _run_and_report(settings)


def _run_and_report(settings: Settings) -> int:
    # Here, not above: the rest of pycomm works without the extra.
    from rich.console import Console

    from pycomm.cli.demo.figures import problems
    from pycomm.cli.demo.plot import save_plot
    from pycomm.cli.demo.report import show, title
    from pycomm.launching import RankError

    console = Console()
    _greet(settings, console)
    try:
        results = _train(settings, console)
    except RankError as error:
        return _fail(str(error))
    show(results, settings, console)
    save_plot(results, title(results, settings), settings.output)
    console.print(f"\nPlot: {settings.output}", soft_wrap=True, highlight=False, markup=False)
    found = problems(results)
    return _fail("\n".join(found)) if found else 0


def _greet(settings: Settings, console: Any) -> None:
    cores = len(os.sched_getaffinity(0))
    runs = f"{len(settings.methods)} runs of {settings.steps} steps, taking turns"
    console.print(f"{runs}, on {ranks_of(settings)} of one thread each.", highlight=False)
    if settings.ranks > cores:
        console.print(f"That is more than the {cores} cores: step times will measure the scheduler, too.")


def _train(settings: Settings, console: Any) -> Results:
    from pycomm.cli.demo.live import display
    from pycomm.cli.demo.train import train
    from pycomm.launching import RankError, run_ranks

    received: list[Results] = []
    with display(settings, console) as on_progress:

        def on_message(message: Message) -> None:
            if isinstance(message, Progress):
                on_progress(message)
            elif isinstance(message, Results):
                received.append(message)

        run_ranks(train, settings.ranks, [settings], on_message)
    if not received:
        raise RankError("rank 0 ended without a result")
    return received[0]


def _missing_extra() -> str | None:
    # Imported, not looked up: a broken installation must be found before the training.
    for name in ("rich.progress", "matplotlib.figure"):
        try:
            __import__(name)
        except ImportError as error:
            return (error.name or name).partition(".")[0]
    return None


def _fail(reason: str) -> int:
    print(f"pycomm demo: {reason}", file=sys.stderr)
    return 1


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value}, wanted 0 < ratio <= 1")
    return value


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a file that can be written")
    return path
