"""torch.jit.script, torch.jit.trace, torch.export and torch.fx of models that are attached or averaged."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.optim.module_hooks import BeforeForward
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, grouped

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Block(), nn.Sequential(Block(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))

    @torch.jit.export
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def attach(**options: Any) -> Callable[..., Any]:
    return lambda optimizer, model: pycomm.attach(optimizer, model, **grouped(timeout=30, **options))


def average(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return pycomm.local_sgd(optimizer, model, every=2, timeout=30)


def reloaded(scripted: torch.jit.ScriptModule) -> Any:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((3, 4), 1.0 + dist.get_rank())).square().sum().backward()
    optimizer.step()


KINDS: dict[str, Callable[..., Any]] = {
    "attach": attach(),
    "shrink": attach(survive=pycomm.Survive()),
    "shard": attach(shard="optimizer"),
    "DGC": attach(compression=pycomm.TopK(0.5)),
    "local_sgd": average,
    "gossip": lambda optimizer, model: pycomm.gossip(optimizer, model, timeout=30),
}


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "record an attached model by `torch.jit`, `torch.export` or `torch.fx`",
    "The recording has no hooks of pycomm.",
)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, fresh=True)
def test_a_model_in_training_is_recorded(kind: str) -> None:
    """By one rank alone, between steps: each recording has the parameters of then, and training goes on."""
    model, x = Net(), torch.randn(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = KINDS[kind](optimizer, model)
    train(model, optimizer)
    if dist.get_rank() == 1:
        with torch.no_grad():
            now = model(x)
        for recorded in (torch.jit.script(model), torch.jit.trace(model, x)):
            assert torch.equal(reloaded(recorded)(x), now)
            assert torch.equal(recorded.encode(x), model.first(x))
        assert torch.equal(reloaded(torch.jit.script(model.rest))(model.first(x)), now)
        assert torch.equal(reloaded(torch.jit.script(nn.Sequential(model, nn.ReLU())))(x), now.relu())
        assert torch.equal(torch.fx.symbolic_trace(model)(x), now)
        if kind == "attach":
            assert torch.equal(torch.export.export(model, (x,)).module()(x), now)
    train(model, optimizer)
    handle.detach()
    assert_replicas_equal(model)
    torch.jit.script(model)


@on_ranks(2, fresh=True)
def test_a_scripted_model_is_trained() -> None:
    """The parameters are the same objects: gradients of the script are averaged, too."""
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
        trained: Any = torch.jit.script(model) if model is models[1] else model
        for _ in range(3):
            train(trained, optimizer)
        reducer.detach()
        assert_replicas_equal(model)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@on_ranks(2, fresh=True)
def test_scripted_parts_are_called_without_the_model() -> None:
    """Parts are hooked then; those that are scripts take no hooks, and have no dicts."""
    for door in (attach(), average, lambda optimizer, model: pycomm.gossip(optimizer, model, timeout=30)):
        model: Any = Net()
        model.first = torch.jit.script(model.first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = door(optimizer, model)
        for _ in range(4):
            train(nn.Sequential(model.first, model.rest), optimizer)
        handle.average() if hasattr(handle, "average") else None
        handle.detach()
        assert_replicas_equal(model)


def double(module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (given[0] * 2,)


@on_ranks(2, fresh=True)
def test_the_users_hooks_are_scripted() -> None:
    model, x = Net(), torch.randn(3, 4)
    before = model.register_forward_pre_hook(double)
    reducer = pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=pycomm.Tuning(timeout=30))
    model.register_forward_pre_hook(double)
    hooks = dict(model._forward_pre_hooks)
    assert torch.equal(reloaded(torch.jit.script(model))(x), model(x))
    assert dict(model._forward_pre_hooks) == hooks
    before.remove()  # a handle from before the script
    assert len(model._forward_pre_hooks) == len(hooks) - 1

    model.register_forward_hook(lambda *_: None)
    with pytest.raises(Exception, match="single top-level function"):  # torch's own error
        torch.jit.script(model)
    assert len(model._forward_pre_hooks) == len(hooks) - 1
    reducer.detach()
    assert list(model._forward_pre_hooks.values()) == [double]


@on_ranks(2, fresh=True)
def test_torch_keeps_nothing_of_ours() -> None:
    """TorchScript keeps the types of modules for ever, with their hooks."""
    model = Net()
    reducer = pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=pycomm.Tuning(timeout=30))
    torch.jit.script(model)
    kept: list[Any] = [weakref.ref(model), weakref.ref(reducer)]
    del model, reducer
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_hooks_of_all_kinds_are_left_out() -> None:
    class Further(BeforeForward):
        pass

    model, x = Net(), torch.randn(3, 4)
    for each in (model, model.rest):
        for hook in (BeforeForward(lambda: None), Further(lambda: None)):
            each.register_forward_pre_hook(hook)
            each.register_forward_hook(hook)
            each.register_forward_pre_hook(lambda *_: None, with_kwargs=True).remove()
    scripted: Any = torch.jit.script(model)
    assert torch.equal(scripted(x), model(x))
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 2
