"""Hashes of what compression carries from step to step, by which a rank notices that its own memory has changed.

Residuals and velocities differ between the ranks by nature, so no other rank can say what they ought to be. Nothing
writes to them between the commit of one step and that of the next. A hash is taken right after a commit, and compared
before the next exchange reads them. The two together cost two reads of the state, and see what happens
to it in the time between them: where every flipped bit has to be seen, that is every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from pycomm import kernels
from pycomm.compression.base import Flag
from pycomm.layout import on_gpu
from pycomm.reducer.buckets import BucketInFlight, state_of
from pycomm.reducer.progress import HostCopy
from pycomm.tensor_memory import hashable

_REMEMBERED = 4
"""Verdicts that may still be asked for: on a GPU the host learns of them two reductions later."""


class Taken:
    """Hashes of state as it was committed. Made by the thread that commits; the rest runs where buckets are sent."""

    def __init__(self, flights: Iterable[BucketInFlight], scratch: kernels.Scratch) -> None:
        # An exchange that carries nothing in this step may have no memory for state yet, and is not to get any.
        state = state_of(flight for flight in flights if flight.exchange.transactional)
        found = [(f"{key} of parameter {name!r}", t) for name, entry in state.items() for key, t in entry.items()]
        device = found[0][1].device if found else None
        found = [(label, tensor) for label, tensor in found if tensor.device == device]
        self.labels = [label for label, _ in found]
        self._tensors = [hashable(tensor) for _, tensor in found]
        self._scratch = scratch
        self._then: torch.Tensor | None = None
        self.changed: torch.Tensor | None = None
        """Whether each has changed; bools, once compared."""

    def take(self) -> None:
        """Take the hashes."""
        if self._tensors:
            self._then = kernels.hashes(self._tensors, scratch=self._scratch, out=self._room())

    def compare(self) -> None:
        """Take them again, and compare. Lets go of the state."""
        if self._then is not None:
            self.changed = kernels.hashes(self._tensors, scratch=self._scratch, out=self._room()) != self._then
        self._tensors = []

    def _room(self) -> torch.Tensor:
        return torch.empty(len(self._tensors), dtype=torch.int64, device=self._tensors[0].device)


class StateHashes:
    """Keeper of this rank's hashes, from a commit to the reduction after it."""

    def __init__(self) -> None:
        self._scratch = kernels.Scratch()
        self._taken: Taken | None = None
        self._compared: deque[Taken] = deque(maxlen=_REMEMBERED)
        self._has_graph = False

    def taking(self, flights: list[BucketInFlight]) -> Taken | None:
        """Begin anew with the state of ``flights``; return the hashes, to be taken; ``None`` if there is nothing to."""
        self._taken = None
        if not self._has_graph and any(flight.exchange.transactional for flight in flights):
            taken = Taken(flights, self._scratch)
            self._taken = taken if taken.labels else None
        return self._taken

    def comparing(self) -> Taken | None:
        """Return the hashes that were taken after the last commit, if they were; they are compared only once."""
        # The launches of a CUDA graph change state unseen: between them and other steps no hash would be right.
        self._has_graph = self._has_graph or HostCopy.impossible()
        taken, self._taken = self._taken, None
        return None if self._has_graph else taken

    def forget(self) -> None:
        """Let go of the hashes, and of the state: it is about to be released."""
        self._taken = None

    def changed(self, taken: Taken | None) -> Flag:
        """Compare ``taken``; return whether any state was found changed now or lately. Does not wait for a GPU."""
        if taken is not None:
            taken.compare()
            self._compared.append(taken)
        flags = [each.changed.any() for each in self._compared if each.changed is not None]
        if not flags:
            return False
        return torch.stack(flags).any() if on_gpu(flags[0]) else any(map(bool, flags))

    def reported(self) -> None:
        """Note that all ranks know what was found."""
        self._compared.clear()

    def damaged(self) -> str:
        """Return what was found changed, "" if nothing was. Waits for a GPU."""
        for taken in self._compared:
            if taken.changed is not None and bool(taken.changed.any()):
                return taken.labels[int(taken.changed.cpu().nonzero()[0])]
        return ""
