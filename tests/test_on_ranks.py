"""The decorator itself: every rank runs the body with the same arguments, and a failure on any rank fails the test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import Pools, on_ranks


@pytest.mark.parametrize("value", [3, 4])
@on_ranks(1, 2)
def test_every_rank_runs_the_body(value: int, tmp_path: Path) -> None:
    """With the same parameters and fixtures; the sum shows that all take part."""
    total = torch.tensor(value)
    dist.all_reduce(total)
    assert total == value * dist.get_world_size()
    folders: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(folders, str(tmp_path))
    assert set(folders) == {str(tmp_path)}


@on_ranks(2, fresh=True)
def fails_on_rank_1(limit: int) -> None:
    assert dist.get_rank() < limit, "too many"


def test_a_failure_on_any_rank_is_the_tests(new_ranks: Pools) -> None:
    fails_on_rank_1(limit=2, new_ranks=new_ranks, pool_size=2)
    with pytest.raises(AssertionError, match=r"rank 1 raised:[\s\S]*too many"):
        fails_on_rank_1(limit=1, new_ranks=new_ranks, pool_size=2)
