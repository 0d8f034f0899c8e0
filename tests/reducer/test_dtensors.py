"""Attaching models whose parameters are DTensors over other ranks than those that are averaged over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pycomm
from tests.backend.worlds import on_world
from tests.reducer.attaching import attached
from tests.reducer.sharded_models import (
    Block,
    assert_same,
    attached_block,
    gradients_alone,
    loss_of,
    mesh_of,
    replica,
    split_block,
    whole,
    whole_gradients,
    wholes,
)


def fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    pycomm.fuse(optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "lars": lambda params: pycomm.LARS(params, lr=2.0, weight_decay=0.01, nesterov=True),
    "lars of torch": lambda params: pycomm.LARS(params, lr=2.0, weight_decay=0.01, exclude="none", fused=False),
    "lamb": lambda params: pycomm.LAMB(params, lr=0.01, weight_decay=0.1),
    "lamb of torch": lambda params: pycomm.LAMB(params, lr=0.01, weight_decay=0.1, exclude="none", fused=False),
    "fused sgd": lambda params: fused(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "fused adamw": lambda params: fused(torch.optim.AdamW(params, lr=0.01)),
}


@pytest.mark.parametrize("plan", ["layers", "sequence"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_world(4)
def test_training_equals_one_process(name: str, plan: str) -> None:
    alone = Block()
    reference = OPTIMIZERS[name](alone.parameters())
    with attached_block(OPTIMIZERS[name], plan=plan) as (model, optimizer, reducer, mesh):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, replica(mesh), step).backward()
            gradients_alone(alone, 2, step)
            assert_same(whole_gradients(model), whole_gradients(alone))
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            torch.testing.assert_close(reducer.clip_grad_norm(0.05), norm, rtol=1e-12, atol=0)
            optimizer.step()
            reference.step()
        assert_same(wholes(model), wholes(alone))
        for p in model.parameters():
            assert (type(p.grad) is DTensor) == isinstance(p, DTensor)


@on_world(4)
def test_windows_and_local_clipping_equal_one_process() -> None:
    alone = Block()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "accumulate": 2,
        "compression": pycomm.DGC(1.0, 0.0, clip_local_norm=0.02),
        "plan": "sequence",
    }
    with attached_block(lambda params: torch.optim.SGD(params, lr=0.1), **options) as (model, optimizer, _, mesh):
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                (loss_of(model, replica(mesh), 2 * step + part) / 2).backward()
            optimizer.step()
            reference.zero_grad()
            for number in range(2):
                loss = (loss_of(alone, number, 2 * step) + loss_of(alone, number, 2 * step + 1)) / 2
                grads = torch.autograd.grad(loss, list(alone.parameters()))
                norm = torch.stack([grad.norm() for grad in grads]).norm()
                factor = float((0.02 / (norm + 1e-6)).clamp(max=1.0))
                assert factor < 1.0
                for p, grad in zip(alone.parameters(), grads, strict=True):
                    p.grad = grad * factor / 2 + (0.0 if p.grad is None else p.grad)
            reference.step()
        assert_same(wholes(model), wholes(alone))


@on_world(4)
def test_gradients_are_accumulated_and_kept_as_autograd_would() -> None:
    alone = Block()
    with attached_block(lambda params: torch.optim.SGD(params, lr=0.0), plan="sequence") as (model, _, reducer, mesh):
        gradients_alone(alone, 2, 0)
        once = whole_gradients(alone)
        loss_of(model, replica(mesh), 0).backward()
        kept = {name: p.grad for name, p in model.named_parameters()}
        loss_of(model, replica(mesh), 0).backward()  # adds to what is there
        assert_same(whole_gradients(model), {name: 2 * grad for name, grad in once.items()})
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        loss_of(model, replica(mesh), 1).backward()
        assert_same({name: whole(grad) for name, grad in kept.items()}, {n: 2 * grad for n, grad in once.items()})
        for p in model.parameters():
            p.grad.mul_(0.5)  # which the norms taken on arrival must not miss
        gradients_alone(alone, 2, 1)
        norm = torch.cat([grad.reshape(-1) for grad in whole_gradients(alone).values()]).norm() / 2
        for _ in range(2):
            torch.testing.assert_close(reducer.clip_grad_norm(1e3), norm, rtol=1e-12, atol=0)
            loss_of(model, replica(mesh), 1).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.zero_().add_(0.0)
            norm = torch.zeros((), dtype=torch.float64)


@on_world(4)
def test_state_of_rank_0_is_everyones() -> None:
    mesh = mesh_of(2, 2)
    model = split_block(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if replica(mesh) == 0:
        loss_of(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = [Block()]
    reference = torch.optim.AdamW(wanted[0].parameters(), lr=0.1)
    gradients_alone(wanted[0], 1, 0)
    reference.step()
    with attached(optimizer, model, process_group=mesh["dp"]):
        assert_same(wholes(model), wholes(wanted[0]))
        for p, q in zip(model.parameters(), wanted[0].parameters(), strict=True):
            assert_same(
                {key: whole(value) for key, value in optimizer.state[p].items()},
                {key: whole(value) for key, value in reference.state[q].items()},
            )
            assert isinstance(optimizer.state[p]["exp_avg"], DTensor) == isinstance(p, DTensor)


@on_world(4)
def test_replicas_that_differ_are_found_by_their_parts() -> None:
    with attached_block(OPTIMIZERS["sgd"], check_replicas=1) as (model, optimizer, _, mesh):
        loss_of(model, replica(mesh), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if replica(mesh) == 1:
            with torch.no_grad():
                model.up.weight.to_local()[0, 0] += 1.0  # on all ranks of this replica
        loss_of(model, replica(mesh), 1).backward()
        with pytest.raises(RuntimeError, match=r"the replicas differ .*'up.weight' differs between rank"):
            optimizer.step()


@pytest.mark.parametrize("method", [None, pycomm.TopK(0.5)], ids=["dense", "topk"])
@pytest.mark.parametrize("scaler_of", [pycomm.LossScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
@on_world(4)
def test_one_part_that_is_not_finite_is_skipped_everywhere(scaler_of: Any, method: Any) -> None:
    scaler = scaler_of(init_scale=1024.0) if scaler_of is pycomm.LossScaler else scaler_of("cpu", init_scale=1024.0)
    mesh = mesh_of(2, 2)
    model = split_block(mesh, "sequence")
    model.head.requires_grad_(False)  # GradScaler takes either DTensors or ordinary tensors
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with attached(optimizer, model, process_group=mesh["dp"], compression=method, loss_scaler=scaler) as reducer:
        for step, broken in enumerate([False, True, False]):
            before = wholes(model)
            optimizer.zero_grad()
            handle = model.up.weight.register_hook(lambda grad, on=broken: poisoned(grad) if on else grad)
            scaler.scale(loss_of(model, replica(mesh), step)).backward()
            handle.remove()
            scaler.step(optimizer)
            scaler.update()
            moved = {name for name, p in wholes(model).items() if not torch.equal(p, before[name])}
            assert moved == (set() if broken else {name for name in before if not name.startswith("head")})
            assert scaler.get_scale() == (512.0 if step > 0 else 1024.0)
        assert reducer.stats()["nonfinite_steps"] == (0 if method is None else 1)


def poisoned(grad: Any) -> Any:
    """A gradient that is infinite in the last rank's part alone."""
    if dist.get_rank() == 3:
        grad.to_local()[-1, -1] = torch.inf
    return grad


@on_world(2)
def test_one_replica_has_norms_of_whole_parameters() -> None:
    alone = Block()
    reference = OPTIMIZERS["lamb"](alone.parameters())
    with attached_block(OPTIMIZERS["lamb"], dp=1, plan="sequence") as (model, optimizer, reducer, _):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            gradients_alone(alone, 1, step)
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            torch.testing.assert_close(reducer.clip_grad_norm(0.05), norm, rtol=1e-12, atol=0)
            optimizer.step()
            reference.step()
        assert_same(wholes(model), wholes(alone))


@on_world(2)
def test_uneven_and_empty_parts() -> None:
    mesh = mesh_of(1, 2)
    torch.manual_seed(0)
    values = {"uneven": torch.randn(5, 3), "one": torch.randn(1, 4), "vector": torch.randn(3)}
    alone = {name: nn.Parameter(value.double()) for name, value in values.items()}
    params = {
        name: nn.Parameter(distribute_tensor(value.double(), mesh["tp"], [Shard(0)])) for name, value in values.items()
    }
    make = OPTIMIZERS["lars"]
    optimizer, reference = make(params.values()), make(alone.values())
    with attached(optimizer, params.items(), process_group=mesh["dp"]) as reducer:
        for step in range(3):
            for some in (params, alone):
                for p in some.values():
                    p.grad = None
                sum((p * p * (step + 1)).sum() for p in some.values()).backward()  # type: ignore[union-attr]
            norm = torch.cat([p.grad.reshape(-1) for p in alone.values() if p.grad is not None]).norm()
            torch.testing.assert_close(reducer.clip_grad_norm(1e9), norm, rtol=1e-12, atol=0)
            optimizer.step()
            reference.step()
        assert_same({n: whole(p) for n, p in params.items()}, {n: p.detach() for n, p in alone.items()})


@on_world(4)
def test_parts_along_two_dimensions_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    placements: dict[str, list[Any]] = {
        "grid": [Shard(0), Shard(1)],
        "rows": [Shard(0), Shard(0)],
        "one": [Replicate(), Shard(1)],
        "copies": [Replicate(), Replicate()],
    }
    torch.manual_seed(0)
    alone = {name: nn.Parameter(torch.randn(5, 6, dtype=torch.float64)) for name in placements}
    params = {
        name: nn.Parameter(distribute_tensor(alone[name].detach(), mesh["ep", "tp"], placement))
        for name, placement in placements.items()
    }
    optimizer, reference = OPTIMIZERS["lamb"](params.values()), OPTIMIZERS["lamb"](alone.values())
    with attached(optimizer, params.items(), process_group=mesh["dp"], compression=pycomm.TopK(1.0)) as reducer:
        for _ in range(2):
            for some in (params, alone):
                for p in some.values():
                    p.grad = None
                sum((p**3).sum() for p in some.values()).backward()  # type: ignore[union-attr]
            norm = torch.nn.utils.clip_grad_norm_(alone.values(), 1.0)
            torch.testing.assert_close(reducer.clip_grad_norm(1.0), norm, rtol=1e-12, atol=0)
            optimizer.step()
            reference.step()
        assert_same({n: whole(p) for n, p in params.items()}, {n: p.detach() for n, p in alone.items()})
        assert sorted(reducer.state_dict()["ranks"]["0"]) == sorted(
            ["grid[0:{}/2,1:{}/2]", "rows[0:{}/2,0:{}/2]", "one[1:{1}/2]", "copies"][i].format(*coordinate(mesh))
            for i in range(4)
        )


def coordinate(mesh: Any) -> list[int]:
    return [mesh["ep"].get_local_rank(), mesh["tp"].get_local_rank()]


@on_world(4)
def test_auto_may_choose_differently_for_other_parts() -> None:
    with attached_block(OPTIMIZERS["sgd"], compression="auto", buffers="average") as (model, optimizer, _, mesh):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, replica(mesh), step).backward()
            optimizer.step()
        for p in model.parameters():
            local = (p.to_local() if isinstance(p, DTensor) else p).detach()
            other = local.clone()
            dist.broadcast(other, group_src=0, group=mesh["dp"].get_group())
            assert torch.equal(local, other)


@on_world(4)
def test_parameters_laid_over_the_group_itself_are_refused() -> None:
    mesh = mesh_of(2, 2)
    model = split_block(mesh)
    with pytest.raises(TypeError, match=r"'up.weight' is a DTensor, sharded over ranks of process_group \(S\(0\)\)"):
        pycomm.attach(OPTIMIZERS["sgd"](model.parameters()), model)
    model = split_block(mesh, "sequence")
    with pytest.raises(TypeError, match=r"'norm.weight' is a DTensor whose mesh contains ranks of process_group"):
        pycomm.attach(OPTIMIZERS["sgd"](model.parameters()), model)
    shifted = mesh_of(2, 2)  # ranks with different parts: none of them in one group of a mesh
    model = split_block(shifted)
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
    with pytest.raises(ValueError, match=r"the ranks disagree: parameter 2 is 'up.weight: .* part 0:[01]/2'"):
        pycomm.attach(OPTIMIZERS["sgd"](model.parameters()), model, process_group=crossed)
    fully_shard(sharded := Block(), mesh=mesh["tp"])
    with pytest.raises(TypeError, match=r"'norm.weight' is a DTensor, sharded by fully_shard: FSDP2 averages"):
        pycomm.attach(OPTIMIZERS["sgd"](sharded.parameters()), sharded, process_group=mesh["dp"])


@on_world(4)
def test_a_module_that_the_garbage_collector_is_taking_apart_is_passed_over() -> None:
    mesh = mesh_of(2, 2)
    fully_shard(collected := Block(), mesh=mesh["tp"])
    vars(collected).clear()  # what the collector leaves for a moment of a module that is part of a circle
    model = split_block(mesh)
    pycomm.attach(OPTIMIZERS["sgd"](model.parameters()), model, process_group=mesh["dp"])


@on_world(4)
def test_master_weights_equal_one_process() -> None:
    mesh = mesh_of(2, 2)
    for make in (lambda params: torch.optim.AdamW(params, lr=0.01), lambda params: pycomm.LAMB(params, lr=0.01)):
        model, alone = split_block(mesh, dtype=torch.bfloat16), Block(torch.bfloat16)
        optimizer, reference, scaler = make(model.parameters()), make(alone.parameters()), pycomm.LossScaler(256.0)
        handle, wanted = pycomm.master_weights(optimizer), pycomm.master_weights(reference)
        assert optimizer.state_dict().keys() == reference.state_dict().keys()
        with attached(optimizer, model, process_group=mesh["dp"], loss_scaler=scaler) as reducer:
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, replica(mesh), step)).backward()
                # One process cannot round as two do: it gets the same gradients, times the scale it does not have.
                for p, grad in zip(alone.parameters(), whole_gradients(model).values(), strict=True):
                    p.grad = grad / scaler.get_scale()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.get_total_norm(
                    [p.grad.double() for p in alone.parameters() if p.grad is not None]
                )
                torch.testing.assert_close(reducer.clip_grad_norm(1e3), norm, rtol=1e-6, atol=0)
                scaler.step(optimizer)
                scaler.update()
                reference.step()
                saved = optimizer.state_dict()
                optimizer.load_state_dict(saved)
                assert_same(wholes(model), wholes(alone), 0.0)
        for master, other in zip(handle.parameters(), wanted.parameters(), strict=True):
            assert master.dtype == torch.float32
            torch.testing.assert_close(whole(master), whole(other), rtol=1e-6, atol=1e-7)
        for p in model.parameters():
            assert {v.dtype for k, v in optimizer.state[p].items() if k != "step"} == {torch.float32}
    with pytest.raises(TypeError, match=r"is a DTensor, and Adagrad is none of the optimizers"):
        pycomm.master_weights(torch.optim.Adagrad(split_block(mesh, dtype=torch.bfloat16).parameters()))
