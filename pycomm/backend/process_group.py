"""Process group as torch takes it: a whole ``ProcessGroup`` written in Python.

From 2.14 on, torch takes a ``Backend`` in Python, too, under a group of its own. That group hands out the works
of such a backend in a holder that passes on ``wait()`` and ``get_future()``, but neither ``is_completed()`` nor
the source of a message from any rank; and it keeps its rank and size when a group is reconfigured.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pycomm.backend.memory import CommunicationMemory
from pycomm.backend.operations import Operations
from pycomm.backend.reconfigure import Reconfigurable
from pycomm.torch_internals import Store
from pycomm.transport.own_group import PYCOMM, Place


class PycommProcessGroup(Reconfigurable, Operations, CommunicationMemory, dist.ProcessGroup):
    """Process group whose operations are pycomm's. Nothing else is registered under it, so nothing bypasses it."""

    def __init__(self, place: Place, timeout: float, empty: bool = False) -> None:
        super().__init__(place.rank, place.size)  # type: ignore[call-arg]
        self.begin(place, timeout, empty)
        self._name, self._description = place.name, ""

    def getBackendName(self) -> str:  # noqa: N802 (torch's names)
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
        return self if device.type == "cpu" else self.gpu_side(device).target

    def _has_hooks(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        """Whether :meth:`split_group` is available."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether sends and receives of a batch have to be started together, which here they have not."""
        return False

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
        part = self.part_of(ranks, group_name)
        if part is None:
            return None
        made = PycommProcessGroup(part, self.engine.timeout if timeout is None else timeout.total_seconds())
        made.setGroupDesc(group_desc or f"{self._description}:split")
        return made

    split_group = splitGroup  # type: ignore[assignment]


def make(options: Any, backend_options: Any) -> PycommProcessGroup:
    """Make the group that torch wants. Collective."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    place = Place(options.group_id, options.store, options.group_rank, ranks, f"cpu:{PYCOMM}")
    empty = getattr(options, "enable_reconfigure", False)
    return PycommProcessGroup(place, options.timeout.total_seconds(), empty)
