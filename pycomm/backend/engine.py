"""Engine of one process group: every operation of torch.distributed on tensors in CPU memory, over a transport.

It knows torch's operations, not its calling conventions (:mod:`pycomm.backend.operations`), nor which
kind of torch class stands in front of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm.backend.in_backward import BackwardErrors
from pycomm.backend.moved import MovedStorages
from pycomm.backend.reduction import contiguous, filled, in_place, reducible
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

    def abort(self) -> None:
        """End operations in progress with an error, here and on the ranks that wait for this one."""
        self.channel.close("it aborted its process group")

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

        def change(dense: torch.Tensor) -> None:
            memory = self._moved.reachable(dense, in_backward)
            self._count(memory)
            self.transport.all_reduce(*self._reducible(memory, op, timeout), timeout)

        if tensor.is_sparse:
            self._all_reduce_sparse(tensor, op, timeout)
        else:
            in_place(tensor, change)

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce all ``tensors`` over all ranks, in place; those of one dtype travel together."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = self._flat_of(sum(tensor.numel() for tensor in same), dtype)
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            views = [part.view(tensor.shape) for part, tensor in zip(parts, same, strict=True)]
            torch._foreach_copy_(views, same)
            self.all_reduce(flat, op, timeout)
            torch._foreach_copy_(same, views)

    def _flat_of(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = count * dtype.itemsize
        if self._flat is None or self._flat.numel() < num_bytes:
            self._flat = None  # released first
            self._flat = self.transport.empty((max(num_bytes, 1),), torch.uint8)
        return self._flat[:num_bytes].view(dtype)

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Sum COO tensors: every rank gathers the indices and values of all."""
        if op != "sum":
            raise ValueError(f"op is {op!r}, wanted 'sum' for a sparse tensor")
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        counts = torch.empty(self.size, dtype=torch.int64)
        self.transport.all_gather(counts, torch.tensor([indices.shape[1]]), timeout)
        lengths = counts.tolist()
        all_indices = [torch.empty(indices.shape[0], n, dtype=torch.int64) for n in lengths]
        all_values = [torch.empty(n, *values.shape[1:], dtype=values.dtype) for n in lengths]
        self.transport.all_to_all_v(all_indices, [indices] * self.size, timeout)
        self.transport.all_to_all_v(all_values, [values] * self.size, timeout)
        total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
        with torch.no_grad():
            tensor.copy_(total.coalesce())  # a detached one has indices of its own

    def reduce(self, tensor: torch.Tensor, dst: int, op: str, timeout: float) -> None:
        """Reduce ``tensor`` over all ranks into that of rank ``dst``."""
        in_place(tensor, lambda dense: self._reduce_dense(dense, dst, op, timeout))

    def _reduce_dense(self, dense: torch.Tensor, dst: int, op: str, timeout: float) -> None:
        self._count(dense)
        array, name = self._reducible(dense, op, timeout)
        self.transport.reduce(array, dst, name, timeout)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``x`` over all ranks and write part ``rank`` of the result into ``out``."""

        def fill(dense: torch.Tensor) -> None:
            source, name = self._reducible(contiguous(x), op, timeout)
            self._count(source)
            self.transport.reduce_scatter(reducible(dense, op)[0], source, name, timeout)

        filled(out, fill)

    def reduce_scatter_parts(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce ``parts[rank]`` over all ranks into ``out``; parts may differ in size."""

        def fill(dense: torch.Tensor) -> None:
            target, name = self._reducible(dense, op, timeout)
            sources = [reducible(contiguous(part), op)[0] for part in parts]
            self._count(*sources)
            self.transport.reduce_scatter_v(target, sources, name, timeout)

        filled(out, fill)

    def _reducible(self, tensor: torch.Tensor, op: str, timeout: float) -> tuple[torch.Tensor, str]:
        """Return what :func:`reducible` does; if it raises, tell the other ranks, which are about to compare."""
        try:
            return reducible(tensor, op)
        except TypeError as error:
            self.transport.refuse(str(error), timeout)
            raise

    # Movements.

    def broadcast(self, tensor: torch.Tensor, src: int, timeout: float) -> None:
        """Overwrite ``tensor`` with that of rank ``src``."""

        def change(dense: torch.Tensor) -> None:
            self._count(dense)
            self.transport.broadcast(dense, src, timeout)

        in_place(tensor, change)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks, in rank order, into ``out``."""

        def fill(dense: torch.Tensor) -> None:
            source = contiguous(x)
            self._count(source)
            self.transport.all_gather(dense, source, timeout)

        filled(out, fill)

    def exchange(self, outs: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor | None], timeout: float) -> None:
        """Send ``xs[p]`` to every rank p, and receive ``outs[p]`` from it; nothing where there is ``None``."""
        dense: dict[int, torch.Tensor] = {}
        for x in xs:
            if x is not None and id(x) not in dense:
                dense[id(x)] = contiguous(x)
        sources = [None if x is None else dense[id(x)] for x in xs]
        targets = [None if out is None else _writable(out) for out in outs]
        self._count(*dense.values())
        self.transport.all_to_all_v(targets, sources, timeout)
        for out, target in zip(outs, targets, strict=True):
            if out is not None and target is not None and target.data_ptr() != out.data_ptr():
                out.detach().copy_(target)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Send part p of ``x`` to rank p, where it becomes part ``rank`` of ``out``; all parts are equal."""

        def fill(dense: torch.Tensor) -> None:
            source = contiguous(x)
            self._count(source)
            self.transport.all_to_all(dense, source, timeout)

        filled(out, fill)

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
        target = _writable(tensor)
        copies = target.data_ptr() != tensor.data_ptr()

        def arrived() -> None:
            tensor.detach().copy_(target)

        reception = Reception(self.transport.receive(target, src, tag), timeout, arrived if copies else None)
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


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory without gaps, of the shape of ``tensor``: its own if it has none."""
    target = tensor.detach()
    if target.is_contiguous() and not target.is_conj() and not target.is_neg():
        return target
    return torch.empty(target.shape, dtype=target.dtype)
