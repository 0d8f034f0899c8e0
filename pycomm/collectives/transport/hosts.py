"""Hosts of a group: which ranks can share memory, according to their greetings."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOG = logging.getLogger("pycomm")
_NAMESPACES = ("network namespace", "process namespace", "user namespace", "user")


@dataclass(frozen=True)
class Hosts:
    """Ranks of a group by host, as rank ``rank`` sees them.

    Attributes:
        rank: this rank.
        ranks: ranks of each host, in rising order; hosts in the order of their first ranks.
        host: index of this rank's host.
    """

    rank: int
    ranks: tuple[tuple[int, ...], ...]
    host: int

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self.ranks[self.host]

    @property
    def local_rank(self) -> int:
        """Index of this rank among those of its host."""
        return self.members.index(self.rank)

    @property
    def are_one(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.ranks) == 1

    @property
    def are_shared(self) -> bool:
        """Whether there are several hosts, and one of them has several ranks."""
        return len(self.ranks) > 1 and any(len(members) > 1 for members in self.ranks)


def order_of(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks in the order in which their parts should lie: by index on their host, then by host."""
    return [p for row in itertools.zip_longest(*hosts) for p in row if p is not None]


def hosts_of(rank: int, greetings: Sequence[Mapping[str, Any]]) -> Hosts:
    """Return the hosts of ranks, given their greetings (``rendezvous.introduction``)."""
    by_host: dict[str, list[int]] = {}
    # If one rank is denied shared memory, all ranks use messages.
    denied = any("no_memory" in greeting for greeting in greetings)
    for p, greeting in enumerate(greetings):
        by_host.setdefault(f"{greeting['host']}, rank {p}" if denied else greeting["host"], []).append(p)
    ranks = tuple(tuple(members) for members in by_host.values())
    return Hosts(rank, ranks, next(host for host, members in enumerate(ranks) if rank in members))


def log_isolation(rank: int, greetings: Sequence[Mapping[str, Any]], transport: str) -> None:
    """Log, on the first rank of a machine, why its ranks cannot share memory and use ``transport``."""
    for p, greeting in enumerate(greetings):
        if "no_memory" in greeting:
            if rank == 0:
                why = greeting["no_memory"]
                text = "rank %d is denied memory that processes share (%s): transport %r is used"
                _LOG.warning(text, p, why, transport)
            return
    hosts = [str(greeting["host"]).split("/") for greeting in greetings]
    mine = hosts[rank]
    there = [p for p, theirs in enumerate(hosts) if len(theirs) == len(mine) and theirs[0] == mine[0]]
    other = next((p for p in there if hosts[p] != mine), None)
    if other is None or there[0] != rank:
        return
    walls = [wall for wall, a, b in zip(_NAMESPACES, mine[1:], hosts[other][1:], strict=False) if a != b]
    _LOG.warning(
        "ranks %d and %d are on one machine but share no memory, as they differ in %s: transport %r is used; "
        "start containers with the same network, pid and user namespaces and user to share memory",
        *(rank, other, " and ".join(walls), transport),
    )
