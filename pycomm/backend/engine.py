"""Engine of one process group: every operation of torch.distributed on tensors in CPU memory, over a transport.

It knows torch's operations, not its calling conventions (:mod:`pycomm.backend.operations`), nor which
kind of torch class stands in front of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm.backend.agreement import prepared, require_same, require_same_dtypes
from pycomm.backend.dense import Target, contiguous, require_writable, to_change, to_fill
from pycomm.backend.in_backward import BackwardErrors
from pycomm.backend.moved import MovedStorages
from pycomm.backend.reduction import reducible
from pycomm.backend.sparse import all_reduce_sparse
from pycomm.backend.work import BackendWork, Collective, MessageWork, Reception
from pycomm.channel import Channel
from pycomm.transport.choice import choose_transport
from pycomm.transport.own_group import Place

Job = Callable[[], None]
_MAILBOX_BYTES = 64 << 10


class Engine:
    """Engine of the group whose ranks meet at ``place``. Its creation is collective.

    Args:
        place: where they meet.
        timeout: limit of every single wait, in seconds.

    Raises:
        CommError, ValueError, OSError, MemoryError: as :class:`pycomm.Communicator`.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.transport = choose_transport(place, "auto", timeout)
        self.channel = Channel(self.transport, timeout)
        self.rank, self.size = place.rank, place.size
        self._moved = MovedStorages(self.transport.host_memory)
        self._bytes = {"direct": 0, "staged": 0, "small": 0}
        self._flat: torch.Tensor | None = None
        self._backward_errors = BackwardErrors()
        self.close = weakref.finalize(self, self.channel.close)

    # Running.

    def run(self, name: str, job: Job, result: Sequence[Any], async_op: bool) -> BackendWork:
        """Run ``job`` after all earlier collectives: on this thread if ``async_op`` is false; return its work.

        A callback of an operation's future runs on the communication thread if it was there before the operation
        ended. Operations that it starts run at once, so that they come next on every rank, and it may wait for them.
        """
        worker = self.channel.worker
        if async_op:
            submit = worker.run_here if worker.is_current() else self.channel.submit
            work = BackendWork(Collective(submit(job)), result, name, self.rank)
            self._backward_errors.watch(work)
            return work
        self.channel.enqueue(job)
        return BackendWork(None, result, name, self.rank)

    def abort(self, reason: str) -> None:
        """End operations in progress with an error, here and on the ranks that wait for this one: the ``reason``."""
        self.channel.close(reason)

    def stats(self) -> dict[str, Any]:
        """Return what :func:`pycomm.backend.stats` does."""
        counted = {f"bytes_{way}": count for way, count in self._bytes.items()}
        return {"transport": self.transport.name, "storages_moved": self._moved.num_moved, **counted}

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of ``count`` elements in memory that all ranks of the host reach."""
        return self.transport.empty((count,), dtype)

    # Reductions.

    def all_reduce(self, tensor: torch.Tensor, op: str, timeout: float, in_backward: bool = False) -> None:
        """Reduce ``tensor`` over all ranks, in place; ``in_backward``: a backward pass has asked for it."""
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
            all_reduce_sparse(self.channel, tensor, op, timeout)
            return

        def prepare() -> tuple[Target, torch.Tensor, torch.Tensor, str]:
            target = to_change(tensor)
            memory = self._moved.reachable(target.dense, in_backward)
            return target, memory, *reducible(memory, op)

        target, memory, array, name = prepared(self.transport, prepare, timeout)
        self._count(memory)
        self.transport.all_reduce(array, name, timeout)
        target.finish()

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce all ``tensors`` over all ranks, in place; those of one dtype travel together."""

        def prepare() -> list[torch.Tensor]:
            return [require_writable(tensor).detach() for tensor in tensors]

        targets = prepared(self.transport, prepare, timeout)
        counts: Counter[torch.dtype] = Counter()
        for x in targets:
            counts[x.dtype] += x.numel()
        forms = ", ".join(f"{count} elements of {str(dtype)[6:]}" for dtype, count in counts.items())
        require_same(self.channel, f"all_reduce_coalesced({forms})", timeout)
        for dtype, count in counts.items():
            same = [x for x in targets if x.dtype == dtype]
            flat = self._flat_of(count, dtype)
            parts = torch.split(flat, [x.numel() for x in same])
            views = [part.view(x.shape) for part, x in zip(parts, same, strict=True)]
            torch._foreach_copy_(views, same)
            self.all_reduce(flat, op, timeout)
            torch._foreach_copy_(same, views)

    def _flat_of(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = count * dtype.itemsize
        if self._flat is None or self._flat.numel() < num_bytes:
            self._flat = None  # released first
            self._flat = self.transport.empty((max(num_bytes, 1),), torch.uint8)
        return self._flat[:num_bytes].view(dtype)

    def reduce(self, tensor: torch.Tensor, dst: int, op: str, timeout: float) -> None:
        """Reduce ``tensor`` over all ranks into that of rank ``dst``."""

        def prepare() -> tuple[Target, torch.Tensor, str]:
            target = to_change(tensor)
            return target, *reducible(target.dense, op)

        target, array, name = prepared(self.transport, prepare, timeout)
        self._count(target.dense)
        self.transport.reduce(array, dst, name, timeout)
        target.finish()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``x`` over all ranks and write part ``rank`` of the result into ``out``."""

        def prepare() -> tuple[Target, torch.Tensor, torch.Tensor, str]:
            target, (source, name) = to_fill(out), reducible(contiguous(x), op)
            return target, reducible(target.dense, op)[0], source, name

        target, array, source, name = prepared(self.transport, prepare, timeout)
        self._count(source)
        self.transport.reduce_scatter(array, source, name, timeout)
        target.finish()

    def reduce_scatter_parts(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce ``parts[rank]`` over all ranks into ``out``; parts may differ in size."""

        def prepare() -> tuple[Target, torch.Tensor, list[torch.Tensor], str]:
            target = to_fill(out)
            sources = [reducible(contiguous(part), op)[0] for part in parts]
            array, name = reducible(target.dense, op)
            return target, array, sources, name

        target, array, sources, name = prepared(self.transport, prepare, timeout)
        self._count(*sources)
        self.transport.reduce_scatter_v(array, sources, name, timeout)
        target.finish()

    def reduce_scatter_coalesced(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], op: str, timeout: float
    ) -> None:
        """Do what :meth:`reduce_scatter` does for several pairs."""
        require_same(self.channel, f"reduce_scatter of {len(pairs)} tensors", timeout)
        for out, x in pairs:
            self.reduce_scatter(out, x, op, timeout)

    # Movements.

    def broadcast(self, tensor: torch.Tensor, src: int, timeout: float) -> None:
        """Overwrite ``tensor`` with that of rank ``src``."""
        target = prepared(self.transport, lambda: to_change(tensor), timeout)
        self._count(target.dense)
        self.transport.broadcast(target.dense, src, timeout)
        target.finish()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks, in rank order, into ``out``."""
        target, source = prepared(self.transport, lambda: (to_fill(out), contiguous(x)), timeout)
        self._count(source)
        self.transport.all_gather(target.dense, source, timeout)
        target.finish()

    def all_gather_coalesced(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], timeout: float) -> None:
        """Do what :meth:`all_gather` does for several pairs."""
        require_same(self.channel, f"all_gather of {len(pairs)} tensors", timeout)
        for out, x in pairs:
            self.all_gather(out, x, timeout)

    def all_gather_lists(self, pairs: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], timeout: float) -> None:
        """Write, for each pair, the tensors of all ranks that are second in it into those that are first."""
        require_same(self.channel, f"all_gather of {len(pairs)} tensors, to lists", timeout)
        for outs, x in pairs:
            self.exchange(outs, [x] * self.size, timeout)

    def exchange(self, outs: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor | None], timeout: float) -> None:
        """Send ``xs[p]`` to every rank p, and receive ``outs[p]`` from it; nothing where there is ``None``."""

        def prepare() -> tuple[list[Target | None], list[torch.Tensor | None]]:
            dense = {id(x): contiguous(x) for x in {id(x): x for x in xs if x is not None}.values()}
            targets = [None if out is None else to_fill(out) for out in outs]
            return targets, [None if x is None else dense[id(x)] for x in xs]

        targets, sources = prepared(self.transport, prepare, timeout)
        self._count(*{id(x): x for x in sources if x is not None}.values())
        arrays = [None if target is None else target.dense for target in targets]
        require_same_dtypes(self.channel, arrays, sources, timeout)
        self.transport.all_to_all_v(arrays, sources, timeout)
        for target in targets:
            if target is not None:
                target.finish()

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Send part p of ``x`` to rank p, where it becomes part ``rank`` of ``out``; all parts are equal."""
        target, source = prepared(self.transport, lambda: (to_fill(out), contiguous(x)), timeout)
        self._count(source)
        self.transport.all_to_all(target.dense, source, timeout)
        target.finish()

    def barrier(self, timeout: float) -> None:
        """Wait for all ranks."""
        self.transport.barrier(timeout)

    # Messages.

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout: float) -> BackendWork:
        """Send ``tensor`` to rank ``dst``; returns once it has been buffered."""
        self.transport.send(contiguous(tensor), dst, tag, timeout)
        return BackendWork(None, [tensor], "send", self.rank)

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int, timeout: float) -> MessageWork:
        """Receive ``tensor`` from rank ``src``, or from any rank if that is ``None``."""
        target = to_fill(tensor)
        reception = Reception(self.transport.receive(target.dense, src, tag), timeout, target.finish)
        return MessageWork(reception, [tensor], self.rank)

    def _count(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            num_bytes = tensor.nbytes
            if num_bytes <= _MAILBOX_BYTES:
                self._bytes["small"] += num_bytes
            elif self._reaches(tensor):
                self._bytes["direct"] += num_bytes
            else:
                self._bytes["staged"] += num_bytes

    def _reaches(self, tensor: torch.Tensor) -> bool:
        memory = self.transport.host_memory
        return memory is not None and memory.offset_of(tensor.data_ptr(), tensor.nbytes) >= 0
