"""Sparse sums: both ways give the sum, lose nothing, and are taken where they are less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from pycomm import Communicator, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.compression.codec import Accumulated, Outcome
from pycomm.compression.report import Report, Told
from pycomm.compression.sparse.codec import WAYS, SparseSum, choose_way
from pycomm.compression.sparse.sums import Selected
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]

NUM_ELEMENTS = 40_000
SHAPES = ("spread", "clustered", "the same", "different", "equal values")


def sums_of(shape: str, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Make each rank's sums; ``shape`` says where they are large."""
    everyone = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64) ** 3
        if shape == "clustered":
            x[: NUM_ELEMENTS // 50] *= 100
        if shape == "the same":
            x[torch.randperm(NUM_ELEMENTS, generator=torch.Generator().manual_seed(step))[:500]] += 1000
        if shape == "different":
            x[rank * 1000 : rank * 1000 + 1000] *= 100
        if shape == "equal values":
            x = torch.ones_like(x)
        everyone.append(x.to(dtype))
    return everyone


def send(sparse: SparseSum, bucket: Bucket, accumulated: Accumulated, count: int) -> tuple[Report, torch.Tensor]:
    """Select and send; returns the indices of what was selected too."""
    values, indices = kernels.topk(accumulated.flat, count)
    largest = values.abs().max().reshape(1) if values.dtype == torch.float32 else None
    ends = torch.tensor(bucket.numels).cumsum(0)
    selected = Selected(accumulated, values, indices, largest, ends, whole=None, keeps=None)
    told = Told((), torch.ones(len(bucket.names), dtype=torch.bool), None)
    return sparse.send(selected, told), indices.long()


def receive(sparse: SparseSum, bucket: Bucket, report: Report, factor: float) -> torch.Tensor:
    last_sources = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    outcome = Outcome(bucket, bucket.flat, factor, [], True, None, report, last_sources, scratch=kernels.Scratch())
    sparse.settle(outcome)
    return bucket.flat.clone()


def adds_up(way: str, shape: str, count: int, dtype: torch.dtype, half: bool) -> list[float]:
    """Return the fraction of the selected sums that was applied, step by step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    applied = []
    with Communicator(timeout=20) as communicator:
        params = [torch.zeros(NUM_ELEMENTS // 4, dtype=dtype) for _ in range(4)]
        bucket = Bucket(["a", "b", "c", "d"], params, communicator)
        sparse = WAYS[way](bucket, communicator, count, half)
        left = [torch.zeros(NUM_ELEMENTS, dtype=dtype) for _ in range(size)]
        for step in range(5):
            everyone = [a + b for a, b in zip(sums_of(shape, step, dtype), left, strict=True)]
            flat, velocity = everyone[rank].clone(), torch.ones(NUM_ELEMENTS, dtype=dtype)
            accumulated = Accumulated(flat, velocity)
            report, indices = send(sparse, bucket, accumulated, count)
            assert sparse.finite(report, accumulated)
            assert report.used().all()
            bucket.flat.fill_(7.0)
            out = receive(sparse, bucket, report, 0.5)
            applied.append(float(out.norm() * 2 / selected(everyone, count).norm()))
            left = gather(flat)
            sent = (velocity == 0.0).nonzero().flatten()  # velocity is masked where entries are sent
            check(everyone, left, out, half, sent, indices)
            # A sum that does not fit is noticed: here, unless it was at once, when it was gathered.
            too_small = Accumulated(flat, velocity, 0.5, most=0.99 * float(out.abs().max()))
            assert way == "gathered" or not sparse.finite(report, too_small)
    return applied


def selected(everyone: list[torch.Tensor], count: int) -> torch.Tensor:
    total = torch.zeros_like(everyone[0])
    for x in everyone:
        values, indices = kernels.topk(x, count)
        total[indices.long()] += values
    return total


def gather(x: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return everyone


def check(
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    out: torch.Tensor,
    half: bool,
    sent: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    total, rest = sum(x.double() for x in before), sum(x.double() for x in after)
    error = (total - rest - 2 * out.double()).abs().max()
    assert error <= 1e-6 * max(x.abs().max() for x in before)
    assert all(torch.equal(x, out) for x in gather(out))
    wanted = 0.5 * selected(before, len(chosen))
    assert (out - wanted).abs().max() <= (1e-3 if half else 1e-6) * max(x.abs().max() for x in before)
    assert torch.equal(sent, chosen)
    assert half or (after[dist.get_rank()][chosen] == 0).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "half"), [(400, False), (4000, True)])
def test_sums(rank_pools: Pools, way: str, shape: str, count: int, half: bool) -> None:
    for applied in rank_pools(3).run(adds_up, way, shape, count, torch.float32, half):
        assert min(applied) > 0.99


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_sums_of_doubles_on_other_numbers_of_ranks(rank_pools: Pools, way: str, size: int) -> None:
    rank_pools(size).run(adds_up, way, "spread", 1000, torch.float64, False)


def takes_back(way: str) -> None:
    """A step that is not committed changes nothing of the next."""
    rank = dist.get_rank()
    with Communicator(timeout=20) as communicator:
        bucket = Bucket(["a"], [torch.zeros(NUM_ELEMENTS)], communicator)
        sums = [WAYS[way](bucket, communicator, 400, False) for _ in range(2)]
        outs = []
        for sparse, commits in zip(sums, ([True, True], [True, False, True]), strict=True):
            good = iter(range(2))
            for committed in commits:
                flat = sums_of("clustered", next(good) if committed else 77, torch.float32)[rank]
                report, _ = send(sparse, bucket, Accumulated(flat, None), 400)
                if committed:
                    out = receive(sparse, bucket, report, 1.0)
            outs.append((out, flat))
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_not_committed(rank_pools: Pools, way: str) -> None:
    rank_pools(3).run(takes_back, way)


def test_which_way_is_less() -> None:
    n = 1_000_000

    def way(density: float, size: int) -> str:
        return choose_way(n, int(density * n), size, torch.float32, False)

    assert [way(0.001, size) for size in (2, 8, 64, 1024, 2048)] == ["gathered"] * 4 + ["dense"]
    assert [way(0.25, size) for size in (2, 4, 8, 64)] == ["gathered", "gathered", "dense", "dense"]
    assert way(0.95, 2) == "dense"
