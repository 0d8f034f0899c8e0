"""Collectives among ranks on several hosts, some of which share a host.

What ranks of one host have to tell each other goes through shared memory, so that a link between hosts
carries each byte once instead of once for every rank. An all-reduce of n bytes has three parts, with as
many lanes as the host with the fewest ranks has ranks:

1. the ranks of a host reduce; lane k's rank gets part k of as many as there are lanes;
2. lane k's rank of every host reduces part k with the other hosts', by a schedule that is chosen by cost;
3. the ranks of a host copy one another's parts.

Between two hosts n bytes go each way. Small arrays, and what is rare between hosts, travel as over
:class:`TorchTransport`, which also compares operations and finds the rank to blame for a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pycomm.errors import CommError
from pycomm.transport.base import Message
from pycomm.transport.between_hosts import BetweenHosts
from pycomm.transport.hierarchical_parts import Exchange, HierarchicalParts, OnHost
from pycomm.transport.hosts import Hosts
from pycomm.transport.roll_call import RollCall
from pycomm.transport.shared_memory import SharedMemoryTransport
from pycomm.transport.torch_distributed import TorchTransport

# Bytes up to which one round of messages between all ranks is faster than three parts.
_FLAT_BYTES = 1 << 10
_ONE_LANE_BYTES = 32 << 10  # up to which parts would be too small to be worth their messages
_ALIGNMENT = 64  # elements, of the borders between parts
# A rank may wait for one of its host that waits for another host: it waits longer, to be told whom for.
_LOCAL_PATIENCE = 2.0
_LOCAL_GRACE = 5.0  # seconds


class HierarchicalTransport(TorchTransport):
    """Transport through ``local`` shared memory within hosts, and torch.distributed between them; owns both.

    Args:
        group: all ranks; nobody else uses it.
        roll_call: see :class:`TorchTransport`.
        local: the ranks of this host, in rising order.
        hosts: which ranks are on which host.
    """

    name = "hierarchical"

    def __init__(
        self, group: dist.ProcessGroup, roll_call: RollCall, local: SharedMemoryTransport, hosts: Hosts
    ) -> None:
        super().__init__(group, roll_call)
        self._local, self._hosts = local, hosts
        self.host_memory = local.host_memory
        self.hosts = hosts.ranks
        self._parts = HierarchicalParts(local, hosts)
        self._group.on_failure = self._leave
        self._num_lanes = min(len(members) for members in hosts.ranks)
        lane = hosts.local_rank
        self._lane: BetweenHosts | None = None
        if lane < self._num_lanes:
            self._lane = BetweenHosts(self._group, [members[lane] for members in hosts.ranks])

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._local.empty(shape, dtype)

    def give_up_stopped_after(self, seconds: float) -> None:
        self._local.give_up_stopped_after(seconds)

    def close(self, reason: str) -> None:
        super().close(reason)  # first: it leaves the note by which others learn why
        self._local.close(reason)

    def _leave(self, reason: str) -> None:
        """After a failure: end what others of this host, and of other hosts, wait for."""
        self._local.close(reason)
        self._group.sever()

    def _on_host(self, operation: str, call: Callable[[float], None], timeout: float) -> None:
        """Run ``call(timeout)``, which uses shared memory; a failure is everybody's."""
        _ = self._group.group  # raises if it is closed, broken, or inherited by a fork
        start = time.monotonic()
        try:
            call(_LOCAL_PATIENCE * timeout + _LOCAL_GRACE)
        except CommError as error:
            raise self._group.fail_with_culprit(operation, error.peer, error, time.monotonic() - start) from error

    # all_reduce

    def _reduce(self, tensor: torch.Tensor, op: str, timeout: float) -> None:
        if tensor.nbytes <= _FLAT_BYTES:
            super()._reduce(tensor, op, timeout)
            return
        kind = "sum" if op == "mean" else op
        lanes = 1 if tensor.nbytes <= _ONE_LANE_BYTES else self._num_lanes
        size = len(tensor) // lanes // _ALIGNMENT * _ALIGNMENT
        # The last lane has the rest.
        parts = [tensor[k * size : (k + 1) * size if k < lanes - 1 else len(tensor)] for k in range(lanes)]
        self._on_host("all_reduce", lambda patience: self._reduce_parts(tensor, parts, kind, patience), timeout)
        if self._lane is not None and self._hosts.local_rank < lanes:
            mine = parts[self._hosts.local_rank]
            self._lane.all_reduce(mine, kind, timeout)
            if op == "mean":
                mine.mul_(1.0 / self.size)
        self._on_host("all_reduce", lambda patience: self._copy_parts(tensor, parts, patience), timeout)

    def _reduce_parts(self, tensor: torch.Tensor, parts: list[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce over this host so that part k is right on its rank k."""
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
        """Return equal parts, one for each rank of this host (``None`` if not so many), and what is left."""
        if len(parts) != self._local.size or len(parts) == 1:
            return None, tensor
        end = len(parts) * len(parts[0])
        return tensor[:end], tensor[end:]

    # The others.

    def _scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        if out.nbytes <= _FLAT_BYTES:
            super()._scatter(out, x, op, timeout)
            return
        parts = list(x.view(self.size, -1))
        self._parts.reduce_scatter(out.view(-1), parts, op, *self._ways("reduce_scatter", timeout))

    def _gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        if x.nbytes <= _FLAT_BYTES:
            super()._gather(out, x, timeout)
            return
        self._parts.all_gather(list(out.view(self.size, -1)), x, *self._ways("all_gather", timeout))

    def _scatter_parts(self, target: torch.Tensor, sources: list[torch.Tensor], op: str, timeout: float) -> None:
        self._parts.reduce_scatter(target, sources, op, *self._ways("reduce_scatter_v", timeout))

    def _gather_parts(self, targets: list[torch.Tensor], source: torch.Tensor, timeout: float) -> None:
        self._parts.all_gather(targets, source, *self._ways("all_gather_v", timeout))

    def _ways(self, operation: str, timeout: float) -> tuple[OnHost, Exchange]:
        """Return how a part of ``operation`` runs on this host, and how messages travel to others."""

        def exchange(sends: Sequence[Message], receives: Sequence[Message]) -> None:
            self._group.exchange(sends, receives, timeout, operation)

        return lambda call: self._on_host(operation, call, timeout), exchange

    def _spread(self, x: torch.Tensor, source: int, timeout: float) -> None:
        """Overwrite ``x``, bytes, with that of ``source``: over a chain of one rank of each host, then within hosts."""
        if x.nbytes <= _FLAT_BYTES:
            super()._spread(x, source, timeout)
            return
        hosts = self._hosts
        host = next(host for host, members in enumerate(hosts.ranks) if source in members)
        heads = [members[0] if h != host else source for h, members in enumerate(hosts.ranks)]
        if self.rank in heads:
            BetweenHosts(self._group, heads).broadcast(x, host, timeout)
        head = hosts.members.index(heads[hosts.host])
        self._on_host("broadcast", lambda patience: self._local.broadcast(x, head, patience), timeout)
