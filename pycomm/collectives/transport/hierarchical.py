"""Collectives among ranks on several hosts, some of which share a host.

Ranks of one host exchange data through shared memory, so that a link between hosts carries each byte once instead of
once per rank. An all-reduce of n bytes has three steps, with as many lanes as the smallest host has ranks:

1. the ranks of a host reduce-scatter; lane k's rank gets part k;
2. lane k's ranks of all hosts all-reduce part k over TCP;
3. the ranks of a host all-gather the parts.

Between two hosts n bytes are sent each way. Small arrays and rare operations go over TCP between all ranks. Before the
three steps, and those of other operations, all ranks compare what they are about to do.

In collectives of parts of any lengths, one per rank, rank p exchanges data with another host through one rank there,
its carrier. The carrier has the same index on its host as p on its own, modulo the number of ranks there. So a link
between two hosts carries each part once, and all ranks of a host share the work. Parts that a rank carries need no copy
if they are adjacent: if hosts have equally many ranks, and parts the order of
:func:`pycomm.collectives.transport.rendezvous.order_of`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from pycomm import kernels
from pycomm.agreement import prepared
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.base import AllReduceApart, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.host_tensors import contributions, movable, pair_for, parts_apart, rank_of, reducible
from pycomm.collectives.transport.rendezvous import Hosts
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from pycomm.collectives.transport.tcp import TcpTransport
from pycomm.errors import CommError

# Bytes up to which one round of messages between all ranks is faster than three steps.
_FLAT_BYTES = 1 << 10
_ONE_LANE_BYTES = 32 << 10  # up to here several lanes do not pay off
_ALIGNMENT = 64  # elements, of the borders between parts
# Waits within a host are longer than waits between hosts, so that the rank that waits for another host fails first.
_LOCAL_PATIENCE = 2.0
_LOCAL_GRACE = 5.0  # seconds
_STOPPED_PATIENCE = 0.9  # of the timeout

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


def whole(operation: F) -> F:
    """Make a failure of ``operation`` in shared memory, or over TCP, one of both."""

    @functools.wraps(operation)
    def call(self: HierarchicalTransport, *args: Any) -> None:
        try:
            operation(self, *args)
        except CommError as error:
            self._local.close(str(error))
            self._between.give_up(-1 if error.peer is None else error.peer, str(error))
            raise

    return cast(F, call)


class HierarchicalTransport:
    """Transport through ``local`` shared memory within hosts, and over TCP between them. It takes ownership of both.

    Args:
        flat: transport of all ranks.
        local: transport of this host's ranks, in rising order.
        hosts: which ranks are on which host.
    """

    name = "hierarchical"
    interruptible = True
    recorder: Recorder
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None

    def __init__(self, flat: TcpTransport, local: SharedMemoryTransport, hosts: Hosts) -> None:
        self.skip_checks: bool | Literal["after the next"] = False
        self._flat, self._between, self._local, self._hosts = flat, flat.group, local, hosts
        self.rank, self.size = flat.rank, flat.size
        self.host_memory = local.host_memory
        self.hosts: Sequence[Sequence[int]] = hosts.ranks
        self.empty, self._stopped_patience = local.empty, math.inf
        self.send, self.receive, self.hand_over = flat.send, flat.receive, flat.hand_over
        self.reduce, self.barrier, self.refuse = flat.reduce, flat.barrier, flat.refuse
        self.all_to_all, self.all_to_all_v, self.run_program = flat.all_to_all, flat.all_to_all_v, flat.run_program
        self._num_lanes = min(len(members) for members in hosts.ranks)
        lane = hosts.local_rank
        self._lane = [members[lane] for members in hosts.ranks] if lane < self._num_lanes else [self.rank]
        self._carried = carried(hosts)
        self._mine = self._carried[lane]
        others = [members for host, members in enumerate(hosts.ranks) if host != hosts.host]
        self._carriers = [members[lane % len(members)] for members in others]
        """Ranks of the other hosts that carry this rank's part."""

    @property
    def buffer_limit(self) -> int:
        return self._flat.buffer_limit

    @buffer_limit.setter
    def buffer_limit(self, num_bytes: int) -> None:
        self._flat.buffer_limit = num_bytes

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes of messages that were sent and not yet received."""
        return self._flat.buffered_bytes

    def give_up_stopped_after(self, seconds: float) -> None:
        self._stopped_patience = seconds

    def _patience(self, timeout: float) -> float:
        """Return the limit of waits within a host.

        A process that is stopped there is named before other hosts' waits for this rank end.
        """
        self._local.give_up_stopped_after(min(self._stopped_patience, _STOPPED_PATIENCE * timeout))
        return _LOCAL_PATIENCE * timeout + _LOCAL_GRACE

    def close(self, reason: str) -> None:
        self._flat.close(reason)
        self._local.close(reason)

    def _checked(self, timeout: float, check: Callable[[], T]) -> T:
        """Return the result of ``check``; if it raises, refuse the operation first."""
        return prepared(check, lambda error: self.refuse(str(error), timeout))

    def _compare(self, kind: str, x: torch.Tensor, op: str, root: int, timeout: float) -> None:
        """Compare the ranks' operations, unless that is skipped."""
        if self.skip_checks is True:
            return
        self._between.compare(kind, x, op, root, timeout)
        if self.skip_checks:
            self.skip_checks = True

    def _compare_parts(
        self, kind: str, dtype: torch.dtype, op: str, sends: Sequence[int], receives: Sequence[int], timeout: float
    ) -> None:
        """Compare the ranks' operations and the lengths of their parts, in bytes, unless that is skipped."""
        if self.skip_checks is True:
            return
        self._between.compare_parts(kind, torch.empty(0, dtype=dtype), op, sends, receives, timeout)
        if self.skip_checks:
            self.skip_checks = True

    # all_reduce

    @whole
    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        tensor = self._checked(timeout, lambda: reducible("x", x, op, writes=True))
        if tensor.nbytes <= _FLAT_BYTES:
            self._flat.all_reduce(tensor, op, timeout)
            return
        self._compare("all_reduce", tensor, op, 0, timeout)
        if not _widens(tensor, op):
            self._all_reduce(tensor, op, timeout)
            return
        wide = tensor.float()
        self._all_reduce(wide, op, timeout)
        tensor.copy_(wide)

    def _all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce flat ``tensor`` in place."""
        kind, patience = "sum" if op == "mean" else op, self._patience(timeout)
        lanes = 1 if tensor.nbytes <= _ONE_LANE_BYTES else self._num_lanes
        size = len(tensor) // lanes // _ALIGNMENT * _ALIGNMENT
        # The last lane also has the remainder.
        parts = [tensor[k * size : (k + 1) * size if k < lanes - 1 else len(tensor)] for k in range(lanes)]
        self._reduce_parts(tensor, parts, kind, patience)
        has_part = self._hosts.local_rank < lanes
        mine = parts[self._hosts.local_rank] if has_part else tensor[:0]
        self._between.all_reduce_among(self._lane if has_part else [self.rank], mine, kind, timeout)
        if op == "mean":
            mine.mul_(1.0 / self.size)
        self._copy_parts(tensor, parts, patience)

    def _reduce_parts(self, tensor: torch.Tensor, parts: list[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce over this host: its rank k gets part k."""
        even, rest = self._evenly(tensor, parts)
        if even is None:
            self._local.all_reduce(tensor, op, timeout)
            return
        self._local.reduce_scatter(parts[self._local.rank][: len(parts[0])], even, op, timeout)
        if len(rest) > 0:
            self._local.all_reduce(rest, op, timeout)

    def _copy_parts(self, tensor: torch.Tensor, parts: list[torch.Tensor], timeout: float) -> None:
        """Copy part k from this host's rank k to its others."""
        even, rest = self._evenly(tensor, parts)
        if even is None:
            for k, part in enumerate(parts):
                self._local.broadcast(part, k, timeout)
            return
        self._local.all_gather(even, parts[self._local.rank][: len(parts[0])], timeout)
        if len(rest) > 0:
            self._local.broadcast(rest, len(parts) - 1, timeout)

    def _evenly(self, tensor: torch.Tensor, parts: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the range of equal parts, one per rank of this host (``None`` if there are fewer), and the rest."""
        if len(parts) != self._local.size or len(parts) == 1:
            return None, tensor
        end = len(parts) * len(parts[0])
        return tensor[:end], tensor[end:]

    # The others.

    @whole
    def reduce_on_host(self, parts: Sequence[torch.Tensor], timeout: float) -> None:
        """Make ``parts[k]`` of each host's k-th rank the sum over its ranks, where hosts have equally many.

        ``parts`` are slices of one tensor, of equal lengths on all ranks.
        """
        own = parts[self._hosts.local_rank]
        self._compare("reduce_on_host", parts[0], "sum", 0, timeout)
        self._local.reduce_scatter_v(own, parts, "sum", self._patience(timeout))

    @whole
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("reduce_scatter", out, x, self.rank, self.size, (op,)))
        if pair.out.nbytes <= _FLAT_BYTES:
            self._flat.reduce_scatter(pair.out, pair.x, op, timeout)
            return
        self._compare("reduce_scatter", pair.x, op, 0, timeout)
        self._reduce_scatter(pair.out, list(pair.x.view(self.size, -1)), op, timeout)

    @whole
    def all_gather(self, out: Any, x: Any, timeout: float) -> None:
        pair = self._checked(timeout, lambda: pair_for("all_gather", out, x, self.rank, self.size))
        if pair.x.nbytes <= _FLAT_BYTES:
            self._flat.all_gather(out, x, timeout)
            return
        self._compare("all_gather", x, "sum", 0, timeout)
        targets = list(pair.out.view(torch.uint8).view(self.size, -1))
        self._all_gather(targets, pair.x.view(torch.uint8), timeout)

    @whole
    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        target, sources = self._checked(timeout, lambda: contributions(out, xs, op, self.rank, self.size))
        sends = [source.nbytes for source in sources]
        receives = [target.nbytes] * self.size
        self._compare_parts("reduce_scatter_v", target.dtype, op, sends, receives, timeout)
        self._reduce_scatter(target, sources, op, timeout)

    @whole
    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        targets, sources = self._checked(timeout, lambda: parts_apart(outs, [x] * self.size, self.rank, self.size))
        source, receives = sources[self.rank], [target.nbytes for target in targets]
        self._compare_parts("all_gather_v", torch.uint8, "sum", [source.nbytes] * self.size, receives, timeout)
        self._all_gather(targets, source, timeout)

    def _reduce_scatter(self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Write the reduction of all ranks' ``sources[rank]`` into ``target``, which may be this rank's own."""
        if _widens(target, op):
            wide = torch.empty_like(target, dtype=torch.float32)
            self._reduce_scatter(wide, [source.float() for source in sources], op, timeout)
            target.copy_(wide)
            return
        kind = "sum" if op == "mean" else op
        runs = [_joined([sources[p] for p in ranks]) for ranks in self._carried]
        sums = torch.empty_like(runs[self._hosts.local_rank])
        self._local.reduce_scatter_v(sums, runs, kind, self._patience(timeout))
        numels = [sources[p].numel() for p in self._mine]
        of_host = dict(zip(self._mine, torch.split(sums, numels), strict=True))
        terms = {p: torch.empty_like(target) for p in self._carriers}
        self._exchange(terms, of_host, timeout)
        terms[self.rank] = of_host[self.rank]
        if target.numel() > 0:
            kernels.reduce(target, [terms[p] for p in sorted(terms)], kind)
            if op == "mean":
                target.mul_(1.0 / self.size)

    def _all_gather(self, targets: Sequence[torch.Tensor], source: torch.Tensor, timeout: float) -> None:
        """Write the ``source`` of every rank p, bytes, into ``targets[p]``, which may be this rank's own."""
        if targets[self.rank].data_ptr() != source.data_ptr():
            targets[self.rank].copy_(source)
        received = {p: targets[p] for p in self._mine}
        self._exchange(received, dict.fromkeys(self._carriers, source), timeout)
        runs = [_joined([targets[p] for p in ranks]) for ranks in self._carried]
        self._local.all_gather_v(runs, runs[self._hosts.local_rank], self._patience(timeout))
        for run, ranks in zip(runs, self._carried, strict=True):
            for p, part in zip(ranks, torch.split(run, [targets[p].numel() for p in ranks]), strict=True):
                if part.data_ptr() != targets[p].data_ptr():
                    targets[p].copy_(part)

    def _exchange(self, received: dict[int, torch.Tensor], sent: dict[int, torch.Tensor], timeout: float) -> None:
        """Send ``sent[p]`` to rank p, and receive ``received[p]`` from it; only of ranks on other hosts."""
        others = [p not in self._hosts.members for p in range(self.size)]
        outs, xs = ([of.get(p) if others[p] else None for p in range(self.size)] for of in (received, sent))
        self._flat.all_to_all_v(outs, xs, timeout)

    @whole
    def broadcast(self, x: Any, src: int, timeout: float) -> None:
        def check() -> tuple[torch.Tensor, int]:
            return movable("x", x, writes=True), rank_of(src, "src", self.size)

        tensor, source = self._checked(timeout, check)
        if tensor.nbytes <= _FLAT_BYTES:
            self._flat.broadcast(x, source, timeout)
            return
        self._compare("broadcast", x, "sum", source, timeout)
        hosts, content = self._hosts, tensor.view(torch.uint8)
        heads = [source if source in members else members[0] for members in hosts.ranks]
        own = heads if self.rank in heads else [self.rank]
        self._between.broadcast_among(sorted(own), content, source, timeout)
        self._local.broadcast(content, hosts.members.index(heads[hosts.host]), self._patience(timeout))


def _patience(timeout: float) -> float:
    """Return the limit of waits within a host."""
    return _LOCAL_PATIENCE * timeout + _LOCAL_GRACE


def _widens(x: torch.Tensor, op: str) -> bool:
    """Return whether ``x`` is reduced in float32: the sum may not fit the half type although the mean does."""
    return op == "mean" and x.dtype in (torch.float16, torch.bfloat16)


def carried(hosts: Hosts) -> list[list[int]]:
    """Return the ranks whose parts each rank of this host carries, by their index on their host, then by host."""
    count = len(hosts.members)
    mine: list[list[int]] = [[] for _ in range(count)]
    for index in range(max(map(len, hosts.ranks))):
        mine[index % count] += [members[index] for members in hosts.ranks if index < len(members)]
    return mine


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return flat tensors as one: without a copy if they are adjacent in memory."""
    some = [tensor for tensor in tensors if tensor.numel() > 0]
    if not some:
        return tensors[0]
    first, numel = some[0], sum(tensor.numel() for tensor in some)
    end = first.storage_offset() + numel
    is_one = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(some))
    if is_one and end * first.itemsize <= first.untyped_storage().nbytes():
        return first.as_strided((numel,), (1,))
    return torch.cat(some)
