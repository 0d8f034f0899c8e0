"""The ranks of ``bench.gpu``: what an operation costs, and a training step of ResNet-50, with and without pycomm.

Processes of their own, also where there is one rank: one that dies takes no other figure with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from bench.gpu.timing import Turn
from bench.harness.ranks import join_group
from bench.harness.timing import interleave

NONE = "without attach"
DENSE = "attach"
FP16 = "attach, FP16()"
TOPK = "attach, TopK(0.001)"
WAYS = (NONE, DENSE, FP16, TOPK)

_COMPRESSION: dict[str, Callable[[], Any]] = {
    DENSE: pycomm.NoCompression,
    FP16: pycomm.FP16,
    TOPK: lambda: pycomm.TopK(0.001),
}
_CLASSES = 1000
_TOLERANCE = 1e-2  # float16 rounds to 2**-11, and cuDNN does not add in the same order twice


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        self.narrow = _convolution(inputs, width, 1)
        self.middle = _convolution(width, width, 3, stride)
        self.widen = _convolution(width, 4 * width, 1)
        self.shortcut = _convolution(inputs, 4 * width, 1, stride) if shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.narrow(x))
        out = torch.relu(self.middle(out))
        return torch.relu(self.widen(out) + self.shortcut(x))


def resnet(blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Sequential:
    """Return ResNet-50 as torchvision has it, or one with fewer blocks; always with the same parameters.

    ``bench.kernels.resnet50`` lists the shapes of ResNet-50's.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_Bottleneck(channels, width, stride, shortcut=block == 0))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES))


class AttachRank:
    """Rank that attaches to its optimizer in one way after the other, and detaches again.

    Args:
        own_host: whether NCCL is told that the rank is on a host of its own.
    """

    def __init__(self, port: int, device: str, blocks: list[int], batch: int, image: int, own_host: bool) -> None:
        self.rank, _ = join_group(port)
        if own_host:
            os.environ["NCCL_HOSTID"] = str(self.rank)
        self._device = torch.device(device)
        torch.backends.cudnn.benchmark = True
        self._model = resnet(blocks).to(self._device)
        # So small that the parameters stay near where they are, however many turns there are.
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-5, momentum=0.9)
        generator = torch.Generator().manual_seed(1 + self.rank)
        self._inputs = torch.randn(batch, 3, image, image, generator=generator).to(self._device)
        self._targets = torch.randint(_CLASSES, (batch,), generator=generator).to(self._device)
        self._reducer: pycomm.Reducer | None = None

    def verify(self) -> None:
        """Check the averages of the ranks' gradients; twice, as pycomm sends during backward only from the second on.

        Raises:
            AssertionError: a way computes something else, or top-k something that is not finite.
        """
        self._synchronise(NONE)
        wanted = self._gradients().double()
        dist.all_reduce(wanted)
        wanted /= dist.get_world_size()
        for way in WAYS[1:]:
            self._synchronise(way)
            for _ in range(2):
                got = self._gradients().double()
            if way == TOPK:
                correct = bool(got.isfinite().all() and got.any())
            else:
                correct = bool((got - wanted).norm() <= _TOLERANCE * wanted.norm())
            if not correct:
                raise AssertionError(f"{way}: the averaged gradient is wrong")

    def turn(self, way: str, steps: int) -> dict[str, Any]:
        """Return the mean seconds of ``steps`` steps that follow each other; whether pycomm does anything in them."""
        self._synchronise(way)
        for _ in range(2):
            self._step()
        self._wait()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        seconds = (time.perf_counter() - start) / steps
        return {"seconds": seconds, "active": self._reducer is not None and self._reducer.stats()["steps"] > 0}

    def close(self) -> None:
        self._synchronise(NONE)
        dist.destroy_process_group()

    def _synchronise(self, way: str) -> None:
        if self._reducer is not None:
            self._reducer.detach()
        self._reducer = None
        if way in _COMPRESSION:
            self._reducer = pycomm.attach(self._optimizer, self._model, compression=_COMPRESSION[way]())
            if self._reducer._idle:
                # One rank has nothing to average; what its hooks and buckets cost is what is measured here.
                self._reducer._install()

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]

    def _step(self) -> None:
        self._backward()
        self._optimizer.step()

    def _gradients(self) -> torch.Tensor:
        self._backward()
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        return torch.cat([grad.reshape(-1) for grad in grads]).cpu()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class NcclRank:
    """Rank that all-reduces on its GPU, by pycomm and by torch.distributed."""

    def __init__(self, port: int) -> None:
        self.rank, _ = join_group(port)
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._communicator = pycomm.Communicator()
        self._nccl = dist.new_group(backend="nccl") if dist.is_nccl_available() else None

    def measure(self, num_bytes: int, rounds: int) -> dict[str, Any]:
        """Return for each side the seconds of a call on the GPU, one per round, and the median of those on the host."""
        x = torch.randn(num_bytes // 4, device=self._device)
        calls: dict[str, Callable[[], object]] = {"pycomm": lambda: self._communicator.all_reduce(x)}
        if self._nccl is not None:
            calls["torch"] = lambda: dist.all_reduce(x, group=self._nccl)
        before = x.clone()
        for name, call in calls.items():
            call()
            if not torch.equal(x, before):
                raise AssertionError(f"{name}: the sum over one rank is not what was there")
        turns = {name: Turn([call] * 20, self._device) for name, call in calls.items()}
        for turn in turns.values():
            turn.warm_up()
        samples = interleave(turns, rounds)
        return {
            name: {"seconds": list(samples[name].seconds), "host_seconds": turn.host_seconds}
            for name, turn in turns.items()
        }

    def close(self) -> None:
        self._communicator.close()
        dist.destroy_process_group()
