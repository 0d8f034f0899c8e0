"""Keeping a module's buffers, the running statistics of BatchNorm say, equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from pycomm.communicator import Communicator
from pycomm.reducer.broadcast import broadcast_tensors
from pycomm.torch_internals import buffers_of

BUFFERS = ("local", "broadcast", "average")


_taken: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, weakref.ref[BufferSync]]] = weakref.WeakKeyDictionary()
"""Who looks after which buffers."""


class BufferSync:
    """Gives all ranks rank 0's buffers, or the average of the floating ones, after each reduction.

    Where they lie is noted once; what lies there is looked up each time, since modules replace buffers.
    Those of a module that was attached twice, with two optimizers, are left to who came first.
    """

    def __init__(self, module: torch.nn.Module, how: str, communicator: Communicator) -> None:
        self._places: list[tuple[torch.nn.Module, str]] = []
        for owner in module.modules():
            takers = _taken.setdefault(owner, {})
            for name in buffers_of(owner):
                if name not in takers or takers[name]() is None:
                    takers[name] = weakref.ref(self)
                    self._places.append((owner, name))
        self._averages = how == "average"
        self._communicator = communicator

    def buffers(self) -> Iterator[torch.Tensor]:
        """Each once."""
        seen: set[int] = set()
        for owner, name in self._places:
            buffer = buffers_of(owner).get(name)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer

    @torch.no_grad()
    def run(self) -> None:
        """Collective; on the communication thread, or stream."""
        taken: list[torch.Tensor] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self.buffers():
            if self._averages and buffer.is_floating_point():
                by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            else:
                taken.append(buffer)
        for buffers in by_kind.values():
            self._average(buffers)
        broadcast_tensors(self._communicator, taken, src=0)

    def _average(self, buffers: list[torch.Tensor]) -> None:
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self._communicator.all_reduce(flat, "mean")
        for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))
