"""Norms are of what is in ``.grad`` now, however it was written: also where no version counter tells of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, rank_and_size
from tests.reducer.test_clipping import SHAPES, backward, clipped, gradients_at, norm_of, parameters

STEPS = 3
BOUND = 0.7

Grads = list[torch.Tensor]


def _amp(grads: Grads, _: Grads) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor([0.25]))


def _multiply(grads: Grads, _: Grads) -> None:
    for grad in grads:
        grad.data.mul_(0.25)


def _foreach(grads: Grads, _: Grads) -> None:
    torch._foreach_mul_(grads, 0.25)


def _foreach_data(grads: Grads, _: Grads) -> None:
    torch._foreach_mul_([grad.data for grad in grads], 0.25)


def _clamp(grads: Grads, _: Grads) -> None:
    for grad in grads:
        grad.data.clamp_(-1.0, 1.0)


def _largest(grads: Grads, averages: Grads) -> None:
    for grad, average in zip(grads, averages, strict=True):
        grad.data.view(-1)[int(average.abs().argmax())] = 0.0


def _one_row(grads: Grads, _: Grads) -> None:
    for grad in grads:
        grad.data[-1] = 0.0


def _negate_and_double(grads: Grads, _: Grads) -> None:
    for grad in grads:
        array = grad.numpy()
        array *= -2.0


WAYS: dict[str, Callable[[Grads, Grads], None]] = {
    "amp": _amp,
    "data": _multiply,
    "foreach": _foreach,
    "foreach of data": _foreach_data,
    "clamp": _clamp,
    "largest": _largest,
    "one row": _one_row,
    "numpy": _negate_and_double,
}

ATTACHED: dict[str, dict[str, Any]] = {
    "dense": {},
    "FP16": {"compression": pycomm.FP16()},
    "TopK": {"compression": pycomm.TopK(1.0)},
    "windows": {"accumulate": 2},
    "shard": {"shard": "optimizer", "grads": "full"},
    "shard, own part": {"shard": "optimizer"},
}


def train(how: str, write: Callable[[Grads, Grads], None], *, fused: bool) -> None:
    """Steps with lr 1 from ones, clipped after gradients were written: what is gone is what was there then."""
    rank, size = rank_and_size()
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    options = ATTACHED[how]
    if fused and "shard" not in options:
        pycomm.fuse(optimizer)
    passes = options.get("accumulate", 1)
    rough: dict[str, Any] = {"rtol": 4e-3, "atol": 1e-2} if how == "FP16" else {"rtol": 2e-5, "atol": 1e-5}
    with attached(optimizer, params, bucket_mb=1e-4, **options) as reducer:
        for step in range(STEPS):
            before = [p.detach().clone() for _, p in params]
            optimizer.zero_grad()
            for _ in range(passes):
                backward(params, gradients_at(rank, step, passes), pycomm.LossScaler(enabled=False))
            theirs = [gradients_at(r, step, 1) for r in range(size)]
            wanted = [torch.stack(grads).sum(0) / size for grads in zip(*theirs, strict=True)]
            averages = [grad.clone() for grad in wanted]
            write([p.grad for _, p in params if p.grad is not None], averages)
            write(wanted, averages)
            norm = reducer.clip_grad_norm(BOUND)
            assert float(norm) == pytest.approx(norm_of(wanted), rel=rough["rtol"])
            optimizer.step()
            for (_, p), old, change in zip(params, before, clipped(wanted, BOUND), strict=True):
                torch.testing.assert_close(old - p.detach(), change, **rough)


@pytest.mark.behavior(
    "Gradients", "write gradients before `clip_grad_norm`, also through NumPy", "The norm is of the new contents."
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["dense", "FP16", "TopK", "windows", "shard"])
@on_ranks(2)
def test_whatever_writes(how: str, way: str) -> None:
    train(how, WAYS[way], fused=way in ("data", "clamp"))


@pytest.mark.parametrize("way", ["amp", "data", "clamp", "largest", "numpy"])
@on_ranks(2)
def test_where_each_rank_has_its_own_part(way: str) -> None:
    train("shard, own part", WAYS[way], fused=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(2)
def test_other_dtypes(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=0.0)
    with attached(optimizer, [("p", p)]) as reducer:
        for step in range(STEPS):
            optimizer.zero_grad()
            p.sum().backward()
            assert p.grad is not None
            p.grad.data[step] = -3.0
            assert float(reducer.clip_grad_norm(1e9)) == pytest.approx((63 + 9) ** 0.5)
            p.grad.data[step] = float("nan")
            assert reducer.clip_grad_norm(1e9).isnan()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@on_ranks(2)
def test_other_layouts(layout: torch.memory_format) -> None:
    p = nn.Parameter(torch.ones(4, 3, 2, 5).to(memory_format=layout))
    optimizer = torch.optim.SGD([p], lr=0.0)
    with attached(optimizer, [("p", p)]) as reducer:
        for _ in range(STEPS):
            optimizer.zero_grad()
            p.sum().backward()
            assert p.grad is not None
            p.grad.data[1] = 2.0
            assert float(reducer.clip_grad_norm(1e9)) == pytest.approx((90 + 30 * 4) ** 0.5)
            optimizer.step()


def scale_and_clip(options: dict[str, Any], scaler: Any, accumulate: int, *, fused: bool) -> None:
    """The documented order: backward, ``unscale_``, ``clip_grad_norm``, ``step``, ``update``."""
    rank, size = rank_and_size()
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    if fused:
        pycomm.fuse(optimizer)
    half = options.get("compression") is not None
    rough: dict[str, Any] = {"rtol": 4e-3, "atol": 1e-2} if half else {"rtol": 2e-5, "atol": 1e-5}
    with attached(optimizer, params, loss_scaler=scaler, accumulate=accumulate, **options) as reducer:
        for step in range(STEPS):
            before = [p.detach().clone() for _, p in params]
            optimizer.zero_grad()
            for _ in range(accumulate):
                backward(params, gradients_at(rank, step, accumulate), scaler)
            theirs = [gradients_at(r, step, 1) for r in range(size)]
            wanted = [torch.stack(grads).sum(0) / size for grads in zip(*theirs, strict=True)]
            scaler.unscale_(optimizer)
            assert float(reducer.clip_grad_norm(BOUND)) == pytest.approx(norm_of(wanted), rel=rough["rtol"])
            scaler.step(optimizer)
            scaler.update()
            for (_, p), old, change in zip(params, before, clipped(wanted, BOUND), strict=True):
                torch.testing.assert_close(old - p.detach(), change, **rough)


@pytest.mark.parametrize("name", ["GradScaler", "LossScaler"])
@pytest.mark.parametrize("how", ["dense", "FP16", "shard", "shard, own part", "windows"])
@on_ranks(2)
def test_unscaled_then_clipped(how: str, name: str) -> None:
    of_torch = name == "GradScaler"
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4096.0) if of_torch else pycomm.LossScaler(4096.0)
    options = {key: value for key, value in ATTACHED[how].items() if key != "accumulate"}
    scale_and_clip(options, scaler, 2 if how == "windows" else 1, fused=how == "dense")


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(1, 2)
def test_clipped_twice(fused: bool) -> None:
    """The second bound is compared with what the first one has left, also where the step applies the factor."""
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    if fused:
        pycomm.fuse(optimizer)
    with attached(optimizer, params) as reducer:
        for _ in range(2):
            before = [p.detach().clone() for _, p in params]
            optimizer.zero_grad()
            backward(params, [torch.ones(shape) for shape in SHAPES], pycomm.LossScaler(enabled=False))
            assert float(reducer.clip_grad_norm(1.0)) == pytest.approx(norm_of([torch.ones(s) for s in SHAPES]))
            assert float(reducer.clip_grad_norm(0.5)) == pytest.approx(1.0, rel=1e-4)
            assert float(reducer.clip_grad_norm(2.0)) == pytest.approx(0.5, rel=1e-4)
            optimizer.step()
            moved = [old - p.detach() for old, (_, p) in zip(before, params, strict=True)]
            assert norm_of(moved) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("to_none", [False, True])
@on_ranks(1, 2)
def test_a_step_left_out_after_clipping(to_none: bool) -> None:
    """What a bad batch left for its step, which did not come, is not the next step's."""
    params = parameters()
    optimizer = torch.optim.SGD([p for _, p in params], lr=1.0)
    pycomm.fuse(optimizer)
    with attached(optimizer, params) as reducer:
        bad = [torch.full(shape, float("inf")) for shape in SHAPES]
        backward(params, bad, pycomm.LossScaler(enabled=False))
        assert not torch.isfinite(reducer.clip_grad_norm(1.0))
        optimizer.zero_grad(set_to_none=to_none)
        backward(params, [torch.ones(shape) for shape in SHAPES], pycomm.LossScaler(enabled=False))
        optimizer.step()
    for _, p in params:
        torch.testing.assert_close(p.detach(), torch.zeros_like(p))


@pytest.mark.behavior(
    "Gradients",
    "write half-precision gradients after `LossScaler.unscale_`, with masters",
    "Error at `step()`, which uses the masters' gradients.",
)
@pytest.mark.parametrize("way", ["amp", "data", "clamp", "numpy"])
def test_scaled_half_gradients_written_after_unscaling(way: str) -> None:
    """Steps use the masters' gradients: writing to the scaled ones is an error, however it is done."""
    p = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], lr=1.0)
    pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(2.0**4)
    for _ in range(2):
        scaler.scale(p.float().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.scale(p.float().sum()).backward()
    scaler.unscale_(optimizer)
    assert p.grad is not None
    if way == "amp":
        p.grad.data[3] = 0.0
    else:
        WAYS[way]([p.grad], [p.grad])
    with pytest.raises(RuntimeError, match="was written to after unscale_"):
        scaler.step(optimizer)


def _penalty(params: list[nn.Parameter]) -> None:
    for p in params:
        assert p.grad is not None
        p.grad.add_(p.detach(), alpha=0.1)


def _noise(params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad + 0.1


BETWEEN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "penalty": _penalty,
    "noise": _noise,
    "by value": lambda params: torch.nn.utils.clip_grad_value_(params, 0.02),
    "by torch": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
}


@pytest.mark.behavior(
    "Gradients",
    "`between clip_grad_norm(), or LossScaler.step(), and the fused step`",
    "The step would multiply what you wrote by the clipping factor. Add penalties and noise before clipping.",
)
@pytest.mark.parametrize("way", BETWEEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(1, 2)
def test_written_between_clipping_and_the_fused_step(way: str, dtype: torch.dtype) -> None:
    """The factor is for the gradients that were clipped. The last rank writes; all get the error."""
    rank, num_ranks = rank_and_size()
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = torch.optim.SGD(params, lr=1.0)
    pycomm.fuse(optimizer) if dtype == torch.float32 else pycomm.master_weights(optimizer)
    with attached(optimizer, [(f"p{i}", p) for i, p in enumerate(params)]) as reducer:
        sum((p.float().sum() for p in params), torch.zeros(())).backward()
        reducer.clip_grad_norm(BOUND)
        if rank == num_ranks - 1:
            BETWEEN[way](params)
            said = "replaced" if way == "noise" else "written to"
            with pytest.raises(RuntimeError, match=f"rank {rank}: the gradient of 'p0' was {said} between clip_grad"):
                optimizer.step()
            assert all(bool((p == 1.0).all()) for p in params)
        else:
            optimizer.step()
            with pytest.raises(RuntimeError, match="the gradient of 'p0' was .* between clip_grad_norm"):
                sum((p.float().sum() for p in params), torch.zeros(())).backward()


@pytest.mark.parametrize("name", ["GradScaler", "LossScaler"])
@on_ranks(1, 2)
def test_unscaled_after_clipping(name: str) -> None:
    """A scaler's own unscaling multiplies, as the factor does: their order does not matter."""
    of_torch = name == "GradScaler"
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0) if of_torch else pycomm.LossScaler(8.0)
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    pycomm.fuse(optimizer)
    with attached(optimizer, [("p", p)], loss_scaler=scaler) as reducer:
        scaler.scale(p.sum()).backward()
        reducer.clip_grad_norm(8.0 if of_torch else 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
