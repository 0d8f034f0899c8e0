"""First weights: the step in which ``set_weight`` is called first, and a rank without a batch does not know of it.

Its first bucket then meets the others' sum of samples, and the transport refuses both on all ranks, before anything is
mixed. What the ranks then tell each other says whether that is a mistake. If not, that rank uses weights, too, and all
sum again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.recorder import told_with
from pycomm.errors import CommError
from pycomm.training.reducer.buckets import BucketInFlight
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork

WEIGHS, _JOINS = "weights", "no batch"
"""What a rank tells the others."""


def sum_first(communicator: Communicator, sums: Any) -> None:
    """Sum the samples for the first time. Collective; a job on the communication thread."""
    try:
        with communicator.channel.recorder.telling(WEIGHS):
            communicator.all_reduce(sums, "sum")
    except ValueError as error:
        if not _weigh_or_join(error):
            raise
        communicator.all_reduce(sums, "sum")


def meets_weights(
    communicator: Communicator, flights: Sequence[BucketInFlight], launch: Callable[[int], Work | GpuWork]
) -> bool:
    """Launch the first bucket that ranks compare, of a rank without a batch; return whether others have weights.

    In that case the bucket is still to be launched. ``launch`` launches one of ``flights`` by its number.
    """
    number = next(number for number, flight in enumerate(flights) if flight.communicator is communicator)
    try:
        with communicator.channel.recorder.telling(_JOINS):
            launch(number).wait()
    except CommError:
        pass  # raised with the others' results
    except ValueError as error:
        if _weigh_or_join(error):
            flights[number].work = None
            return True
    return False


def _weigh_or_join(error: ValueError) -> bool:
    """Return whether ``error`` is of ranks with weights and of ranks without a batch, and of no others."""
    return set(told_with(error)) == {WEIGHS, _JOINS}
