"""Ranks for tests of trainers, whose libraries other tests' ranks need not have imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pools() -> Iterator[list[RankPool]]:
    made: list[RankPool] = []
    yield made
    for pool in made:
        pool.close()


@pytest.fixture
def trainers(pools: list[RankPool]) -> RankPool:
    """Return two ranks of this module's own, in whose environment torchrun seems to have started them."""
    if not pools or not pools[-1].alive():
        pools.append(RankPool(2, forked=True))
        pools[-1].run(_seem_started_by_torchrun, pools[-1].port)
    return pools[-1]


def _seem_started_by_torchrun(port: int) -> None:
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests")
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
