"""Two network namespaces as hosts, two ranks each, where root may make them."""

from __future__ import annotations

import json

import pytest

from bench.slow_network.namespaces import available, hosts, run_ranks
from tests.several_hosts import COUNT


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_hosts_with_two_ranks_each() -> None:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    with hosts(2, gigabits=1) as cluster:
        outputs = run_ranks(cluster, "tests.several_hosts", per_host=2, timeout=120)
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [rank["transport"] for rank in found] == ["hierarchical"] * 4
    assert all(rank["sums"] == found[0]["sums"] for rank in found)
    num_bytes = 4 * COUNT
    for rank in found:  # each host's link carries the array once; headers, acknowledgments and barriers besides
        assert num_bytes <= rank["bytes"] < 1.1 * num_bytes
