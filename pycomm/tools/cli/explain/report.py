"""``pycomm explain``: reads the flight-recorder files of all ranks, and says where the ranks diverged."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pycomm import untrusted
from pycomm.collectives.recorder import DIRECTORY, folder
from pycomm.tools.cli.arguments import complain, say
from pycomm.tools.cli.explain.dumps import Content, DumpedGroup, NoDumpError, groups_of, newest_job, read
from pycomm.tools.cli.explain.verdict import described, verdict


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return the exit code."""
    try:
        groups = groups_of(_contents(arguments.dumps))
    except NoDumpError as error:
        complain(f"pycomm explain: {error}")
        return 2
    found = [(group, verdict(group)) for group in groups]
    troubled = [(group, text) for group, text in found if text is not None]
    if not troubled:
        print(f"{len(groups)} groups: all ranks made the same calls, and none was late.")
    for number, (group, text) in enumerate(troubled):
        say(("\n" if number else "") + str(text))
        _list(group, arguments.last)
    return 0


def _contents(given: Sequence[Path]) -> list[Content]:
    """Read the ``given`` files and folders; by default, the files of the newest run in this directory."""
    if given:
        return [content for path in given for content in (_all_in(path) if _is_folder(path) else [read(path)])]
    place = folder()
    if place is None:
        raise NoDumpError(f"{DIRECTORY} is empty, so nothing has been written: name the files")
    # Any user may have created a folder of this name in the temporary directory.
    own = DIRECTORY not in os.environ
    if own:
        _require_own(place)
    there = _readable(place, own=own) if _is_folder(place) else []
    try:
        here = untrusted.one_line(os.getcwd())
    except OSError as error:
        raise NoDumpError(f"the working directory is gone ({error.strerror}): name the files") from error
    found = newest_job(there, here)
    if not there:
        raise NoDumpError(f"there are no files in {place}: name them, or their folder")
    if not found:
        others = ", ".join(sorted({each.dump.directory or "unknown directories" for each in there}))
        raise NoDumpError(
            f"no run in {here} has left files in {place}, but runs in {others}: go there, or name the files"
        )
    _say_which(found, place)
    return found


def _say_which(job: Sequence[Content], place: Path) -> None:
    """Say which run was found, since the user has not named one."""
    newest = job[0].dump
    script = " ".join(newest.command) or "a script without a name"
    age = _age(max(0.0, time.time() - newest.time))
    files = "1 file" if len(job) == 1 else f"{len(job)} files"
    say(f"newest run in {newest.directory}: {script}, {files} in {place}, written {age} ago\n")


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds:.0f} s"


def _all_in(place: Path) -> list[Content]:
    found = _readable(place)
    if not found:
        raise NoDumpError(f"there are no files of the flight recorder in {place}")
    return found


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise NoDumpError(f"{path} cannot be read: {error.strerror or error}") from error


def _require_own(place: Path) -> None:
    try:
        untrusted.require_own_folder(place)
    except FileNotFoundError:
        return  # reported by the caller
    except (OSError, ValueError) as error:
        raise NoDumpError(f"{error}; name the files if you trust them") from error


def _readable(place: Path, *, own: bool = False) -> list[Content]:
    """Read the files in ``place``; say which are left out.

    The user has not named these one by one, so a file that is not a dump or has another version does not stop the
    command.
    """
    found = []
    for path in sorted(place.glob("rank*-*.json")):
        try:
            found.append(read(path, own=own))
        except NoDumpError as error:
            complain(f"pycomm explain: left out: {error}")
    return found


def _list(group: DumpedGroup, count: int) -> None:
    for rank, history in sorted(group.histories.items()):
        dump = history.dump
        origin = f"{dump.host}, process {dump.pid}, written at {_clock(dump.time)}: {dump.reason}"
        say(f"\n  rank {rank} ({origin}):")
        numbers = sorted(history.operations)[-count:] if count > 0 else []
        for number in numbers:
            operation = history.operations[number]
            seconds = operation["seconds"]
            took = "still in it" if seconds is None else f"{1e3 * seconds:.3g} ms"
            say(f"    {number:>6}  {_clock(operation['began'])}  {took:>11}  {described(operation, group)}")
            if operation["error"]:
                say(f"            error: {operation['error']}")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
