"""The short form of ``bench.chaos``: faults of all kinds."""

from __future__ import annotations

import pytest

from bench.chaos.campaign import Case, Result, plan, run_all

SHORT = [
    ("kill", "exchange"),
    ("stop", "hook"),
    ("raise", "hook"),
    ("kill", "recovery"),
    ("memory", "exchange"),
    ("sockets", "forward"),
]


def survive(cases: list[Case], faults: list[tuple[str, str]], seed: int) -> None:
    results: list[Result] = []
    totals = run_all(cases, faults, seed, results.append)
    assert not [result.line() for result in results if result.problems]
    assert len(results) == len(faults)
    assert not totals.leaks
    assert totals.committed == totals.attempted > 0


def test_training_goes_on_on_one_host() -> None:
    survive([Case("dense", 3, "")], SHORT, 1)


@pytest.mark.slow
def test_training_goes_on_on_two_hosts() -> None:
    faults = [("kill", "exchange"), ("raise", "hook"), ("sockets", "commit"), ("kill", "recovery"), ("memory", "hook")]
    survive([Case("topk", 4, "ab")], faults, 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_goes_on_for_longer() -> None:
    survive([Case("dgc", 5, ""), Case("powersgd", 4, "")], plan(40, 2), 2)
