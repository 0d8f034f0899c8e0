"""``pycomm``: one parser, one command per module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pycomm
from pycomm.cli import info
from pycomm.cli.demo import command as demo


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pycomm", description="Fast data-parallel training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"pycomm {pycomm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, demo):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("pycomm: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
