"""Statistics of a Reducer: what ``Reducer.stats`` returns about buckets, time, waits and compression."""

from __future__ import annotations

from typing import Any

from pycomm.reducer.arrivals import Waits
from pycomm.reducer.buckets import method_stats
from pycomm.reducer.figures import CompressionFigures
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.phases import Phases


class Statistics:
    """Statistics of all reductions of a rank.

    Attributes:
        waits: who was waited for.
        phases: where the time goes.
        figures: what compression leaves out.
    """

    def __init__(self) -> None:
        self.waits, self.phases, self.figures = Waits(), Phases(), CompressionFigures()

    def report(self, table: ParameterTable, num_reductions: int, world: tuple[int, ...]) -> dict[str, Any]:
        """Return the counters, by the names that ``Reducer.stats`` documents."""
        exchanges = [flight.exchange for flight in table.flights]
        sent = sum(exchange.bytes_sent for exchange in exchanges)
        gradients = sum(flight.bucket.flat.nbytes for flight in table.flights) * num_reductions
        stats: dict[str, Any] = {
            "bytes_sent": sent,
            "steps": num_reductions,
            "wait_seconds": self.waits.seconds,
            "waits": self.waits.report(world),
            "num_buckets": len(exchanges),
            **self.phases.report(),
            "compression_ratio": gradients / sent if sent else None,
            **self.figures.report(exchanges, num_reductions),
            **method_stats(exchanges),
        }
        for key, value in table.earlier.items():
            stats[key] = stats.get(key, 0) + value
        if stats.get("selections"):
            stats["miss_rate"] = stats["selections_missed"] / stats["selections"]
        return stats
