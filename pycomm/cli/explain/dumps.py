"""Files of the flight recorder, read back, and sorted by group of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.recorder import FORMAT

_MESSAGES = frozenset(("send", "receive", "recv"))


class NoDumpError(ValueError):
    """A file is no dump of the flight recorder."""


@dataclass(frozen=True)
class Dump:
    """What one process has written.

    Attributes:
        path: the file.
        host, pid: the process.
        time: when it was written, in seconds, as of its host's ``time.time()``.
        reason: why.
        line: where its main thread was then, if that was a line of the script.
    """

    path: Path
    host: str
    pid: int
    time: float
    reason: str
    line: Mapping[str, Any] | None


@dataclass(frozen=True)
class History:
    """What one rank has called on one group.

    Attributes:
        rank: its global rank.
        dump: the file it was read from.
        count: number of its collectives.
        operations: the last ones, as the file has them, by number; messages left out.
    """

    rank: int
    dump: Dump
    count: int
    operations: Mapping[int, Mapping[str, Any]]

    @property
    def last(self) -> Mapping[str, Any] | None:
        """The last collective."""
        return self.operations.get(self.count)


@dataclass(frozen=True)
class Group:
    """Group of ranks.

    Attributes:
        name: name that all its ranks have for it.
        ranks: global ranks of its members.
        histories: of the ranks whose files were read, by global rank.
    """

    name: str
    ranks: Sequence[int]
    histories: Mapping[int, History]

    @property
    def missing(self) -> list[int]:
        """Ranks of which there is no file."""
        return [rank for rank in self.ranks if rank not in self.histories]

    @property
    def is_enqueued(self) -> bool:
        """Whether operations end, as the recorder sees it, once a GPU's stream has them: of NCCL."""
        return "/nccl " in self.name

    @property
    def last_time(self) -> float:
        """When its last operation began."""
        times = [each["began"] for history in self.histories.values() for each in history.operations.values()]
        return max(times, default=0.0)


def read_groups(paths: Iterable[Path]) -> list[Group]:
    """Return the groups that the files at ``paths`` tell of; those with the latest operations first.

    Raises:
        NoDumpError: a file cannot be read, or is something else.
    """
    members: dict[str, list[int]] = {}
    histories: dict[str, dict[int, History]] = {}
    for path in paths:
        dump, groups = _read(path)
        for group in groups:
            name = group["name"]
            members[name] = group["ranks"] or [group["rank"]]
            rank = group["ranks"][group["rank"]] if group["ranks"] else group["rank"]
            operations = {each["number"]: each for each in group["operations"] if each["operation"] not in _MESSAGES}
            known = histories.setdefault(name, {}).get(rank)
            if known is None or known.dump.time < dump.time:
                histories[name][rank] = History(rank, dump, group["count"], operations)
    found = [Group(name, ranks, histories[name]) for name, ranks in members.items()]
    return sorted(found, key=lambda group: -group.last_time)


def _read(path: Path) -> tuple[Dump, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise NoDumpError(f"{path} has format {content['format']}, wanted {FORMAT}: use the pycomm that wrote it")
        keys = ("host", "pid", "time", "reason")
        dump = Dump(path, **{key: content[key] for key in keys}, line=content["main_thread"])
        wanted = ("name", "rank", "ranks", "count", "operations")
        groups = [{key: group[key] for key in wanted} for group in content["groups"]]
    except OSError as error:
        raise NoDumpError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, NoDumpError):
            raise
        raise NoDumpError(f"{path} is no file of pycomm's flight recorder") from error
    return dump, groups


def group_names(path: Path) -> set[str]:
    """Return the names of the groups that the file at ``path`` tells of.

    Raises:
        NoDumpError: it cannot be read, or is something else.
    """
    return {group["name"] for group in _read(path)[1]}


def newest_job(names: Mapping[Path, set[str]]) -> list[Path]:
    """Return, of files and the names of their groups, those that have a group in common with the newest one."""
    files = sorted(names, key=lambda path: -path.stat().st_mtime)
    wanted: set[str] = set()
    chosen: list[Path] = []
    for path in files:
        if not chosen or names[path] & wanted:
            chosen.append(path)
            wanted |= names[path]
    return chosen
