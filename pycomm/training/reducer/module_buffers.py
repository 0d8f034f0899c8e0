"""Synchronization of a module's buffers, such as BatchNorm's running statistics, between the ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pycomm import kernels
from pycomm.agreement import check_same_lines, digest
from pycomm.collectives.broadcasting import broadcast_parts, signature, write
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Memory, digests_of, hashable, look_at
from pycomm.torch_internals import buffers_of, is_dtensor, keeps_statistics_aside
from pycomm.training.reductions.replicas import is_comparison_due

BUFFERS = ("local", "broadcast", "average")

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of normalizations that a backward in training mode does not use."""

AVERAGED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

synced_by: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[BufferSync]] = weakref.WeakKeyDictionary()
"""Synchronization that each module's buffers belong to."""


class BufferContent(NamedTuple):
    """Plain memory of a buffer as integers, ``part``, and the ``value`` in it: the same tensor, or a copy."""

    name: str
    dtype: torch.dtype
    part: torch.Tensor
    value: torch.Tensor


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

    def content(self, buffer: torch.Tensor, copies: bool) -> BufferContent:
        """Return the memory to write, without its version counter if no graph needs its present values."""
        (part,) = self.memory.parts
        part = part.data if self.name in _STATISTICS and keeps_statistics_aside(self.owner) else part
        return BufferContent(self.full_name, buffer.dtype, part, part.clone() if copies else part)


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
        interval: ranks compare names, shapes and dtypes in the first exchange, once in about so many
            (:func:`is_comparison_due`), and when this rank's have changed; ``None``: in each.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mode: str,
        communicator: Communicator,
        leaves_out: Callable[[str, torch.Tensor], bool] = lambda _, __: False,
        *,
        keeps: bool = False,
        interval: int | None = None,
    ) -> None:
        self._owners: list[tuple[str, torch.nn.Module]] = []
        for prefix, owner in module.named_modules():
            known = synced_by.get(owner)
            if known is None or known() is None:
                synced_by[owner] = weakref.ref(self)
                self._owners.append((f"{prefix}." if prefix else "", owner))
        self._places: dict[str, _Place] = {}
        self._averages, self._keeps = mode == "average", keeps
        self._communicator, self._leaves_out = communicator, leaves_out
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._interval, self._num_exchanges = interval, 0
        self._compared = -1  # hash of this rank's names, shapes and dtypes, as they were compared last

    def _present(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        """Yield each buffer with its place, described afresh; once even if it is registered twice."""
        seen: set[int] = set()
        for prefix, owner in self._owners:
            for name, buffer in buffers_of(owner).items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                full_name = prefix + name
                if self._leaves_out(full_name, buffer):
                    continue
                place = self._places.setdefault(full_name, _Place(owner, name, full_name))
                place.look(buffer)
                yield place, buffer

    def take(self, *, copies: bool) -> tuple[list[BufferContent], list[str], str]:
        """Return what can be sent, or ``copies``; a line for each buffer that ranks compare; and a problem, or ""."""
        try:
            found = list(self._present())
        except TypeError as error:
            return [], [], str(error)
        contents = [place.content(buffer, copies) for place, buffer in found if place.memory.writable]
        return contents, [place.line for place, _ in found], ""

    @torch.no_grad()
    def run(self) -> None:
        """Make the buffers equal; see :meth:`exchange`. Runs on the communication thread or stream."""
        changes = [(c.part, value) for c, value in self.exchange(self.take(copies=self._keeps)) if value is not c.part]
        self._before = [(part, part.clone()) for part, _ in changes] if self._keeps else []
        for part, value in changes:
            write(part, value)

    @torch.no_grad()
    def exchange(self, taken: tuple[list[BufferContent], list[str], str]) -> list[tuple[BufferContent, torch.Tensor]]:
        """Return what to write, as integers; what is not averaged becomes rank 0's where it was taken. Collective.

        Equal bits on all ranks stay: their rounded mean may differ. Before that, ranks compare a hash of 8 bytes of all
        names, shapes and dtypes, if it is time to. On GPUs the hosts compare it, and so wait for each other here.

        Raises:
            ValueError: the ranks' buffers differ in names, shapes or dtypes, or in contents that cannot be sent; on
                every rank, naming the first difference. No buffer has been written to.
            CommError: another rank failed or did not come: its buffers have not changed, if this rank's have.
        """
        channel = self._communicator.channel
        # Single operations are not compared: what is compared first is all that they depend on.
        with channel.skip_checks() if channel.worker.is_current() else contextlib.nullcontext():
            contents, lines, problem = taken
            mine = int.from_bytes(digest("\n".join([*lines, problem])), "little", signed=True)
            if self._is_comparing(mine, has_unsendable=len(contents) < len(lines)):
                if len(set(channel.all_gather_number(mine))) > 1 or problem:
                    check_same_lines(channel.all_gather_bytes, [problem] if problem else lines, "buffer")
                if problem:
                    raise ValueError(problem)
                self._compared = mine
            by_kind: dict[tuple[torch.dtype, torch.device] | None, list[BufferContent]] = {None: []}
            for content in contents:
                kind = (content.dtype, content.value.device) if self._averages and content.dtype in AVERAGED else None
                by_kind.setdefault(kind, []).append(content)
            sent = [(content, content.value) for content in by_kind.pop(None)]
            broadcast_parts(self._communicator, [value for _, value in sent], src=0)
            return sent + [change for same in by_kind.values() for change in self._averaged(same)]

    def _is_comparing(self, mine: int, *, has_unsendable: bool) -> bool:
        """Return whether ranks compare descriptions, whose hash is ``mine``, in this exchange; count the exchange."""
        number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        if self._interval is None or has_unsendable or mine != self._compared:
            return True
        return is_comparison_due(number, self._interval)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers' contents from before the last :meth:`run`."""
        for part, before in self._before:
            write(part, before)
        self._before = []

    def _averaged(self, contents: list[BufferContent]) -> list[tuple[BufferContent, torch.Tensor]]:
        """Return means of ``contents``, which have one dtype; equal bits on all ranks stay as they are."""
        own = kernels.hashes([hashable(content.value) for content in contents])
        everyones = own.new_empty(self._communicator.size * len(own))
        self._communicator.all_gather(everyones, own)
        flat = torch.cat([content.value.reshape(-1) for content in contents])
        self._communicator.all_reduce(flat.view(contents[0].dtype), "mean")
        means = torch.split(flat, [content.value.numel() for content in contents])
        found = zip(contents, means, (everyones.view(-1, len(own)) == own).all(0), strict=True)
        return [(c, torch.where(is_equal, c.value, mean.view(c.value.shape))) for c, mean, is_equal in found]
