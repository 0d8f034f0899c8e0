"""Clipping before and after the reduction: under compression, loss scaling, accumulation, by fused steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size

SHAPES = ((4, 6), (6,), (3, 2, 5))


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.ones(shape))) for i, shape in enumerate(SHAPES)]


def gradients_at(rank: int, step: int, passes: int) -> list[torch.Tensor]:
    """Return the gradients that a window's passes add up to, with very different norms on different ranks."""
    generator = torch.Generator().manual_seed(17 * rank + step)
    return [(1.0 + 9.0 * rank) * torch.randn(shape, generator=generator) / passes for shape in SHAPES]


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def clipped(tensors: list[torch.Tensor], bound: float) -> list[torch.Tensor]:
    factor = min(1.0, bound / (norm_of(tensors) + 1e-6))
    return [t * factor for t in tensors]


def backward(params: list[tuple[str, nn.Parameter]], grads: list[torch.Tensor], scaler: Any) -> None:
    loss = sum(((p * g).sum() for (_, p), g in zip(params, grads, strict=True)), torch.zeros(()))
    scaler.scale(loss).backward()


def close(actual: torch.Tensor | None, wanted: Any, method: str) -> None:
    """Compare; float16 rounds what the ranks send to 11 bits of the largest value that is summed."""
    assert actual is not None
    rtol, atol = (4e-3, 1e-2) if method == "FP16" else (2e-5, 1e-4)
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol)


METHODS: dict[str, Any] = {
    "dense": None,
    "FP16": pycomm.FP16(),
    "DGC": pycomm.DGC(1.0, momentum=0.0),
    "RandomK": pycomm.RandomK(1.0),
}


def clip_locally(ratio: float, scaled: bool, accumulate: int, bound: float, weighted: bool) -> None:
    rank, size = rank_and_size()
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    scaler = pycomm.LossScaler(2.0**8, enabled=scaled)
    options = {"compression": pycomm.DGC(ratio, 0.0, clip_local_norm=bound), "accumulate": accumulate}
    with attached(optimizer, params, loss_scaler=scaler, bucket_mb=1e-4, **options) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            if weighted:
                reducer.set_weight(1 + 2 * rank)
            for _ in range(accumulate):
                backward(params, gradients_at(rank, step, 1 if weighted else accumulate), scaler)
            scaler.unscale_(optimizer)
            shares = [(1 + 2 * r) / sum(1 + 2 * q for q in range(size)) if weighted else 1 / size for r in range(size)]
            theirs = [clipped(gradients_at(r, step, 1), bound) for r in range(size)]
            for i, (_, p) in enumerate(params):
                wanted = sum(share * grads[i] for share, grads in zip(shares, theirs, strict=True))
                close(p.grad, wanted, "DGC")
            scaler.step(optimizer)
            if scaled:
                scaler.update()


RATIOS = pytest.mark.parametrize("ratio", [1.0, 1.0 - 1e-9], ids=["whole", "entries"])
"""All entries are sent: by an all-reduce, or as entries that have been selected."""


@RATIOS
@pytest.mark.parametrize(("scaled", "accumulate"), [(False, 1), (True, 1), (True, 2)])
@on_ranks(2)
def test_before_the_reduction(ratio: float, scaled: bool, accumulate: int) -> None:
    """A bound between the two ranks' norms: one is clipped, the other is not."""
    clip_locally(ratio, scaled, accumulate, 20.0, False)


@RATIOS
@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2)
def test_before_the_reduction_with_weights(ratio: float, accumulate: int) -> None:
    clip_locally(ratio, False, accumulate, 20.0, True)


@on_ranks(1, 3)
def test_before_the_reduction_on_other_numbers_of_ranks() -> None:
    clip_locally(1.0, True, 1, 5.0, False)


@on_ranks(2)
def test_only_attach_knows_the_whole_gradient() -> None:
    method = pycomm.DGC(0.1, clip_local_norm=1.0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for use in (
        lambda: pycomm.ddp.register(wrapped, compression=method),
        lambda: pycomm.local_sgd(optimizer, model, every=2, compression=method),
        lambda: pycomm.parameter_server(optimizer, model, compression=method),
    ):
        with pytest.raises(ValueError, match="clip_local_norm=1.0 works with pycomm.attach only"):
            use()


@on_ranks(2)
def test_what_is_not_finite_is_not_clipped_away() -> None:
    rank, _ = rank_and_size()
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    with attached(optimizer, params, compression=pycomm.DGC(1.0, 0.0, clip_local_norm=1.0)) as reducer:
        grads = gradients_at(rank, 0, 1)
        if rank == 1:
            grads[1][2] = float("inf")
        backward(params, grads, pycomm.LossScaler(enabled=False))
        assert reducer.stats()["nonfinite_steps"] == 1
        assert "p1" in str(reducer.stats()["last_nonfinite"])
    assert not bool(torch.isfinite(params[1][1].grad).all())  # type: ignore[arg-type]


def clip_average(method: str, kind: str, accumulate: int, bound: float, unscale: bool) -> list[float]:
    """Steps with lr 1 from ones: what is gone is the clipped average. ``kind``: whose kernels step."""
    rank, size = rank_and_size()
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    if kind == "fused":
        pycomm.fuse(optimizer)
    scaler = pycomm.LossScaler(2.0**8)
    norms = []
    options = {"compression": METHODS[method], "accumulate": accumulate}
    with attached(optimizer, params, loss_scaler=scaler, bucket_mb=1e-4, **options) as reducer:
        for step in range(3):
            before = [p.detach().clone() for _, p in params]
            optimizer.zero_grad()
            for _ in range(accumulate):
                backward(params, gradients_at(rank, step, accumulate), scaler)
            if unscale:
                scaler.unscale_(optimizer)
            norm = reducer.clip_grad_norm(bound)
            scaler.step(optimizer)
            scaler.update()
            theirs = [gradients_at(r, step, 1) for r in range(size)]
            average = [sum(grads) / size for grads in zip(*theirs, strict=True)]
            assert float(norm) == pytest.approx(norm_of(average), rel=4e-3 if method == "FP16" else 2e-5)
            for (_, p), old, wanted in zip(params, before, clipped(average, bound), strict=True):
                close(old - p.detach(), wanted, method)
            norms.append(float(norm))
        for _, p in params:
            assert_replicas_equal(nn.ParameterList([p]))
    return norms


@pytest.mark.pairwise
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["torch's", "fused"])
@pytest.mark.parametrize("method", METHODS)
def test_after_the_reduction(two_ranks: RankPool, method: str, kind: str, unscale: bool) -> None:
    first, second = two_ranks.run(clip_average, method, kind, 1, 5.0, unscale)
    assert first == second


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(1, 3)
def test_after_the_reduction_in_windows(accumulate: int) -> None:
    clip_average("dense", "fused", accumulate, 5.0, False)


@on_ranks(2)
def test_nothing_happens_within_the_bound() -> None:
    clip_average("dense", "torch's", 1, 1e6, False)


@on_ranks(2)
def test_a_factor_left_for_a_step_that_did_not_come() -> None:
    """The factor of a step that did not come is not the next step's."""
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    pycomm.fuse(optimizer)
    with attached(optimizer, params) as reducer:
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, [torch.ones(shape) for shape in SHAPES], pycomm.LossScaler(enabled=False))
            reducer.clip_grad_norm(0.5)
        optimizer.step()
    moved = [torch.ones(shape) - p.detach() for shape, (_, p) in zip(SHAPES, params, strict=True)]
    assert norm_of(moved) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("unscale", [False, True])
@on_ranks(2)
def test_half_precision(unscale: bool) -> None:
    """float16 parameters with masters: gradients so small that only scaled ones exist."""
    p = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], lr=1.0)
    masters = pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(2.0**16)
    with attached(optimizer, [("p", p)], loss_scaler=scaler) as reducer:
        scaler.scale((p.float() * 1e-8).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.testing.assert_close(masters.parameters()[0].grad, torch.full((64,), 1e-8), rtol=1e-3, atol=0)
        norm = reducer.clip_grad_norm(4e-8)
        assert float(norm) == pytest.approx(8e-8, rel=1e-3)
        masters.parameters()[0].data.zero_()
        scaler.step(optimizer)
    moved = 1e-8 * 4e-8 / (8e-8 + 1e-6)  # torch's rule: the small number is not small here
    torch.testing.assert_close(masters.parameters()[0].detach(), torch.full((64,), -moved), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (0, ValueError, "is 0, wanted a positive number"),
        (-1.0, ValueError, "is -1.0, wanted a positive number"),
        (float("nan"), ValueError, "is nan, wanted a positive number"),
        ("1", TypeError, "is '1', wanted a number"),
    ],
)
def test_bad_bounds(value: Any, error: type[Exception], match: str) -> None:
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    with pytest.raises(error, match=f"clip_local_norm {match}"):
        pycomm.DGC(clip_local_norm=value)
    with attached(optimizer, params) as reducer:
        with pytest.raises(error, match=f"max_norm {match}"):
            reducer.clip_grad_norm(value)


@pytest.mark.usefixtures("one_rank_group")
def test_norm_that_is_not_finite() -> None:
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    with attached(optimizer, params) as reducer:
        grads = gradients_at(0, 0, 1)
        grads[2][0] = float("nan")
        backward(params, grads, pycomm.LossScaler(enabled=False))
        with pytest.raises(RuntimeError, match="the norm of the gradients is nan: see parameter 'p2'"):
            reducer.clip_grad_norm(1.0, error_if_nonfinite=True)


@pytest.mark.usefixtures("one_rank_group")
def test_not_inside_a_window() -> None:
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    options: dict[str, Any] = {"accumulate": 2, "compression": pycomm.TopK(1.0)}
    with attached(optimizer, params, **options) as reducer:
        backward(params, gradients_at(0, 0, 1), pycomm.LossScaler(enabled=False))
        with pytest.raises(RuntimeError, match="inside an accumulation window: call flush"):
            reducer.clip_grad_norm(1.0)
