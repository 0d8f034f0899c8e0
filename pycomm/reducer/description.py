"""What the ``repr`` of a Reducer says."""

from __future__ import annotations

from pycomm.compression.by_method import method_text
from pycomm.descriptions import counted, size_text, tensors_text
from pycomm.reducer.engine import Engine


def description(engine: Engine) -> str:
    """Return who averages, what, and how, in the words of ``repr``."""
    settings, table = engine.settings, engine.table
    transport = "nccl" if table.on_gpu else engine.communicator.transport
    parts = [counted(len(engine.world), "rank"), transport, _parameters(engine), method_text(settings.compression)]
    if settings.shard is not None:
        parts.append(f"shard={settings.shard}")
    if settings.survive is not None:
        parts.append(f"survive={settings.survive}")
    return ", ".join(parts)


def _parameters(engine: Engine) -> str:
    """Return the trainable parameters, in the buckets that they travel in. One rank alone needs no buckets."""
    slots, flights = engine.table.slots(), engine.table.flights
    if not flights:
        return tensors_text(slot.local for slot in slots)
    size = size_text(sum(flight.bucket.flat.nbytes for flight in flights))
    return f"{counted(len(slots), 'parameter')} in {counted(len(flights), 'bucket')} of {size} in all"
