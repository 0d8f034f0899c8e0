"""Checkpoints of a handle: by parameter name, in attach's format, shared out anew for another number of ranks."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.ddp import HookHandle
from tests.ddp.wrapping import OutOfOrder, residuals_of, step, wrapped
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.models import close, loss_of, make_model, sgd


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("method", [pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.PowerSGD(1)], ids=repr)
@on_ranks(2)
def test_a_run_goes_on_from_a_checkpoint(method: Any) -> None:
    """Before and after the buckets have been made anew: the names are what counts."""
    with wrapped(OutOfOrder(), method) as (model, handle):
        for number in range(2):
            step(model, number)
        state = saved_and_loaded(handle.state_dict())
        wanted = [step(model, number) for number in (2, 3)]
    with wrapped(OutOfOrder(), method) as (model, handle):
        handle.load_state_dict(state)
        assert handle.state_dict()["steps"] == 2
        for number, grads in zip((2, 3), wanted, strict=True):
            for name, grad in step(model, number).items():
                close(grad, grads[name], 1e-9)


@on_ranks(2)
def test_a_state_without_residuals_loads_on_any_rank() -> None:
    with wrapped(OutOfOrder(), None) as (model, handle):
        step(model, 0)
        states = [handle.state_dict()]
        dist.broadcast_object_list(states, 0)
        handle.load_state_dict(states[0])
        handle.load_state_dict({**states[0], "world_size": 5})


@pytest.mark.parametrize("method", [pycomm.TopK(0.1), pycomm.DGC(0.1)], ids=repr)
@on_ranks(2)
def test_attach_and_the_hook_load_each_others_state(method: Any) -> None:
    model = make_model()
    optimizer = sgd(model, 0.0)
    with attached(optimizer, model, compression=method) as reducer:
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), number).backward()
            optimizer.step()
        state = saved_and_loaded(reducer.state_dict())
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), 2).backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    with wrapped(make_model(), method) as (ddp_model, handle):
        handle.load_state_dict(state)
        for name, grad in step(ddp_model, 2).items():
            close(grad, wanted[name], 1e-9)
        state = saved_and_loaded(handle.state_dict())
        wanted = step(ddp_model, 3)
    with attached(optimizer, model, compression=method) as reducer:
        reducer.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), 3).backward()
        for name, p in model.named_parameters():
            close(p.grad, wanted[name], 1e-9)


@on_ranks(3)
def test_state_of_three_ranks_is_shared_out_over_two() -> None:
    with wrapped(make_model(), pycomm.TopK(0.1)) as (model, handle):
        step(model, 0)
        states: list[Any] = [None] * 3
        dist.all_gather_object(states, handle.state_dict())
        total = residuals_of(handle)
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with wrapped(make_model(), pycomm.TopK(0.1), process_group=group) as (_, handle):
            handle.load_state_dict(states)
            own = handle.state_dict()["ranks"][str(dist.get_rank())]
            for name, entry in own.items():
                dist.all_reduce(entry["residual"], group=group)
                close(entry["residual"], total[name])
            with pytest.raises(ValueError, match="wanted TopK"):
                handle.load_state_dict({**handle.state_dict(), "method": "DGC"})
    dist.barrier()


@on_ranks(2)
def test_a_removed_handle() -> None:
    with wrapped(make_model(), pycomm.TopK(0.1)) as (model, handle):
        step(model, 0)
        stats = handle.stats()
        handle.remove()
        handle.remove()
        assert handle.stats() == stats
        for call in (handle.state_dict, lambda: handle.load_state_dict({})):
            with pytest.raises(RuntimeError, match="after remove"):
                call()
        assert isinstance(handle, HookHandle)
