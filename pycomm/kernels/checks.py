"""Arguments that are looked at before the extension sees them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def number(name: str, value: Any) -> float:
    """``value`` as a float; TypeError or ValueError, with ``name``, for what is none."""
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name} is too large for a float") from error
        except Exception as error:  # whatever a strange object comes to
            raise TypeError(f"{name} is a {type(value).__name__}, wanted a number") from error
    raise TypeError(f"{name} is {value!r}, wanted a number")


def count(name: str, value: Any, least: int = 0) -> int:
    """``value`` as an int of 63 bits, at least ``least``; TypeError or ValueError, with ``name``, for what is none."""
    try:
        whole = operator.index(value)
    except Exception as error:  # whatever a strange object comes to
        raise TypeError(f"{name} is a {type(value).__name__}, wanted an int") from error
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted an int")
    if not least <= whole < 2**63:
        raise ValueError(f"{name} is {whole}, wanted at least {least} and less than 2**63")
    return whole


def instance(name: str, value: Any, kind: type) -> None:
    """TypeError, with ``name``, unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, wanted a {kind.__name__}")


def pair(name: str, value: Any, of_what: str) -> tuple[Any, Any]:
    """``value`` as a tuple of two; TypeError, with ``name``, for what is none."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise TypeError(f"{name} is a {type(value).__name__}, wanted a pair: {of_what}")


def length(name: str, value: Any) -> int:
    """The length of a sequence of arrays; TypeError, with ``name``, for what is none."""
    try:
        return len(value)
    except Exception as error:  # whatever a strange object comes to
        raise TypeError(f"{name} is a {type(value).__name__}, wanted a sequence of arrays") from error


def first_of(name: str, arrays: Sequence[Any]) -> Any:
    """The array by which to make results for ``arrays``; any where there is none, which the kernel refuses."""
    if length(name, arrays) == 0 or isinstance(arrays, str | bytes | dict):
        return np.empty(0)
    try:
        return arrays[0]
    except Exception as error:  # whatever a strange object comes to
        raise TypeError(f"{name} is a {type(arrays).__name__}, wanted a sequence of arrays") from error
