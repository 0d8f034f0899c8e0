"""Checks of arguments: each returns the converted value, or raises an error that names the argument."""

from __future__ import annotations

import importlib
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, SupportsIndex, cast

import numpy as np

_LONGEST_SHOWN = 80  # characters


def shown(value: object) -> str:
    """Return ``repr(value)`` if that is short, otherwise its type in words."""
    try:
        text = "" if hasattr(type(value), "data_ptr") else repr(value)  # a freed tensor's repr ends the process
    except Exception:  # a foreign object may raise anything
        text = ""
    return text if 0 < len(text) <= _LONGEST_SHOWN and "\n" not in text else f"a {type(value).__name__}"


def number(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError, ValueError: it is not a number; the message starts with ``name``.
    """
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is too large for a float") from None
        except Exception:  # a foreign object may raise anything
            raise TypeError(f"{name} is a {type(value).__name__}, wanted a number") from None
    raise TypeError(f"{name} is {value!r}, wanted a number")


def environment_count(name: str) -> int:
    """Return the number in the environment variable ``name``, which is set; raise ValueError if it is negative."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) < _LONGEST_SHOWN):
        raise ValueError(
            f"{name} is {text[:_LONGEST_SHOWN]!r} in the environment, wanted a number that is not negative"
        )
    return int(text)


def count(name: str, value: Any, least: int) -> int:
    """Return ``value``, of any integer type but bool, as an int of at least ``least`` and below 2**63.

    Raises:
        TypeError, ValueError: it is not; the message starts with ``name``.
    """
    try:
        whole = operator.index(value)
    except Exception:  # a foreign object may raise anything
        raise TypeError(f"{name} is {shown(value)}, wanted an int") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted an int")
    if whole < least:
        raise ValueError(f"{name} is {whole}, wanted at least {least}")
    if whole >= 2**63:
        raise ValueError(f"{name} is {whole}, wanted less than 2**63")
    return whole


def positive(name: str, value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError, ValueError: it is not a positive number; the message starts with ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, wanted a number")
    if not value > 0:
        raise ValueError(f"{name} is {value}, wanted a positive number")
    return _as_float(name, value, "a positive number")


def _as_float(name: str, value: Any, wanted: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is larger than any float, wanted {wanted}") from None


def bounded(name: str, value: Any, wanted: str, is_valid: Callable[[float], bool]) -> float:
    """Return ``value``, a real number of any type but bool, as a float.

    Raises:
        TypeError, ValueError: it is no number, or ``is_valid(value)`` is false; ``wanted`` describes valid ones.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}, wanted a number")
    number = _as_float(name, value, wanted)
    if not is_valid(number):
        raise ValueError(f"{name} is {value}, wanted {wanted}")
    return number


def instance(name: str, value: Any, kind: type) -> None:
    """Raise TypeError, with ``name``, unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, wanted a {kind.__name__}")


def pair(name: str, value: Any, of_what: str) -> tuple[Any, Any]:
    """Return ``value`` as a tuple of two; raise TypeError, with ``name``, if it is not a pair."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    raise TypeError(f"{name} is a {type(value).__name__}, wanted a pair: {of_what}")


def length(name: str, value: Any) -> int:
    """Return the length of a sequence of arrays; raise TypeError, with ``name``, if it has none."""
    try:
        return len(value)
    except Exception:  # a foreign object may raise anything
        raise TypeError(f"{name} is a {type(value).__name__}, wanted a sequence of arrays") from None


def first_of(name: str, arrays: Sequence[Any]) -> Any:
    """Return the first of ``arrays``, the model for results; an empty array if there is none, or no sequence.

    The kernel then refuses ``arrays`` itself. Raises TypeError, with ``name``, if they have no length or items.
    """
    if length(name, arrays) == 0 or isinstance(arrays, str | bytes | dict):
        return np.empty(0)
    try:
        return arrays[0]
    except Exception:  # a foreign object may raise anything
        raise TypeError(f"{name} is a {type(arrays).__name__}, wanted a sequence of arrays") from None


LONGEST_TIMEOUT = timedelta(days=366).total_seconds()  # longer ones overflow in lower layers


def seconds_of(timeout: timedelta | float, name: str = "timeout") -> float:
    """Return ``timeout`` in seconds; errors call it ``name``.

    Raises:
        TypeError: it is neither a number nor a ``timedelta``.
        ValueError: it is not positive, or longer than a year.
    """
    wanted = "wanted a positive number of seconds, or a timedelta, of at most a year"
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout + 0.0)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} is {timeout!r}, {wanted}") from None
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise ValueError(f"{name} is {timeout}, {wanted}")
    return seconds


def shape_of(shape: object) -> tuple[int, ...]:
    """Return ``shape``, an int or an iterable of ints, as a tuple.

    Raises:
        TypeError: it is neither.
        ValueError: a length is negative.
        MemoryError: a length is beyond all addressable memory.
    """
    try:
        given = (shape,) if isinstance(shape, SupportsIndex) else tuple(cast(Iterable[Any], shape))
        if any(isinstance(length, bool) for length in given):
            raise TypeError
        dims = tuple(operator.index(length) for length in given)
    except TypeError:
        raise TypeError(f"shape is {shape!r}, wanted an int or several") from None
    if any(length < 0 for length in dims) or (0 in dims and max(dims) >= 2**63):
        raise ValueError(f"shape is {dims}, wanted no negative length, and none of 2**63 or more")
    if dims and max(dims) >= 2**63:
        raise MemoryError(f"a tensor of shape {dims} is needed, more than can be addressed")
    return dims


def integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise TypeError or ValueError, with ``name``, unless ``value`` is an int from ``least`` to ``most``.

    For settings whose ``repr`` ranks compare: numpy's integers, which have another ``repr``, are refused.
    """
    wanted = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, wanted {wanted}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}, wanted {wanted}")


def real(name: str, value: object, least: float, below: float = math.inf, *, or_equal: bool = True) -> None:
    """Raise TypeError or ValueError, with ``name``, unless ``value`` is a number within bounds.

    Args:
        least: lower bound, excluded unless ``or_equal``.
        below: upper bound, excluded.
    """
    bounds = f"{name} {'>=' if or_equal else '>'} {least:g}" + ("" if below == math.inf else f" and < {below:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, wanted a number, {bounds}")
    if not (least <= value if or_equal else least < value) or not value < below:
        raise ValueError(f"{name} is {value}, wanted {bounds}")


def fraction(name: str, value: object) -> None:
    """Raise TypeError or ValueError, with ``name``, unless 0 < ``value`` <= 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, wanted a number in (0, 1]")
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} is {value}, wanted 0 < {name} <= 1")


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise TypeError or ValueError, with ``name``, unless ``value`` is one of ``choices``."""
    wanted = f"wanted {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, {wanted}")
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, {wanted}")


def flag(name: str, value: object) -> None:
    """Raise TypeError, with ``name``, unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted True or False")


def plain(value: Any) -> Any:
    """Return a string without the methods of its class, which may raise on one rank; anything else as it is."""
    return str.__str__(value) if isinstance(value, str) else value


def reduction(op: Any) -> Any:
    """Return ``op``, with torch's "avg" replaced by "mean"; see :func:`plain`."""
    if type(op) is not str:
        op = plain(op)
    return "mean" if isinstance(op, str) and op == "avg" else op


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of ``package``, whose public names are imported at their first use.

    Args:
        homes: by module of the package its names, separated by spaces; a module without any is a name itself.
    """
    found = {name: module for module, names in homes.items() for name in names.split() or [module]}

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{found[name]}")
        value = getattr(module, name) if homes[found[name]] else module
        vars(sys.modules[package])[name] = value
        return value

    return get, lambda: sorted([*vars(sys.modules[package]), *found])


def public_names(names: Mapping[str, object], *modules: str) -> list[str]:
    """Return the ``__all__`` of a package with these globals: what it imports, but of modules only the named ones.

    Without it, ``import *`` would take all modules that were ever loaded, whose names users have for variables.
    """
    return [n for n, v in names.items() if not n.startswith("_") and (n in modules or not isinstance(v, ModuleType))]
