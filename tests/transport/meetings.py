"""Ranks as threads that meet through a store of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from pycomm.collectives.transport.meeting import Meeting
from pycomm.collectives.transport.rendezvous import Peers, exchange_memory, introduction, listen

Disturbance = Callable[[Store], None]


def swap_memory(store: Store, rank: int, size: int, timeout: float) -> Peers:
    """Exchange memory, as ``choose_transport`` does on one host."""
    with Meeting(store, rank, size, timeout) as meeting, listen(size) as listener:
        return exchange_memory(meeting, listener, meeting.greet(introduction(listener)))


def greet(store: Store, rank: int, size: int, timeout: float, **greeting: Any) -> tuple[str, list[dict[str, Any]]]:
    """The meeting's name and everybody's greeting."""
    with Meeting(store, rank, size, timeout) as meeting:
        greetings = meeting.greet(greeting)
        return meeting.name, greetings


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run the jobs in threads; return what each returned or raised."""
    outcomes: list[Any] = [None] * len(jobs)

    def run(i: int) -> None:
        try:
            outcomes[i] = jobs[i]()
        except Exception as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def swap_in_threads(size: int, disturb: Disturbance | None = None, timeout: float = 10.0) -> list[Any]:
    """Outcomes of :func:`swap_memory` by rank. ``disturb`` runs before the ranks above 0 begin."""
    store = HashStore()
    disturbed = threading.Event()

    def job(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            if rank > 0:
                disturbed.wait()
            return swap_memory(store, rank, size, timeout)

        return run

    def disturbance() -> None:
        try:
            if disturb is not None:
                disturb(store)
        finally:
            disturbed.set()

    *outcomes, problem = in_threads([*(job(rank) for rank in range(size)), disturbance])
    if problem is not None:
        raise problem
    return outcomes


def close_all(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Peers):
            outcome.close()
