"""Lanes: several communicators over the same ranks, so that several buckets travel at once.

Between hosts an all-reduce leaves the link idle while ranks add up, wake up, or wait for a slower one. A second
all-reduce fills these gaps. Each lane has its own thread and connections. Lanes share the buckets by bytes, alike on
all ranks, so that a lane's operations have the same order everywhere. Ranks of one host have one lane, which keeps
their memory busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycomm.collectives.communicator import Communicator, communicator_beside
from pycomm.training.reducer.settings import Options

_NUM_LANES = 2
_USUAL_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20
"""Size of the first bucket between hosts and on GPUs, small so that the link has work as soon as possible."""
_NUM_BUCKETS = 4
"""Number of buckets of a small model on one host: all but the last can be hidden behind backward."""
_LEAST_BYTES = 1 << 20
"""Size of a bucket on one host below which waking a thread costs more than it hides."""


def open_lanes(communicator: Communicator, settings: Options, on_gpu: bool) -> list[Communicator]:
    """Return the lanes. The first is ``communicator``, which closes the others with itself. Collective.

    A method that measures uses one lane, as nothing else may use the link meanwhile.

    Args:
        on_gpu: whether the gradients are on a GPU, and so do not use the transport.
    """
    lanes = [communicator]
    if on_gpu or not is_remote(communicator) or settings.compression.measures:
        return lanes
    while len(lanes) < _NUM_LANES:
        lane = communicator_beside(communicator)
        communicator.channel.companions.append(lane.channel)
        lanes.append(lane)
    return lanes


def numbers_of_lanes(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the number of the lane for each bucket of ``sizes`` bytes, where the lanes carry ``loads`` bytes already.

    That is the lane with the least to carry, and of several the last one, where ranks compare nothing first. A step's
    only bucket uses the first lane.
    """
    if len(sizes) == 1 and not any(loads):
        return [0]
    loads, numbers = list(loads), []
    for size in sizes:
        number = min(reversed(range(len(loads))), key=loads.__getitem__)
        loads[number] += max(size, 1)
        numbers.append(number)
    return numbers


def is_remote(communicator: Communicator) -> bool:
    """Return whether the ranks are on several hosts."""
    return communicator.transport != "shared_memory"


def bucket_sizes(lanes: Sequence[Communicator], settings: Options, num_bytes: int, on_gpu: bool) -> tuple[int, int]:
    """Return the size of a bucket, and that of the first one, for ``num_bytes`` of gradients; equal on all ranks.

    Between hosts and on GPUs the first bucket is small, as the link would otherwise wait for it. In CPU memory of one
    host, where ranks compute what they send on the same cores, small models get four equal buckets, unless
    ``bucket_mb`` is given. Neither holds for methods with much work per bucket and little to send.
    """
    most = _USUAL_BYTES if settings.tuning.bucket_bytes is None else settings.tuning.bucket_bytes
    if settings.compression.transactional:
        return most, most
    if on_gpu or is_remote(lanes[0]):
        return most, min(most, int(_FIRST_BYTES / settings.compression.sent_fraction))
    if settings.tuning.bucket_bytes is None:
        most = min(most, max(-(-num_bytes // _NUM_BUCKETS), _LEAST_BYTES))
    return most, most
