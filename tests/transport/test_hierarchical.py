"""Transport "hierarchical": hosts that are invented, so that no root is needed. Ranks are real processes."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from pycomm import CommError, Communicator
from pycomm.transport import rendezvous
from tests.on_ranks import on_ranks
from tests.ranks import RankPool

LAYOUTS = ["aabb", "abab", "aaab", "abbc"]
LENGTHS = [1, 300, 9000, 70_001, 300_000]  # one round of messages; one lane; lanes; a rest; segments
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8]


@contextmanager
def on_hosts(hosts: str, transport: str = "auto", timeout: float = 20.0) -> Iterator[Communicator]:
    """A communicator of ranks that say they are on these hosts, one letter each."""
    with pytest.MonkeyPatch.context() as patch:
        real = rendezvous.host_identity()
        patch.setattr(rendezvous, "host_identity", lambda: f"{hosts[dist.get_rank()]}{real}")
        communicator = Communicator(timeout=timeout, transport=transport)
    with communicator:
        yield communicator


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype."""
    return ((torch.arange(count) * (rank + 3) + rank) % 11).to(dtype)


def same_bits(communicator: Communicator, x: torch.Tensor) -> bool:
    return len(set(communicator.channel.all_gather_bytes(x.view(torch.uint8).numpy().tobytes()))) == 1


@pytest.mark.parametrize("hosts", LAYOUTS)
@on_ranks(4)
def test_all_reduce(hosts: str) -> None:
    with on_hosts(hosts) as communicator:
        assert communicator.transport == "hierarchical"
        for count, dtype, shared in itertools.product(LENGTHS, DTYPES, (False, True)):
            x = communicator.empty(count, dtype) if shared else torch.empty(count, dtype=dtype)
            x.copy_(data(communicator.rank, count, dtype))
            communicator.all_reduce(x)
            expected = sum(data(p, count, torch.float64) for p in range(4))
            assert torch.equal(x.double(), torch.as_tensor(expected)), (count, dtype)


@pytest.mark.parametrize("hosts", LAYOUTS)
@on_ranks(4)
def test_reductions_of_real_numbers(hosts: str) -> None:
    with on_hosts(hosts) as communicator:
        for op, dtype in itertools.product(("mean", "min", "max", "sum"), (torch.float32, torch.float16)):
            everyones = [torch.randn(70_001, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(4)]
            x = everyones[communicator.rank].clone()
            communicator.all_reduce(x, op)
            stacked = torch.stack(everyones).double()
            expected = {"mean": stacked.mean(0), "min": stacked.amin(0), "max": stacked.amax(0), "sum": stacked.sum(0)}
            tolerance = 4e-3 if dtype == torch.float16 else 1e-6
            torch.testing.assert_close(x.double(), expected[op], rtol=tolerance, atol=4 * tolerance)
            assert (
                communicator.channel.all_gather_bytes(x.view(torch.uint8).numpy().tobytes())
                == [x.view(torch.uint8).numpy().tobytes()] * 4
            )


@pytest.mark.parametrize("hosts", LAYOUTS)
@on_ranks(4)
def test_the_other_collectives(hosts: str) -> None:
    with on_hosts(hosts) as communicator:
        rank = communicator.rank
        for count, dtype in itertools.product((1, 2000, 70_001), (torch.float32, torch.bfloat16, torch.int64)):
            everyones = [data(p, 4 * count, dtype) for p in range(4)]
            total = sum(x.double() for x in everyones)
            assert isinstance(total, torch.Tensor)
            out = torch.empty(count, dtype=dtype)
            communicator.reduce_scatter(out, everyones[rank])
            assert torch.equal(out.double(), total[rank * count : (rank + 1) * count])
            gathered = torch.empty(16 * count, dtype=dtype)
            communicator.all_gather(gathered, everyones[rank])
            assert torch.equal(gathered, torch.cat(everyones))
            swapped = torch.empty(4 * count, dtype=dtype)
            communicator.all_to_all(swapped, everyones[rank])
            assert torch.equal(swapped, torch.cat([x.view(4, count)[rank] for x in everyones]))
            for src in range(4):
                x = everyones[rank].clone()
                communicator.broadcast(x, src)
                assert torch.equal(x, everyones[src])
        big = torch.full((3 << 20,), rank, dtype=torch.uint8)  # several segments of the chain
        communicator.broadcast(big, 2)
        assert bool((big == 2).all())
        communicator.barrier()
        x = torch.full((1000,), float(rank))
        communicator.all_reduce(x, algorithm="ring")
        assert bool((x == 6).all())


@on_ranks(4)
def test_mistakes_are_told_to_all_ranks() -> None:
    with on_hosts("aabb") as communicator:
        x = torch.ones(70_000 + (communicator.rank == 3))
        with pytest.raises(ValueError, match="rank 3 called all_reduce"):
            communicator.all_reduce(x)
        x = torch.ones(70_000, dtype=torch.bool if communicator.rank == 2 else torch.float32)
        with pytest.raises((ValueError, TypeError), match=r"rank 2 could not take part|bool"):
            communicator.all_reduce(x)
        x = torch.ones(70_000)
        communicator.all_reduce(x)
        assert bool((x == 4).all())


@pytest.mark.parametrize(
    ("hosts", "why"), [("aaaa", "all ranks are on one host"), ("abcd", "no two ranks share a host")]
)
@on_ranks(4)
def test_insisting_where_hosts_are_not_shared(hosts: str, why: str) -> None:
    with pytest.raises(ValueError, match=why), on_hosts(hosts, "hierarchical"):
        pass
    with on_hosts(hosts) as communicator:
        assert communicator.transport == ("shared_memory" if hosts == "aaaa" else "torch")
    with pytest.raises(ValueError, match="not all on one host"), on_hosts("aabb", "shared_memory"):
        pass


def again(communicator: Communicator, x: torch.Tensor) -> None:
    for _ in range(3):  # a rank that leaves at once may have ended the first
        communicator.all_reduce(x)


def dies(hosts: str, victim: int, how: str) -> CommError | None:
    with on_hosts(hosts) as communicator:
        x = torch.ones(1 << 20)
        communicator.all_reduce(x)
        if communicator.rank == victim:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            communicator.close("it had enough")
            return None
        with pytest.raises(CommError) as caught:
            again(communicator, x)
        with pytest.raises(CommError, match="broken since"):
            communicator.all_reduce(x)
        return caught.value


@pytest.mark.parametrize(("hosts", "victim", "how"), [("aabb", 3, "kill"), ("aabb", 3, "close"), ("aaab", 3, "kill")])
def test_a_rank_that_leaves_is_named_everywhere(new_ranks: object, hosts: str, victim: int, how: str) -> None:
    assert callable(new_ranks)
    ranks: RankPool = new_ranks(4)
    for rank, outcome in enumerate(ranks.outcomes(dies, hosts, victim, how)):
        if rank == victim:
            continue
        assert outcome.error is None, outcome.trace
        assert (outcome.result.rank, outcome.result.peer) == (rank, victim), str(outcome.result)
        assert outcome.result.elapsed < 10
        assert how == "kill" or "it had enough" in str(outcome.result)
