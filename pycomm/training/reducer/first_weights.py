"""First weights: the step in which ``set_weight`` is called first, and a rank without a batch does not know of it.

Its first bucket then meets the others' sum of samples, and the transport refuses both on all ranks, before anything is
mixed. What ranks have announced in the store says whether that is a mistake. If not, that rank uses weights, too, and
all sum again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.errors import CommError
from pycomm.training.reducer.buckets import BucketInFlight
from pycomm.worker import Work

_POLL = 0.005  # seconds


def sum_first(communicator: Communicator, keys: str, sums: Any) -> None:
    """Sum the samples for the first time. Collective; a job on the communication thread.

    ``keys``: see :class:`pycomm.training.reducer.window.SampleWeights`.
    """
    with contextlib.suppress(RuntimeError):  # of the store; without it an error is less clear
        communicator.place.store.set(f"{keys}/weights/{communicator.rank}", "")
    with _expecting_others(communicator):
        try:
            communicator.all_reduce(sums, "sum")
        except ValueError:
            if not _all_weigh_or_join(communicator, keys):
                raise
            communicator.all_reduce(sums, "sum")


def meets_weights(
    communicator: Communicator, keys: str, flights: Sequence[BucketInFlight], launch: Callable[[int], Work | GpuWork]
) -> bool:
    """Launch the first bucket that ranks compare, of a rank without a batch; return whether others have weights.

    In that case this rank has announced weights, too, and the bucket is still to be launched. ``launch`` launches one
    of ``flights`` by its number.
    """
    store, rank = communicator.place.store, communicator.rank
    number = next(number for number, flight in enumerate(flights) if flight.communicator is communicator)
    with contextlib.suppress(RuntimeError):
        store.set(f"{keys}/joins/{rank}", "")
    others_weigh = False
    with _expecting_others(communicator):
        try:
            launch(number).wait()
        except CommError:
            pass  # raised with the others' results
        except ValueError:
            others_weigh = _all_weigh_or_join(communicator, keys)
            with contextlib.suppress(RuntimeError):
                store.set(f"{keys}/{'weights' if others_weigh else 'neither'}/{rank}", "")
    if others_weigh:
        flights[number].work = None
    with contextlib.suppress(RuntimeError):
        store.delete_key(f"{keys}/joins/{rank}")
    return others_weigh


@contextlib.contextmanager
def _expecting_others(communicator: Communicator) -> Iterator[None]:
    """Take operations that differ between the ranks for no failure of which the flight recorder writes."""
    recorder = communicator.channel.recorder
    recorder.may_differ = True
    try:
        yield
    finally:
        recorder.may_differ = False


def _all_weigh_or_join(communicator: Communicator, keys: str) -> bool:
    """Return whether some ranks have announced weights, and all others that they have no batch.

    Waits for slower ranks: a rank with neither announces that when it gets the error.
    """
    store, ranks, begun = communicator.place.store, range(communicator.size), time.monotonic()
    with contextlib.suppress(RuntimeError):
        while True:
            # Joins first: a rank that has joined has weights.
            joins, weighs, neither = (
                [store.check([f"{keys}/{what}/{rank}"]) for rank in ranks] for what in ("joins", "weights", "neither")
            )
            are_known = all(map(max, joins, weighs, neither))
            if are_known or time.monotonic() - begun > communicator.channel.timeout:
                return any(weighs) and all(map(max, joins, weighs))
            time.sleep(_POLL)
    return False
