"""WorkerGroup of ``bench.pipelines``: stages that sleep instead of computing, so that cores are no resource."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.ranks import join_group
from pycomm.parallel import Pipeline
from pycomm.schedule import pipeline as tables


class _Sleep(torch.autograd.Function):
    """Identity that sleeps: so long on the way forward, and so long on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingStage(nn.Module):
    """Stage ``y = x + w`` that sleeps ``forward`` seconds, ``backward`` for x's gradient, ``weights`` for w's."""

    def __init__(self, seconds: Mapping[str, float], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float64))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self._seconds
        if not x.requires_grad:  # stage 0's gradient of its input, which nobody wants, takes as long as others'
            x = x.detach().requires_grad_()
        sleep: Any = _Sleep.apply
        weight = sleep(self.weight, 0.0, seconds["weights"])
        out: torch.Tensor = sleep(x, seconds["forward"], seconds["backward"]) + weight
        return out


class PipelineRank:
    """Rank of a pipeline over the backend "pycomm"."""

    def __init__(self, port: int, seconds: Mapping[str, float], width: int, microbatches: int) -> None:
        self.rank, _ = join_group(port)
        self._seconds, self._width, self._microbatches = seconds, width, microbatches
        group = dist.new_group(backend="pycomm")
        assert group is not None
        self._group = group
        self._pipelines: dict[str, Pipeline] = {}
        self._x = torch.arange(4.0 * microbatches * width, dtype=torch.float64).reshape(-1, width)

    def make(self, name: str) -> None:
        """Make the pipeline ``name``, and verify that each stage's gradient is the gradient of the mean of squares."""
        table = tables.by_name(name, dist.get_world_size(), self._microbatches)
        stages = [SleepingStage(self._seconds, self._width) for _ in range(table.num_stages)]
        made = Pipeline(stages, self._group, table, loss=lambda y, _: y.square().mean())
        made.step(self._x, target=self._x)
        expected = 2 * self._x.mean(0) / self._width
        for module in made.stages.values():
            torch.testing.assert_close(module.weight.grad, expected, rtol=0, atol=1e-12 * float(self._x.max()))
        self._pipelines[name] = made

    def turn(self, name: str) -> float:
        """Return the seconds of one step."""
        made = self._pipelines[name]
        made.module.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        made.step(self._x, target=self._x)
        dist.barrier()
        return time.perf_counter() - start
