"""What a caller passes to a communicator, looked at."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, SupportsIndex, cast

_LONGEST_TIMEOUT = timedelta(days=366).total_seconds()  # more overflows somewhere below


def seconds_of(timeout: timedelta | float) -> float:
    """``timeout`` in seconds.

    Raises:
        ValueError: it is not positive, or longer than a year. TypeError: it is no number.
    """
    wanted = "wanted a positive number of seconds, or a timedelta, of at most a year"
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout + 0.0)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"timeout is {timeout!r}, {wanted}") from error
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError(f"timeout is {timeout}, {wanted}")
    return seconds


def shape_of(shape: object) -> tuple[int, ...]:
    """``shape``, an int or several, as a tuple.

    Raises:
        TypeError: it is neither. ValueError: a length is negative. MemoryError: one is beyond all memory.
    """
    try:
        given = (shape,) if isinstance(shape, SupportsIndex) else tuple(cast(Iterable[Any], shape))
        if any(isinstance(length, bool) for length in given):
            raise TypeError
        dims = tuple(operator.index(length) for length in given)
    except TypeError as error:
        raise TypeError(f"shape is {shape!r}, wanted an int or several") from error
    if any(length < 0 for length in dims) or (0 in dims and max(dims) >= 2**63):
        raise ValueError(f"shape is {dims}, wanted no negative length, and none of 2**63 or more")
    if dims and max(dims) >= 2**63:
        raise MemoryError(f"a tensor of shape {dims} is needed, more than can be addressed")
    return dims
