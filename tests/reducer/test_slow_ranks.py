"""Ranks that others wait for are named: in the log, in stats() after a step, and while it is waited for them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from tests.on_ranks import on_ranks
from tests.reducer.attaching import Training

SLEEPER = 1
NAP = 1.5  # seconds: far more than these machines stall for


class Noted(logging.Handler):
    """What is said of slow ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is slow" in record.getMessage():
            self.said.append(record.getMessage())


class Watched(Training):
    """Training in which one rank naps, and what is said of it."""

    def __init__(self, over_hosts: bool = False, **options: Any) -> None:
        super().__init__(over_hosts, **options)
        self.noted = Noted()
        logging.getLogger("pycomm").addHandler(self.noted)
        self.steps = 0

    def go_on(self, nap: float = 0.0) -> None:
        self.step(self.steps, nap if self.rank == SLEEPER else 0.0)
        self.steps += 1

    def end(self) -> None:
        logging.getLogger("pycomm").removeHandler(self.noted)
        self.reducer.detach()


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... is slow: the others have waited ... s for it in this step`",
    "If it repeats: another process on its cores, or its data loader.",
)
@pytest.mark.parametrize(
    ("on_failure", "over_hosts"),
    [("raise", False), ("shrink", False), ("shrink", True)],
    ids=["raise", "shrink", "hosts"],
)
@on_ranks(2, 3, timeout=90)
def test_a_rank_that_sleeps_is_named_once(on_failure: str, over_hosts: bool) -> None:
    training = Watched(over_hosts, on_failure=on_failure)
    for step in range(20):
        training.go_on(NAP if step in (14, 17) else 0.0)
    by_rank = training.reducer.stats()["waits"]["by_rank"]
    assert sorted(by_rank) == list(training.reducer.world)
    assert sum(account["times"] for account in by_rank.values()) == 20, by_rank
    slow = by_rank.pop(SLEEPER)
    assert slow["times"] >= 2
    assert slow["seconds"] > 2 * NAP * 0.9
    assert NAP * 0.9 < slow["longest"] <= slow["seconds"]
    assert all(account["longest"] < slow["longest"] for account in by_rank.values())
    said = [line for line in training.noted.said if line.startswith(f"[pycomm rank 0] rank {SLEEPER} ")]
    assert len(said) == (1 if training.rank == 0 else 0), training.noted.said
    if said:
        assert said[0].startswith("[pycomm rank 0] rank 1 is slow: the others have waited 1.")
        assert " s for it in this step, " in said[0]
        assert " times the median of " in said[0]
    training.end()


@pytest.mark.parametrize("on_failure", ["raise", "shrink"])
@on_ranks(3)
def test_who_is_waited_for_is_known_meanwhile(on_failure: str) -> None:
    training = Watched(on_failure=on_failure)
    for _ in range(3):
        training.go_on()
    assert training.reducer.stats()["waits"]["now"] is None
    seen: list[tuple[float, float, dict[str, Any] | None]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            begun = time.time()
            seen.append((begun, time.time(), training.reducer.stats()["waits"]["now"]))

    thread = threading.Thread(target=watch)
    thread.start()
    training.go_on(NAP)
    done.set()
    thread.join()
    waits = [(before, now) for before, _, now in seen if now is not None and now["ranks"] == (SLEEPER,)]
    if training.rank != SLEEPER:
        assert len(waits) > 3
        before, now = waits[-1]
        assert 0.3 < now["seconds"] < NAP + 20.0
        assert abs(now["since"] + now["seconds"] - before) < 1.0
        assert len({round(now["since"], 3) for _, now in waits}) == 1  # one wait
    else:
        assert not waits
    assert training.reducer.stats()["waits"]["now"] is None
    training.end()
    assert training.reducer.stats()["waits"]["by_rank"][SLEEPER]["longest"] > NAP * 0.9


@on_ranks(2)
def test_between_hosts_without_messages_only_the_time_is_known() -> None:
    training = Watched(over_hosts=True)
    assert training.reducer.stats()["waits"] == {"now": None, "by_rank": {}}
    seen: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            seen.append(training.reducer.stats()["waits"]["now"])

    thread = threading.Thread(target=watch)
    thread.start()
    training.go_on(NAP)
    done.set()
    thread.join()
    if training.rank != SLEEPER:
        assert max(now["seconds"] for now in seen if now is not None) > 0.3
    assert all(now is None or now["ranks"] == () for now in seen)
    assert training.reducer.stats()["waits"]["by_rank"] == {}
    training.end()
