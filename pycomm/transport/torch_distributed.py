"""Collectives of torch.distributed, by the user's own backend, for ranks that are not all on one host.

Every operation is preceded by an all-gather of 56 bytes per rank in which the ranks describe the
operation, so that ranks that disagree get an error instead of a hang.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import kernels
from pycomm.schedule.program import Program
from pycomm.transport.between_hosts import BetweenHosts
from pycomm.transport.host_tensors import apart, rank_of, reducible, require, tensor_of
from pycomm.transport.messages import run_program
from pycomm.transport.parts import messages
from pycomm.transport.torch_exchanges import TorchExchanges, counted
from pycomm.transport.torch_group import DIRECT_RANKS

# Newer releases of torch renamed it, and warn about the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Small tensors are gathered, then reduced by every rank, as long as a rank receives at most this many bytes.
_GATHERED_BYTES = 256 << 10
_WORD_BYTES = 8  # of an array that travels with the announcements
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


class TorchTransport(TorchExchanges):
    """Transport by torch.distributed's collectives on ``group``, which nobody else uses, and which it destroys."""

    name = "torch"

    @counted
    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._checked(timeout, lambda: reducible("x", x, op, writes=True))
        if 0 < tensor.nbytes <= _WORD_BYTES and self.skip_checks is not True:
            self._reduce_words(tensor, op, timeout)
            return
        self._agree("all_reduce", tensor, op, 0, timeout)
        if op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16):
            wide = tensor.float()  # the sum may not fit the half type although the mean does
            self._reduce(wide, op, timeout)
            tensor.copy_(wide)
        else:
            self._reduce(tensor, op, timeout)

    def _reduce_words(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``tensor``, which is so small that it travels with the announcements."""
        word = torch.zeros(1, dtype=torch.int64)
        mine = word.view(tensor.dtype)[: len(tensor)]
        mine.copy_(tensor)
        words = torch.tensor(self._agree("all_reduce", tensor, op, 0, timeout, word=int(word)), dtype=torch.int64)
        kernels.reduce(tensor, [word.view(tensor.dtype)[: len(tensor)] for word in torch.split(words, 1)], op)

    @counted
    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        def check() -> torch.Tensor:
            require(
                (program.rank, program.num_ranks) == (self.rank, self.size),
                f"the program is of rank {program.rank} of {program.num_ranks}, wanted one of rank {self.rank} of "
                f"{self.size}",
            )
            return reducible("x", x, op, writes=True)

        tensor = self._checked(timeout, check)
        self._agree("schedule", tensor, op, program.digest >> 1, timeout)  # 63 bits
        run_program(program, tensor, op, self._group, timeout)

    @counted
    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, int]:
            tensor = reducible("x", x, op, writes=True)
            return tensor, rank_of(dst, "dst", self.size)

        tensor, root = self._checked(timeout, check)
        self._agree("reduce", tensor, op, root, timeout)
        if tensor.numel() == 0:
            return
        if (self.size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            self._reduce_at(tensor, root, op, timeout)
            return
        # A copy: backends use the memory of the other ranks too.
        wide = op == "mean" and tensor.dtype in (torch.float16, torch.bfloat16)
        work_on = tensor.float() if wide else tensor.clone()
        group = self._group.group
        place = dist.get_global_rank(group, root)
        work = self._group.begin(
            "reduce", lambda: dist.reduce(work_on, place, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("reduce", work, timeout)
        if self.rank == root:
            tensor.copy_(work_on.mul_(1.0 / self.size) if op == "mean" else work_on)

    def _reduce_at(self, tensor: torch.Tensor, root: int, op: str, timeout: float) -> None:
        """Send ``tensor`` to ``root``, who reduces all of them, in the order of the ranks."""
        if self.rank != root:
            self._group.exchange([(root, tensor)], [], timeout, "reduce")
            return
        inputs = [tensor if p == root else torch.empty_like(tensor) for p in range(self.size)]
        self._group.exchange([], messages(inputs, root), timeout, "reduce")
        kernels.reduce(tensor, inputs, op)

    def _reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        if self.size <= DIRECT_RANKS and (self.size - 1) * tensor.nbytes <= _GATHERED_BYTES:
            gathered = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype)
            self._group.gather("all_reduce", gathered, tensor.view(-1), timeout)
            kernels.reduce(tensor, list(gathered.view(self.size, *tensor.shape)), op)
            return
        group = self._group.group
        if tensor.dtype == torch.float16 and dist.get_backend(group) == dist.Backend.GLOO:
            self._by_messages = self._by_messages or BetweenHosts(self._group, range(self.size))
            self._by_messages.all_reduce(tensor, op, timeout)  # "mean" has been widened
            return
        work = self._group.begin(
            "all_reduce", lambda: dist.all_reduce(tensor, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("all_reduce", work, timeout)
        if op == "mean":
            tensor.mul_(1.0 / self.size)

    @counted
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            target, source, _, _ = apart(out, x, self.rank, self.size, (op,))
            require(
                source.numel() == self.size * target.numel(),
                f"x has {source.numel()} elements, wanted {self.size * target.numel()}: {self.size} ranks times the "
                f"{target.numel()} of out",
            )
            return target, source

        target, source = self._checked(timeout, check)
        self._agree("reduce_scatter", source, op, 0, timeout)
        if target.numel() == 0:
            return
        wide = op == "mean" and target.dtype in (torch.float16, torch.bfloat16)
        if wide:
            source, result = source.float(), torch.empty(target.shape, dtype=torch.float32)
        else:
            result = target
        self._scatter(result, source, op, timeout)
        if wide:
            target.copy_(result)

    def _scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        group = self._group.group
        work = self._group.begin(
            "reduce_scatter", lambda: _reduce_scatter(out, x, _REDUCTIONS[op], group=group, async_op=True)
        )
        self._group.wait("reduce_scatter", work, timeout)
        if op == "mean":
            out.mul_(1.0 / self.size)

    @counted
    def all_gather(self, out: Any, x: Any, timeout: float) -> None:

        def check() -> tuple[torch.Tensor, torch.Tensor, int]:
            target, source, tag, _ = apart(out, x, self.rank, self.size)
            require(
                target.numel() == self.size * source.numel(),
                f"out has {target.numel()} elements, wanted {self.size * source.numel()}: {self.size} ranks times the "
                f"{source.numel()} of x",
            )
            return target, source, tag

        target, source, tag = self._checked(timeout, check)
        self._agree("all_gather", source, "sum", 0, timeout, tag)
        self._gather(target.view(torch.uint8), source.view(torch.uint8), timeout)

    def _gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        self._group.gather("all_gather", out, x, timeout)

    @counted
    def broadcast(self, x: Any, src: int, timeout: float) -> None:

        def check() -> tuple[_native.HostArray, int]:
            array = _native.HostArray(x, "x", True, True)
            return array, rank_of(src, "src", self.size)

        array, source = self._checked(timeout, check)
        tensor = tensor_of(array)
        self._agree("broadcast", tensor, "sum", source, timeout, array.tag)
        self._spread(tensor.view(torch.uint8), source, timeout)

    def _spread(self, x: torch.Tensor, source: int, timeout: float) -> None:
        group = self._group.group
        root = dist.get_global_rank(group, source)
        work = self._group.begin("broadcast", lambda: dist.broadcast(x, root, group=group, async_op=True))
        self._group.wait("broadcast", work, timeout)
