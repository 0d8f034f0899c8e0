"""Exchange of gradients as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Defaults, Flag, Scaling, State, as_flag
from pycomm.fingerprint import differing_places


def reduce_message(communicator: Communicator, bucket: Bucket, message: torch.Tensor, op: str) -> None:
    """Reduce ``message``, which is laid out as the memory of ``bucket`` is, over the ranks, in place.

    Of the gradients a rank may get its own part only; flags it gets all.
    """
    if bucket.shares is None:
        communicator.all_reduce(message, op, bucket.algorithm)
        return
    bucket.is_deferred = bucket.defers
    if not bucket.defers:
        reduce_part(communicator, bucket, message, op)
    flags = message[bucket.num_elements :]
    communicator.all_reduce(flags, op)


def reduce_part(communicator: Communicator, bucket: Bucket, message: torch.Tensor, op: str) -> None:
    """Reduce this rank's own part of ``message`` over the ranks, in place. Collective."""
    assert bucket.shares is not None
    parts = [message[share] for share in bucket.shares]
    communicator.channel.reduce_scatter_v(message[bucket.own], parts, op)
    bucket.is_deferred = False


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
        reduce_message(self._communicator, self._bucket, self._bucket.memory, "mean" if scaling.average else "sum")
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
