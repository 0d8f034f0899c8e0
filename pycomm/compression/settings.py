"""Checks of what a method is given."""

from __future__ import annotations

import math


def require_ratio(ratio: object) -> None:
    """TypeError, ValueError unless 0 < ``ratio`` <= 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"ratio is {ratio!r}, wanted a number in (0, 1]")
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio is {ratio}, wanted 0 < ratio <= 1")


def require_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """TypeError, ValueError unless ``value`` is a whole number from ``least`` to ``most``."""
    wanted = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, wanted {wanted}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}, wanted {wanted}")


def require_number(name: str, value: object, least: float, below: float = math.inf, *, or_equal: bool = True) -> None:
    """TypeError, ValueError unless ``value`` is a number of at least, or above, ``least``, and less than ``below``."""
    bounds = f"{name} {'>=' if or_equal else '>'} {least:g}" + ("" if below == math.inf else f" and < {below:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, wanted a number, {bounds}")
    if not (least <= value if or_equal else least < value) or not value < below:
        raise ValueError(f"{name} is {value}, wanted {bounds}")


def require_flag(name: str, value: object) -> None:
    """TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted True or False")
