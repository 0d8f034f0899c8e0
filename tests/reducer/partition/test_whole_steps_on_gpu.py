"""Steps of whole parameters that ranks take together on a GPU: CPU memory stands in for it, as in test_gpu_path.py."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.collectives.channel import Channel
from pycomm.training.reducer.partition import spread
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, grouped
from tests.reducer.partition import test_same_steps as bodies
from tests.reducer.partition.stepping import Weights, assert_same, assert_unusable_until_loaded, backward, rank
from tests.reducer.partition.stepping import gradients_of as random_gradients
from tests.reducer.partition.test_spread import Layers, stepped
from tests.reducer.partition.test_whole_steps import HALF, SCALERS, SHARED, skipped_steps, steps, trained
from tests.reducer.partition.whole_optimizers import OPTIMIZERS, Averaging, Orthogonal
from tests.reducer.test_gpu_path import STREAM, LateWork, no_host_reads, pretended_gpu

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


# Arrivals.


class Streams:
    """Torch's current stream, and of each work the streams that wait for it."""

    def __init__(self) -> None:
        self.now = STREAM
        self.waiting: list[tuple[int, LateWork]] = []


@contextmanager
def several_streams() -> Iterator[Streams]:
    streams, original = Streams(), LateWork.wait

    def wait(self: LateWork) -> Any:
        streams.waiting.append((streams.now, self))
        return original(self)

    with pretended_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "current_stream_of", staticmethod(lambda _: lambda: streams.now))
        patch.setattr(LateWork, "wait", wait)
        for name in ("has_compiled", "has_scripted"):  # earlier tests of these ranks may have
            patch.setattr(spread, name, lambda: False)
        yield streams


def are_arriving(model: nn.Module) -> list[bool]:
    return [type(p) is not nn.Parameter for p in model.parameters()]


@contextmanager
def stepped_once(model: Layers, optimizer: torch.optim.Optimizer) -> Iterator[Streams]:
    """Yields the streams after a step whose parameters have not arrived."""
    with several_streams() as streams, attached(optimizer, model, shard="optimizer", independent=True, bucket_mb=0.02):
        for _ in range(2):
            stepped(model, optimizer)
        optimizer.zero_grad()
        streams.waiting.clear()
        assert all(are_arriving(model))
        yield streams
        assert_replicas_equal(model)


@on_ranks(2)
def test_every_stream_that_uses_parameters_waits_for_them() -> None:
    """Also one that uses them later than another, which may have begun to follow the step's stream before."""
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with stepped_once(model, optimizer) as streams:
        for now in (8, 9, 8, STREAM):
            streams.now = now
            model(torch.ones(1, 64))
        seen = [stream for stream, _ in streams.waiting]
        number = seen.count(8)
        assert number > 1
        assert seen == [8] * number + [9] * number + [STREAM] * number
        assert all(are_arriving(model))
        model(torch.full((2, 64), 0.1 + rank())).backward()
        assert not any(are_arriving(model))


@on_ranks(2)
def test_a_forward_waits_for_the_layers_that_it_has_reached() -> None:
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    seen: list[int] = []
    with stepped_once(model, optimizer) as streams:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: seen.append(len(streams.waiting)))
        model(torch.ones(1, 64))
        assert seen == sorted(seen)
        assert 0 < seen[0] < seen[-1], seen


USES: dict[str, Callable[[Layers], Any]] = {
    "reading": lambda model: [p + 0 for p in model.parameters()],
    "writing": lambda model: [p.data.add_(1.0) for p in model.parameters()],
    "state_dict": lambda model: {k: v.clone() for k, v in model.state_dict().items()},
    "deepcopy": lambda model: [p.detach().clone() for p in copy.deepcopy(model).parameters()],
    "pickle": lambda model: [p.detach().clone() for p in pickle.loads(pickle.dumps(model)).parameters()],
    "repr": lambda model: repr(list(model.parameters())),
    "foreach": lambda model: torch._foreach_add(list(model.parameters()), 1.0),
    "evaluation": lambda model: model.eval()(torch.ones(1, 64)),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_uses_of_parameters(use: str) -> None:
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with stepped_once(model, optimizer) as streams:
        found = USES[use](model)
        works = {id(work) for _, work in streams.waiting}
        assert len(works) > 1
        assert len(works) == len(streams.waiting)
        if isinstance(found, list):
            assert all(type(x) in (torch.Tensor, nn.Parameter) for x in found)


@on_ranks(2)
def test_cuda_graphs() -> None:
    """They call no Python when they are launched: parameters arrive before. Steps stay outside."""
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with stepped_once(model, optimizer) as streams, pytest.MonkeyPatch.context() as context:
        spread._await_all()
        assert not any(are_arriving(model))
        assert len(streams.waiting) > 1
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
        refused(r"Sharding\('parameters'\) requires parameters in CPU memory", Orthogonal, "parameters")
        refused("grads='local'.* requires parameters in CPU", Orthogonal, pycomm.Sharding("optimizer", grads="local"))
        refused("Orthogonal is not among the optimizers that are known", Orthogonal, "optimizer")
        refused("call it without pycomm.fuse", fused, "optimizer")
        refused("LBFGS: its step depends on all gradients together", torch.optim.LBFGS, "optimizer")


def lose_messages(point: str) -> None:
    """NCCL fails: nobody knows whether the parameters of the step before have arrived."""
    model = Layers()
    optimizer = Orthogonal(model.parameters())
    with pretended_gpu():
        reducer = pycomm.attach(optimizer, model, **grouped(timeout=20, shard=SHARED, check_replicas=0))
        for _ in range(2):
            stepped(model, optimizer)

        def fail(self: LateWork) -> Any:
            raise pycomm.CommError.during("broadcast", "NCCL has failed", rank=rank())

        if point == "gradients":
            reducer.named_parameters()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateWork, "wait", fail)
            patch.setattr(LateWork, "ends_within", lambda *_: True)
            with pytest.raises(pycomm.CommError, match="NCCL has failed"):
                stepped(model, optimizer)
            assert not any(are_arriving(model))
            assert_unusable_until_loaded(reducer, optimizer, lambda: model(torch.ones(1, 64)), model)


@pytest.mark.parametrize("point", ["parameters", "gradients"])
def test_no_mixture_trains_on(point: str, new_ranks: Pools) -> None:
    for outcome in new_ranks(2).outcomes(lose_messages, point, timeout=60.0):
        assert outcome.error is None, outcome.trace
