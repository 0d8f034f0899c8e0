"""``pycomm explain``: reads what the flight recorders of all ranks have written, and says where the ranks parted."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.cli.explain.dumps import Dump, Group, NoDumpError, group_names, newest_job, read_groups
from pycomm.cli.explain.verdict import told, verdict
from pycomm.recorder import DIRECTORY, folder


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="what the ranks did before an error, by their flight recorders",
        description=(
            "Reads the files that ranks have written when an operation failed, or at SIGUSR2 (kill -USR2 PID), and "
            "says which rank did what else, or was late. They lie in the folder that "
            f"{DIRECTORY} names, or in one of yours below that of temporary files; from several hosts, bring them "
            "together."
        ),
        epilog="Exit code: 0 there is something to say, or all is well; 2 wrong arguments, or no files.",
    )
    parser.add_argument(
        "dumps", nargs="*", type=Path, metavar="DUMP", help="files, or folders (default: the newest job)"
    )
    parser.add_argument("--last", type=int, default=3, metavar="N", help="operations to list of each rank (default 3)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        groups = read_groups(_files(arguments.dumps))
    except NoDumpError as error:
        print(f"pycomm explain: {error}", file=sys.stderr)
        return 2
    found = [(group, verdict(group)) for group in groups]
    troubled = [(group, text) for group, text in found if text is not None]
    if not troubled:
        print(f"{len(groups)} groups: all ranks called the same, and came together.")
    for number, (group, text) in enumerate(troubled):
        print(("\n" if number else "") + str(text))
        _list(group, arguments.last)
    return 0


def _files(given: Sequence[Path]) -> list[Path]:
    """Return the files that are meant.

    Raises:
        NoDumpError: there are none.
    """
    if given:
        return [file for path in given for file in (_readable(path) if path.is_dir() else [path])]
    place = folder()
    if place is None:
        raise NoDumpError(f"{DIRECTORY} is empty, so that nothing has been written: name the files")
    found = newest_job(_readable(place)) if place.is_dir() else []
    if not found:
        raise NoDumpError(f"there are no files in {place}: name them, or their folder")
    return found


def _readable(place: Path) -> dict[Path, set[str]]:
    """Return the files in ``place`` with the names of their groups; say which others are left out.

    Nobody has named these one by one, so that a file that is none, or of another version, is not to stop the command.
    """
    found = {}
    for path in sorted(place.glob("rank*-*.json")):
        try:
            found[path] = group_names(path)
        except NoDumpError as error:
            print(f"pycomm explain: left out: {error}", file=sys.stderr)
    return found


def _list(group: Group, count: int) -> None:
    for rank, history in sorted(group.histories.items()):
        print(f"\n  rank {rank} ({_origin(history.dump)}):")
        numbers = sorted(history.operations)[-count:] if count > 0 else []
        for number in numbers:
            operation = history.operations[number]
            seconds = operation["seconds"]
            took = "still in it" if seconds is None else f"{1e3 * seconds:.3g} ms"
            print(f"    {number:>6}  {_clock(operation['began'])}  {took:>11}  {told(operation, group)}")
            if operation["error"]:
                print(f"            error: {operation['error']}")


def _origin(dump: Dump) -> str:
    return f"{dump.host}, process {dump.pid}, written at {_clock(dump.time)}: {dump.reason}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
