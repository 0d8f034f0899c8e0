"""``pycomm bench``: a command for each collective."""

from __future__ import annotations

import argparse
from typing import Any

from pycomm.tools.cli.arguments import load_package
from pycomm.tools.cli.bench import settings


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure a collective against other libraries")
    for one in settings.add_collectives(parser.add_subparsers(dest="bench", required=True, metavar="WHAT")):
        one.set_defaults(run=_measure)


def _measure(arguments: argparse.Namespace) -> int:
    try:
        checked = settings.settings_of(arguments, settings.launched_ranks())
    except settings.UsageError as error:
        arguments.parser.error(str(error))
    load_package()
    from pycomm.tools.cli.bench import measure

    return measure.run(checked)
