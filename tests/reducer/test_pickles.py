"""Pickles of what is attached, such as ``torch.save(model)``: they hold nothing of pycomm's."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd
from tests.on_ranks import on_ranks
from tests.reducer.models import loss_of, make_model

Attach = Callable[[torch.optim.Optimizer, Any], Callable[[], Any]]


def by_ddp(optimizer: torch.optim.Optimizer, model: Any) -> Callable[[], Any]:
    return pycomm.ddp.register(model, compression=pycomm.TopK(0.5), timeout=30).remove


def by_horovod(optimizer: torch.optim.Optimizer, model: Any) -> Callable[[], Any]:
    hvd.init()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return hvd.shutdown


def attach(**options: Any) -> Attach:
    return lambda *what: pycomm.attach(*what, tuning=pycomm.Tuning(timeout=30), **options).detach


HOW: dict[str, Attach] = {
    "attach": attach(),
    "residuals": attach(compression=pycomm.TopK(0.5)),
    "shard": attach(shard="optimizer"),
    "survive": attach(survive=pycomm.Survive()),
    "masters": lambda optimizer, model: (pycomm.master_weights(optimizer), attach()(optimizer, model))[1],
    "ddp": by_ddp,
    "local_sgd": lambda *what: pycomm.local_sgd(*what, every=2, timeout=30).detach,
    "gossip": lambda *what: pycomm.gossip(*what, timeout=30).detach,
    "horovod": by_horovod,
}


def names_of_pycomm(thing: Any) -> list[str]:
    file = io.BytesIO()
    torch.save(thing, file)
    texts = {"torch.save": file.getvalue(), "pickle": pickle.dumps(thing)}
    return [how for how, text in texts.items() if b"pycomm" in text]


def noted(module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def loaded(file: io.BytesIO) -> Any:
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        return torch.load(file, weights_only=True)


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "`torch.save` an attached module",
    "It loads as an ordinary module, without pycomm.",
)
@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_a_saved_module_is_as_a_bare_one(how: str) -> None:
    """So is the wrapper, a copy of the module, and a part of it; hooks of others stay."""
    rank, dtype = dist.get_rank(), torch.bfloat16 if how == "masters" else torch.float64
    inner = make_model(dtype=dtype)
    model = DistributedDataParallel(inner) if how == "ddp" else inner
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    end = HOW[how](optimizer, model)
    try:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model.eval() if how == "attach" else model, rank, step).backward()
            optimizer.step()
        for thing in (model, inner, inner[0], pickle.loads(pickle.dumps(model)), optimizer):
            assert names_of_pycomm(thing) == []
        file = io.BytesIO()
        torch.save(inner, file)
        again = loaded(file)
        assert [type(hooks) for hooks in (again._forward_hooks, again[0]._forward_pre_hooks)] == [OrderedDict] * 2
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in again.modules())
        assert all(map(torch.equal, inner.parameters(), again.parameters()))
        loss_of(again, rank, 3).backward()  # it is nobody's copy
        torch.optim.SGD(again.parameters()).step()
        handle = inner.register_forward_hook(noted)
        kept = pickle.loads(pickle.dumps(inner))
        assert list(kept._forward_hooks.values()) == [noted]
        handle.remove()
        assert noted not in inner._forward_hooks.values()
    finally:
        end()
    copied = copy.deepcopy(inner)  # nobody's, either
    assert all(
        vars(hooks) == {} for part in copied.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )
    loss_of(copied, rank, 3).backward()
    torch.optim.SGD(copied.parameters()).step()


@on_ranks(2)
def test_a_module_of_two_optimizers_until_both_are_detached() -> None:
    model = make_model()
    ends = [attach()(torch.optim.SGD(part.parameters(), 0.1), model) for part in (model[:2], model[2:])]
    for end in ends:
        assert names_of_pycomm(model) == []
        end()
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
