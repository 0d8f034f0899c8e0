"""Compression of models whose parameters are DTensors: the same as on ordinary tensors of the parts; saved state."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import pycomm
from tests.backend.worlds import on_world
from tests.reducer.attaching import attached, own_state
from tests.reducer.sharded_models import (
    Block,
    assert_same,
    attached_block,
    gradients_alone,
    loss_of,
    mesh_of,
    replica,
    split_block,
    wholes,
)

METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: pycomm.DGC(0.2, momentum=0.9),
    "randomk": lambda: pycomm.RandomK(0.3),
    "powersgd": lambda: pycomm.PowerSGD(1),
    "qsgd": pycomm.QSGD,
    "fp16": pycomm.FP16,
}


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: (p.to_local() if hasattr(p, "to_local") else p).detach() for name, p in model.named_parameters()}


@on_world(4)
def test_methods_treat_parts_as_ordinary_tensors() -> None:
    mesh = mesh_of(2, 2)
    for make in METHODS.values():
        model = split_block(mesh)
        # The same parts as ordinary parameters, which get the same gradients.
        twins = {name: nn.Parameter(part.clone()) for name, part in parts(model).items()}
        optimizers = sgd(model.parameters()), sgd(twins.values())
        with (
            attached(optimizers[0], model, process_group=mesh["dp"], compression=make()) as reducer,
            attached(optimizers[1], twins.items(), process_group=mesh["dp"], compression=make()) as other,
        ):
            for step in range(2):
                optimizers[0].zero_grad()
                optimizers[1].zero_grad()
                grads = local_gradients(model, reducer, step, mesh)
                sum((twins[name] * grad).sum() for name, grad in grads.items()).backward()  # type: ignore[union-attr]
                loss_of(model, replica(mesh), step).backward()
                for optimizer in optimizers:
                    optimizer.step()
            assert_same(parts(model), {name: p.detach() for name, p in twins.items()}, 1e-15)
            state, wanted = own_state(reducer), own_state(other)
            assert {label.split("[")[0] for label in state} == wanted.keys()
            for label, entry in state.items():
                assert_same(entry, wanted[label.split("[")[0]], 1e-15)


def local_gradients(model: Any, reducer: pycomm.Reducer, step: int, mesh: Any) -> dict[str, torch.Tensor]:
    """This rank's parts of its own replica's gradients."""
    with reducer.paused():
        loss_of(model, replica(mesh), step).backward()
    grads = {n: (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad) for n, p in model.named_parameters()}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("method", [pycomm.TopK(1.0), pycomm.DGC(1.0, momentum=0.0)], ids=["topk", "dgc"])
@on_world(4)
def test_methods_that_send_all_equal_one_process(method: Any) -> None:
    alone = Block()
    reference = sgd(alone.parameters())
    with attached_block(sgd, plan="sequence", compression=method) as (model, optimizer, _, mesh):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, replica(mesh), step).backward()
            optimizer.step()
            gradients_alone(alone, 2, step)
            reference.step()
        assert_same(wholes(model), wholes(alone))


def train(model: Any, optimizer: Any, mesh: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, replica(mesh), step).backward()
        optimizer.step()


@on_world(4)
def test_each_rank_gets_the_state_of_its_own_part(tmp_path: Path) -> None:
    with attached_block(sgd, compression=pycomm.TopK(0.2)) as (model, optimizer, reducer, mesh):
        train(model, optimizer, mesh, range(2))
        saved, weights = reducer.state_dict(), {n: p.clone() for n, p in parts(model).items()}
        tp = mesh["tp"].get_local_rank()
        assert own_state(saved).keys() == {f"up.weight[0:{tp}/2]", f"down.weight[1:{tp}/2]", "head.weight"}
        state_dict_saver.save({"reducer": reducer}, checkpoint_id=tmp_path)
        train(model, optimizer, mesh, range(2, 4))
        wanted = parts(model), own_state(reducer)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, saved)

        def restart(state: Any) -> None:
            for name, part in parts(model).items():
                part.copy_(weights[name])
            if state is None:
                state_dict_loader.load({"reducer": reducer}, checkpoint_id=tmp_path)
            else:
                reducer.load_state_dict(state)
            assert_residuals(own_state(reducer), own_state(saved))
            train(model, optimizer, mesh, range(2, 4))
            assert_same(parts(model), wanted[0], 0.0)
            assert_residuals(own_state(reducer), wanted[1])

        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        restart(torch.load(file, weights_only=True))
        restart(everyone)
        restart([everyone[tp], everyone[2 + tp]])
        restart(None)
        with pytest.raises(ValueError, match=rf"'down.weight' is of part 1:{1 - tp}/2, this rank has part 1:{tp}/2"):
            reducer.load_state_dict(everyone[dist.get_rank() ^ 1])


def assert_residuals(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for label, entry in wanted.items():
        assert_same(found[label], entry, 0.0)


@on_world(4)
def test_state_moves_to_other_numbers_of_replicas_but_not_of_parts() -> None:
    with attached_block(sgd, compression=pycomm.TopK(0.2)) as (model, optimizer, reducer, mesh):
        train(model, optimizer, mesh, range(2))
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, reducer.state_dict())
        tp = mesh["tp"].get_local_rank()
    with attached_block(sgd, dp=1, tp=4, compression=pycomm.TopK(0.2)) as (_, _, reducer, _):
        with pytest.raises(ValueError, match=r"'down.weight' is of part 1:0/2 and 1:1/2, this rank has part 1:\d/4"):
            reducer.load_state_dict(everyone)
    lone = split_block(mesh)
    own = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    with attached(sgd(lone.parameters()), lone, process_group=own, compression=pycomm.TopK(0.2)) as reducer:
        reducer.load_state_dict(everyone)
        for label, entry in own_state(reducer).items():
            total = sum(own_state(everyone[2 * dp + tp])[label]["residual"] for dp in range(2))
            torch.testing.assert_close(entry["residual"], total, rtol=0, atol=0)
            assert math.isfinite(float(entry["residual"].sum()))


@on_world(4)
def test_dgc_clips_by_norms_of_whole_parameters() -> None:
    method = pycomm.DGC(1.0, momentum=0.5, clip_norm=0.02)
    alone = Block()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    with attached_block(sgd, compression=method) as (model, optimizer, reducer, mesh):
        for step in range(3):
            optimizer.zero_grad()
            reducer.set_weight(1 + replica(mesh))
            loss_of(model, replica(mesh), step).backward()
            optimizer.step()
            clipped_alone(alone, step, [1 / 3, 2 / 3], 0.02 / math.sqrt(2))
            reference.step()
        assert_same(wholes(model), wholes(alone), 1e-7)  # the kernels' factors are float32


def clipped_alone(model: Block, step: int, weights: list[float], max_norm: float) -> None:
    """Leave in ``.grad`` the sum of two replicas' contributions, each clipped by parameter."""
    names, params = zip(*model.named_parameters(), strict=True)
    total = {name: torch.zeros_like(p) for name, p in zip(names, params, strict=True)}
    num_clipped = 0
    for number, weight in enumerate(weights):
        for name, grad in zip(names, torch.autograd.grad(loss_of(model, number, step), params), strict=True):
            norm = float(grad.norm()) * weight
            num_clipped += norm > max_norm
            total[name] += grad * weight * min(1.0, max_norm / norm)
    assert 0 < num_clipped < 2 * len(names)
    for name, p in model.named_parameters():
        p.grad = total[name]
