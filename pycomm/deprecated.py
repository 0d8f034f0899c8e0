"""Deprecated keywords: calls with them go on working, and one DeprecationWarning shows the new line."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pycomm.checks import shown

_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Old:
    """Keywords that one new argument replaces.

    Args:
        names: the old keywords.
        make: called with those of them that a call has, as keywords; returns the new argument's value.
        short: type of values that the new argument had before, too, such as ``str``. Such a value is no conflict: it
            is given to ``make`` under the new argument's name.
    """

    names: tuple[str, ...]
    make: Callable[..., Any]
    short: type | tuple[type, ...] = ()


@dataclass(frozen=True)
class Moved:
    """Calls that another function answers now.

    Args:
        is_meant: called with a call's keywords, after new ones have replaced old ones; returns whether it is one.
        target: returns the other function, which may be imported for that.
        rewrite: called with the positional arguments and the keywords; returns those of the new call. As they are
            if ``None``.
    """

    is_meant: Callable[[Mapping[str, Any]], bool]
    target: Callable[[], Callable[..., Any]]
    rewrite: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None


def renamed(moved: Moved | None = None, **arguments: Old) -> Callable[[_F], _F]:
    """Return a decorator that lets a function go on taking old keywords, which its signature no longer has.

    ::

        @renamed(mode=Old(("staleness", "backup"), _mode_of, short=str))
        def parameter_server(optimizer, model, *, mode="async"): ...

        parameter_server(o, m, mode="ssp", staleness=3)  # calls _mode_of(mode="ssp", staleness=3), and warns:
        # staleness= of pycomm.parameter_server() will be gone in two releases; write
        # pycomm.parameter_server(..., mode=pycomm.StaleSynchronous(3))

    An error that ``make`` raises becomes the argument itself, for the function to raise by :func:`settled` where all
    ranks learn of it. A call with an old keyword and the new argument raises TypeError.

    Args:
        moved: calls that another function answers.
        arguments: what each new argument replaces, by its name.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            target: Callable[..., Any] = function
            old = [name for replaced in arguments.values() for name in replaced.names if name in kwargs]
            if old:
                kwargs = _replaced(kwargs, arguments)
            if moved is not None and moved.is_meant(kwargs):
                target = moved.target()
                args, kwargs = (args, kwargs) if moved.rewrite is None else moved.rewrite(args, kwargs)
            failed = any(isinstance(kwargs.get(name), Exception) for name in arguments)
            if not failed and (old or target is not function):
                what = f"{', '.join(f'{name}=' for name in old)} of " if old else "this call of "
                line = _line(target, args, kwargs)
                text = f"{what}pycomm.{function.__name__}() will be gone in two releases; write {line}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return target(*args, **kwargs)

        return cast(_F, wrapper)

    return decorate


def settled(value: Any) -> Any:
    """Return an argument of a function that is :func:`renamed`; raise the error that old keywords have made of it."""
    if isinstance(value, Exception):
        raise value
    return value


def _replaced(kwargs: dict[str, Any], arguments: Mapping[str, Old]) -> dict[str, Any]:
    """Return ``kwargs`` with new arguments in place of old ones."""
    rest = dict(kwargs)
    for new, replaced in arguments.items():
        given = {name: rest.pop(name) for name in replaced.names if name in rest}
        if not given:
            continue
        if new in rest and rest[new] is not None and not isinstance(rest[new], replaced.short):
            old = ", ".join(f"{name}=" for name in given)
            raise TypeError(f"{old} is given together with {new}={shown(rest[new])}, wanted {new}= alone")
        if rest.get(new) is not None:
            given[new] = rest[new]
        try:
            rest[new] = replaced.make(**given)
        except (TypeError, ValueError) as error:
            rest[new] = error
    return rest


def _line(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a call as one would write it; what is no plain value is left out or ``...``."""
    positional = [_written(value) for value in args]
    first = [text for i, text in enumerate(positional) if text != "..." or positional[i - 1 : i] != ["..."]]
    return f"pycomm.{target.__name__}({', '.join([*first, *(f'{n}={_written(v)}' for n, v in kwargs.items())])})"


def _written(value: Any) -> str:
    """Return a plain value, or one of our options with the fields that differ from their defaults, as one writes it."""
    if isinstance(value, _PLAIN) and len(text := repr(value)) <= 80:
        return text
    is_option = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_option or type(value).__module__.split(".")[0] != "pycomm":
        return "..."
    named = [(f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init and f.repr]
    changed = [f"{f.name}={_written(found)}" for f, found in named if found is not f.default and found != f.default]
    return f"pycomm.{type(value).__name__}({', '.join(changed)})"
