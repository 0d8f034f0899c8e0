"""DGC against a plain state machine: velocities, residuals and what is sent, through everything that can happen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.compression.machines import PlainDGC, gradients_of
from tests.ranks import RankPool
from tests.reducer.attaching import attached, own_state

Pools = Callable[[int], RankPool]

METHODS = {
    "plain": pycomm.DGC(0.01),
    "nesterov": pycomm.DGC(0.02, 0.8, nesterov=True),
    "warm-up": pycomm.DGC(0.001, 0.9, warmup_steps=60),
    "clipping and decay": pycomm.DGC(0.01, 0.9, clip_norm=30.0, weight_decay=0.01, warmup_steps=7),
    "no momentum": pycomm.DGC(0.01, 0.0),
    "dense": pycomm.DGC(1.0, 0.9),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shapes = {"w": (70, 90), "b": (90,), "tiny": (3, 1), "conv": (8, 5, 3, 3), "scale": (1,)}
    return {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}


def loss_with(params: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> Any:
    """Return a loss that has these gradients."""
    return torch.stack([(p * gradients[name]).sum() for name, p in params.items()]).sum()


def like_the_machine(name: str, steps: int, bucket_mb: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    method, params = METHODS[name], parameters()
    machine = PlainDGC(method, params, size)
    optimizer = torch.optim.SGD(params.values(), lr=0.001)
    with attached(optimizer, params.items(), compression=method, bucket_mb=bucket_mb) as reducer:
        for step in range(steps):
            everyone = gradients_of(params, size, step)
            if step % 17 == 5:  # the flag of one rank and one parameter
                everyone[step % size]["conv"].view(-1)[step] = (math.inf, -math.inf, math.nan)[step % 3]
            optimizer.zero_grad()
            loss_with(params, everyone[rank]).backward()
            average = machine.step(everyone)
            if average is None:
                grads: list[Any] = [params[n].grad for n in ("conv", "w")]
                assert not any(torch.isfinite(grad).all() for grad in grads)
            compare(reducer, machine, rank, exact=method.clip_norm is None)
            if average is not None:
                for n, p in params.items():
                    torch.testing.assert_close(p.grad, average[n], rtol=1e-5, atol=1e-6)
                optimizer.step()
        assert reducer.stats()["nonfinite_steps"] == len([s for s in range(steps) if s % 17 == 5])
        assert reducer.state_dict()["steps"] == machine.committed


def compare(reducer: pycomm.Reducer, machine: PlainDGC, rank: int, exact: bool) -> None:
    tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-5, "atol": 2e-6}
    state = own_state(reducer)
    for name, p in machine.params.items():
        entry = state.get(name, {})
        assert ("velocity" in entry) == (machine.method.momentum > 0)
        assert ("residual" in entry) == (p.dim() > 1 and machine.method.ratio < 1)
        if "velocity" in entry:
            torch.testing.assert_close(entry["velocity"], machine.u[rank][name].detach(), **tolerance)
        if "residual" in entry:
            torch.testing.assert_close(entry["residual"], machine.v[rank][name].detach(), **tolerance)
            if machine.committed and exact and name in machine.sent[rank]:
                assert (entry["residual"].flatten()[machine.sent[rank][name]] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_dgc_is_the_plain_state_machine(rank_pools: Pools, name: str) -> None:
    rank_pools(2).run(like_the_machine, name, 70, 25)


@pytest.mark.parametrize(("name", "size"), [("warm-up", 1), ("nesterov", 3), ("clipping and decay", 3)])
def test_on_one_and_three_ranks_and_in_small_buckets(rank_pools: Pools, name: str, size: int) -> None:
    rank_pools(size).run(like_the_machine, name, 40, 0.01)


def density_one(nesterov: bool) -> None:
    """Compare with torch's own SGD with momentum, of averaged gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    params, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer = torch.optim.SGD(params.values(), lr=0.01)
    sgd = torch.optim.SGD(plain.values(), lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    method = pycomm.DGC(1.0, 0.9, nesterov, weight_decay=0.01)
    momentum = float(torch.tensor(0.9, dtype=torch.float32))
    sgd.param_groups[0]["momentum"] = momentum  # as the kernels have it
    with attached(optimizer, params.items(), compression=method):
        for step in range(30):
            everyone = gradients_of(params, size, step)
            optimizer.zero_grad()
            loss_with(params, everyone[rank]).backward()
            optimizer.step()
            for name, p in plain.items():
                p.grad = sum((each[name] for each in everyone), torch.zeros_like(p)) / size
            sgd.step()
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_density_one_is_momentum_sgd(two_ranks: RankPool, nesterov: bool) -> None:
    two_ranks.run(density_one, nesterov)


def refused(optimizer_of: str, method: pycomm.DGC) -> str:
    params = parameters()
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p),
        "adamw": lambda p: torch.optim.AdamW(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "adadelta": lambda p: torch.optim.Adadelta(p),
        "rprop": lambda p: torch.optim.Rprop(p),
    }
    try:
        pycomm.attach(optimizers[optimizer_of](params.values()), params.items(), compression=method).detach()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adagrad", "adadelta", "rprop"])
def test_optimizers_that_are_not_linear(two_ranks: RankPool, name: str) -> None:
    for message in two_ranks.run(refused, name, pycomm.DGC(0.01)):
        assert "linear in the gradient" in message
        assert "use pycomm.TopK(0.01)" in message


def test_momentum_and_decay_twice(two_ranks: RankPool) -> None:
    for message in two_ranks.run(refused, "momentum", pycomm.DGC(0.01, 0.8)):
        assert "would apply momentum twice: give the optimizer momentum=0, nesterov=False" in message
        assert "DGC(momentum=0.9, nesterov=True)" in message
    for message in two_ranks.run(refused, "decay", pycomm.DGC(0.01, weight_decay=0.1)):
        assert "would decay twice: give the optimizer weight_decay=0" in message
    assert two_ranks.run(refused, "decay", pycomm.DGC(0.01)) == ["", ""]
    assert two_ranks.run(refused, "momentum", pycomm.DGC(0.01, 0.0)) == ["", ""]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"ratio": 0.0}, ValueError, "ratio is 0.0, wanted 0 < ratio <= 1"),
        ({"ratio": True}, TypeError, "ratio is True"),
        ({"momentum": 1.0}, ValueError, "momentum is 1.0, wanted momentum >= 0 and < 1"),
        ({"momentum": "0.9"}, TypeError, "momentum is '0.9', wanted a number"),
        ({"momentum": 0.0, "nesterov": True}, ValueError, "Nesterov's momentum needs one above 0"),
        ({"nesterov": 1}, TypeError, "nesterov is 1, wanted True or False"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm is 0.0, wanted clip_norm > 0"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm is nan"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps is -1, wanted an integer >= 0"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps is 1.5"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay is -0.1, wanted weight_decay >= 0"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        pycomm.DGC(**options)
    assert says in str(caught.value)


def odd_parameters() -> None:
    """Reduce empty parameters, scalars, and one element in two dimensions."""
    shapes = {"none": (0, 4), "empty": (0,), "scalar": (), "one": (1, 1), "w": (20, 30)}
    params: dict[str, torch.Tensor] = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    with attached(optimizer, params.items(), compression=pycomm.DGC(0.1, 0.5), bucket_mb=1e-6) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            loss: Any = torch.stack([p.sum() for p in params.values()]).sum()
            loss.backward()
            for name in ("scalar", "one"):  # sent whole: momentum goes on
                grad = params[name].grad
                assert grad is not None
                assert float(grad) == pytest.approx(2 - 0.5**step)
        assert reducer.stats()["nonfinite_steps"] == 0


def test_odd_parameters(two_ranks: RankPool) -> None:
    two_ranks.run(odd_parameters)
