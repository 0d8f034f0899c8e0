"""``pycomm``: the parser, and a command per module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.tools.cli.arguments import Parser, later
from pycomm.tools.cli.bench import command as bench
from pycomm.tools.cli.demo import command as demo
from pycomm.tools.cli.plan import command as plan
from pycomm.tools.cli.trace import command as trace


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Its result has a function ``run``, which executes the chosen one."""
    parser = Parser(prog="pycomm", description="Fast data-parallel training for PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="show this build, what was found here, and the usable transports")
    info.set_defaults(run=later("pycomm.tools.cli.info", whole=True))
    for command in (demo, plan, bench, trace):
        command.add_parser(commands)
    _add_explain(commands)
    _add_checkpoint(commands)
    return parser


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say which rank made another call, or was late, before an error",
        description=(
            "Reads the files that ranks write when an operation fails, or at SIGUSR2 (kill -USR2 PID), and says which "
            "rank made another call or was late. The files are in the folder PYCOMM_FLIGHT_DIR, by default a folder "
            "of your own in the temporary directory. Copy the files of several hosts to one place first."
        ),
        epilog="Exit code: 0 success; 2 wrong arguments, or no files.",
    )
    parser.add_argument(
        "dumps",
        nargs="*",
        type=Path,
        metavar="DUMP",
        help="files, or folders (default: the newest run in this directory)",
    )
    parser.add_argument("--last", type=int, default=3, metavar="N", help="operations to list per rank (default 3)")
    parser.set_defaults(run=later("pycomm.tools.cli.explain.report"))


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser("checkpoint", help="look at checkpoints without ranks")
    show = parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "show",
        help="say what is in a folder of pycomm.save, and whether it is whole",
        description=(
            "Lists the checkpoints in a folder, reads all of their files to compare checksums, and shows the contents "
            "of the last whole one. pycomm.checkpoint.state_dicts(FOLDER) reads it."
        ),
        epilog="Exit code: 0 all are whole; 1 one is damaged, or there is none; 2 wrong arguments.",
    )
    show.add_argument("folder", type=Path, metavar="FOLDER", help="the folder given to pycomm.save, or a checkpoint")
    show.set_defaults(run=later("pycomm.tools.cli.checkpoint", whole=True))


class _Version(argparse.Action):
    """Look up the version and print it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        print(f"pycomm {importlib.metadata.version('pycomm-torch')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    0 success, 1 failure, 2 wrong arguments, 130 interrupted, 141 broken pipe.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("pycomm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
