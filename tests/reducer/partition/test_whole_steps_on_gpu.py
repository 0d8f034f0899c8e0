"""Steps of whole parameters that ranks take together on a GPU: CPU memory stands in for it, as in test_gpu_path.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, grouped
from tests.reducer.partition import test_same_steps as bodies
from tests.reducer.partition.stepping import Weights, assert_same, assert_unusable_until_loaded, backward, rank
from tests.reducer.partition.stepping import gradients_of as random_gradients
from tests.reducer.partition.test_spread import Layers, stepped
from tests.reducer.partition.test_whole_steps import HALF, SCALERS, SHARED, skipped_steps, steps, trained
from tests.reducer.partition.whole_optimizers import OPTIMIZERS, Averaging, Orthogonal
from tests.reducer.test_gpu_path import LateWork, no_host_reads, pretended_gpu

FUSABLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "LAMB": lambda params: pycomm.LAMB(params, lr=0.01),
}
"""Optimizers that kernels step in CPU memory."""


def assert_same_as_alone(make: Callable[[Any], torch.optim.Optimizer], *parts: bodies.Body, **options: Any) -> None:
    """Compare training on a GPU with and without shard, to the bit."""
    with pretended_gpu():
        wanted = trained(make, *parts, **options)
        assert_same(trained(make, *parts, shard="optimizer", independent=True, **options), wanted)


@on_ranks(3)
def test_every_optimizer_has_the_bits_of_a_step_alone() -> None:
    for make in {**OPTIMIZERS, **FUSABLE}.values():
        assert_same_as_alone(make, bodies.few_steps, bodies.few_steps)


@pytest.mark.parametrize("full", [False, True])
@on_ranks(2)
def test_all_that_training_does(full: bool) -> None:
    shard = pycomm.Sharding("optimizer", grads="full" if full else "part", independent=True)
    for last in (bodies.clipped_steps, bodies.new_parameters):
        parts = (bodies.few_steps, bodies.schedules, bodies.missing_gradients, last)
        with pretended_gpu():
            assert_same(trained(Averaging, *parts, shard=shard), trained(Averaging, *parts))
    assert_same_as_alone(Orthogonal, bodies.windows, bodies.windows, accumulate=2)
    assert_same_as_alone(Orthogonal, bodies.few_steps, bodies.few_steps, compression="bf16")


@pytest.mark.parametrize("name", ["Orthogonal", "AdamW"])
@pytest.mark.parametrize("dtype", HALF)
@on_ranks(2)
def test_masters_of_half_precision_parameters(dtype: str, name: str) -> None:
    """With those that kernels step without shard, which round once where torch's own steps round several times."""
    make, parts = {**OPTIMIZERS, **FUSABLE}[name], (bodies.few_steps, bodies.schedules, bodies.clipped_steps)
    if name == "Orthogonal":
        assert_same_as_alone(make, *parts, dtype=HALF[dtype])
        return
    with pretended_gpu():
        wanted = trained(make, *parts, dtype=HALF[dtype])
        found = trained(make, *parts, dtype=HALF[dtype], shard="optimizer", independent=True)
    for number, entry in wanted[1].items():
        for key, value in entry.items():
            torch.testing.assert_close(found[1][number][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", SCALERS)
@on_ranks(2)
def test_scalers_skip_on_all_ranks(make: Any) -> None:
    with pretended_gpu():
        (found, scale), (wanted, its_scale) = skipped_steps(make, SHARED), skipped_steps(make, None)
    assert_same(found, wanted)
    assert scale == its_scale < 2.0**4


@on_ranks(2)
def test_a_gradient_that_is_not_finite_stays_in_its_parameter_without_a_scaler() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with pretended_gpu(), attached(optimizer, model, shard="optimizer", independent=True):
        steps(optimizer, model, 0, 2)
        grads = random_gradients(0, 9)
        grads[4][0] = torch.nan
        optimizer.zero_grad()
        backward(model.parameters(), grads)
        optimizer.step()
        assert [bool(torch.isfinite(p).all()) for p in model.parameters()] == [i != 4 for i in range(len(grads))]
        assert_replicas_equal(nn.ParameterList(p.nan_to_num(7.0) for p in model.parameters()))


@on_ranks(2)
def test_the_host_does_not_look_at_values_in_backward() -> None:
    model, scaler = Weights(), pycomm.LossScaler(2.0**4)
    optimizer = Orthogonal(model.parameters())
    with (
        pretended_gpu(),
        attached(optimizer, model, shard="optimizer", independent=True, loss_scaler=scaler, bucket_mb=0.005),
    ):
        for step in range(4):
            optimizer.zero_grad()
            products = [(p * g).sum() for p, g in zip(model.parameters(), random_gradients(0, step), strict=True)]
            loss = scaler.scale(torch.stack(products).sum())
            with no_host_reads():
                loss.backward()
            scaler.step(optimizer)
            scaler.update()


@on_ranks(3)
def test_parameters_lie_apart_in_memory_as_kernels_of_a_gpu_want_it() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with pretended_gpu(), attached(optimizer, model, shard="optimizer", independent=True) as reducer:
        steps(optimizer, model, 0, 2)
        partition = reducer._table.partition
        assert partition is not None
        for param in model.parameters():
            segment, _ = partition._places[param]
            assert (param.data_ptr() - segment.own.ctypes.data) % 256 == 0 or param.numel() == 0
            assert param.untyped_storage().nbytes() == param.nbytes
        assert_replicas_equal(model)


@on_ranks(2)
def test_the_current_stream_waits_for_parameters_in_the_step() -> None:
    """The host does not: a work that nobody waits for does nothing here, so parameters would be old ones."""
    model, waited = Layers(), list[LateWork]()
    optimizer = Orthogonal(model.parameters())
    original = LateWork.wait

    def wait(self: LateWork) -> Any:
        waited.append(self)
        return original(self)

    with pretended_gpu(), attached(optimizer, model, shard=SHARED, bucket_mb=0.02) as reducer:
        stepped(model, optimizer)
        optimizer.zero_grad()
        model(torch.full((2, 64), 0.1 + rank())).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateWork, "wait", wait)
            optimizer.step()
        assert len(waited) >= reducer.stats()["num_buckets"] > 1
        assert_replicas_equal(model)


@on_ranks(2)
def test_cuda_graphs() -> None:
    """Steps stay outside."""
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with pretended_gpu(), attached(optimizer, model, shard=SHARED), pytest.MonkeyPatch.context() as context:
        stepped(model, optimizer)
        optimizer.zero_grad()
        model(torch.full((2, 64), 0.1 + rank())).backward()
        context.setattr(torch.cuda, "is_initialized", lambda: True)
        context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises((RuntimeError, ValueError), match="into a CUDA graph, and the ranks agree"):
            optimizer.step()


# Mistakes, and what is lost.


def refused(match: str, make: Callable[[Any], torch.optim.Optimizer], shard: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=match):
        pycomm.attach(optimizer, model, **grouped(timeout=20, shard=shard))


@on_ranks(2)
def test_what_cannot_be_shared_out_on_a_gpu_is_refused() -> None:
    def fused(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        pycomm.fuse(optimizer)
        return optimizer

    with pretended_gpu():
        refused("Orthogonal is not among the optimizers that are known", Orthogonal, "optimizer")
        refused("leave pycomm.fuse out", fused, "optimizer")
        refused("LBFGS: its step depends on all gradients together", torch.optim.LBFGS, "optimizer")


def lose_messages(point: str) -> None:
    """NCCL fails: nobody knows whether parameters, those of this step or of the one before, have arrived."""
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with pretended_gpu():
        reducer = pycomm.attach(optimizer, model, **grouped(timeout=20, shard=SHARED, check_replicas=0))
        for _ in range(2):
            stepped(model, optimizer)

        def fail(self: LateWork) -> Any:
            raise pycomm.CommError.during("broadcast", "NCCL has failed", rank=rank())

        if point == "parameters":
            optimizer.zero_grad()
            model(torch.full((2, 64), 0.1 + rank())).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateWork, "wait", fail)
            patch.setattr(LateWork, "ends_within", lambda *_: True)
            with pytest.raises(pycomm.CommError, match="NCCL has failed"):
                optimizer.step() if point == "parameters" else stepped(model, optimizer)
            assert_unusable_until_loaded(reducer, optimizer, lambda: model(torch.ones(1, 64)), model)


@pytest.mark.parametrize("point", ["parameters", "gradients"])
def test_no_mixture_trains_on(point: str, new_ranks: Pools) -> None:
    for outcome in new_ranks(2).outcomes(lose_messages, point, timeout=60.0):
        assert outcome.error is None, outcome.trace
