"""Collectives of checked arrays over a process group of torch.distributed: its own, and some made from messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm import kernels, schedule
from pycomm.collectives.transport.base import HostMemory, Message
from pycomm.collectives.transport.messages import HALVES, run_program
from pycomm.collectives.transport.torch_group import DIRECT_RANKS, TorchGroup
from pycomm.schedule.network import Link, Network
from pycomm.schedule.program import Program, program_of
from pycomm.torch_internals import reduce_scatter_single

# Small tensors are gathered, then reduced by every rank, as long as a rank receives at most this many bytes.
_GATHERED_BYTES = 256 << 10
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

# Model for the choice of schedules, the same on all ranks: thread wake-ups and a link of 1 Gbit/s.
_LINK = Link(alpha=1e-4, beta=8e-9, gamma=1e-10)
_NETWORK = Network(name="between hosts", within_host=_LINK, between_hosts=_LINK)
_RING_BYTES = 8 << 20  # from here on Gloo's own sums are faster
_PIECE_BYTES = 64 << 20  # of a sum at a time: a rank needs as much memory again


class TorchCollectives:
    """Collectives between the ranks of ``group``, regardless of hosts."""

    name = "torch"
    host_memory: HostMemory | None = None

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._rank, self._size = group.rank, group.size
        self.hosts: Sequence[Sequence[int]] = [(p,) for p in range(group.size)]
        self._by_messages = ByMessages(group)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in memory of this process."""
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError:  # torch's allocator
            raise MemoryError(f"a tensor of shape {shape} ({dtype}) needed more memory than there is") from None

    def give_up_stopped_after(self, seconds: float) -> None:
        """Do nothing: stopped processes are not visible here."""

    def close(self, reason: str) -> None:
        """Do nothing: the owner closes the group."""

    def begins_with_messages(self, tensor: torch.Tensor) -> bool:
        """Return whether an all-reduce of ``tensor`` begins with messages, so that ranks may compare it meanwhile."""
        # Gloo rounds sums of half types after every addition. Its ring takes more steps, but overlaps them with its
        # sums, which pays off for large tensors.
        few = self._size <= DIRECT_RANKS and tensor.nbytes <= _RING_BYTES
        return self._group.is_gloo and (few or tensor.dtype in HALVES)

    def all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``tensor`` in place."""
        if self._size <= DIRECT_RANKS and (self._size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            gathered = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype)
            self._group.gather("all_reduce", gathered, tensor.view(-1), timeout)
            kernels.reduce(tensor, list(gathered.view(self._size, *tensor.shape)), op)
            return
        if self.begins_with_messages(tensor):
            self._by_messages.all_reduce(tensor.view(-1), op, timeout)
            return
        group = self._group.group
        self._run("all_reduce", lambda: dist.all_reduce(tensor, _REDUCTIONS[op], group=group, async_op=True), timeout)
        if op == "mean":
            tensor.mul_(1.0 / self._size)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, timeout: float) -> None:
        """Reduce ``tensor`` into that of ``root``."""
        if (self._size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            self._reduce_at(tensor, root, op, timeout)
            return
        # A copy: backends use the memory of the other ranks too.
        wide = op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16)
        work_on = tensor.float() if wide else tensor.clone()
        group = self._group.group
        place = dist.get_global_rank(group, root)
        self._run("reduce", lambda: dist.reduce(work_on, place, _REDUCTIONS[op], group=group, async_op=True), timeout)
        if self._rank == root:
            tensor.copy_(work_on.mul_(1.0 / self._size) if op == "mean" else work_on)

    def _reduce_at(self, tensor: torch.Tensor, root: int, op: str, timeout: float) -> None:
        """Send ``tensor`` to ``root``, which reduces all of them in rank order."""
        if self._rank != root:
            self._group.exchange([(root, tensor)], [], timeout, "reduce")
            return
        inputs = [tensor if p == root else torch.empty_like(tensor) for p in range(self._size)]
        self._group.exchange([], messages(inputs, root), timeout, "reduce")
        kernels.reduce(tensor, inputs, op)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        """Write part ``rank`` of the reduction of ``x`` into ``out``."""
        group = self._group.group
        self._run(
            "reduce_scatter",
            lambda: reduce_scatter_single(out, x, _REDUCTIONS[op], group=group, async_op=True),
            timeout,
        )
        if op == "mean":
            out.mul_(1.0 / self._size)

    def reduce_scatter_v(self, target: torch.Tensor, sources: list[torch.Tensor], op: str, timeout: float) -> None:
        """Write the reduction of all ranks' ``sources[rank]`` into ``target``, which may be this rank's own."""
        # No backend reduces parts of different lengths. Each is sent once, directly to its rank.
        inputs = [sources[p] if p == self._rank else torch.empty_like(target) for p in range(self._size)]
        sends, receives = messages(sources, self._rank), messages(inputs, self._rank)
        self._group.exchange(sends, receives, timeout, "reduce_scatter_v")
        if target.numel() > 0:
            kernels.reduce(target, inputs, op)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks, bytes, into ``out``."""
        self._group.gather("all_gather", out, x, timeout)

    def all_gather_v(self, targets: list[torch.Tensor], source: torch.Tensor, timeout: float) -> None:
        """Write the ``source`` of every rank p, bytes, into ``targets[p]``, which may be this rank's own."""
        if targets[self._rank].data_ptr() != source.data_ptr():
            targets[self._rank].copy_(source)
        sends, receives = messages([source] * self._size, self._rank), messages(targets, self._rank)
        self._group.exchange(sends, receives, timeout, "all_gather_v")

    def broadcast(self, x: torch.Tensor, source: int, timeout: float) -> None:
        """Overwrite ``x``, bytes, with that of ``source``."""
        group = self._group.group
        root = dist.get_global_rank(group, source)
        self._run("broadcast", lambda: dist.broadcast(x, root, group=group, async_op=True), timeout)

    def _run(self, operation: str, start: Callable[[], Any], timeout: float) -> None:
        self._group.wait(operation, self._group.begin(operation, start), timeout)


class ByMessages:
    """Reductions of a group by programs of its messages."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._choices: list[tuple[float, str]] = []
        self._programs: dict[str, Program] = {}

    def all_reduce(self, x: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce flat ``x`` in place; the same bits on all ranks."""
        # "direct" has two steps, of as many bytes as a ring's, and rounds once; its messages grow with the ranks.
        is_direct = self._group.size <= DIRECT_RANKS or x.dtype in HALVES
        program = self._program("direct" if is_direct else self._choice(x.nbytes))
        for piece in torch.split(x, _PIECE_BYTES // x.itemsize) if is_direct else [x]:
            if piece.numel() > 0:
                run_program(program, piece, op, self._group, timeout)

    def _choice(self, num_bytes: int) -> str:
        if not self._choices:
            self._choices = schedule.rank_algorithms(self._group.size, _NETWORK).crossovers()
        return [name for size, name in self._choices if size <= num_bytes][-1]

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            table = schedule.by_name(name, self._group.size)
            schedule.verify(table)
            self._programs[name] = program_of(table, self._group.rank)
        return self._programs[name]


def messages(tensors: Sequence[torch.Tensor], rank: int) -> list[Message]:
    """Return the messages to, or from, the other ranks; empty tensors are skipped."""
    return [(p, tensor) for p, tensor in enumerate(tensors) if p != rank and tensor.numel() > 0]
