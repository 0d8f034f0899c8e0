"""Life of a process group beside its operations: batches, other groups, the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from pycomm.backend.calls import Calls
from pycomm.backend.work import BackendWork
from pycomm.torch_internals import PrefixStore
from pycomm.transport.own_group import Place


class Life(Calls):
    """Batches of operations, groups of some of the ranks, and the end of a group."""

    # Coalescing of operations one by one, as the group's users ask for on devices with streams.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.gpu_side(device).call("_start_coalescing", device)
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self.gpu_side(device).call("_end_coalescing", device)
        works, self._coalescing = self._coalescing or [], None
        for work in works:
            work.wait()
        return BackendWork(None, [], "coalesced", self.engine.rank)

    # Other groups, and the end.

    def part_of(self, ranks: Sequence[int], name: str | None) -> Place | None:
        """Return where some ranks, given by their ranks in this group, meet for one of theirs; ``None`` on others."""
        if self.engine.rank not in ranks:
            return None
        place = self.engine.place
        name = name or f"{place.name}/{'_'.join(str(rank) for rank in ranks)}"
        return Place(
            name,
            PrefixStore(f"{name}/", place.store),
            list(ranks).index(self.engine.rank),
            [place.ranks[rank] for rank in ranks],
            place.backends,
        )

    def abort(self, reason: str = "it aborted its process group") -> None:
        """End operations in progress with an error, here and on the ranks that wait for this one: the ``reason``."""
        if self._gpu_side is not None:
            self._gpu_side.call("abort")
        self.engine.abort(reason)

    def shutdown(self) -> None:
        """Release everything. Peers that still wait for this rank get a CommError."""
        if self._gpu_side is not None:
            self._gpu_side.call("shutdown")
        self.engine.close()

    @property
    def default_timeout(self) -> timedelta:
        """Limit of every single wait, if the operation has none of its own."""
        return timedelta(seconds=self.engine.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit every single wait of operations from now on."""
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout
