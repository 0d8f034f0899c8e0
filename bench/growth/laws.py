"""The laws by which costs grow, and how exponents are fitted.

An exponent is the slope, by least squares, of the logarithm of what a cost grew by since the first point against the
logarithm of what its cause grew by: a fixed part, which nearly every cost has, then does not bend the line. A law's own
exponent is fitted likewise, to its formula at the same points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_FLAT = 0.1
"""Part of its first value by which a cost may grow over a whole curve and count as constant."""
TOLERANCE = 0.15
"""Difference of a counted cost's exponent from its law's that is still right."""


@dataclass(frozen=True)
class Law:
    """Expected growth of one cost.

    Attributes:
        text: the law in words.
        shape: the formula, up to factors and fixed parts.
        counted: whether a test holds the cost to the law; times are only shown, and memory that the allocator rounds.
    """

    text: str
    shape: Callable[[float], float]
    counted: bool = True


def _constant(_: float) -> float:
    return 1.0


def _line(x: float) -> float:
    return x


_SAME, _LINE = Law("the same", _constant), Law("in proportion", _line)
_SAME_SHOWN = Law("the same", _constant, counted=False)
_LINE_SHOWN = Law("a fixed part, and one in proportion", _line, counted=False)
_ALL = {
    **dict.fromkeys(("requests", "descriptors", "left", "shared", "messages", "sent"), _SAME),
    "private": _SAME_SHOWN,
    **dict.fromkeys(("attach", "host", "alone"), _LINE_SHOWN),
}
LAWS: Mapping[str, Mapping[str, Law]] = {
    "ranks": {
        **_ALL,
        "descriptors": Law("a connection to each other rank", _line),
        "attach": Law("in proportion, once there are more ranks than cores", _line, counted=False),
        **dict.fromkeys(("host", "alone"), _SAME_SHOWN),
    },
    "parameters": {**_ALL, "private": _LINE_SHOWN},
    "bytes": {**_ALL, "shared": _LINE, "sent": _LINE},
    "buckets": {**_ALL, "messages": _LINE},
}
"""Laws by what grows, then by the cost, on each rank of one host."""

SIMULATED: Mapping[str, Mapping[str, Law]] = {
    "ring": {"messages": Law("2 (P - 1)", _line), "sent": _SAME, "seconds": Law("a message's latency each", _line)},
    "halving_doubling": {"messages": Law("2 log2 P", math.log2), "sent": _SAME, "seconds": Law("2 log2 P", math.log2)},
    "double_tree": {"messages": _SAME, "sent": _SAME, "seconds": Law("2 log2 P", math.log2)},
}
"""Laws of all-reduce against the number of ranks P, by algorithm."""


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent of the growth of ``ys`` with ``xs``, which rise; 0 if they hardly grow, or fall."""
    grown = [(x - xs[0], y - ys[0]) for x, y in zip(xs[1:], ys[1:], strict=True) if y > ys[0]]
    if len(grown) < 2 or max(ys) - ys[0] <= _FLAT * abs(ys[0]):
        return 0.0
    by, growth = np.log(np.array(grown)).T
    return float(np.polyfit(by, growth, 1)[0])


def expected(law: Law, xs: Sequence[float]) -> float:
    """Return the exponent of ``law`` at ``xs``."""
    return exponent(xs, [law.shape(x) for x in xs])


def off_law(axis: str, points: Sequence[float], curve: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return the counted costs of ``curve`` that do not follow their laws, with their exponents and the laws'."""
    laws = {name: law for name, law in LAWS[axis].items() if law.counted}
    found = {name: (exponent(points, curve[name]), expected(law, points)) for name, law in laws.items()}
    return {name: pair for name, pair in found.items() if abs(pair[0] - pair[1]) > TOLERANCE}
