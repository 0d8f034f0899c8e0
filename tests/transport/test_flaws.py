"""Every array that must be refused, once: an error of the right kind on all ranks, and the next operation works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import RankPool
from tests.transport import fuzz_rank
from tests.transport.fuzz_arrays import Spec
from tests.transport.fuzz_cases import WRITTEN, Case, Plan
from tests.transport.fuzz_flaws import FEWEST, FLAWS
from tests.transport.fuzz_oracle import judge

TRANSPORTS = ["shared_memory", "tcp", "torch"]


def case_with(flaw: str, operation: str, transport: str) -> Case:
    """Two ranks, of which rank 1 passes an ``x`` with this flaw."""
    sound = {"x": Spec("float32", FEWEST)}
    if operation == "all_gather":
        sound["out"] = Spec("float32", 2 * FEWEST)
    right = Plan(operation, sound)
    flawed = {**sound, "x": replace(sound["x"], flaw=flaw)}
    return Case((0, 0), transport, [right, replace(right, arrays=flawed, guilt="sure", wrong=flaw)])


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce", "broadcast"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_flaw_is_refused_on_all_ranks(two_ranks: RankPool, transport: str, operation: str) -> None:
    writes = WRITTEN[operation] == "x"
    two_ranks.run(fuzz_rank.prepare, transport, 20.0)
    for flaw in [name for name, kind in FLAWS.items() if (kind.write if writes else kind.read)]:
        case = case_with(flaw, operation, transport)
        problems = judge(case, two_ranks.run(fuzz_rank.perform_case, case))
        afterwards = [problem for problem in two_ranks.run(fuzz_rank.probe, transport) if problem]
        assert not problems + afterwards, f"{flaw}\n{case}"
    two_ranks.run(fuzz_rank.leave, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_a_flaw_nothing_is_refused(two_ranks: RankPool, transport: str) -> None:
    two_ranks.run(fuzz_rank.prepare, transport, 20.0)
    for operation in ("all_gather", "all_reduce", "broadcast"):
        case = case_with("", operation, transport)
        case = replace(case, plans=[case.plans[0]] * 2)
        assert not judge(case, two_ranks.run(fuzz_rank.perform_case, case))
    two_ranks.run(fuzz_rank.leave, transport)
