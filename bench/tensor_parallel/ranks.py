"""WorkerGroup of ``bench.tensor_parallel``: steps of a byte-level GPT whose layers are split, over two backends."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bench.harness.ranks import join_group
from pycomm import parallel
from pycomm.tools.cli.demo.model import ByteGPT, loss_of

GLOO = "gloo"
PYCOMM = "pycomm"
WAYS = (GLOO, PYCOMM)
_TOLERANCE = 1e-10


class SplitRank:
    """Rank with its part of the model, over the backend ``way``.

    One backend for each group of processes: torch takes meshes of the same ranks for one, and hands a DTensor the mesh
    that it saw first.
    """

    def __init__(self, port: int, way: str, sizes: dict[str, int], batch: int) -> None:
        self.rank, _ = join_group(port)
        self._way, self._sizes = way, sizes
        self._mesh = DeviceMesh.from_group(dist.new_group(backend=way), "cpu")
        shape = (batch, sizes["context"] + 1)
        text = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
        self._text, self._targets = text[:, :-1], text[:, 1:]
        self._split = self._model(True)
        self._optimizer = torch.optim.AdamW(self._split.parameters(), lr=1e-3)

    def _model(self, split: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        model = ByteGPT(**self._sizes).to(dtype)
        return parallel.split(model, self._mesh, "auto") if split else model

    def verify(self) -> int:
        """Check in float64 that loss and gradients equal the whole model's, and that data went over the backend.

        Returns:
            Number of parameters that are split.

        Raises:
            AssertionError: they are not.
        """
        assert dist.get_backend(self._mesh.get_group()) == self._way
        wanted = self._gradients(self._model(False, torch.float64))
        for name, found in self._gradients(self._model(True, torch.float64)).items():
            if not bool(((found - wanted[name]).abs() <= _TOLERANCE).all()):
                raise AssertionError(f"{self._way}: {name} is wrong")
        split = [param for param in self._split.parameters() if isinstance(param, DTensor)]
        assert all(dist.get_backend(param.device_mesh.get_group()) == self._way for param in split)
        return sum(param.numel() for param in split)

    def _gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        loss = loss_of(model(self._text), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        found = {"loss": loss.detach()}
        for name, param in model.named_parameters():
            grad: Any = param.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return found

    def turn(self, steps: int) -> list[float]:
        """Return the seconds of each of ``steps`` steps."""
        self._step()  # brings back what the caches lost to the other ranks
        dist.barrier()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _step(self) -> None:
        self._optimizer.zero_grad()
        loss = loss_of(self._split(self._text), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def loss(self) -> float:
        """Return the loss after all steps."""
        with torch.no_grad():
            return float(loss_of(self._split(self._text), self._targets))

    def close(self) -> None:
        dist.destroy_process_group()
