"""Compression behind attach: against plain torch, step by step, and through everything that can happen to a step."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives.bucket import FINGERPRINT_PLACES
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import close, loss_of, make_model


def plain_topk(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return ``x`` with all but its k largest magnitudes zeroed; ties go to the lowest index."""
    order = torch.sort(x.flatten().abs(), descending=True, stable=True).indices[:k]
    out = torch.zeros_like(x.flatten())
    out[order] = x.flatten()[order]
    return out.view_as(x)


class PlainTopK:
    """Top-k with error feedback for all ranks at once, as a state machine in torch operations."""

    def __init__(self, model: nn.Module, size: int, ratio: float) -> None:
        self.model, self.size, self.ratio = model, size, ratio
        self.residual = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(size)]

    def step(self, gradients: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        average = {}
        for name, p in self.model.named_parameters():
            total = torch.zeros_like(p)
            for rank in range(self.size):
                share = gradients[rank][name] / self.size
                if p.dim() > 1:
                    acc = self.residual[rank][name] + share
                    share = plain_topk(acc, max(1, round(self.ratio * p.numel())))
                    self.residual[rank][name] = acc - share
                total += share
            average[name] = total
        return average


def gradients_at(model: nn.Module, step: int) -> list[dict[str, torch.Tensor]]:
    names = [name for name, _ in model.named_parameters()]
    return [
        dict(zip(names, torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())), strict=True))
        for rank in range(dist.get_world_size())
    ]


@on_ranks(2)
def test_names_of_methods() -> None:
    """A name is the method without arguments: also if only one of the ranks has the name."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind in (pycomm.FP16, pycomm.BF16, pycomm.Int8, pycomm.OneBit, pycomm.QSGD, pycomm.TernGrad, pycomm.PowerSGD):
        name = kind.__name__.lower()
        with attached(optimizer, model, compression=name if dist.get_rank() == 0 else kind()) as reducer:
            assert repr(reducer).endswith(f", {kind.__name__}())")
    momentum = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(momentum, model, compression="dgc") as reducer:
        assert repr(reducer).endswith(", DGC())")
    averager = pycomm.local_sgd(optimizer, model, every=2, compression="bf16", timeout=30)
    assert repr(averager).endswith(", BF16())")
    averager.detach()


@pytest.mark.parametrize(
    ("ratio", "bucket_mb", "set_to_none"), [(0.05, 25, True), (0.3, 0.001, False), (1.0, 25, True)]
)
@on_ranks(1, 2, 3)
def test_topk_is_the_plain_state_machine(ratio: float, bucket_mb: float, set_to_none: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    machine = PlainTopK(plain, size, ratio)
    with attached(optimizer, model, compression=pycomm.TopK(ratio), bucket_mb=bucket_mb) as reducer:
        for step in range(30):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            wanted = machine.step(gradients_at(plain, step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name], 1e-11)
            state = own_state(reducer)
            assert state.keys() == {name for name, p in model.named_parameters() if p.dim() > 1}
            for name, entry in state.items():
                close(entry["residual"], machine.residual[rank][name], 1e-11)
            for name, p in plain.named_parameters():
                p.grad = wanted[name]
            optimizer.step()
            alone.step()
        assert_replicas_equal(model)
        k = sum(max(1, round(ratio * p.numel())) for p in model.parameters() if p.dim() > 1)
        dense = sum(p.numel() for p in model.parameters() if p.dim() == 1)
        sent = reducer.stats()["bytes_sent"] / 30
        pair = 8 if ratio == 1.0 else 8 + (math.log2(1 / ratio) + 3) / 8
        assert 8 * k + 8 * dense <= sent <= pair * k + 8 * dense + (48 + 8 * size + 8 * FINGERPRINT_PLACES) * 6


METHODS: dict[str, Any] = {
    "none": pycomm.NoCompression(),
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "topk": pycomm.TopK(0.1),
    "no feedback": pycomm.TopK(0.1, error_feedback=False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(3)
def test_training_with_every_method_and_type(method: str, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    model = make_model(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    with attached(optimizer, model, compression=METHODS[method]):
        for _ in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, rank, 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert_replicas_equal(model)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("method", ["fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [1.0, 60000.0, 1e30, 1e-7, 1e-30])
@on_ranks(4)
def test_neither_overflow_nor_underflow_on_the_wire(method: str, magnitude: float) -> None:
    """Magnitudes that float16 cannot hold, cannot sum, or cannot divide."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p = nn.Parameter(torch.zeros(1000, 3))
    q = nn.Parameter(torch.zeros(7))
    optimizer = torch.optim.SGD([p, q], lr=1.0)
    with attached(optimizer, [("p", p), ("q", q)], compression=METHODS[method]) as reducer:
        base = torch.linspace(-1, 1, 3000).view(1000, 3)
        (magnitude * (rank + 1) * (p * base).sum() + magnitude * q.sum()).backward()
        mean = (size + 1) / 2
        largest = magnitude * size
        precision = 2**-9 if method == "fp16" else 2**-6
        assert p.grad is not None
        assert q.grad is not None
        assert torch.isfinite(p.grad).all()
        assert (p.grad - magnitude * mean * base).abs().max() <= largest * precision
        torch.testing.assert_close(q.grad, torch.full((7,), magnitude), rtol=precision, atol=0)
        assert reducer.stats()["bytes_sent"] <= 2 * (3010 + FINGERPRINT_PLACES) + 4


@contextlib.contextmanager
def spoiled(param: torch.Tensor, value: float) -> Iterator[None]:
    """Put ``value`` into one place of the gradients of ``param``."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = value
        return grad

    handle = param.register_hook(spoil)
    yield
    handle.remove()


@pytest.mark.pairwise
@pytest.mark.parametrize("method", ["none", "fp16", "topk"])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(
    ("bad_parameter", "value"), [("0.weight", math.inf), ("4.weight", -math.inf), ("2.bias", math.nan)]
)
@on_ranks(2)
def test_a_non_finite_gradient_anywhere_leaves_no_trace(
    method: str, bad_rank: int, bad_parameter: str, value: float
) -> None:
    """Finite, non-finite, finite: the middle step must leave no trace."""
    rank = dist.get_rank()

    def run(disturbed: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        model = make_model(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(optimizer, model, compression=METHODS[method], bucket_mb=0.001) as reducer:
            for step in range(4):
                optimizer.zero_grad()
                if step != 2:
                    loss_of(model, rank, step).backward()
                    optimizer.step()
                elif disturbed:  # a scaler would skip the step
                    bad = model.get_parameter(bad_parameter)
                    with spoiled(bad, value) if rank == bad_rank else contextlib.nullcontext():
                        loss_of(model, rank, step).backward()
                    grads = [p.grad for p in model.parameters()]
                    assert any(g is not None and not torch.isfinite(g).all() for g in grads)
            stats = reducer.stats()
            assert stats["nonfinite_steps"] == int(disturbed and "topk" in method)
            if disturbed and method == "topk":
                assert stats["last_nonfinite"] == f"parameter {bad_parameter!r} on rank {bad_rank}"
            return own_state(reducer), [p.detach().clone() for p in model.parameters()]

    calm_state, calm = run(False)
    state, weights = run(True)
    for a, b in zip(calm, weights, strict=True):
        assert torch.equal(a, b)
    assert state.keys() == calm_state.keys()
    for name in state:
        assert torch.equal(state[name]["residual"], calm_state[name]["residual"])


@on_ranks(2)
def test_an_overflow_in_the_sum_is_noticed() -> None:
    """Each rank's gradient is finite; their sum is not."""
    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    with attached(optimizer, [("p", p)], compression=pycomm.TopK(0.5), average=False) as reducer:
        (p.sum() * 3e38).backward()
        assert p.grad is not None
        assert torch.isnan(p.grad).all()
        assert not own_state(reducer)["p"]["residual"].any()
        optimizer.zero_grad()
        p.sum().backward()
        assert p.grad.sum() == 2 * 8
        assert reducer.stats()["last_nonfinite"] == "a sum over the ranks"


@pytest.mark.parametrize("method", ["none", "fp16", "topk"])
@on_ranks(2)
def test_grad_scaler(method: str) -> None:
    """Steps that torch's GradScaler skips, for an inf on one rank, are skipped everywhere and leave no trace."""
    rank = dist.get_rank()

    def run(scaler: torch.amp.GradScaler | None) -> tuple[list[torch.Tensor], dict[str, Any], list[float]]:
        model = make_model(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scales = []
        with attached(optimizer, model, compression=METHODS[method], loss_scaler=scaler) as reducer:
            for step in range(8):
                spoiled = step in (2, 5)
                if spoiled and scaler is None:
                    continue
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                if spoiled and rank == step % 2:
                    loss = loss * math.inf
                if scaler is None:
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
            assert_replicas_equal(model)
            return [p.detach().clone() for p in model.parameters()], own_state(reducer), scales

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    scaled, state, scales = run(scaler)
    plain, plain_state, _ = run(None)
    assert scales == [4096.0, 8192.0, 4096.0, 4096.0, 8192.0, 4096.0, 4096.0, 8192.0]
    tolerance = 2e-3 if method == "fp16" else 1e-6
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name in state:
        torch.testing.assert_close(state[name]["residual"], plain_state[name]["residual"], rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_topk_with_unused_parameters() -> None:
    """A parameter that nobody used keeps its residual; one that somebody used goes on everywhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    p, q = nn.Parameter(torch.zeros(10, 2)), nn.Parameter(torch.zeros(10, 2))
    ramp = torch.arange(20.0).view(10, 2)
    optimizer = torch.optim.SGD([p, q], lr=0.1)
    with attached(optimizer, [("p", p), ("q", q)], compression=pycomm.TopK(0.1)) as reducer:
        ((p + q) * ramp).sum().backward()
        before = own_state(reducer)["q"]["residual"]
        assert before.sum() == (ramp.sum() - 19 - 18) / size
        optimizer.zero_grad()
        (p * ramp).sum().backward()
        assert [q.grad] == [None]
        assert torch.equal(own_state(reducer)["q"]["residual"], before)
        optimizer.zero_grad()
        if rank == 0:
            (q * ramp).sum().backward()
        else:
            (p * 0).sum().backward()
        assert q.grad is not None
        after = own_state(reducer)["q"]["residual"]
        share = ramp / size if rank == 0 else torch.zeros(10, 2)
        lost = before + share - after  # what this rank sent
        total = lost.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(q.grad, total)
        assert (lost != 0).sum() == 2


def memory_of(method: str) -> tuple[int, int]:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def resident() -> int:
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss_Shmem")).split()[1])

    gc.collect()
    before = resident()
    with attached(optimizer, model, compression=METHODS[method]):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 1000)).sum().backward()
        dist.barrier()
        return resident() - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("method", "factor"), [("none", 1.0), ("topk", 2.0)])
def test_memory_is_gradients_and_one_residual(two_ranks: RankPool, method: str, factor: float) -> None:
    """Buckets are the gradients; the transport's own staging is 4.2 MB per rank.

    On average over the ranks: a page that both have mapped counts half for each, and whose they are follows from who
    came late.
    """
    used, gradients = (sum(column) / 2 for column in zip(*two_ranks.run(memory_of, method), strict=True))
    assert factor * gradients * 0.95 < used < factor * gradients * 1.05 + (5 << 20)
