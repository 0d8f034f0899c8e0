"""State that was saved with a module in other wrappers: torch.compile, checkpoints of activations, DataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import pycomm
from pycomm.torch_internals import modules
from tests.on_ranks import on_ranks
from tests.survival.test_gaining_ranks import come, equal_to_the_bit, together
from tests.survival.training import Plan, small_model


class Counting(nn.Module):
    """Module with extra state, and one that its author has called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.module = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.module(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def make_net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), Counting()).double()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def with_part(net: Any, index: int, wrap: Callable[[nn.Module], Any]) -> Any:
    net[index] = wrap(net[index])
    return net


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda net: net,
    "compiled": compiled,
    "a compiled part": lambda net: with_part(with_part(net, 1, compiled), 3, compiled),
    "checkpoints": lambda net: with_part(with_part(net, 0, checkpoint_wrapper), 3, checkpoint_wrapper),
    "DataParallel": nn.DataParallel,
    "several": lambda net: compiled(nn.DataParallel(with_part(net, 0, checkpoint_wrapper))),
}


class Run:
    """Training of a wrapped network, by ``attach`` or by ``local_sgd``."""

    def __init__(self, wrap: str, how: str = "attach") -> None:
        self.net = make_net()
        self.given = WRAPS[wrap](self.net)
        self.optimizer = torch.optim.SGD(self.given.parameters(), 0.1, momentum=0.9)
        method = pycomm.TopK(0.3)
        if how == "attach":
            tuning = pycomm.Tuning(timeout=30)
            self.handle: Any = pycomm.attach(self.optimizer, self.given, compression=method, tuning=tuning)
        else:
            options: Any = {"every": 2, "outer": pycomm.Nesterov(), "compression": method, "timeout": 30}
            self.handle = pycomm.local_sgd(self.optimizer, self.given, **options)

    def train(self, *steps: int) -> None:
        for step in steps:
            x = torch.randn(
                7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
            )
            self.optimizer.zero_grad()
            self.given(x).square().sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        parts = {"weights": list(self.net.parameters()), "buffers": list(self.net.buffers())}
        return copy.deepcopy({**parts, "optimizer": self.optimizer.state_dict(), "handle": self.handle.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for what, own in (("weights", self.net.parameters()), ("buffers", self.net.buffers())):
                for mine, saved in zip(own, state[what], strict=True):
                    mine.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])

    def values(self) -> list[torch.Tensor]:
        return [*(p.detach().clone() for p in self.net.parameters()), *(b.clone() for b in self.net.buffers())]


def calls_of(run: Run) -> int:
    return next(part.calls for part in run.given.modules() if isinstance(part, Counting))


PAIRS = [("plain", "several"), ("checkpoints", "plain"), ("a compiled part", "DataParallel"), ("several", "compiled")]
NAMES = {f"{layer}.{what}" for layer in ("0", "1", "3.module") for what in ("weight", "bias")}


@pytest.mark.behavior(
    "Checkpoints", "resume with or without `torch.compile`, or in other wrappers", "The checkpoint loads."
)
@pytest.mark.parametrize("old", [False, True], ids=["", "with the names of older releases"])
@pytest.mark.parametrize(("first", "then"), PAIRS)
@on_ranks(2)
def test_a_checkpoint_loads_in_other_wrappers(
    first: str, then: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if old:
            patch.setattr(modules, "_plain", lambda _, name: name)
        run = Run(first)
        run.train(0, 1)
        pycomm.save(tmp_path, run.handle).wait()
        calls = calls_of(run)
        names = run.handle.state_dict()["ranks"][str(dist.get_rank())].keys()
    if not old:
        assert {"0.weight", "3.module.weight"} <= names <= NAMES
    run.train(2, 3)
    wanted = run.values()
    run.handle.detach()
    again = Run(then)
    pycomm.load(tmp_path, again.handle)
    assert calls_of(again) == calls > 0
    again.train(2, 3)
    assert all(map(torch.equal, again.values(), wanted))
    again.handle.detach()


@pytest.mark.parametrize("how", ["attach", "local_sgd"])
@pytest.mark.parametrize(("first", "then"), PAIRS)
@on_ranks(2)
def test_a_state_loads_in_other_wrappers(first: str, then: str, how: str) -> None:
    run = Run(first, how)
    run.train(0, 1, 2)
    state = run.state()
    run.train(3, 4)
    wanted = run.values()
    run.handle.detach()
    again = Run(then, how)
    again.load(state)
    again.train(3, 4)
    assert all(map(torch.equal, again.values(), wanted))
    again.handle.detach()


@on_ranks(2)
def test_what_fits_no_name_is_an_error(tmp_path: Path) -> None:
    run = Run("compiled")
    run.train(0)
    pycomm.save(tmp_path, run.handle).wait()
    run.handle.detach()
    net = nn.Sequential(make_net())
    reducer = pycomm.attach(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, compression=pycomm.TopK(0.3))
    with pytest.raises(ValueError, match="the checkpoint has no parameter '0.0.bias'"):
        pycomm.load(tmp_path, reducer)
    reducer.detach()


def come_compiled(plan: Plan, size: int, port: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(come.__globals__, "small_model", lambda: compiled(small_model()))
        return come(plan, size, port)


def test_a_newcomer_may_be_compiled(new_ranks: Any) -> None:
    members, guest = together(new_ranks, 2, Plan(), (come_compiled, Plan()))
    assert all(outcome.error is None for outcome in (*members, *guest)), guest[0].trace
    assert equal_to_the_bit([members, guest])
