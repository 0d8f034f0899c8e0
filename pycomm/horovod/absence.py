"""Absence of a rank that has joined: it takes part, without data, in what attached optimizers of the others reduce.

Reductions of attached optimizers are not announced, as all ranks make the same ones in the same order. A rank that has
joined therefore sits in the next one of every optimizer, on a thread for each, and contributes nothing. When all have
joined, all sit there: a reduction that comes to nothing is followed by a message of two numbers, by which the ranks
find out that it was the last. Ranks that have data pay nothing for it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from pycomm import threads
from pycomm.horovod.engine import Engine, internal_error
from pycomm.horovod.state import world
from pycomm.reducer import Reducer

_PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def absence(engine: Engine) -> Iterator[list[int]]:
    """Take part in reductions of attached optimizers inside, and return once all ranks have got so far.

    Args:
        engine: of all ranks, by which this one waits meanwhile; closed if a reduction fails.

    Yields:
        A list: afterwards, how many reductions of each optimizer this rank has been absent from.

    Raises:
        HorovodInternalError: a reduction has failed.
    """
    gc.collect()  # what a script has let go of must be gone on all ranks or on none
    counts: list[int] = []
    errors: list[BaseException] = []
    served = [(reducer, _start(reducer, engine, counts, errors)) for reducer in world().attached]
    try:
        yield counts
    except BaseException:
        for reducer, thread in served:
            thread.join(_PATIENCE)  # whatever ended the wait has ended this too, as a rule
            if thread.is_alive():
                reducer.detach()
        if errors:
            raise internal_error(errors[0]) from errors[0]
        raise
    for _, thread in served:
        thread.join()
    if errors:
        raise internal_error(errors[0]) from errors[0]


def _start(reducer: Reducer, engine: Engine, counts: list[int], errors: list[BaseException]) -> threading.Thread:
    def stay() -> None:
        try:
            counts.append(reducer.stay_absent())
        except BaseException as error:
            errors.append(error)
            engine.close(f"a reduction of gradients failed while this rank had joined: {error}")

    return threads.start(stay, "pycomm-horovod-joined")
