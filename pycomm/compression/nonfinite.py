"""Finds the gradient that was not finite, on all ranks: the sum alone does not show whose it was.

Compression with state sends the names in its messages (see :mod:`pycomm.compression.report`). For gradients sent as
they are, or in half precision, a summed flag shows that some rank's were not finite, or too large for a sum. Only in
such a step do the ranks exchange the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Exchange, Flag


class Sent(Protocol):
    """Bucket that has been sent, and its exchange."""

    @property
    def bucket(self) -> Bucket: ...

    @property
    def exchange(self) -> Exchange: ...


class NonfiniteSource:
    """Source of the non-finite values of the last step that had any; the same on all ranks, but not known on GPUs.

    Attributes:
        told: what the ranks exchanged last; ``None`` if none of them knew the source, or nothing was exchanged since.
    """

    def __init__(self) -> None:
        self.told: str | None = None
        self._is_flagged = False

    def share(self, sent: Iterable[Sent], communicator: Communicator) -> None:
        """Exchange the source between all ranks, once they have all results of a step.

        Sends nothing if these are finite. Collective if they are not; the flags are equal on all ranks.
        """
        flagged = [each for each in sent if _is_flagged(each)]
        self._is_flagged = bool(flagged)
        if flagged:
            mine = nonfinite_source(each.exchange for each in flagged) or ""
            everyones = communicator.channel.all_gather_bytes(mine.encode())
            self.told = next((source.decode() for source in everyones if source), None)

    def count(self, finite: Flag | None) -> None:
        """Drop the source of an earlier step if compression found this step not finite."""
        if finite is False and not self._is_flagged:
            self.told = None

    def keep(self, sent: Iterable[Sent]) -> None:
        """Keep the source that the exchanges know, as they are about to be replaced."""
        self.told = self.of(sent)

    def of(self, sent: Iterable[Sent]) -> str | None:
        """Return the source, from messages or exchanged; ``None`` if it is not known. Waits for a GPU."""
        return nonfinite_source(each.exchange for each in sent if each.exchange.transactional) or self.told


def _is_flagged(sent: Sent) -> bool:
    """Return whether some rank's gradients were not finite, or too large; false where the host would have to wait."""
    bucket = sent.bucket
    return not sent.exchange.transactional and not bucket.on_gpu and float(bucket.too_large_flag) != 0.0


def nonfinite_source(exchanges: Iterable[Exchange]) -> str | None:
    """Return the source of the non-finite values in the last step that had any, if an exchange knows it."""
    return next((found for exchange in exchanges if (found := exchange.nonfinite_source())), None)
