"""Synchronisation of a module's buffers, such as BatchNorm's running statistics, between the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from pycomm.communicator import Communicator
from pycomm.reducer.broadcast import broadcast_tensors
from pycomm.torch_internals import buffers_of, local_of

BUFFERS = ("local", "broadcast", "average")


_synced_by: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, weakref.ref[BufferSync]]] = weakref.WeakKeyDictionary()
"""Owner of each buffer, by module and name."""


class BufferSync:
    """Job that makes a module's buffers equal after each reduction: rank 0's, or the floating-point ones averaged.

    The places of the buffers are noted once, but the tensors are looked up each time, as modules replace
    their buffers. If a module is attached twice, with two optimizers, its buffers belong to the first.

    Args:
        module: owner of the buffers, also in its submodules.
        mode: "broadcast" or "average".
        communicator: the ranks that share the buffers.
    """

    def __init__(self, module: torch.nn.Module, mode: str, communicator: Communicator) -> None:
        self._places: list[tuple[torch.nn.Module, str]] = []
        for owner in module.modules():
            syncs = _synced_by.setdefault(owner, {})
            for name in buffers_of(owner):
                if name not in syncs or syncs[name]() is None:
                    syncs[name] = weakref.ref(self)
                    self._places.append((owner, name))
        self._averages = mode == "average"
        self._communicator = communicator
        self.keeps = False
        """Whether to keep what the buffers were before, so that :meth:`restore` can undo a run that did not end."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield each buffer once, also if it is registered twice."""
        seen: set[int] = set()
        for owner, name in self._places:
            buffer = buffers_of(owner).get(name)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield local_of(buffer)

    @torch.no_grad()
    def run(self) -> None:
        """Make the buffers equal. Collective; runs on the communication thread or stream."""
        if self.keeps:
            self._before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        broadcast: list[torch.Tensor] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self.buffers():
            if self._averages and buffer.is_floating_point():
                by_kind.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            else:
                broadcast.append(buffer)
        for buffers in by_kind.values():
            self._average(buffers)
        broadcast_tensors(self._communicator, broadcast, src=0)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back as they were before the last :meth:`run`."""
        for buffer, before in self._before:
            buffer.copy_(before)
        self._before = []

    def _average(self, buffers: list[torch.Tensor]) -> None:
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self._communicator.all_reduce(flat, "mean")
        for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))
