"""Gradients as they are: their exchange, the method, and which parameters travel like this."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pycomm.collectives.bucket import Bucket, differing_places
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression, Defaults, Flag, Method, Scaling, State, as_flag
from pycomm.descriptions import settings_text

IS_THERE: Callable[[object], bool] = functools.partial(operator.is_not, None)
"""Returns whether its argument is not ``None``."""


def reduce_message(
    communicator: Communicator,
    bucket: Bucket,
    message: torch.Tensor,
    op: str,
    algorithm: str,
    pieces: Sequence[torch.Tensor] = (),
) -> None:
    """Reduce ``message``, which has the layout of ``bucket``'s memory, over the ranks, in place.

    With sharding a rank receives its own part of the gradients only, but all flags; its own input for that part may be
    ``pieces``, see :func:`_reduce_part`.
    """
    if bucket.shares is None:
        communicator.all_reduce(message, op, algorithm)
        return
    _reduce_part(communicator, bucket, message, op, pieces)
    flags = message[bucket.num_elements :]
    communicator.all_reduce(flags, op)


def _reduce_part(
    communicator: Communicator, bucket: Bucket, message: torch.Tensor, op: str, pieces: Sequence[torch.Tensor]
) -> None:
    """Reduce this rank's own part of ``message`` over the ranks, in place. Collective.

    ``pieces``, if any, hold this rank's input for it, and are checked here: the bucket's flag says what was found.
    """
    assert bucket.shares is not None
    parts, own = [message[share] for share in bucket.shares], message[bucket.own]
    if pieces:
        largest = communicator.channel.reduce_scatter_apart(own, parts, op, pieces)
        note_largest(bucket, largest)
    else:
        communicator.channel.reduce_scatter_v(own, parts, op)


def note_largest(bucket: Bucket, largest: float) -> None:
    """Set the flag of gradients that are too large if ``largest``, a magnitude, is, or is NaN."""
    if not largest < bucket.limit(bucket.dtype):
        bucket.too_large_flag.fill_(1.0)


class DenseExchange(Defaults):
    """Exchange without state: one in-place all-reduce of the bucket."""

    transactional = False

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self.bytes_sent = 0
        self._bucket = bucket
        self._communicator = communicator
        self._all_used_here, self._is_compared = True, False
        self._nonfinite_source: str | None = None
        # A mean between hosts takes one more pass over memory than a sum. Packing can divide instead: exactly unless a
        # result is below 2**-126; then each contribution is off by at most 2**-150, and the mean by size * 2**-150.
        # NCCL divides each term, too; NVLink's switches, and registered memory, support only sums.
        size, is_remote = communicator.size, len(communicator.hosts) > 1
        is_exact = bucket.dtype.itemsize >= 4 and size & (size - 1) == 0
        self._divides_first = bucket.on_gpu or (is_remote and is_exact and bucket.shares is None)
        self._packed: tuple[str, Sequence[torch.Tensor | None], slice | None, Sequence[torch.Tensor]] | None = None

    def lie_in(self, buffer: torch.Tensor) -> None:
        self._bucket.lie_in(buffer)

    def pack(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket = self._bucket
        # With a single rank a sum needs no work; a mean would read and write the bucket.
        is_mean = scaling.average and self._communicator.size > 1
        op = "mean" if is_mean and not self._divides_first else "sum"
        scale = scaling.contribution if is_mean and self._divides_first else scaling.local
        self._all_used_here = all(map(IS_THERE, grads))
        assert self._all_used_here or not bucket.has_flags_apart
        self._is_compared = scaling.fingerprint is not None
        own = self._own_share()
        pieces = bucket.gather(grads, scale, scaling.fingerprint, None if scaling.frees else own)
        self._packed = op, () if bucket.on_gpu else bucket.places if scaling.frees else grads, own, pieces

    def send(self) -> None:
        assert self._packed is not None
        (op, grads, own, pieces), self._packed = self._packed, None
        bucket, on_host = self._bucket, not self._bucket.on_gpu  # a GPU's flag is not read, as the host would wait
        found = on_host and float(bucket.too_large_flag) != 0.0 and self._find_source(grads)
        if own is None or bucket.shares is not None:
            reduce_message(self._communicator, bucket, bucket.memory, op, bucket.algorithm, pieces)
            if self._is_compared and bucket.has_flags_apart:
                self._communicator.all_reduce(bucket.flags, op)
        else:
            largest = self._communicator.channel.all_reduce_apart(bucket.memory, op, own.start, pieces)
            note_largest(bucket, largest)
        if on_host and not found and float(bucket.too_large_flag) != 0.0:  # of any rank, once summed
            # Look at this rank's gradients that were not copied; those in the bucket have become sums.
            self._find_source([None if grad is None or bucket.holds(i, grad) else grad for i, grad in enumerate(grads)])
        self.bytes_sent += bucket.memory.nbytes

    def _own_share(self) -> slice | None:
        """Return the elements that this rank reduces itself, and so need not copy into the bucket."""
        bucket = self._bucket
        if bucket.on_gpu:
            return None
        if bucket.shares is None:
            return self._communicator.own_share(bucket.memory, bucket.algorithm)
        reads_apart = self._communicator.channel.transport.reduce_scatter_apart is not None
        return bucket.own if reads_apart and bucket.dtype != torch.float64 else None

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

    def _find_source(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Record the first gradient that is not finite; return whether there is one."""
        for name, grad in zip(self._bucket.names, grads, strict=True):
            if grad is not None and not bool(torch.isfinite(grad).all()):
                self._nonfinite_source = f"parameter {name!r} on rank {self._communicator.rank}"
                return True
        self._nonfinite_source = None  # it was an earlier step's
        return False

    def nonfinite_source(self) -> str | None:
        return self._nonfinite_source

    def load_state(self, state: State) -> None:
        pass


@dataclass(frozen=True)
class NoCompression(Method):
    """Gradients in their own dtype; means accumulate in float32 for the half types."""

    reduces_parts = True

    def make(self, bucket: Bucket, communicator: Communicator) -> DenseExchange:
        return DenseExchange(bucket, communicator)


def by_method(method: Compression, params: Sequence[torch.Tensor]) -> list[tuple[Compression, list[int]]]:
    """Return methods, each with the indices of its ``params``: ``method`` where it applies, else its alternative."""
    groups: dict[bool, list[int]] = {}
    for i, param in enumerate(params):
        groups.setdefault(method.applies_to(param), []).append(i)
    otherwise = method.otherwise or NoCompression()
    return [(method if applies else otherwise, indices) for applies, indices in groups.items()]


def method_text(compression: Compression | None) -> str:
    """Return a compression method in a word or two; "dense" if there is none."""
    return "dense" if compression is None or isinstance(compression, NoCompression) else settings_text(compression)
