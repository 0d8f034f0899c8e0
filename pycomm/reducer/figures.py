"""Figures of what compression leaves out, which cost reads of the gradients: now and then, however often one asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pycomm.compression.base import Exchange

INTERVAL = 10
"""Number of reductions for which figures stand: looking at each of them could cost a tenth of the time of a step."""

_TINY = 1e-300
"""Square that stands for zero where it divides."""


class CompressionFigures:
    """Figures of what this rank's compression leaves out, looked at anew once they are ``INTERVAL`` reductions old."""

    def __init__(self) -> None:
        self._looked_at: int | None = None
        self._residual: float | None = None
        self._error: float | None = None

    def forget(self) -> None:
        """Look anew at the next question, since what was left has been replaced."""
        self._looked_at = None

    def report(self, exchanges: Sequence[Exchange], num_reductions: int) -> dict[str, float]:
        """Return ``residual_norm`` and ``compression_error``, as far as they are known; see ``Reducer.stats``."""
        if self._looked_at is None or num_reductions >= self._looked_at + INTERVAL:
            self._looked_at = num_reductions
            self._look(exchanges)
        measured = [found for exchange in exchanges if (found := exchange.measured()) is not None]
        if measured:
            there_was, left = (sum(squares) for squares in zip(*measured, strict=True))
            if math.isfinite(there_was):  # else the step was left out
                self._error = math.sqrt(left / max(there_was, _TINY))
        known = {"residual_norm": self._residual, "compression_error": self._error}
        return {name: figure for name, figure in known.items() if figure is not None}

    def _look(self, exchanges: Sequence[Exchange]) -> None:
        """Read the residuals, and have the next reduction measured."""
        residuals = [square for exchange in exchanges if (square := exchange.squared_residual()) is not None]
        self._residual = math.sqrt(sum(residuals)) if residuals else None
        for exchange in exchanges:
            exchange.measure_next()
