"""Live table of the last rows on the terminal; as plain lines where there is no terminal."""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_ROWS = 10
_COLUMNS = ("step", "step time", "wait", "pack", "wire", "hidden", "sent", "ratio", "error", "waited for", "not finite")


class LiveTable:
    """Writer that shows the last rows."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._live: Live | None = None

    def write(self, row: dict[str, Any]) -> None:
        """Add ``row``; the oldest leaves."""
        self._rows.append(_cells(row))
        if not self._console.is_terminal:
            pairs = zip(_COLUMNS, self._rows[-1], strict=True)
            self._console.print(
                "pycomm: " + ", ".join(f"{name} {cell}" for name, cell in pairs if cell), soft_wrap=True
            )
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Leave the table as it is."""
        if self._live is not None:
            self._live.stop()

    def _table(self) -> Table:
        table = Table(*_COLUMNS, title="pycomm")
        for cells in self._rows:
            table.add_row(*cells)
        return table


def _cells(row: dict[str, Any]) -> list[str]:
    lag = "" if row["waited_for_rank"] is None else f"{row['waited_for_rank']} ({_ms(row['waited_for_seconds'])})"
    finite = "" if not row["nonfinite_steps"] and not row["last_nonfinite"] else str(row["last_nonfinite"])
    return [
        str(row["step"]),
        *(_ms(row[key]) for key in ("seconds", "wait_seconds", "pack_seconds", "wire_seconds")),
        "" if row["hidden_share"] is None else f"{row['hidden_share']:.0%}",
        "" if row["bytes_sent"] is None else f"{row['bytes_sent'] / 1e6:.3g} MB",
        "" if row["compression_ratio"] is None else f"{row['compression_ratio']:.3g}",
        "" if row["compression_error"] is None else f"{row['compression_error']:.3f}",
        lag,
        finite,
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g} ms"
