"""Several connections between two ranks, over which the data of operations is spread."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from pycomm import Communicator
from tests.on_ranks import Pools
from tests.ranks import PerRank, RankPool


def with_streams() -> list[str]:
    """Everything moves as over one connection."""
    with Communicator(timeout=20, transport="tcp") as c:
        rank, size = c.rank, c.size
        for count in (1, 1000, 17_000, 100_001, 1_500_000):
            pattern = torch.arange(count, dtype=torch.int64) % 1013
            x = pattern + 3 * rank
            c.all_reduce(x)
            assert torch.equal(x, size * pattern + 3 * sum(range(size)))
            whole = torch.empty(size * count, dtype=torch.int64)
            c.all_gather(whole, pattern + rank)
            assert torch.equal(whole.view(size, -1), torch.stack([pattern + p for p in range(size)]))
            c.all_reduce(x, algorithm="ring")
        with pytest.raises(ValueError, match="the ranks disagree"):
            c.all_reduce(torch.ones(200_000 + rank))
        c.send(x, (rank + 1) % size)
        c.recv(x, (rank - 1) % size)
        c.barrier()
        return sorted(os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if is_socket(each))


def is_socket(descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return False


def test_several_streams(rank_pools: Pools) -> None:
    one, three = (rank_pools(3).run(streams_in_environment, streams) for streams in ("1", "3"))
    assert [len(more) - len(few) for few, more in zip(one, three, strict=True)] == [2 * 2] * 3, "to each of the others"


def streams_in_environment(streams: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOMM_STREAMS", streams)
        return with_streams()


def wrong_streams(streams: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOMM_STREAMS", streams)
        with pytest.raises(ValueError, match="PYCOMM_STREAMS") as caught:
            Communicator(timeout=20, transport="tcp")
    return str(caught.value)


def test_streams_that_are_wrong(two_ranks: RankPool) -> None:
    said = two_ranks.run(wrong_streams, PerRank(["2", "1"]))
    assert said == ["the ranks disagree: PYCOMM_STREAMS is 1 on rank 1, 2 on rank 0"] * 2
    mine, others = two_ranks.run(wrong_streams, PerRank(["9", "1"]))
    assert mine == "the environment variable PYCOMM_STREAMS is '9', wanted a number from 1 to 8"
    assert others == f"rank 0 could not take part: {mine}"
