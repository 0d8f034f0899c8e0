"""Selection of algorithms: maps a name to this rank's program."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.dlpack import from_dlpack

from pycomm.collectives.transport.rendezvous import host_identity
from pycomm.untrusted import ANYTHING, ListOf, parse

if TYPE_CHECKING:
    from pycomm.schedule.network import Network
    from pycomm.schedule.program import Program
    from pycomm.schedule.table import Round, Table

_MOST_KNOWN = 256


def _schedules() -> ModuleType:
    """Return the package of schedules, which the transports' own algorithms do without."""
    from pycomm import schedule

    return schedule


class _CachedTable:
    """Table that caches the rounds it generates first, so that the verified rounds are those that run."""

    def __init__(self, table: Table) -> None:
        self.num_ranks, self.num_chunks = table.num_ranks, table.num_chunks
        self.name = str(getattr(table, "name", type(table).__name__))
        self._table = table
        self._rounds: list[Round] | None = None

    def rounds(self) -> Iterator[Round]:
        if self._rounds is not None:
            yield from self._rounds
            return
        rounds, kind = [], _schedules().Round
        for r in self._table.rounds():
            rounds.append(kind(*(np.array(column) for column in r)))
            yield rounds[-1]
        self._rounds = rounds


class AlgorithmSelector:
    """Selector of the programs of rank ``rank`` of ``size``; verifies and projects each schedule once."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._known: dict[str | int, tuple[str | Table, Program]] = {}  # by name, or by id() of the table kept with it
        self._choices: list[tuple[float, str]] = []  # of "auto": smallest size in bytes, name
        self._per_host: int | None = None

    def agree(
        self,
        network: Network | str | os.PathLike[str] | None,
        transport: str,
        share: Callable[[bytes], list[bytes]],
    ) -> tuple[str, ...]:
        """Choose the algorithms of "auto" by rank 0's ``network``, or the one in its environment. Collective.

        Ranks also exchange their hosts, for grids whose rows are hosts.

        Returns:
            Names that always mean the transport's own algorithm.

        Raises:
            ValueError: on every rank: a rank's network is not valid.
        """
        problem, choices = "", []
        mistake: Exception | None = None
        try:
            source = os.environ.get("PYCOMM_NETWORK") if network is None else network
            described = None if source is None else _schedules().load(source)
            # A process group of torch has its own algorithm only.
            fits = described is not None and transport != "torch" and described.transport in ("", transport)
            if fits and self._rank == 0 and self._size > 1:
                choices = _schedules().rank_algorithms(self._size, described).crossovers()
        except Exception as error:  # a foreign object may raise anything
            problem, mistake = str(error) or type(error).__name__, error
        mine = json.dumps([problem, choices, host_identity()]).encode()
        everyone = [parse(data, ListOf(ANYTHING, 3), f"rank {rank}'s network") for rank, data in enumerate(share(mine))]
        if isinstance(mistake, TypeError):
            raise mistake
        for rank, (theirs, _, _) in enumerate(everyone):
            if theirs:
                raise ValueError(f"rank {rank}: {theirs}")
        self._choices = [(size, name) for size, name in everyone[0][1]]
        per_host = ranks_per_host([host for _, _, host in everyone])
        self._per_host = None if per_host in (1, self._size) else per_host  # else a grid would have one row or column
        return ("native",) if self._choices else ("auto", "native")

    def find(self, algorithm: str | Table, x: Any) -> Program | None:
        """Return this rank's program for the array ``x``; ``None``: the transport's own algorithm."""
        if algorithm == "auto" and self._choices:
            num_bytes = _bytes_of(x)
            algorithm = [name for size, name in self._choices if size <= num_bytes][-1]
        if algorithm in ("auto", "native"):
            return None
        key = algorithm if isinstance(algorithm, str) else id(algorithm)
        if key not in self._known:
            while len(self._known) >= _MOST_KNOWN:  # in case every call passes a new schedule
                del self._known[next(iter(self._known))]
            self._known[key] = algorithm, self._verified(algorithm)
        return self._known[key][1]

    def _verified(self, algorithm: str | Table) -> Program:
        table = self._named(algorithm) if isinstance(algorithm, str) else algorithm
        if getattr(table, "num_ranks", None) != self._size:
            raise ValueError(f"algorithm is {table!r}, wanted a schedule for the {self._size} ranks of this group")
        if getattr(table, "goal", "all_reduce") != "all_reduce":
            raise ValueError(f"algorithm is {table!r}, wanted an all_reduce")
        if table is algorithm:
            table = _CachedTable(table)  # our own are deterministic, and large
        _schedules().verify(table)
        program: Program = _schedules().program_of(table, self._rank)
        return program

    def _named(self, name: str) -> Table:
        known = ("auto", "native", *_schedules().names())
        if name not in known and "(" not in name:
            raise ValueError(f"algorithm is {name!r}, wanted one of {', '.join(known)}, or a schedule")
        table: Table = _schedules().by_name(name, self._size, self._per_host)
        return table


def ranks_per_host(hosts: Sequence[str]) -> int | None:
    """Return the number of ranks per host, given each rank's host; ``None`` unless equal and consecutive."""
    count = hosts.count(hosts[0])
    expected = [hosts[rank // count * count] for rank in range(len(hosts))]
    regular = len(hosts) % count == 0 and list(hosts) == expected and len(set(hosts)) == len(hosts) // count
    return count if regular else None


def _bytes_of(x: Any) -> int:
    """Return the size of ``x`` in bytes; 0 if it is not an array, as it is refused later."""
    if hasattr(x, "nbytes"):
        return int(x.nbytes)
    return from_dlpack(x).nbytes if hasattr(x, "__dlpack__") else 0
