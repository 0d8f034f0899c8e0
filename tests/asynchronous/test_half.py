"""Half-precision parameters: servers have float32 masters, and workers what these round to; local SGD too."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.asynchronous.parameter_server import ParameterServer
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks

TIMEOUT = 110.0
STEPS = 12
DTYPES = [torch.float16, torch.bfloat16]


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(30, 21).to(dtype)


def gradients_of(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Return gradients that depend on the step only, so that what is rounded in one step does not grow in the next."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def pull_and_push(server: ParameterServer, model: nn.Module, step: int) -> None:
    server.pull()
    for p, g in zip(model.parameters(), gradients_of(model, step), strict=True):
        p.grad = g
    server.push()


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(params, 1e-4)
    return torch.optim.SGD(params, 2.0**-12, momentum=0.5)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(name: str, dtype: torch.dtype, servers: int, hosts: str, stepped: bool = False) -> list[torch.Tensor]:
    """Return what the worker has pulled after each step; on a server its part of the masters, and its model."""
    with on_hosts(hosts) if hosts else contextlib.nullcontext():
        model = model_of(dtype)
        optimizer = optimizer_of(name, model.parameters())
        if stepped:  # there is state then, in the parameters' dtype
            for p, g in zip(model.parameters(), gradients_of(model, -1), strict=True):
                p.grad = g
            optimizer.step()
        server = pycomm.parameter_server(optimizer, model, servers=servers, timeout=60)
        pulled = []
        if server.is_worker:
            for step in range(STEPS):
                pull_and_push(server, model, step)
                server.pull()
                pulled.append(flat(model))
            assert server.stats()["bytes_sent"] == STEPS * 2 * len(pulled[0])
            server.close()
            return pulled
        server.close()
        masters = server._core.shard.memory
        assert masters.dtype == torch.float32
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} <= {torch.float32}
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert {v.dtype for v in states} == {torch.float32}
        return [masters.clone(), flat(model)]


def simulated(name: str, dtype: torch.dtype, stepped: bool = False) -> list[torch.Tensor]:
    """Return the float32 masters after each step."""
    model = model_of(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = optimizer_of(name, masters)
    if stepped:
        halves = optimizer_of(name, model.parameters())
        for p, g in zip(model.parameters(), gradients_of(model, -1), strict=True):
            p.grad = g
        halves.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.data.copy_(p.detach())
            optimizer.state[master] = {k: v.float() if v.dim() else v for k, v in halves.state[p].items()}
    found = []
    for step in range(STEPS):
        for p, g in zip(masters, gradients_of(model, step), strict=True):
            p.grad = g.float()
        optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in masters]))
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("hosts", ["", "ABC"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_servers_train_masters_and_workers_have_what_they_round_to(
    rank_pools: Pools, name: str, dtype: torch.dtype, hosts: str
) -> None:
    first, second, worker = rank_pools(3).run(train, name, dtype, 2, hosts, timeout=TIMEOUT)
    wanted = simulated(name, dtype)
    masters = torch.cat([first[0], second[0]])
    torch.testing.assert_close(masters, wanted[-1], rtol=1e-6, atol=1e-7)
    assert torch.equal(worker[-1], masters.to(dtype)), "a pull is the masters, rounded"
    half = len(first[0])
    assert torch.equal(first[1][:half], masters[:half].to(dtype)), "so is what is written back"
    assert torch.equal(second[1][half:], masters[half:].to(dtype))
    for pulled, then in zip(worker, wanted, strict=True):
        torch.testing.assert_close(pulled, then.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    moved = (wanted[1] - wanted[0]).abs() < torch.finfo(dtype).eps / 4 * wanted[0].abs()
    assert moved.any(), "steps that are lost without masters"


@pytest.mark.parametrize("servers", [1, 2])
def test_state_of_the_optimizer_goes_on_in_float32(rank_pools: Pools, servers: int) -> None:
    told = rank_pools(3).run(train_with_one_worker, servers, timeout=TIMEOUT)
    masters = torch.cat([each[0] for each in told[:servers]])
    torch.testing.assert_close(masters, simulated("adam", torch.bfloat16, stepped=True)[-1], rtol=1e-6, atol=1e-7)


def train_with_one_worker(servers: int) -> list[torch.Tensor]:
    """As ``train``; of two workers, if there are two, one does nothing."""
    if dist.get_rank() == 1 and servers == 1:
        model = model_of(torch.bfloat16)
        optimizer = optimizer_of("adam", model.parameters())
        for p, g in zip(model.parameters(), gradients_of(model, -1), strict=True):
            p.grad = g
        optimizer.step()
        pycomm.parameter_server(optimizer, model, servers=servers, timeout=60).close()
        return []
    return train("adam", torch.bfloat16, servers, "", stepped=True)


def train_compressed(dtype: torch.dtype, hosts: str) -> torch.Tensor:
    """Return what was pulled last; gradients of rank 1 alone are pushed, by TopK with all that it keeps."""
    with on_hosts(hosts) if hosts else contextlib.nullcontext():
        model = model_of(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 2.0**-6)
        server = pycomm.parameter_server(optimizer, model, compression=pycomm.TopK(0.1), timeout=60)
        if dist.get_rank() == 1:
            for step in range(STEPS):
                pull_and_push(server, model, step)
            server.pull()
        server.close()
        return flat(model)


@pytest.mark.parametrize("hosts", ["", "ABC"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_half_gradients_are_their_simulation(rank_pools: Pools, dtype: torch.dtype, hosts: str) -> None:
    model = model_of(dtype)
    masters = [p.detach().double() for p in model.parameters()]
    residual = torch.zeros(masters[0].shape)
    for step in range(STEPS):
        weight, bias = (g.float() for g in gradients_of(model, step))
        residual += weight
        chosen = residual.abs().view(-1).sort(descending=True, stable=True).indices[:63]
        masters[0].view(-1)[chosen] -= residual.view(-1)[chosen].to(dtype).double() * 2.0**-6
        residual.view(-1)[chosen] = 0.0
        masters[1] -= bias * 2.0**-6
    wanted = torch.cat([m.view(-1) for m in masters])
    served, pulled, _ = rank_pools(3).run(train_compressed, dtype, hosts, timeout=TIMEOUT)
    assert torch.equal(served, pulled)
    torch.testing.assert_close(pulled.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


# Local SGD.

OUTERS = {"mean": None, "DiLoCo": pycomm.Nesterov(0.7, 0.9), "elastic": pycomm.Elastic(0.8)}


def gradients_of_rank(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    return gradients_of(model, 1000 * rank + step)


class Reference:
    """Ranks that meet every two steps, in one process: what is kept between meetings is float32.

    Attributes:
        kept: each rank's parameters, or their masters.
    """

    def __init__(self, dtype: torch.dtype, outer: Any, size: int, *, has_masters: bool) -> None:
        self._outer, self._size = outer, size
        models = [model_of(dtype) for _ in range(size)]
        halves = [[nn.Parameter(p.detach()) for p in model.parameters()] for model in models]
        self.kept = [[nn.Parameter(p.float()) for p in each] for each in halves] if has_masters else halves
        self._optimizers = [torch.optim.SGD(each, 2.0**-7, momentum=0.5) for each in self.kept]
        self.anchors = [p.detach().float().clone() for p in self.kept[0]]
        self._velocities = [torch.zeros_like(a) for a in self.anchors]

    @torch.no_grad()
    def step(self, model: nn.Module, number: int) -> None:
        for rank, (params, optimizer) in enumerate(zip(self.kept, self._optimizers, strict=True)):
            for p, g in zip(params, gradients_of_rank(model, rank, number), strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
        if number % 2:
            for i, (anchor, velocity) in enumerate(zip(self.anchors, self._velocities, strict=True)):
                self._meet([each[i] for each in self.kept], anchor, velocity)

    def _meet(self, params: list[nn.Parameter], anchor: torch.Tensor, velocity: torch.Tensor) -> None:
        apart = torch.stack([anchor - p.float() for p in params])
        moved = apart.sum(0) / self._size
        if isinstance(self._outer, pycomm.Elastic):
            for p, d in zip(params, apart, strict=True):
                p.copy_(p.float() + self._outer.strength / self._size * d)
            anchor -= self._outer.strength * moved
            return
        if isinstance(self._outer, pycomm.Nesterov):
            velocity.mul_(self._outer.momentum).add_(moved)
            moved = self._outer.lr * (moved + self._outer.momentum * velocity)
        anchor -= moved
        for p in params:
            p.copy_(anchor)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:SGD updates parameter")
@on_ranks(2, timeout=TIMEOUT)
def test_local_sgd_averages_half_precision_in_float32(dtype: torch.dtype, outer: str) -> None:
    rank, model = dist.get_rank(), model_of(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-7, momentum=0.5)
    handle = pycomm.local_sgd(optimizer, model, every=2, outer=OUTERS[outer], timeout=60)
    reference, names = Reference(dtype, OUTERS[outer], 2, has_masters=False), [n for n, _ in model.named_parameters()]
    for step in range(STEPS):
        for p, g in zip(model.parameters(), gradients_of_rank(model, rank, step), strict=True):
            p.grad = g
        optimizer.step()
        reference.step(model, step)
        for p, wanted in zip(model.parameters(), reference.kept[rank], strict=True):
            torch.testing.assert_close(p, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        anchors = handle.state_dict()["anchors"]
        for name, anchor in zip(names, reference.anchors, strict=True):
            assert anchors[name].dtype == torch.float32
            torch.testing.assert_close(anchors[name], anchor, rtol=1e-5, atol=1e-6)
    rounded = [a.to(dtype).float() for a in anchors.values()]
    assert any(not torch.equal(a, r) for a, r in zip(anchors.values(), rounded, strict=True)), (
        "more than half precision"
    )
    handle.detach()


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(3, timeout=TIMEOUT)
def test_local_sgd_averages_masters_where_there_are_some(dtype: torch.dtype, outer: str) -> None:
    """Rank 0's masters are those of all at first, also below the precision of the parameters."""
    rank, model = dist.get_rank(), model_of(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-7, momentum=0.5)
    masters = pycomm.master_weights(optimizer)
    reference = Reference(dtype, OUTERS[outer], 3, has_masters=True)
    with torch.no_grad():
        for own in masters.parameters():
            own.add_(torch.finfo(dtype).eps / 8 * own.abs() * (rank + 1))
        for params in reference.kept:
            for p in params:
                p.add_(torch.finfo(dtype).eps / 8 * p.abs())
        for anchor, p in zip(reference.anchors, reference.kept[0], strict=True):
            anchor.copy_(p)
    handle = pycomm.local_sgd(optimizer, model, every=2, outer=OUTERS[outer], timeout=60)
    for step in range(STEPS):
        for p, g in zip(model.parameters(), gradients_of_rank(model, rank, step), strict=True):
            p.grad = g
        optimizer.step()
        reference.step(model, step)
        for own, p, wanted in zip(masters.parameters(), model.parameters(), reference.kept[rank], strict=True):
            torch.testing.assert_close(own.detach(), wanted.detach(), rtol=2e-6, atol=1e-7)
            assert torch.equal(p, own.to(dtype)), "parameters are their masters, rounded"
    everyones: list[Any] = [None] * 3
    dist.all_gather_object(everyones, [own.detach() for own in masters.parameters()])
    if outer != "elastic":
        assert all(map(torch.equal, everyones[0], everyones[1]))
    handle.detach()


@pytest.mark.filterwarnings("ignore:SGD updates parameter")
@on_ranks(2, timeout=TIMEOUT)
def test_local_sgd_takes_half_precision_beside_float32_and_refuses_other_mixtures() -> None:
    rank = dist.get_rank()
    model: nn.Module = nn.Sequential(nn.Linear(4, 3).bfloat16(), nn.LayerNorm(3).float())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = pycomm.local_sgd(optimizer, model, every=1, timeout=60)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1)
    before = [p.detach().float().clone() for p in model.parameters()]
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        own = [(old.to(p.dtype) - 0.1 * torch.full_like(p, r + 1)).float() for r in range(2)]
        torch.testing.assert_close(p.detach(), ((own[0] + own[1]) / 2).to(p.dtype))
    handle.detach()
    for dtype in (torch.float64, torch.complex64):
        mixed = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.bfloat16, dtype)])
        with pytest.raises(ValueError, match="wanted all float64, or float32 and half types, on one device"):
            pycomm.local_sgd(torch.optim.SGD(mixed.parameters(), 0.1), mixed, every=1, timeout=60)
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if rank == 1:
        pycomm.master_weights(optimizer)
    with pytest.raises(ValueError, match="the ranks disagree: setting .* 'master weights"):
        pycomm.local_sgd(optimizer, model, every=1, timeout=60)
