"""Synchronisation of a module's buffers, such as BatchNorm's running statistics, between the ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm.agreement import check_same_lines, digest
from pycomm.collectives.broadcasting import broadcast_parts, signature, write
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Memory, digests_of, look_at
from pycomm.torch_internals import buffers_of, is_dtensor, keeps_statistics_aside

BUFFERS = ("local", "broadcast", "average")

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of normalisations that a backward in training mode does not use."""

_AVERAGED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_synced_by: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[BufferSync]] = weakref.WeakKeyDictionary()
"""Synchronisation that each module's buffers belong to."""


@dataclass
class _Place:
    """Place of a buffer in the module that registered it, and what was found there last."""

    owner: torch.nn.Module
    name: str
    full_name: str
    buffer: torch.Tensor | None = None
    """The buffer described below, if it has plain memory."""
    key: tuple[Any, ...] = ()
    memory: Memory = field(default_factory=lambda: Memory((), False))
    line: str = ""

    def look(self, buffer: torch.Tensor) -> None:
        """Describe ``buffer``, which is in this place now."""
        key = () if self.buffer is not buffer else _key(buffer)
        if key and key == self.key:
            return
        self.memory = look_at(self.full_name, buffer, "buffer")
        self.line = f"{self.full_name}: {signature(buffer)}{', ' if self.memory.text else ''}{self.memory.text}"
        if self.memory.writable:
            self.buffer, self.key = buffer, _key(buffer)
        else:  # buffers that cannot be sent are compared each time
            self.buffer = None
            self.line += f", contents {digests_of([self.memory])[0].hex()}"

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the memory to write, without its version counter if no graph needs its present values."""
        if self.name in _STATISTICS and keeps_statistics_aside(self.owner):
            return tuple(part.data for part in self.memory.parts)
        return self.memory.parts


def _key(buffer: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that changes when the memory of ``buffer`` is replaced; () if that is not plain memory."""
    if is_dtensor(buffer):
        return ()
    try:
        return buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype, buffer.is_conj()
    except RuntimeError:
        return ()


class BufferSync:
    """Job that makes a module's buffers equal after each reduction: rank 0's, or the floating-point ones averaged.

    The modules are noted once, but the tensors are looked up each time, as modules replace their buffers, or register
    more. If a module is attached twice, with two optimizers, its buffers belong to the first.

    Args:
        keeps: whether to keep old contents, so that :meth:`restore` can undo a failed run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mode: str,
        communicator: Communicator,
        leaves_out: Callable[[str, torch.Tensor], bool] = lambda _, __: False,
        *,
        keeps: bool = False,
    ) -> None:
        self._owners: list[tuple[str, torch.nn.Module]] = []
        for prefix, owner in module.named_modules():
            known = _synced_by.get(owner)
            if known is None or known() is None:
                _synced_by[owner] = weakref.ref(self)
                self._owners.append((f"{prefix}." if prefix else "", owner))
        self._places: dict[str, _Place] = {}
        self._averages = mode == "average"
        self._communicator, self._leaves_out = communicator, leaves_out
        self._keeps = keeps
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _present(self) -> Iterator[_Place]:
        """Yield the place of each buffer with a fresh description, once even if it is registered twice."""
        seen: set[int] = set()
        for prefix, owner in self._owners:
            for name, buffer in buffers_of(owner).items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                full_name = prefix + name
                if self._leaves_out(full_name, buffer):
                    continue
                place = self._places.get(full_name)
                if place is None:
                    place = self._places[full_name] = _Place(owner, name, full_name)
                place.look(buffer)
                yield place

    @torch.no_grad()
    def run(self) -> None:
        """Make the buffers equal. Collective; runs on the communication thread or stream.

        Before anything is sent, ranks compare a hash of 8 bytes of all names, shapes and dtypes. On GPUs the hosts
        compare it, and so wait for each other here.

        Raises:
            ValueError: the ranks' buffers differ in names, shapes or dtypes, or in contents that cannot be sent; on
                every rank, naming the first difference. No buffer has been written to.
        """
        channel = self._communicator.channel
        # Single operations are not compared: what is compared first is all that they depend on.
        with channel.skip_checks() if channel.worker.is_current() else contextlib.nullcontext():
            places = self._compared()
            if self._keeps:
                self._before = [(part, part.clone()) for place in places for part in place.parts()]
            sent: list[torch.Tensor] = []
            by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for place in places:
                buffer, parts = place.buffer, place.parts()
                if self._averages and buffer is not None and buffer.dtype in _AVERAGED:
                    parts = tuple(part.view(buffer.dtype) for part in parts)
                    by_kind.setdefault((buffer.dtype, parts[0].device), []).extend(parts)
                else:
                    sent += parts
            for buffers in by_kind.values():
                self._average(buffers)
            broadcast_parts(self._communicator, sent, src=0)

    def _compared(self) -> list[_Place]:
        """Compare the ranks' buffers; return the places of those that can be sent."""
        try:
            places, problem = list(self._present()), ""
        except TypeError as error:
            places, problem = [], str(error)
        lines = [place.line for place in places]
        channel = self._communicator.channel
        mine = int.from_bytes(digest("\n".join([*lines, problem])), "little", signed=True)
        if problem or len(set(channel.all_gather_number(mine))) > 1:
            check_same_lines(channel.all_gather_bytes, [problem] if problem else lines, "buffer")
        if problem:
            raise ValueError(problem)
        return [place for place in places if place.memory.writable]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers' contents from before the last :meth:`run`."""
        for part, before in self._before:
            write(part, before)
        self._before = []

    def _average(self, buffers: list[torch.Tensor]) -> None:
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self._communicator.all_reduce(flat, "mean")
        for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
            write(buffer, part.view(buffer.shape))
