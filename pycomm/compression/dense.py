"""Exchange of gradients as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Defaults, Flag, Scaling, State, as_flag
from pycomm.fingerprint import differing_places


class DenseExchange(Defaults):
    """Exchange without state: one in-place all-reduce of the bucket."""

    transactional = False

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self.bytes_sent = 0
        self._bucket = bucket
        self._communicator = communicator
        self._all_used_here = True

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        self._all_used_here = all(grad is not None for grad in grads)
        self._bucket.gather(grads, scaling.local, scaling.fingerprint)
        op = "mean" if scaling.average else "sum"
        self._communicator.all_reduce(self._bucket.memory, op, self._bucket.algorithm)
        self.bytes_sent += self._bucket.memory.nbytes

    def finite(self) -> Flag:
        return as_flag(self._bucket.finite(), self._bucket)

    def differing(self) -> torch.Tensor:
        return differing_places(self._bucket.fingerprint_places)

    def finish(self, finite: Flag) -> None:
        pass

    def used(self) -> list[bool]:
        if self._all_used_here:
            return [True] * len(self._bucket.names)
        return [flag != 0.0 for flag in self._bucket.used_flags.tolist()]

    def nonfinite_source(self) -> str | None:
        return None

    def load_state(self, state: State) -> None:
        pass
