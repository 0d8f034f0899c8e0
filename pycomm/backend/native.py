"""Adapter for torch from 2.14 on, which takes a ``Backend`` written in Python under its own ``ProcessGroup``."""

from __future__ import annotations

from typing import Any, cast

from pycomm.backend.engine import Engine
from pycomm.backend.memory import CommunicationMemory
from pycomm.backend.operations import Operations
from pycomm.torch_internals import Store, TorchBackend
from pycomm.transport.own_group import PYCOMM, Place


class PycommBackend(Operations, CommunicationMemory, TorchBackend):
    """Backend whose operations are pycomm's."""

    def __init__(self, engine: Engine, timeout: Any) -> None:
        super().__init__(engine.rank, engine.size)
        self.set_engine(engine)
        self._options = TorchBackend.Options(PYCOMM, timeout)
        self._options.group_name = cast(Any, engine.place.name)
        self._options.global_ranks_in_group = list(engine.place.ranks)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return "pycomm"."""
        return PYCOMM

    name = getBackendName

    @property
    def options(self) -> Any:
        """Options of the group, as torch keeps them: timeout, name and ranks."""
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """Whether :meth:`split` is available."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether sends and receives of a batch have to be started together, which here they have not."""
        return False

    def split(self, store: Store, ranks: list[int], opts: Any) -> PycommBackend | None:
        """Make a backend of some of this one's ranks; ``None`` on the others."""
        timeout = getattr(opts, "_timeout", None) or self._options._timeout
        engine = self.split_engine(ranks, timeout, getattr(opts, "group_name", None), store)
        return None if engine is None else PycommBackend(engine, timeout)


def make(options: Any, backend_options: Any) -> PycommBackend:
    """Make the backend that torch wants. Collective."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    place = Place(options.group_id, options.store, options.group_rank, ranks, f"cpu:{PYCOMM}")
    return PycommBackend(Engine(place, options.timeout.total_seconds()), options.timeout)
