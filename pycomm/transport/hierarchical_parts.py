"""Collectives of parts of any lengths, one for each rank, among hosts with several ranks.

Whatever rank p has for another host, or gets from it, passes through one rank there, its carrier: the rank whose index
on its host is that of p on its own, modulo the number of ranks there. So a link between two hosts carries each part
once, and all ranks of a host carry. What a rank carries is not copied first if it lies in one piece, which it does
where hosts have equally many ranks, and parts lie in the order of :func:`order_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from pycomm import kernels
from pycomm.transport.base import Message
from pycomm.transport.hosts import Hosts
from pycomm.transport.shared_memory import SharedMemoryTransport

OnHost = Callable[[Callable[[float], None]], None]
"""Function that runs what uses shared memory only, with a timeout."""
Exchange = Callable[[Sequence[Message], Sequence[Message]], None]
"""Function that sends and receives messages."""


def order_of(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks in the order in which their parts should lie: by index on their host, then by host."""
    return [p for row in itertools.zip_longest(*hosts) for p in row if p is not None]


def carried(hosts: Hosts) -> list[list[int]]:
    """Return the ranks whose parts each rank of this host carries; by index on their own host, then by host."""
    count = len(hosts.members)
    mine: list[list[int]] = [[] for _ in range(count)]
    for index in range(max(map(len, hosts.ranks))):
        mine[index % count] += [members[index] for members in hosts.ranks if index < len(members)]
    return mine


class HierarchicalParts:
    """Collectives of parts over the ranks ``local`` of this host, and messages between ``hosts``."""

    def __init__(self, local: SharedMemoryTransport, hosts: Hosts) -> None:
        self._local, self._hosts = local, hosts
        self._carried = carried(hosts)
        self._mine = self._carried[hosts.local_rank]
        others = [members for host, members in enumerate(hosts.ranks) if host != hosts.host]
        self._carriers = [members[hosts.local_rank % len(members)] for members in others]
        """Ranks of the other hosts that carry this rank's part."""

    def reduce_scatter(
        self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: str, on_host: OnHost, exchange: Exchange
    ) -> None:
        """Write the reduction of all ranks' ``sources[rank]`` into ``target``, which may be this rank's own."""
        if op == "mean" and target.dtype in (torch.float16, torch.bfloat16):
            wide = torch.empty_like(target, dtype=torch.float32)  # the sum may not fit the half type
            self.reduce_scatter(wide, [source.float() for source in sources], op, on_host, exchange)
            target.copy_(wide)
            return
        kind = "sum" if op == "mean" else op
        runs = [_joined([sources[p] for p in ranks]) for ranks in self._carried]
        sums = torch.empty_like(runs[self._hosts.local_rank])
        on_host(lambda timeout: self._local.reduce_scatter_v(sums, runs, kind, timeout))
        numels = [sources[p].numel() for p in self._mine]
        of_host = dict(zip(self._mine, torch.split(sums, numels), strict=True))
        terms = {p: torch.empty_like(target) for p in self._carriers}
        exchange(_not_empty(of_host, self._hosts), _messages(terms))
        terms[self._hosts.rank] = of_host[self._hosts.rank]
        if target.numel() > 0:
            kernels.reduce(target, [terms[p] for p in sorted(terms)], kind)
            if op == "mean":
                target.mul_(1.0 / sum(map(len, self._hosts.ranks)))

    def all_gather(
        self, targets: Sequence[torch.Tensor], source: torch.Tensor, on_host: OnHost, exchange: Exchange
    ) -> None:
        """Write the ``source`` of every rank p, bytes, into ``targets[p]``, which may be this rank's own."""
        rank = self._hosts.rank
        if targets[rank].data_ptr() != source.data_ptr():
            targets[rank].copy_(source)
        received = {p: targets[p] for p in self._mine}
        exchange(_messages(dict.fromkeys(self._carriers, source)), _not_empty(received, self._hosts))
        runs = [_joined([targets[p] for p in ranks]) for ranks in self._carried]
        mine = runs[self._hosts.local_rank]
        on_host(lambda timeout: self._local.all_gather_v(runs, mine, timeout))
        for run, ranks in zip(runs, self._carried, strict=True):
            for p, part in zip(ranks, torch.split(run, [targets[p].numel() for p in ranks]), strict=True):
                if part.data_ptr() != targets[p].data_ptr():
                    targets[p].copy_(part)


def _messages(tensors: dict[int, torch.Tensor]) -> list[Message]:
    return [(p, tensor) for p, tensor in tensors.items() if tensor.numel() > 0]


def _not_empty(tensors: dict[int, torch.Tensor], hosts: Hosts) -> list[Message]:
    """Return the messages with ranks of other hosts."""
    return _messages({p: tensor for p, tensor in tensors.items() if p not in hosts.members})


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return flat tensors one after the other: where they lie so, what is there, else a copy."""
    some = [tensor for tensor in tensors if tensor.numel() > 0]
    if not some:
        return tensors[0]
    first, numel = some[0], sum(tensor.numel() for tensor in some)
    end = first.storage_offset() + numel
    is_one = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(some))
    if is_one and end * first.itemsize <= first.untyped_storage().nbytes():
        return first.as_strided((numel,), (1,))
    return torch.cat(some)
