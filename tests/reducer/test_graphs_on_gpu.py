"""attach under ``torch.cuda.graph``, on a real GPU: forward, backward and step, launched again and again."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.kernels.gpus import requires_cuda
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.models import make_model
from tests.transport.test_nccl_on_gpu import requires_nccl, sharing

__all__ = ["sharing"]
pytestmark = [requires_cuda, requires_nccl]

WARM_UP, LAUNCHES = 4, 5


class Training:
    """A model, its optimizer, and a step on the batch that lies in ``x``."""

    def __init__(self) -> None:
        self.model: nn.Module = make_model(dtype=torch.float32).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.zeros(64, 12, device="cuda")

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        self.x.copy_(torch.randn(64, 12, generator=generator))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (self.model(self.x) ** 2).mean().backward()
        self.optimizer.step()


def run_eagerly(compression: Any) -> list[torch.Tensor]:
    training = Training()
    with attached(training.optimizer, training.model, compression=compression, bucket_mb=0.002):
        for step in range(WARM_UP + LAUNCHES):
            training.load(step)
            training.step()
    return [p.detach().clone() for p in training.model.parameters()]


def run_captured(compression: Any) -> list[torch.Tensor]:
    training, side = Training(), torch.cuda.Stream()
    with attached(training.optimizer, training.model, compression=compression, bucket_mb=0.002):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in range(WARM_UP):
                training.load(step)
                training.step()
        torch.cuda.current_stream().wait_stream(side)
        before = [p.detach().clone() for p in training.model.parameters()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the global mode: a forbidden call of any thread of ours is an error
            training.step()
        assert all(torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True))
        for step in range(WARM_UP, WARM_UP + LAUNCHES):
            training.load(step)
            graph.replay()
        after = [p.detach().clone() for p in training.model.parameters()]
        assert not any(torch.equal(p, b) for p, b in zip(after, before, strict=True))
        assert_replicas_equal(copy.deepcopy(training.model).cpu())
        training.load(WARM_UP + LAUNCHES)
        training.step()  # ordinary steps go on
        assert_replicas_equal(copy.deepcopy(training.model).cpu())
        torch.cuda.synchronize()
        del graph
        gc.collect()
    return after


def compare(compression: Any) -> None:
    """The graph does what the steps do that it was made of, to the bit."""
    for captured, wanted in zip(run_captured(compression), run_eagerly(compression), strict=True):
        torch.testing.assert_close(captured, wanted, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("compression", [pycomm.TopK(1.0), pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.OneBit()])
def test_one_rank(compression: Any) -> None:
    """With methods that are at work, and carry state, with one rank too."""
    compare(compression)


@pytest.mark.parametrize("compression", [None, pycomm.FP16(), pycomm.TopK(0.1)])
def test_two_ranks(sharing: RankPool, compression: Any) -> None:
    sharing.run(compare, compression)


def wait_for_capture() -> float:
    """Return the sum that a captured all-reduce leaves, while the watchdog looks after another that is on its way."""
    with pycomm.Communicator(timeout=5) as c:
        x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
        c.all_reduce(x)
        c.all_reduce(y)
        graph = torch.cuda.CUDAGraph()
        torch.cuda._sleep(1_000_000_000)
        c.all_reduce(x)
        with torch.cuda.graph(graph):
            time.sleep(0.3)
            y.fill_(1.0)
            c.all_reduce(y)
        for _ in range(3):
            graph.replay()
        time.sleep(6)  # longer than the timeout
        c.check()
        total = float(y.sum())
        del graph
        gc.collect()
        return total


@pytest.mark.usefixtures("one_rank_group")
def test_the_watchdog_and_a_capture() -> None:
    assert wait_for_capture() == 1000.0


@pytest.mark.usefixtures("one_rank_group")
def test_without_a_warm_up() -> None:
    training = Training()
    with attached(training.optimizer, training.model, compression=pycomm.TopK(0.1)):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="warm up"), torch.cuda.graph(graph):
            training.step()
