"""Collectives among ranks on several hosts, some of which share a host.

The work is done in csrc/transport/hierarchical/group.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pycomm._native as _native
from pycomm.collectives.transport.base import AllReduceApart, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.native import NativeTransport
from pycomm.collectives.transport.rendezvous import Hosts
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from pycomm.collectives.transport.tcp import TcpTransport


class HierarchicalTransport(NativeTransport):
    """Transport through ``local`` shared memory within hosts, and over TCP between them. It takes ownership of both.

    Args:
        flat: transport of all ranks.
        local: transport of this host's ranks, in rising order.
        hosts: which ranks are on which host.
    """

    name = "hierarchical"
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None

    def __init__(self, flat: TcpTransport, local: SharedMemoryTransport, hosts: Hosts) -> None:
        self.flat, self.local = flat, local
        self._skips: bool | Literal["after the next"] = False
        self._group = _native.HierarchicalGroup(flat.group, local.group, hosts.ranks)
        super().__init__(self._group, flat.rank, flat.size)
        self.host_memory, self.empty = local.host_memory, local.empty
        self.hosts: Sequence[Sequence[int]] = hosts.ranks
        self.hand_over = flat.hand_over
        self.reduce_on_host = self._group.reduce_on_host
        self.give_up_stopped_after = self._group.give_up_stopped_after

    @property
    def skip_checks(self) -> bool | Literal["after the next"]:
        return self._skips

    @skip_checks.setter
    def skip_checks(self, which: bool | Literal["after the next"]) -> None:
        self._skips = which
        self._group.skip_comparisons(which is True, which == "after the next")
