"""Tables of figures; figures as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Row = Sequence[str]

MISSING = "-"
KIB, MIB = 1 << 10, 1 << 20
_TIMES = "\N{MULTIPLICATION SIGN}"


def table(rows: Iterable[Row]) -> str:
    """Return a table whose first row is its header; all columns but the first are figures."""
    return "".join(_lines(rows))


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |\n"
        if number == 0:
            yield f"| --- |{' ---: |' * (len(row) - 1)}\n"


def size(count: int) -> str:
    """Return a number of bytes in whole MB or KB."""
    return f"{count // MIB} MB" if count >= MIB else f"{count // KIB} KB"


def megabytes(count: float) -> str:
    """Return bytes in millions, with as many digits as small numbers need."""
    return f"{count / 1e6:.{2 if count < 1e7 else 1 if count < 1e8 else 0}f} MB"


def duration(seconds: float) -> str:
    """Return three digits, in the unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 9.995 or unit == "µs" or (unit == "ms" and seconds * scale >= 0.9995):
            value = seconds * scale
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError("the last unit takes everything")


def times(ratio: float) -> str:
    """Return a ratio: three digits below ten, whole ones above."""
    return f"{ratio:.2f}{_TIMES}" if ratio < 9.995 else f"{ratio:.0f}{_TIMES}"


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """Return the least and the largest of ``values``, or one where both print the same; a common unit stands once."""
    found = sorted(values)
    low, high = show(found[0]), show(found[-1])
    if low == high:
        return low
    return f"{low.removesuffix(high.lstrip('0123456789.'))}-{high}"


def count(number: Any, noun: str) -> str:
    """Return a number and what it counts, which has an s in the plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def link(gbit: float | None) -> str:
    """Return the speed of a link; ``None`` is one without a limit."""
    if gbit is None:
        return "no limit"
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1000:g} Mbit/s"
