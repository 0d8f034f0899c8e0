"""Starts of a job by torchrun, which have one store, and the part of it in which the ranks of one start meet.

After a failure torchrun's agents start all processes again. The store still has what earlier starts left there, such
as the addresses of dead ranks. No variable tells starts apart: each agent counts its own restarts. An agent whose own
process failed counts up; an agent that restarts because others did, or that is new, does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from pycomm.torch_internals import PrefixStore, Store
from pycomm.untrusted import COUNT, ListOf, parse

_POLL = 0.01, 0.5  # seconds between two looks: shortest and longest


def store_of_start(store: Store, rank: int, size: int, timeout: float = 300.0) -> Store:
    """Return the part of ``store`` in which the ranks of this start meet, and no others. Collective.

    Rank 0 draws the number of the start, and waits for the others. A process of an older start gets an error: at once
    if it came before another one of its rank, else after ``timeout``, as no start begins for it.

    Args:
        store: the store of all starts, as ``torch.distributed.rendezvous("env://")`` gives it under torchrun.
        rank: rank of this process.
        size: number of ranks.
        timeout: seconds to wait for the others.

    Raises:
        RuntimeError: this process is of an older start than the last one.
        TimeoutError: other ranks have not come; they are named.
    """
    board = PrefixStore("pycomm/starts", store)
    number = _begin(board, size, timeout) if rank == 0 else _come(board, rank, size, timeout)
    return PrefixStore(f"pycomm/start/{number}", store)


def _begin(board: Store, size: int, timeout: float) -> int:
    """Return the number of a new start once all other ranks have come to it."""
    number, absent = board.add("number", 1), list(range(1, size))
    for _ in _looks(timeout):
        absent = [rank for rank in absent if not board.check([_came(number, size, rank)])]
        if board.add("number", 0) != number:
            raise RuntimeError(f"this process, rank 0, belongs to start {number} of its job, but a later one has begun")
        if not absent:
            tickets = [int(board.get(_came(number, size, rank))) for rank in range(1, size)]
            board.set(_begun(number), f"{[0, *tickets]}")
            return number
    raise TimeoutError(f"ranks {absent} of {size} have not come to start {number} of the job in {timeout:g} s")


def _come(board: Store, rank: int, size: int, timeout: float) -> int:
    """Return the number of the start that has begun with this process."""
    ticket, joined, number = board.add("tickets", 1), 0, 0
    for _ in _looks(timeout):
        number = board.add("number", 0)
        if number != joined:
            board.set(_came(number, size, rank), str(ticket))
            joined = number
        if not board.check([_begun(number)]):
            continue
        tickets = parse(board.get(_begun(number)), ListOf(COUNT), "the processes of a start")
        mine = tickets[rank] if len(tickets) == size else 0
        if mine == ticket:
            return number
        if mine > ticket:
            raise RuntimeError(
                f"start {number} of the job has begun with another process as rank {rank}, which came later: this one "
                "belongs to an older start"
            )
    if number == 0:
        why = "rank 0 has not come"
    elif board.check([_begun(number)]):
        why = f"start {number}, the last one, has begun without this process"
    else:
        why = f"ranks of start {number}, the last one, are missing, which rank 0 names"
    raise TimeoutError(f"rank {rank} of {size} has waited {timeout:g} s for its start of the job: {why}")


def _looks(timeout: float) -> Iterator[None]:
    """Yield until ``timeout`` seconds have passed, at growing intervals."""
    until, pause = time.monotonic() + timeout, _POLL[0]
    while True:
        yield None
        if time.monotonic() > until:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL[1])


def _came(number: int, size: int, rank: int) -> str:
    return f"{number}/came/{rank}/of/{size}"


def _begun(number: int) -> str:
    return f"{number}/begun"
