"""WorkerGroup of ``bench.memory``: a rank that trains in one way."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from bench.harness.memory import usage
from bench.harness.ranks import join_group
from bench.training.ranks import DDP, DDP_VIEWS, DENSE, METHODS, NONE

WAYS = (NONE, DDP, DDP_VIEWS, DENSE, *METHODS)
_STEPS = 6
_SECONDS = 0.002  # between two looks


class MemoryRank:
    """Rank whose model trains in one way; one only, so that nothing of another is left."""

    def __init__(self, port: int, way: str, layers: int, width: int) -> None:
        self.rank, _ = join_group(port)
        self._before = usage()["pss"]
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._module: nn.Module = model
        self._reducer: pycomm.Reducer | None = None
        if way in (DDP, DDP_VIEWS):
            self._module = DistributedDataParallel(model, gradient_as_bucket_view=way == DDP_VIEWS)
        elif way != NONE:
            self._reducer = pycomm.attach(self._optimizer, model, compression=METHODS.get(way))
        self._inputs = torch.randn(16, width)

    def peak(self) -> int:
        """Return the most bytes during the first steps, beyond what the process had before the model."""
        found, is_over = [usage()["pss"]], threading.Event()

        def watch() -> None:
            while not is_over.wait(_SECONDS):
                found.append(usage()["pss"])

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(_STEPS):
            self._step()
        is_over.set()
        thread.join()
        dist.barrier()
        return max(found) - self._before

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._module(self._inputs).square().mean().backward()
        self._optimizer.step()

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.detach()
        dist.destroy_process_group()
