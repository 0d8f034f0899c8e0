"""Order of buckets: after the first reduction, that in which gradients arrive."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from pycomm.collectives.layout import is_capturing
from pycomm.training.reducer.buckets import Slot, are_sorted
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.lanes import bucket_sizes
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork

_PATIENCE = 2.0  # seconds


class ArrivalOrder:
    """Order in which the gradients of the first reduction arrived on rank 0, by which all ranks sort their buckets.

    A bucket is sent once those before it have been sent. So a gradient that arrives late, or never, delays all buckets
    behind it. The reverse order of the parameters, in which buckets begin, is a guess.

    The buckets stay as they are where nothing is sent before the last gradient has arrived, where other ranks or a
    newcomer rely on their layout, and where the method measures each of them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._table = engine, engine.table
        settings = engine.settings
        is_kept = engine.members.survives or engine.table.partition is not None or settings.compression.measures
        self._is_open = not is_kept and engine.communicator.size > 1 and settings.compression.clip_local_norm is None
        self._arrived: dict[Slot, None] = {}
        self._agreed = np.zeros(0, np.int64)  # places of the slots
        self._slots: list[Slot] = []
        self._work: Work | GpuWork | None = None  # that brings rank 0's

    def note(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated. Only the last accumulation of a pass counts."""
        if self._is_open:
            self._arrived.pop(slot, None)
            self._arrived[slot] = None

    def agree(self) -> None:
        """Begin to take rank 0's order. Collective after the first reduction; later calls do nothing.

        Waits for no rank: with several optimizers in one backward, another may first come to another one's end.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._slots, arrived = self._table.slots(), self._arrived
        places = {slot: len(arrived) - number for number, slot in enumerate(arrived)}
        self._agreed = np.array([places.get(slot, 0) for slot in self._slots], np.int64)
        self._work = self._engine.communicator.broadcast(self._agreed, 0, async_op=True)
        if isinstance(self._work, Work):
            # If it fails, others see that instead of why a rank stops, or although it has ended well.
            self._engine.communicator.channel.let_end = functools.partial(self._work.ends_within, _PATIENCE)

    def apply(self) -> bool:
        """Sort the buckets before the second reduction; return whether that has changed them.

        The addresses of gradients change, so a reduction that is captured into a CUDA graph keeps its buckets. Waits
        for a GPU, this once: what the first reduction counted, and whose gradient was not finite, is kept.
        """
        work, self._work = self._work, None
        if work is None:
            return False
        work.wait()
        engine, table = self._engine, self._table
        places = dict(zip(self._slots, self._agreed.tolist(), strict=True))
        self._slots, self._arrived = [], {}
        order = sorted(table.slots(), key=lambda slot: places.get(slot, 0))  # the first one to arrive is last
        sizes = bucket_sizes(engine.lanes, engine.settings, sum(slot.local.nbytes for slot in order), table.on_gpu)
        if is_capturing() or are_sorted(table.buckets, order, engine.settings.compression, *sizes):
            return False
        engine.reduction.source.keep(table.buckets)
        table.rebuild(engine.lanes, engine.settings, adopt=True, order=order)
        engine.hash_state()
        return True
