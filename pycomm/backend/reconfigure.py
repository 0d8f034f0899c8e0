"""Groups whose members change: torch's reconfiguration, which leaves lost ranks behind and takes newcomers in.

torch 2.14 and later, as an experiment: ``init_process_group(..., enable_reconfigure=True)``, ``dist._reconfigure``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pycomm.backend.calls import Calls
from pycomm.backend.engine import Engine
from pycomm.backend.work import BackendWork
from pycomm.torch_internals import PrefixStore, number_process_group, owns_process_group
from pycomm.transport.own_group import Place

_FIRST = "its group has no members before reconfigure() is called"


class Reconfigurable(Calls):
    """Group that gets another engine, for other ranks, each time that it is reconfigured."""

    def begin(self, place: Place, timeout: float, empty: bool) -> None:
        """Make the first engine of the ranks at ``place``, or, if it is to begin ``empty``, none that could be used."""
        self._place, self._uuids = place, set[int]()
        self._empty = empty
        if not empty:
            self.set_engine(Engine(place, timeout))
            return
        alone = Place(
            f"{place.name}/{place.rank}", PrefixStore(f"alone/{place.rank}", place.store), 0, [0], place.backends
        )
        self.set_engine(Engine(alone, timeout))
        self.engine.channel.close(_FIRST)

    def getRank(self) -> int:  # noqa: N802 (torch's names)
        """Return the rank of this process in the group."""
        return self._place.rank if self._empty else self.engine.rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks in the group."""
        return self._place.size if self._empty else self.engine.size

    @property
    def supports_reconfigure(self) -> bool:
        """Whether :meth:`reconfigure` is available."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the name by which other ranks reconfigure the group with this one."""
        return f"pycomm/{self._place.name}/{self._place.rank}"

    def reconfigure(self, opts: Any) -> BackendWork:
        """Make this the group of the ranks with ``opts.handles``, in their order if that is a list. Collective.

        Operations in progress end with an error. The group's store is where the ranks meet, so it must be there still.

        Returns:
            Work that has ended.

        Raises:
            ValueError: ``opts.handles`` lacks this rank's, or has one twice.
            RuntimeError: ``opts.uuid`` was used before.
            CommError: a rank did not come in time, or failed.
        """
        handles = _in_order(opts.handles)
        mine = self.get_reconfigure_handle()
        if mine not in handles or len(set(handles)) < len(handles):
            raise ValueError(f"handles are {handles}, wanted each rank's once, with this one's, {mine!r}, among them")
        if opts.uuid in self._uuids:
            raise RuntimeError(f"uuid {opts.uuid} was already used on this rank, wanted a new one each time")
        self._uuids.add(opts.uuid)
        if self._gpu_side is not None:
            self._gpu_side.call("abort")
        timeout = self.engine.timeout
        self.engine.close()
        place = Place(
            f"{self._place.name}/{opts.uuid}",
            PrefixStore(f"reconfigured/{opts.uuid}", self._place.store),
            handles.index(mine),
            list(range(len(handles))),
            self._place.backends,
        )
        limit = self.seconds(opts)
        self.set_engine(Engine(place, limit))
        self.engine.timeout, self._empty = timeout, False
        if owns_process_group(self):  # type: ignore[arg-type]
            number_process_group(self, place.ranks)  # type: ignore[arg-type]
        return BackendWork(None, [], "reconfigure", self.engine.rank)


def _in_order(handles: Collection[str]) -> list[str]:
    """Return handles in the order of their ranks: the given one, or that of the ranks they had first."""
    if isinstance(handles, (list, tuple)):
        return list(handles)
    return sorted(handles, key=lambda handle: (handle.rpartition("/")[0], int(handle.rpartition("/")[2])))
