"""Parameter servers with what models have: tied, frozen, unused and scalar parameters, odd layouts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.asynchronous.runs import Run, loss_of, model_of, optimizer_of
from tests.on_ranks import Pools, on_ranks

TIMEOUT = 110.0


class Odd(nn.Module):
    """A tied weight, a frozen one, one that is used in every other step, a scalar, a convolution in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, step: int) -> torch.Tensor:
        x = self.frozen(self.embedding(torch.tensor([step % 7, (3 * step + 1) % 7])))
        if step % 2:
            x = self.sometimes(x)
        image = torch.linspace(-1, 1, 2 * 5 * 5).view(1, 2, 5, 5).contiguous(memory_format=torch.channels_last)
        return (self.head(x) * self.scale).square().mean() + self.conv(image).square().mean()


@pytest.mark.parametrize("options", [{}, {"servers": 2}, {"compression": pycomm.TopK(1.0)}], ids=["one", "two", "top"])
@on_ranks(3, timeout=TIMEOUT)
def test_odd_parameters(options: dict[str, Any]) -> None:
    """The last rank alone works, so that its training is one process's."""
    model, alone = Odd(), Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    own = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], 0.05, momentum=0.9)
    server = pycomm.parameter_server(torch.optim.SGD(trained, 0.05, momentum=0.9), model, timeout=60, **options)
    if server.is_worker:
        for step in range(6 if dist.get_rank() == 2 else 0):
            with server.step():
                model(step).backward()
            for p in alone.parameters():
                p.grad = None if not p.requires_grad else torch.zeros_like(p)
            alone(step).backward()
            own.step()
        server.pull()
        if dist.get_rank() == 2:
            for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, right)
            assert model.head.weight is model.embedding.weight
    server.close()


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=["plain", "compressed"])
@on_ranks(3, timeout=TIMEOUT)
def test_a_server_that_holds_nothing(compression: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = pycomm.LARS(model.parameters(), 1.0, trust_coefficient=0.1)
    server = pycomm.parameter_server(optimizer, model, servers=2, compression=compression, timeout=60)
    if server.is_worker:
        server.pull()
        before = model.weight.detach().clone()
        for _ in range(2):
            model.weight.grad = torch.ones(3, 4)
            server.push()
            server.pull()
        assert (model.weight < before).any()
        assert sorted(each["pushes"] for each in server.stats()["servers"]) == [2, 2]
    server.close()


@on_ranks(2, timeout=TIMEOUT)
def test_gradients_in_odd_layouts() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 1.0), model, timeout=60)
    if server.is_worker:
        server.pull()
        before = model.weight.detach().clone()
        model.weight.grad = torch.arange(12.0).view(4, 3).t()  # columns one after the other
        server.push()
        server.pull()
        torch.testing.assert_close(model.weight, before - torch.arange(12.0).view(4, 3).t())
        model.weight.grad = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([2.0]), (3, 4))
        with pytest.raises(ValueError, match="'weight' is sparse"):
            server.push()
        model.weight.grad = None
        with pytest.raises(RuntimeError, match="no parameter has a gradient"):
            server.push()
    server.close()


def work_beside_one_that_is_stopped(run: Run) -> dict[str, Any]:
    """Worker 2 is stopped for a second in its third step; the others tell how many steps they make meanwhile."""
    rank, model = dist.get_rank(), model_of()
    server = pycomm.parameter_server(optimizer_of(run, model), model, timeout=60, **run.options)
    moments, stopped = list[float](), 0.0
    if server.is_worker:
        begun = time.monotonic()
        while time.monotonic() - begun < 2.5:
            with server.step():
                loss_of(model, rank, len(moments)).backward()
                if rank == 2 and len(moments) == 3:
                    stopped = time.monotonic()
                    stop_for_a_second()
            moments.append(time.monotonic())
            time.sleep(0.002)
    server.close()
    return {"moments": moments, "stopped": stopped, "stats": server.stats()}


def stop_for_a_second() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(1.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


@pytest.mark.parametrize("options", [{}, {"mode": pycomm.Sync(backup=1)}], ids=["async", "backup"])
def test_a_worker_that_is_stopped_holds_up_nobody_and_goes_on(rank_pools: Pools, options: dict[str, Any]) -> None:
    outcomes = rank_pools(4).outcomes(work_beside_one_that_is_stopped, Run(options), timeout=TIMEOUT)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    told = [outcome.result for outcome in outcomes]
    stopped = told[2]["stopped"]
    for rank in (1, 3):
        assert sum(stopped + 0.1 < moment < stopped + 0.9 for moment in told[rank]["moments"]) >= 5
    assert told[2]["moments"][-1] > stopped + 1.0
    stats = told[0]["stats"]
    assert stats["pushes"] == sum(len(each["moments"]) for each in told[1:])
