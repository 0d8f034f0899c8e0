"""``pycomm bench``: a command for each collective, and one for the kernels."""

from __future__ import annotations

import argparse
from typing import Any

from pycomm.cli.arguments import load_package
from pycomm.cli.bench import settings
from pycomm.cli.bench.kernels import arguments as kernels
from pycomm.cli.bench.operations import OPERATIONS

_COLLECTIVE = """\
Measures {name} between ranks: those that are started here or, under torchrun, those that it has started. Results
are verified first. The table, the options with one letter and the keys of the report are those of nccl-tests; below
the table stand, in comments, spread, floor, and the times of --peers, which take turns with what is measured.

Exit code: 0 all is well, 1 a rank failed, 2 wrong arguments, 7 wrong results or less bandwidth than --min-busbw.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure a collective against other libraries, or the kernels")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for operation in OPERATIONS.values():
        described = _COLLECTIVE.format(name=operation.name)
        one = _add(benches, operation.name, f"{operation.name} between ranks", described)
        settings.add_arguments(one, operation)
        one.set_defaults(run=_measure)
    kernels.add_arguments(_add(benches, "kernels", "the CPU kernels against torch", kernels.DESCRIPTION))


def _add(benches: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    added: argparse.ArgumentParser = benches.add_parser(
        name, help=summary, description=description, formatter_class=formatter
    )
    return added


def _measure(arguments: argparse.Namespace) -> int:
    try:
        checked = settings.settings_of(arguments, settings.launched_ranks())
    except settings.UsageError as error:
        arguments.parser.error(str(error))
    load_package()
    from pycomm.cli.bench import collective

    return collective.run(checked)
