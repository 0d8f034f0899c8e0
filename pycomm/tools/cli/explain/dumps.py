"""Flight-recorder files: reading them, and sorting their operations by process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import checks, untrusted
from pycomm.collectives.recorder.dump import FORMAT
from pycomm.untrusted import COUNT, INTEGER, ListOf, Number, OneOf

_MESSAGES = frozenset(("send", "receive", "recv"))
_LARGEST = 32 << 20  # bytes: what a process with some hundred groups writes

_SECONDS = Number(0, 1e11)  # so that it can be formatted as a time of day
_TEXT = OneOf(None, str)
_LINE = OneOf(None, {"file": str, "line": COUNT, "function": str})
_OPERATION = {
    "number": COUNT,
    "operation": str,
    "dtype": _TEXT,
    "elements": OneOf(None, COUNT),
    "detail": ListOf(OneOf(None, str, INTEGER)),
    "label": _TEXT,
    "line": _LINE,
    "began": _SECONDS,
    "seconds": OneOf(None, _SECONDS),
    "error": _TEXT,
}
_GROUP = {"name": str, "rank": COUNT, "ranks": ListOf(COUNT), "count": COUNT, "operations": ListOf(_OPERATION)}
_SHAPE = {
    "format": FORMAT,
    "host": str,
    "pid": COUNT,
    "command?": ListOf(str),
    "directory?": str,
    "time": _SECONDS,
    "reason": str,
    "main_thread": _LINE,
    "groups": ListOf(_GROUP),
}


class NoDumpError(ValueError):
    """A file is not a flight-recorder dump."""


@dataclass(frozen=True)
class Dump:
    """Origin of one dump file.

    Attributes:
        path: the file.
        host, pid: the process that wrote it.
        time: when it was written: ``time.time()`` on its host.
        reason: why it was written.
        command: the script and its arguments. directory: where it ran, "" if unknown.
        line: the script's line that the main thread was executing, if any.
    """

    path: Path
    host: str
    pid: int
    time: float
    reason: str
    command: Sequence[str]
    directory: str
    line: Mapping[str, Any] | None


@dataclass(frozen=True)
class History:
    """Collectives of one rank on one group.

    Attributes:
        rank: its global rank.
        dump: the file it was read from.
        count: number of its collectives.
        operations: the recorded ones (the last few) by number, without point-to-point messages.
    """

    rank: int
    dump: Dump
    count: int
    operations: Mapping[int, Mapping[str, Any]]

    @property
    def last(self) -> Mapping[str, Any] | None:
        return self.operations.get(self.count)


@dataclass(frozen=True)
class DumpedGroup:
    """One process group.

    Attributes:
        name: the same on all its ranks.
        ranks: global ranks of its members.
        histories: of the ranks whose files were read, by global rank.
    """

    name: str
    ranks: Sequence[int]
    histories: Mapping[int, History]

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [rank for rank in self.ranks if rank not in self.histories]

    @property
    def is_enqueued(self) -> bool:
        """Whether recorded operations end when they are enqueued on a GPU stream, as with NCCL."""
        return "/nccl " in self.name

    @property
    def last_time(self) -> float:
        """When its last operation began."""
        times = [each["began"] for history in self.histories.values() for each in history.operations.values()]
        return max(times, default=0.0)


@dataclass(frozen=True)
class Content:
    """Content of one file.

    Attributes:
        dump: its origin.
        groups: the process's groups as recorded, without control characters.
    """

    dump: Dump
    groups: Sequence[Mapping[str, Any]]

    @property
    def names(self) -> set[str]:
        return {group["name"] for group in self.groups}


def read(path: Path, *, own: bool = False) -> Content:
    """Read the file at ``path``.

    Args:
        own: whether it must belong to this user, see :func:`pycomm.untrusted.open_file`.
    """
    try:
        text = untrusted.read_file(path, most=_LARGEST, own=own)
    except OSError as error:
        raise NoDumpError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise NoDumpError(str(error)) from None
    try:
        content = untrusted.parse(text, untrusted.ANYTHING, "it")
        found = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
        if type(found) is not int or found != FORMAT:
            wanted = f"wanted {FORMAT}: use the pycomm that wrote it"
            raise NoDumpError(f"{path} has format {checks.shown(found)}, {wanted}")
        untrusted.require(content, _SHAPE, "it")
    except ValueError as error:
        if isinstance(error, NoDumpError):
            raise
        raise NoDumpError(f"{path} is not a file of pycomm's flight recorder: {error}") from None
    known = untrusted.printable(content, _SHAPE)
    for number, group in enumerate(known["groups"]):
        if group["ranks"] and group["rank"] >= len(group["ranks"]):
            what = f"groups[{number}] has rank {group['rank']} of {len(group['ranks'])}"
            raise NoDumpError(f"{path} is not a file of pycomm's flight recorder: {what}")
    keys = ("host", "pid", "time", "reason")
    ran = {"command": known.get("command", []), "directory": known.get("directory", "")}
    return Content(Dump(path, **{key: known[key] for key in keys}, **ran, line=known["main_thread"]), known["groups"])


def groups_of(contents: Iterable[Content]) -> list[DumpedGroup]:
    """Return the groups in ``contents``, the most recently active first."""
    members: dict[str, list[int]] = {}
    histories: dict[str, dict[int, History]] = {}
    for content in contents:
        for group in content.groups:
            name = group["name"]
            members[name] = group["ranks"] or [group["rank"]]
            rank = group["ranks"][group["rank"]] if group["ranks"] else group["rank"]
            operations = {each["number"]: each for each in group["operations"] if each["operation"] not in _MESSAGES}
            known = histories.setdefault(name, {}).get(rank)
            if known is None or known.dump.time < content.dump.time:
                histories[name][rank] = History(rank, content.dump, group["count"], operations)
    found = [DumpedGroup(name, ranks, histories[name]) for name, ranks in members.items()]
    return sorted(found, key=lambda group: -group.last_time)


def newest_job(contents: Sequence[Content], directory: str) -> list[Content]:
    """Return the newest file of a process in ``directory``, and all files linked to it by common groups."""
    latest = sorted(contents, key=lambda each: -_written(each.dump.path))
    chosen = [each for each in latest if each.dump.directory == directory][:1]
    wanted = {name for each in chosen for name in each.names}
    for content in latest:
        if content not in chosen and content.names & wanted:
            chosen.append(content)
            wanted |= content.names
    return chosen


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
