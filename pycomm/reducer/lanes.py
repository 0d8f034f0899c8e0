"""Lanes: communicators over the same ranks by which several buckets are in flight at once.

Between hosts an all-reduce leaves the link idle now and then: while ranks reduce what came, wake up, or wait
for a slower one. A second one fills these gaps. Each lane has a thread and connections of its own; on all
ranks bucket i takes lane i modulo their number, so that the operations of a lane come in the same order
everywhere. Ranks of one host have one lane: their memory is never idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.communicator import Communicator, communicator_beside
from pycomm.cost.auto import Auto
from pycomm.reducer.settings import AttachSettings

_NUM_LANES = 2
_USUAL_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20
"""Size of the first bucket between hosts: so the link has work as soon as the last layers' gradients are there."""
_NUM_BUCKETS = 4
"""Number of buckets of a small model on one host: what comes before the last one can be hidden behind backward."""
_LEAST_BYTES = 1 << 20
"""Size of a bucket on one host below which waking its thread costs more than there is to hide."""


def open_lanes(communicator: Communicator, settings: AttachSettings, on_gpu: bool) -> list[Communicator]:
    """Return the lanes, ``communicator`` the first of them, which closes the others with itself. Collective.

    ``Auto`` has one: it measures the link, which nothing else may use meanwhile. So have ranks that need not be waited
    for, as one thread decides which buckets go without them.

    Args:
        communicator: of the attach.
        settings: of the attach.
        on_gpu: whether the gradients are on a GPU, and so do not travel over the transport.
    """
    lanes = [communicator]
    if on_gpu or not is_remote(communicator) or isinstance(settings.compression, Auto):
        return lanes
    if settings.backup > 0:
        return lanes
    while len(lanes) < _NUM_LANES:
        lane = communicator_beside(communicator)
        communicator.channel.companions.append(lane.channel)
        lanes.append(lane)
    return lanes


def is_remote(communicator: Communicator) -> bool:
    """Return whether the ranks are on several hosts."""
    return communicator.transport != "shared_memory"


def bucket_sizes(
    lanes: Sequence[Communicator], settings: AttachSettings, num_bytes: int, on_gpu: bool
) -> tuple[int, int]:
    """Return the size of a bucket, and that of the first one, for ``num_bytes`` of gradients; equal on all ranks.

    On one host small models get four buckets, unless somebody has said how large a bucket is. Between hosts the first
    one is small, as the link would otherwise wait for it. Neither where a method has much to do for each bucket and
    little to send, nor on a GPU, where launches cost.
    """
    most = _USUAL_BYTES if settings.tuning.bucket_bytes is None else settings.tuning.bucket_bytes
    if on_gpu or settings.compression.transactional:
        return most, most
    if is_remote(lanes[0]):
        return most, min(most, int(_FIRST_BYTES / settings.compression.sent_fraction))
    if settings.tuning.bucket_bytes is None:
        most = min(most, max(-(-num_bytes // _NUM_BUCKETS), _LEAST_BYTES))
    return most, most
