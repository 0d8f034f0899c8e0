"""``pycomm explain``: reads the flight-recorder files of all ranks, and says in a sentence where the ranks diverged."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycomm import untrusted
from pycomm.collectives.recorder import DIRECTORY
from pycomm.collectives.recorder.dump import folder
from pycomm.tools.cli.arguments import complain, say
from pycomm.tools.cli.explain.dumps import Content, DumpedGroup, History, NoDumpError, groups_of, newest_job, read

Operation = Mapping[str, Any]
_LATE = 1.0
"""Seconds by which a rank has to be late to be worth a sentence."""

_SHORT = 6
"""Number of characters shown of the random part of a group's name."""

# Collectives whose inputs have the same number of elements on all ranks; in others the numbers may differ.
_EQUAL = frozenset(("all_reduce", "reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "run_program"))

# Collectives that no rank leaves before all ranks have entered.
_TOGETHER = frozenset(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"))


def verdict(group: DumpedGroup) -> str | None:
    """Return what is wrong with ``group``; ``None`` if all its ranks did the same at about the same time."""
    absent = _absent(group)
    found = _differing(group) or absent or _failed(group) or _unfinished(group) or _late(group)
    if not group.missing or (found is not None and found is absent):  # `absent` names the missing ranks already
        return found
    gap = f"There is no file of {_ranks(group.missing)}"
    if found is not None:
        return f"{found} {gap}."
    return f"{gap} of {_name(group)}; the others made the same calls, and none was late."


def _differing(group: DumpedGroup) -> str | None:
    """Describe the first operation in which two ranks' calls differ."""
    histories = sorted(group.histories.values(), key=lambda history: history.rank)
    for number in sorted({number for history in histories for number in history.operations}):
        calls = [(h.rank, h.operations[number]) for h in histories if number in h.operations]
        if len({_signature(operation) for _, operation in calls}) > 1:
            parts = [f"{_ranks(ranks)} called {described(call, group)}" for ranks, call in _sorted_by_call(calls)]
            return f"In operation {number} of {_name(group)}, {', where '.join(parts)}."
    return None


def _absent(group: DumpedGroup) -> str | None:
    """Describe the ranks that have not reached the last operation of the others."""
    histories = group.histories.values()
    furthest = max(histories, key=lambda history: (history.count, _is_stuck(history)))
    operation = furthest.last
    waits = operation is not None and (_is_stuck(furthest) or operation["operation"] not in _TOGETHER)
    if operation is None or not (waits or group.is_enqueued):
        return None
    # A rank may have written its file before this operation began elsewhere. Ranks that only enqueue operations are
    # not in step either.
    since = operation["began"] + (_LATE if group.is_enqueued else 0.0)
    behind = [history for history in histories if history.count < furthest.count and history.dump.time > since]
    others = [history.rank for history in histories if history.count == furthest.count]
    if not behind and not (group.missing and _is_stuck(furthest)):
        return None
    waited = operation["seconds"]
    if waited is None or group.is_enqueued:
        waited = max(0.0, furthest.dump.time - operation["began"])
    text = (
        f"{_ranks(others).capitalize()} waited {waited:.3g} s in operation {furthest.count} of {_name(group)}, "
        f"{described(operation, group)}"
    )
    reasons = [_whereabouts(history, group) for history in behind]
    if group.missing:
        reasons.append(f"there is no file of {_ranks(group.missing)}, which may have died")
    return f"{text}: {'; '.join(reasons)}."


def _is_stuck(history: History) -> bool:
    """Return whether the last operation has failed or not ended."""
    return history.last is not None and bool(history.last["error"] or history.last["seconds"] is None)


def _whereabouts(history: History, group: DumpedGroup) -> str:
    last, line = history.last, history.dump.line
    before = f"its last was operation {history.count}, {described(last, group)}" if last else "it had called nothing"
    now = "" if line is None else f", and it was at {_place(line)} when its file was written"
    return f"rank {history.rank} never reached it: {before}{now}"


def _failed(group: DumpedGroup) -> str | None:
    """Describe the error of the last operation, if it failed."""
    for history in sorted(group.histories.values(), key=lambda history: history.rank):
        if history.last is not None and history.last["error"]:
            what = f"Operation {history.count} of {_name(group)}, {described(history.last, group)}"
            return f"{what}, failed on rank {history.rank}: {history.last['error']}"
    return None


def _unfinished(group: DumpedGroup) -> str | None:
    """Describe the last operation if all ranks entered it and some had not left it."""
    histories = sorted(group.histories.values(), key=lambda history: history.rank)
    count = max(history.count for history in histories)  # earlier operations have ended
    inside = [h for h in histories if h.count == count and h.last is not None and h.last["seconds"] is None]
    if not inside:
        return None
    first = inside[0]
    assert first.last is not None
    ranks = _ranks([each.rank for each in inside])
    verb = "is" if len(inside) == 1 else "are"
    who = "all are" if len(inside) == len(histories) else f"{ranks} {verb}"
    what = f"operation {count} of {_name(group)}, {described(first.last, group)}"
    return f"All ranks entered {what}, and {who} still in it."


def _late(group: DumpedGroup) -> str | None:
    """Describe the operation that one rank entered much later than the others."""
    worst: tuple[float, int, History] | None = None
    histories = list(group.histories.values())
    for number in set.intersection(*(set(history.operations) for history in histories)) if len(histories) > 1 else ():
        times = sorted(history.operations[number]["began"] for history in histories)
        delay = times[-1] - times[(len(times) - 1) // 2]
        if delay >= _LATE and (worst is None or delay > worst[0]):
            last = max(histories, key=lambda history: history.operations[number]["began"])
            worst = delay, number, last
    if worst is None:
        return None
    delay, number, last = worst
    everybody = "The ranks whose files are there" if group.missing else "All ranks"
    return (
        f"{everybody} made the same calls, but rank {last.rank} came {delay:.3g} s late to operation {number} "
        f"of {_name(group)}, {described(last.operations[number], group)}."
    )


def described(operation: Operation, group: DumpedGroup) -> str:
    """Describe an operation on ``group``: the call, its data and its line."""
    words = [operation["operation"]]
    if operation["elements"] is not None:
        words.append(f"of {operation['elements']:,} {operation['dtype'] or 'elements'}")
    if operation["operation"] == "broadcast":
        words.append(f"from rank {_global(group, operation['detail'][0])}" if operation["detail"] else "")
    elif operation["detail"]:
        words.append(f"({', '.join(map(str, operation['detail']))})")
    if operation["label"]:
        words.append(f"for {operation['label']}")
    if operation["line"] is not None:
        words.append(f"at {_place(operation['line'])}")
    return " ".join(word for word in words if word)


def _global(group: DumpedGroup, rank: Any) -> Any:
    """Return the global rank of ``rank`` in ``group``; return anything else unchanged."""
    return group.ranks[rank] if isinstance(rank, int) and 0 <= rank < len(group.ranks) else rank


def _place(line: Mapping[str, Any]) -> str:
    return f"{line['file']}:{line['line']} ({line['function']})"


def _signature(operation: Operation) -> tuple[Any, ...]:
    """Return what must be equal on all ranks of one operation."""
    name = operation["operation"]
    elements = operation["elements"] if name in _EQUAL else None
    return name, operation["dtype"] if name in _EQUAL else None, elements, tuple(operation["detail"])


def _sorted_by_call(calls: Sequence[tuple[int, Operation]]) -> list[tuple[list[int], Operation]]:
    """Group ranks by their call; each group comes with its first rank's call."""
    found: dict[tuple[Any, ...], tuple[list[int], Operation]] = {}
    for rank, operation in calls:
        found.setdefault(_signature(operation), ([], operation))[0].append(rank)
    return list(found.values())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _name(group: DumpedGroup) -> str:
    base, _, meeting = group.name.partition("/")
    members = "" if list(group.ranks) == list(range(len(group.ranks))) else f" of {_ranks(group.ranks)}"
    return (f"group {base}/{meeting[:_SHORT]}" if meeting else f"group {base}") + members


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
        raise NoDumpError(f"the working directory is gone ({error.strerror}): name the files") from None
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
        raise NoDumpError(f"{path} cannot be read: {error.strerror or error}") from None


def _require_own(place: Path) -> None:
    try:
        untrusted.require_own_folder(place)
    except FileNotFoundError:
        return  # reported by the caller
    except (OSError, ValueError) as error:
        raise NoDumpError(f"{error}; name the files if you trust them") from None


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
