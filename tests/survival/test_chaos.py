"""The short form of ``bench.chaos``: faults of all kinds, on one host and on two invented ones."""

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


@pytest.mark.parametrize("case", [Case("dense", 3, ""), Case("topk", 4, "ab")], ids=str)
def test_training_goes_on(case: Case) -> None:
    survive([case], SHORT, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hosts", ["", "ab"], ids=["one host", "two hosts"])
def test_training_goes_on_for_longer(hosts: str) -> None:
    survive([Case("dgc", 5, hosts), Case("powersgd", 4, hosts)], plan(40, 2), 2)
