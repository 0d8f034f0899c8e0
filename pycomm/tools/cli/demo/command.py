"""``pycomm demo``: its arguments, and the run itself. Modules that import torch are imported late."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycomm.tools.cli.arguments import integer, load_package
from pycomm.tools.cli.demo import network
from pycomm.tools.cli.demo.settings import HEAD_WIDTH, DemoSettings

_MAX_CONTEXT = 4096  # far less than any validation text has
_RANKS_PER_CORE = 4
_MOST_SEED = (1 << 23) - 1  # combined with a step and a rank, it makes a seed of 64 bits
_MEGABITS = {"mbit": 1.0, "gbit": 1000.0}
_SLOWEST, _FASTEST = 10.0, 30_000.0  # Mbit/s
_FOR_RANKS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # on the slow link torch warns that addresses have no names
    "PYCOMM_FLIGHT_DIR": "",  # the death is intended: no file about it
}
_DESCRIPTION = """\
Trains a byte-level language model on the source of Python's standard library, on local ranks. It compares pycomm with
DistributedDataParallel over Gloo, first on this host, then over a slow link between network namespaces, where it also
compresses gradients. It shows the gain in a table and a picture. Takes about a minute on two cores.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small language model on local ranks and over a slow link, and compare with torch's DDP",
        description=_DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=integer(2), default=2, help="processes, each with one thread")
    add("--yes", action="store_true", help=f"allow more than {_RANKS_PER_CORE} ranks per core")
    add("--link", type=_link, default="300mbit", help="rate of the slow link, such as 300mbit or 1gbit")
    add("--kill", action="store_true", help="also kill a rank while it trains; the others continue")
    add("--seconds", type=integer(2), default=30, help="seconds of training, all runs together")
    add(
        "--seed",
        type=integer(0, largest=_MOST_SEED),
        default=0,
        help="seed of the initial weights and of the order of the text",
    )
    add("--output", type=_writable, default=Path("pycomm_demo.png"), help="file for the picture, a PNG")
    size = parser.add_argument_group("size", "a larger batch has more to compute for the same gradients")
    size.add_argument("--width", type=integer(HEAD_WIDTH, multiple_of=HEAD_WIDTH), default=384, help="of the model")
    size.add_argument("--layers", type=integer(1), default=2, help="of the model")
    size.add_argument(
        "--context", type=integer(8, largest=_MAX_CONTEXT), default=16, help="bytes of text that the model sees"
    )
    size.add_argument("--batch", type=integer(1), default=2, help="windows of text per rank and step")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    cores = len(os.sched_getaffinity(0))
    most = arguments.ranks + 1 if arguments.kill and arguments.ranks == 2 else arguments.ranks
    if most > _RANKS_PER_CORE * cores and not arguments.yes:
        arguments.parser.error(
            f"argument --ranks: {most} on {cores} cores, wanted at most {_RANKS_PER_CORE * cores}; --yes allows more"
        )
    missing = _missing_extra()
    if missing is not None:
        return _fail(f"{missing} is not installed; the demo needs it: pip install 'pycomm-torch[demo]'")
    denied = network.become_root()
    print(
        f"Training for {arguments.seconds} s: {arguments.ranks} ranks on this host, then over a slow link.", flush=True
    )
    with contextlib.ExitStack() as stack:
        hosts: list[str] = []
        if denied is None:
            try:
                hosts = stack.enter_context(network.hosts(arguments.ranks, arguments.link))
            except OSError as error:
                denied = str(error)
        if denied is not None:
            print(f"No network namespaces ({denied}): pycomm's network model simulates the slow link.", flush=True)
        names = ("ranks", "kill", "seconds", "seed", "batch", "context", "width", "layers", "output")
        values = {name: getattr(arguments, name) for name in names}
        return _run_and_report(DemoSettings(megabits=arguments.link, hosts=tuple(hosts), **values))


def _run_and_report(settings: DemoSettings) -> int:
    load_package()  # late: it takes seconds, and become_root() may restart this process
    from rich.console import Console

    from pycomm.tools.cli.demo.report import link_name, save_plot, show, title
    from pycomm.tools.cli.demo.results import problems
    from pycomm.tools.launching import RankError

    try:
        results = _train(settings)
    except (RankError, FileNotFoundError) as error:
        return _fail(str(error))
    try:
        save_plot(results, title(results, settings), link_name(settings), settings.output)
        print(f"\nPicture: {settings.output}")
    except OSError as error:
        print(f"\nThe picture was not written: {error}")
    show(results, settings, Console())
    found = problems(results)
    return _fail("\n".join(found)) if found else 0


def _train(settings: DemoSettings) -> Any:
    from pycomm.tools.cli.demo.model import source_files
    from pycomm.tools.cli.demo.train import train, train_with_a_death

    source_files()
    results = _run_ranks(train, settings.ranks, settings)
    if settings.kill:
        ranks = max(3, settings.ranks)
        print(f"\nRank {ranks - 1} of {ranks} will be killed.", flush=True)
        results.death = _run_ranks(train_with_a_death, ranks, settings, mortal=[ranks - 1])
    return results


def _run_ranks(program: Callable[..., None], size: int, settings: DemoSettings, **options: Any) -> Any:
    """Run ``program`` on ranks, show its progress, and return its result."""
    from pycomm.tools.launching import RankError, run_ranks
    from pycomm.tools.launching.reporting import Progress, display

    received: list[Any] = []
    with display() as show:
        show(Progress(0, 1))  # at once, since ranks take seconds to start

        def on_message(message: Any) -> None:
            if isinstance(message, Progress):
                show(message)
            else:
                received.append(message)

        run_ranks(program, size, [settings], on_message, environment=_FOR_RANKS, **options)
    if not received:
        raise RankError("rank 0 ended without a result")
    return received[0]


def _missing_extra() -> str | None:
    # Imported, not looked up: a broken installation must be found before the training.
    for name in ("rich.progress", "matplotlib.figure", "pyroute2"):
        try:
            __import__(name)
        except ImportError as error:
            return (error.name or name).partition(".")[0]
    return None


def _fail(reason: str) -> int:
    print(f"pycomm demo: {reason}", file=sys.stderr)
    return 1


def _link(text: str) -> float:
    """Return a rate in Mbit/s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a rate such as 300mbit or 1gbit")
    megabits = float(found[1]) * _MEGABITS[found[2]]
    if not _SLOWEST <= megabits <= _FASTEST:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted {_SLOWEST:g}mbit to {_FASTEST / 1000:g}gbit")
    return megabits


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a file that can be written")
    return path
