"""Replicas of a model that FSDP2 shards: averaged with any compression, and state that is the shards'."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pycomm
from pycomm.ddp import register_hsdp
from tests.ddp.test_gradients import NEW, lost_by
from tests.on_ranks import Pools, on_ranks
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd


def sharded(mesh: Any, **options: Any) -> Any:
    model: Any = make_model()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    return model


@contextlib.contextmanager
def replicated(compression: Any = None, scaler: Any = None, **options: Any) -> Iterator[Any]:
    """``(model, handle, mesh)`` of two replicas in two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"], **options)
    handle = register_hsdp(model, mesh["replicate"], compression=compression, loss_scaler=scaler, timeout=30)
    try:
        yield model, handle, mesh
    finally:
        handle.remove()


def step(model: Any, number: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The whole gradients of one backward pass."""
    model.zero_grad()
    (loss_of(model, dist.get_rank(), number) * factor).backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def residuals_of(model: Any, handle: Any, mesh: Any) -> dict[str, torch.Tensor]:
    """What all replicas have not sent. Before it scatters float64, FSDP divides by the number of shards."""
    own = handle.state_dict()["ranks"][str(mesh["replicate"].get_local_rank())]
    found = {}
    for name, p in model.named_parameters():
        if name not in own:
            continue
        total = own[name]["residual"].clone()
        dist.all_reduce(total, group=mesh["replicate"].get_group())
        parts = [torch.empty_like(total) for _ in range(2)]
        dist.all_gather(parts, total, group=mesh["shard"].get_group())
        found[name] = torch.cat(parts)[: p.shape[0]]
    return found


@on_ranks(4)
def test_without_compression_gradients_are_exact_means() -> None:
    with replicated() as (model, handle, _):
        for number in range(2):
            wanted = average_gradients(make_model(), losses_at(number))
            for name, grad in step(model, number).items():
                close(grad, wanted[name])
        assert handle.stats()["steps"] == 2
        assert handle.stats()["num_buckets"] == 3


@pytest.mark.parametrize("method", [pycomm.TopK(0.1), pycomm.PowerSGD(1), pycomm.Auto(0.1), *NEW], ids=repr)
@on_ranks(4)
def test_nothing_is_lost(method: Any) -> None:
    """But for the roundings of half types, which ``Auto`` may take for the fastest."""
    with replicated(method) as (model, handle, mesh):
        received = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
        wanted = {name: torch.zeros_like(tensor) for name, tensor in received.items()}
        for number in range(3):
            for name, grad in step(model, number).items():
                received[name] += grad
            for name, grad in average_gradients(make_model(), losses_at(number)).items():
                wanted[name] += grad
        left = residuals_of(model, handle, mesh)
        for name, total in received.items():
            close(total + left.get(name, 0.0), wanted[name], lost_by(method))
        if lost_by(method) <= 1e-7:
            assert max(float(tensor.abs().max()) for tensor in left.values()) > 0


def overflow_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda grad: grad * torch.inf)


@pytest.mark.parametrize("method", [None, pycomm.FP16()], ids=repr)
@on_ranks(4)
def test_all_replicas_know_the_parameter_and_the_replica(method: Any) -> None:
    with replicated(method) as (model, handle, _):
        step(model, 0)
        assert handle.stats()["last_nonfinite"] is None
        hook = model[0].register_forward_hook(overflow_in_backward) if dist.get_rank() == 3 else None
        step(model, 1)
        assert handle.stats()["last_nonfinite"] == "parameter '0.weight' on rank 1", "of the two replicas"
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("method", [pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.PowerSGD(1)], ids=repr)
@on_ranks(4)
def test_an_overflow_on_one_rank_leaves_no_trace_on_any(method: Any) -> None:
    scaler = pycomm.LossScaler(init_scale=1024.0)
    with replicated(method, scaler) as (model, handle, mesh):
        rank = str(mesh["replicate"].get_local_rank())
        step(model, 0, 1024.0)
        before = handle.state_dict()
        model.zero_grad()
        # Only rank 3, and only in the first layer: the others' modules have been averaged by then.
        hook = model[0].register_forward_hook(overflow_in_backward) if dist.get_rank() == 3 else None
        (loss_of(model, dist.get_rank(), 1) * 1024.0).backward()
        assert all(p.grad.to_local().isnan().all() for p in model.parameters() if p.grad.to_local().numel())
        after = handle.state_dict()
        assert after["steps"] == before["steps"] == 1
        for name, entry in before["ranks"][rank].items():
            for key, tensor in entry.items():
                assert torch.equal(after["ranks"][rank][name][key], tensor), (name, key)
        assert handle.stats()["nonfinite_steps"] == 1
        if hook is not None:
            hook.remove()
        step(model, 2, 1024.0)
        assert handle.state_dict()["steps"] == 2


@on_ranks(4)
def test_accumulation_and_mixed_precision() -> None:
    with replicated(pycomm.TopK(0.2)) as (model, handle, _):
        model.set_requires_gradient_sync(False)
        loss_of(model, dist.get_rank(), 0).backward()
        assert handle.stats()["bytes_sent"] == handle.stats()["steps"] == 0
        model.set_requires_gradient_sync(True)
        loss_of(model, dist.get_rank(), 1).backward()
        assert handle.stats()["steps"] == 1
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wanted = average_gradients(make_model(), losses_at(0))
    with replicated(None, mp_policy=policy) as (model, _, _):
        model.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
        model(x).float().square().mean().backward()
        assert all(p.grad.dtype == torch.float64 for p in model.parameters())
        assert wanted.keys() == {name for name, _ in model.named_parameters()}


@on_ranks(4)
def test_a_run_goes_on_from_a_checkpoint() -> None:
    with replicated(pycomm.TopK(0.1)) as (model, handle, _):
        step(model, 0)
        file = io.BytesIO()
        torch.save(handle.state_dict(), file)
        wanted = step(model, 1)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with replicated(pycomm.TopK(0.1)) as (model, handle, _):
        handle.load_state_dict(state)
        for name, grad in step(model, 1).items():
            close(grad, wanted[name], 1e-9)
        with pytest.raises(ValueError, match="shards do not change"):
            handle.load_state_dict({**state, "num_shards": 3})


@on_ranks(4)
def test_a_removed_handle_leaves_plain_averages_and_may_come_again() -> None:
    with replicated(pycomm.TopK(0.1)) as (model, handle, mesh):
        step(model, 0)
        handle.remove()
        wanted = average_gradients(make_model(), losses_at(1))
        for name, grad in step(model, 1).items():
            close(grad, wanted[name])
        with pytest.raises(RuntimeError, match="after remove"):
            handle.state_dict()
        again = register_hsdp(model, mesh["replicate"])
        with pytest.raises(ValueError, match="already has an all-reduce hook"):
            register_hsdp(model, mesh["replicate"])
        for name, grad in step(model, 1).items():
            close(grad, wanted[name])
        again.remove()


@on_ranks(4)
def test_replicas_start_equal_and_mistakes_are_told_to_all() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(dist.get_rank() // 2)
    model: Any = nn.Linear(6, 4)
    with torch.no_grad():
        model.weight += dist.get_rank() // 2
    fully_shard(model, mesh=mesh["shard"])
    register_hsdp(model, mesh["replicate"]).remove()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, model.weight.to_local().detach().clone())
    assert torch.equal(everyone[0], everyone[2])
    assert torch.equal(everyone[1], everyone[3])
    native: Any = make_model()
    fully_shard(native, mesh=mesh)
    part: Any = make_model()
    fully_shard(part[0], mesh=mesh["shard"])
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (make_model(), {}, "without sharded parameters"),
        (3, {}, "model is a int"),
        (native, {}, 'averages its replicas itself.*mesh\\["shard"\\]'),
        (part, {}, "parameter '2.weight' is not sharded"),
        (model, {"compression": pycomm.DGC(0.1, weight_decay=0.1)}, "leave weight decay to the optimizer"),
    ]
    for given, options, says in cases:
        with pytest.raises((TypeError, ValueError), match=says):
            register_hsdp(given, mesh["replicate"], **options)
    with pytest.raises(ValueError, match="setting 0|rank 1 could not register"):
        register_hsdp(model, mesh["replicate"], compression=pycomm.TopK(0.1 + 0.1 * (dist.get_rank() // 2)))
    with pytest.raises(TypeError, match="pycomm.ddp.register_hsdp"):
        pycomm.attach(sgd(model), model)


def step_until_an_error() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    register_hsdp(model, mesh["replicate"], compression=pycomm.TopK(0.1), timeout=30)
    loss = loss_of(model, dist.get_rank(), 0)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.CommError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("body", [step_until_an_error], ids=["a rank dies"])
def test_a_rank_that_dies(new_ranks: Pools, body: Callable[[], str]) -> None:
    outcome = new_ranks(2).outcomes(body)[0]
    assert outcome.error is None, outcome.trace
    assert "rank 1" in outcome.result
