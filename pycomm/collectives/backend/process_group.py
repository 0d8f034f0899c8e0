"""Process group for torch: a whole ``ProcessGroup`` written in Python.

From 2.14 on, torch also accepts a ``Backend`` in Python, under a group of its own. That group wraps works so that they
have ``wait()`` and ``get_future()``, but neither ``is_completed()`` nor the source of a message from any rank; and it
keeps its rank and size when a group is reconfigured.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm.collectives.backend.calls import METHODS, Calls
from pycomm.collectives.backend.engine import GroupEngine
from pycomm.collectives.backend.operations import monitored_barrier
from pycomm.collectives.backend.work import BackendWork
from pycomm.collectives.transport.own_group import PYCOMM, Place
from pycomm.torch_internals import PrefixStore, Store, number_process_group, owns_process_group

_EMPTY = "its group has no members before reconfigure() is called"


class PycommProcessGroup(dist.ProcessGroup):
    """Process group whose operations are pycomm's. Nothing else is registered under it, so nothing bypasses it.

    The operations themselves are the functions of ``backend.operations``: see the end of this module.

    Args:
        place: where its ranks meet.
        timeout: limit of every single wait, in seconds.
        empty: whether it begins without members, until it is reconfigured.

    Attributes:
        calls: calls of its operations.
    """

    supports_splitting = True
    supports_coalescing = False
    """Whether sends and receives of a batch have to be started together."""
    supports_reconfigure = True

    def __init__(self, place: Place, timeout: float, empty: bool = False) -> None:
        super().__init__(place.rank, place.size)  # type: ignore[call-arg]
        self._name, self._description = place.name, ""
        self._place, self._empty, self._uuids = place, empty, set[int]()
        if empty:
            alone = PrefixStore(f"alone/{place.rank}", place.store)
            place = Place(f"{place.name}/{place.rank}", alone, 0, [0], place.backends)
        self.calls = Calls(GroupEngine(place, timeout))
        if empty:
            self.engine.channel.close(_EMPTY)

    @property
    def engine(self) -> GroupEngine:
        """Engine of its operations on tensors in CPU memory."""
        return self.calls.engine

    # Names and places.

    def getRank(self) -> int:  # noqa: N802 (torch's names)
        """Return the rank of this process in the group."""
        return self._place.rank if self._empty else self.engine.rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks in the group."""
        return self._place.size if self._empty else self.engine.size

    def getBackendName(self) -> str:  # noqa: N802
        """Return "pycomm"."""
        return PYCOMM

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch finds the group."""
        return self._name

    group_name = property(getGroupName)  # torch 2.4 has it in C++, which does not call the method

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch finds the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set torch's description of the group."""
        self._description = description

    def get_group_store(self) -> Store:
        """Return the group's store."""
        return self._place.store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what operates on tensors of ``device``; on the CPU that is the group itself."""
        side = self.calls.side_of(device)
        return self if side is None else side.target

    def _has_hooks(self) -> bool:
        return False

    # Beside the operations: a barrier that is no collective, batches on devices with streams, memory for FSDP2.

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; on rank 0, name those that did not come within ``timeout``.

        Args:
            timeout: as a ``timedelta``, in seconds, or in the options of a barrier: releases of torch differ.
            wait_all_ranks: whether rank 0 names all ranks that did not come, instead of the first of them.
        """
        limit = getattr(timeout, "timeout", timeout)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        monitored_barrier(self.calls, self.engine.timeout if seconds is None else seconds, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        side = self.calls.side_of(device)
        if side is None:
            self.calls.coalescing = []
        else:
            side.call(["_start_coalescing"], device)

    def _end_coalescing(self, device: torch.device) -> Any:
        side = self.calls.side_of(device)
        if side is not None:
            return side.call(["_end_coalescing"], device)
        works, self.calls.coalescing = self.calls.coalescing or [], None
        for work in works:
            work.wait()
        return BackendWork(None, [], "coalesced", self.engine.rank)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether :meth:`allocate_tensor` has memory for ``device``, given as such or as an index."""
        return isinstance(device, (torch.device, str)) and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a flat tensor of ``size`` elements, uninitialized, which collectives reach without a copy.

        FSDP2 asks for it after ``set_allocate_memory_from_process_group_for_comm(True)``.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"device is {device}, wanted the CPU")
        return self.engine.transport.empty((size,), dtype)

    # Other groups, and the end.

    def splitGroup(  # noqa: N802
        self,
        ranks: list[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        devices: Any = None,
    ) -> PycommProcessGroup | None:
        """Make a group of some of this group's ranks; ``None`` on the others."""
        place, rank = self.engine.place, self.engine.rank
        if rank not in ranks:
            return None
        name = group_name or f"{place.name}/{'_'.join(str(one) for one in ranks)}"
        members = [place.ranks[one] for one in ranks]
        part = Place(name, PrefixStore(f"{name}/", place.store), list(ranks).index(rank), members, place.backends)
        made = PycommProcessGroup(part, self.engine.timeout if timeout is None else timeout.total_seconds())
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    split_group = splitGroup  # type: ignore[assignment]

    def get_reconfigure_handle(self) -> str:
        """Return the name by which other ranks reconfigure the group with this one."""
        return f"pycomm/{self._place.name}/{self._place.rank}"

    def reconfigure(self, opts: Any) -> BackendWork:
        """Make this the group of the ranks with ``opts.handles``, in their order if that is a list. Collective.

        It leaves lost ranks behind and takes newcomers in: ``init_process_group(..., enable_reconfigure=True)`` and
        ``dist._reconfigure`` of torch 2.14 and later, as an experiment. Operations in progress end with an error. The
        group's store is where the ranks meet, so it must be there still.

        Returns:
            Work that has ended.
        """
        handles, mine = _in_order(opts.handles), self.get_reconfigure_handle()
        if mine not in handles or len(set(handles)) < len(handles):
            raise ValueError(f"handles are {handles}, wanted one per rank, including this rank's, {mine!r}")
        if opts.uuid in self._uuids:
            raise RuntimeError(f"uuid {opts.uuid} was already used on this rank, wanted a new one each time")
        self._uuids.add(opts.uuid)
        timeout, limit = self.engine.timeout, self.calls.seconds(opts)
        if self.calls.gpu is not None:
            self.calls.gpu.call(["abort", "_abort"])
        self.engine.close()
        before, ranks = self._place, list(range(len(handles)))
        store = PrefixStore(f"reconfigured/{opts.uuid}", before.store)
        place = Place(f"{before.name}/{opts.uuid}", store, handles.index(mine), ranks, before.backends)
        self.calls = Calls(GroupEngine(place, limit))
        self.engine.timeout, self._empty = timeout, False
        if owns_process_group(self):
            number_process_group(self, place.ranks)
        return BackendWork(None, [], "reconfigure", self.engine.rank)

    def abort(self, reason: str = "it aborted its process group") -> None:
        """End operations in progress with an error, here and on the ranks that wait for this one: the ``reason``."""
        if self.calls.gpu is not None:
            self.calls.gpu.call(["abort", "_abort"])
        self.engine.channel.close(reason)

    def shutdown(self) -> None:
        """Release everything. Peers that still wait for this rank get a CommError."""
        if self.calls.gpu is not None:
            self.calls.gpu.call(["shutdown", "_shutdown"])
        self.engine.close()

    @property
    def default_timeout(self) -> timedelta:
        """Limit of every single wait, if the operation has none of its own."""
        return timedelta(seconds=self.engine.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit every single wait of later operations."""
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout


for _name, _method in METHODS.items():  # torch's C++ finds them by name, as it would find methods written above
    setattr(PycommProcessGroup, _name, _method)


def make(options: Any, backend_options: Any) -> PycommProcessGroup:
    """Make the group that torch requests. Collective."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    place = Place(options.group_id, options.store, options.group_rank, ranks, f"cpu:{PYCOMM}")
    empty = getattr(options, "enable_reconfigure", False)
    return PycommProcessGroup(place, options.timeout.total_seconds(), empty)


def _in_order(handles: Collection[str]) -> list[str]:
    """Return handles in the order of their ranks: as passed if it is a list, else by the ranks in the handles."""
    if isinstance(handles, (list, tuple)):
        return list(handles)
    return sorted(handles, key=lambda handle: (handle.rpartition("/")[0], int(handle.rpartition("/")[2])))
