"""Order of streams on a real GPU: with random delays on every stream, the bits of a run that waits for everything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pycomm.collectives.transport.gpu import GpuQueue
from tests.kernels.gpus import requires_cuda
from tests.ranks import RankPool
from tests.reducer.attaching import attached
from tests.reducer.test_gpu_path import METHODS, Scaler
from tests.transport.test_nccl_on_gpu import requires_nccl, sharing

__all__ = ["sharing"]
pytestmark = [requires_cuda, requires_nccl]

STEPS = 30
_CYCLES = 200_000
"""Most clock cycles of a delay: about a tenth of a millisecond."""


@contextmanager
def delays(seed: int, *, waits: bool) -> Iterator[None]:
    """Let streams do nothing for a random time before each job and gradient; or, if it ``waits``, the host wait."""
    chance, plain = random.Random(seed), GpuQueue.call

    def pause() -> None:
        if waits:
            torch.cuda.synchronize()
        else:
            torch.cuda._sleep(chance.randrange(_CYCLES))

    def call(self: GpuQueue, job: Any) -> Any:
        def delayed() -> Any:
            pause()
            result = job()
            pause()
            return result

        return plain(self, delayed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuQueue, "call", call)
        patch.setattr(nn.Linear, "forward", _paused(nn.Linear.forward, pause))
        yield


def _paused(forward: Any, pause: Any) -> Any:
    def call(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(self, x)
        out.register_hook(lambda _: pause())
        return out

    return call


def train(method: str, *, waits: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rank, model, scaler = dist.get_rank(), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda(), Scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression: Any = METHODS[method]
    with attached(optimizer, model, compression=compression, loss_scaler=scaler, bucket_mb=0.02) as reducer:
        with delays(rank, waits=waits):
            for step in range(STEPS):
                optimizer.zero_grad()
                scaler.value = 2.0 ** (step % 8)
                x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
                loss = model(x).square().mean() * (torch.inf if step == 7 and rank == 1 else 1.0)
                scaler.scale(loss).backward()
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.div_(scaler.value).nan_to_num_(0.0, 0.0, 0.0)
                optimizer.step()
        torch.cuda.synchronize()
        assert reducer.stats()["steps"] == STEPS
    return [param.detach().cpu() for param in model.parameters()]


def compare(method: str) -> None:
    wanted, got = train(method, waits=True), train(method, waits=False)
    for x, y in zip(wanted, got, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("method", METHODS)
def test_delays_change_no_bit(sharing: RankPool, method: str) -> None:
    sharing.run(compare, method)
