"""Collectives among ranks on several hosts, some of which share a host.

Ranks of one host exchange data through shared memory, so that a link between hosts carries each byte once instead of
once per rank. An all-reduce of n bytes has three steps, with as many lanes as the smallest host has ranks:

1. the ranks of a host reduce-scatter; lane k's rank gets part k;
2. lane k's ranks of all hosts all-reduce part k, by a schedule chosen by cost;
3. the ranks of a host all-gather the parts.

Between two hosts n bytes are sent each way. :class:`TorchCollectives` handles small arrays and rare operations.

In collectives of parts of any lengths, one per rank, rank p exchanges data with another host through one rank there,
its carrier. The carrier has the same index on its host as p on its own, modulo the number of ranks there. So a link
between two hosts carries each part once, and all ranks of a host share the work. Parts that a rank carries need no copy
if they are adjacent: if hosts have equally many ranks, and parts the order of
:func:`pycomm.collectives.transport.rendezvous.order_of`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from pycomm import kernels
from pycomm.collectives.transport.base import Message
from pycomm.collectives.transport.rendezvous import Hosts
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from pycomm.collectives.transport.torch_collectives import BetweenHosts, TorchCollectives
from pycomm.collectives.transport.torch_group import TorchGroup
from pycomm.errors import CommError

# Bytes up to which one round of messages between all ranks is faster than three steps.
_FLAT_BYTES = 1 << 10
_ONE_LANE_BYTES = 32 << 10  # up to here several lanes do not pay off
_ALIGNMENT = 64  # elements, of the borders between parts
# Waits within a host are longer than waits between hosts, so that the rank that waits for another host fails first.
_LOCAL_PATIENCE = 2.0
_LOCAL_GRACE = 5.0  # seconds


class HierarchicalCollectives:
    """Collectives through ``local`` shared memory within hosts, and messages between them.

    Args:
        flat: collectives among all ranks, for small arrays.
        group: all ranks.
        local: transport of this host's ranks, in rising order; taken over.
        hosts: which ranks are on which host.
    """

    name = "hierarchical"

    def __init__(self, flat: TorchCollectives, group: TorchGroup, local: SharedMemoryTransport, hosts: Hosts) -> None:
        self._flat, self._group, self._local, self._hosts = flat, group, local, hosts
        self._rank, self._size = group.rank, group.size
        self.host_memory, self.hosts = local.host_memory, hosts.ranks
        self.empty, self.give_up_stopped_after, self.close = local.empty, local.give_up_stopped_after, local.close
        self.reduce = flat.reduce
        group.on_failure = self._leave
        self._num_lanes = min(len(members) for members in hosts.ranks)
        lane = hosts.local_rank
        self._lane: BetweenHosts | None = None
        if lane < self._num_lanes:
            self._lane = BetweenHosts(group, [members[lane] for members in hosts.ranks])
        self._carried = carried(hosts)
        self._mine = self._carried[lane]
        others = [members for host, members in enumerate(hosts.ranks) if host != hosts.host]
        self._carriers = [members[lane % len(members)] for members in others]
        """Ranks of the other hosts that carry this rank's part."""

    def _leave(self, reason: str) -> None:
        """End, after a failure, the waits of other ranks for this one."""
        self._local.close(reason)
        self._group.sever()

    def _on_host(self, operation: str, call: Callable[[float], None], timeout: float) -> None:
        """Run ``call(timeout)``, which uses shared memory; a failure breaks the whole group."""
        _ = self._group.group  # raises if it is closed, broken, or inherited by a fork
        start = time.monotonic()
        try:
            call(_LOCAL_PATIENCE * timeout + _LOCAL_GRACE)
        except CommError as error:
            raise self._group.fail_with_culprit(operation, error.peer, error, time.monotonic() - start) from None

    # all_reduce

    def begins_with_messages(self, tensor: torch.Tensor) -> bool:
        """Return whether an all-reduce of ``tensor`` begins with messages between the ranks, not in shared memory."""
        return tensor.nbytes <= _FLAT_BYTES and self._flat.begins_with_messages(tensor)

    def all_reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce flat ``tensor`` in place."""
        if tensor.nbytes <= _FLAT_BYTES:
            self._flat.all_reduce(tensor, op, timeout)
            return
        kind = "sum" if op == "mean" else op
        lanes = 1 if tensor.nbytes <= _ONE_LANE_BYTES else self._num_lanes
        size = len(tensor) // lanes // _ALIGNMENT * _ALIGNMENT
        # The last lane also has the remainder.
        parts = [tensor[k * size : (k + 1) * size if k < lanes - 1 else len(tensor)] for k in range(lanes)]
        self._on_host("all_reduce", lambda patience: self._reduce_parts(tensor, parts, kind, patience), timeout)
        if self._lane is not None and self._hosts.local_rank < lanes:
            mine = parts[self._hosts.local_rank]
            self._lane.all_reduce(mine, kind, timeout)
            if op == "mean":
                mine.mul_(1.0 / self._size)
        self._on_host("all_reduce", lambda patience: self._copy_parts(tensor, parts, patience), timeout)

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

    def reduce_on_host(self, parts: Sequence[torch.Tensor], timeout: float) -> None:
        """Make ``parts[k]`` of this host's k-th rank the sum over its ranks."""
        own = parts[self._hosts.local_rank]
        self._on_host(
            "reduce_on_host", lambda patience: self._local.reduce_scatter_v(own, parts, "sum", patience), timeout
        )

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        """Write part ``rank`` of the reduction of ``x`` into ``out``."""
        if out.nbytes <= _FLAT_BYTES:
            self._flat.reduce_scatter(out, x, op, timeout)
        else:
            self.reduce_scatter_v(out.view(-1), list(x.view(self._size, -1)), op, timeout, "reduce_scatter")

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks, bytes, into ``out``."""
        if x.nbytes <= _FLAT_BYTES:
            self._flat.all_gather(out, x, timeout)
        else:
            self.all_gather_v(list(out.view(self._size, -1)), x, timeout, "all_gather")

    def reduce_scatter_v(
        self,
        target: torch.Tensor,
        sources: Sequence[torch.Tensor],
        op: str,
        timeout: float,
        operation: str = "reduce_scatter_v",
    ) -> None:
        """Write the reduction of all ranks' ``sources[rank]`` into ``target``, which may be this rank's own."""
        if op == "mean" and target.dtype in (torch.float16, torch.bfloat16):
            wide = torch.empty_like(target, dtype=torch.float32)  # the sum may not fit the half type
            self.reduce_scatter_v(wide, [source.float() for source in sources], op, timeout, operation)
            target.copy_(wide)
            return
        kind = "sum" if op == "mean" else op
        runs = [_joined([sources[p] for p in ranks]) for ranks in self._carried]
        sums = torch.empty_like(runs[self._hosts.local_rank])
        self._on_host(operation, lambda patience: self._local.reduce_scatter_v(sums, runs, kind, patience), timeout)
        numels = [sources[p].numel() for p in self._mine]
        of_host = dict(zip(self._mine, torch.split(sums, numels), strict=True))
        terms = {p: torch.empty_like(target) for p in self._carriers}
        self._group.exchange(self._to_others(of_host), _messages(terms), timeout, operation)
        terms[self._rank] = of_host[self._rank]
        if target.numel() > 0:
            kernels.reduce(target, [terms[p] for p in sorted(terms)], kind)
            if op == "mean":
                target.mul_(1.0 / self._size)

    def all_gather_v(
        self, targets: Sequence[torch.Tensor], source: torch.Tensor, timeout: float, operation: str = "all_gather_v"
    ) -> None:
        """Write the ``source`` of every rank p, bytes, into ``targets[p]``, which may be this rank's own."""
        if targets[self._rank].data_ptr() != source.data_ptr():
            targets[self._rank].copy_(source)
        received = {p: targets[p] for p in self._mine}
        sends = _messages(dict.fromkeys(self._carriers, source))
        self._group.exchange(sends, self._to_others(received), timeout, operation)
        runs = [_joined([targets[p] for p in ranks]) for ranks in self._carried]
        mine = runs[self._hosts.local_rank]
        self._on_host(operation, lambda patience: self._local.all_gather_v(runs, mine, patience), timeout)
        for run, ranks in zip(runs, self._carried, strict=True):
            for p, part in zip(ranks, torch.split(run, [targets[p].numel() for p in ranks]), strict=True):
                if part.data_ptr() != targets[p].data_ptr():
                    targets[p].copy_(part)

    def _to_others(self, tensors: dict[int, torch.Tensor]) -> list[Message]:
        return _messages({p: tensor for p, tensor in tensors.items() if p not in self._hosts.members})

    def broadcast(self, x: torch.Tensor, source: int, timeout: float) -> None:
        """Overwrite ``x``, bytes, with ``source``'s: along a chain of one rank per host, then within hosts."""
        if x.nbytes <= _FLAT_BYTES:
            self._flat.broadcast(x, source, timeout)
            return
        hosts = self._hosts
        host = next(host for host, members in enumerate(hosts.ranks) if source in members)
        heads = [members[0] if h != host else source for h, members in enumerate(hosts.ranks)]
        if self._rank in heads:
            BetweenHosts(self._group, heads).broadcast(x, host, timeout)
        head = hosts.members.index(heads[hosts.host])
        self._on_host("broadcast", lambda patience: self._local.broadcast(x, head, patience), timeout)


def carried(hosts: Hosts) -> list[list[int]]:
    """Return the ranks whose parts each rank of this host carries, by their index on their host, then by host."""
    count = len(hosts.members)
    mine: list[list[int]] = [[] for _ in range(count)]
    for index in range(max(map(len, hosts.ranks))):
        mine[index % count] += [members[index] for members in hosts.ranks if index < len(members)]
    return mine


def _messages(tensors: dict[int, torch.Tensor]) -> list[Message]:
    return [(p, tensor) for p, tensor in tensors.items() if tensor.numel() > 0]


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
