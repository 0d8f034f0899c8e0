"""Deprecated keywords and modules: they still work, with one DeprecationWarning that shows the new line."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

from pycomm.checks import shown

_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Old:
    """Keywords that one new argument replaces.

    Args:
        names: the old keywords.
        make: called with the old keywords of a call; returns the new argument's value.
        short: type of values that the new argument took before, such as ``str``. Such a value does not conflict with
            old keywords: ``make`` gets it under the new argument's name.
    """

    names: tuple[str, ...]
    make: Callable[..., Any]
    short: type | tuple[type, ...] = ()


@dataclass(frozen=True)
class Moved:
    """Calls that another function handles now.

    Args:
        is_meant: returns whether a call is one, given its keywords after replacement of old ones.
        target: returns the other function, importing it if necessary.
        rewrite: returns the new call's arguments and keywords, given those of the old call; ``None``: unchanged.
    """

    is_meant: Callable[[Mapping[str, Any]], bool]
    target: Callable[[], Callable[..., Any]]
    rewrite: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None


def renamed(moved: Moved | None = None, **arguments: Old) -> Callable[[_F], _F]:
    """Return a decorator by which a function accepts old keywords that its signature no longer has.

    ::

        @renamed(mode=Old(("staleness", "backup"), _mode_of, short=str))
        def parameter_server(optimizer, model, *, mode="async"): ...

        parameter_server(o, m, mode="ssp", staleness=3)  # calls _mode_of(mode="ssp", staleness=3), and warns:
        # staleness= of pycomm.parameter_server() will be gone in two releases; write
        # pycomm.parameter_server(..., mode=pycomm.StaleSynchronous(3))

    An error in ``make`` becomes the argument itself: the function raises it by :func:`settled` on all ranks. A call
    with both an old keyword and the new argument raises TypeError.

    Args:
        moved: calls that another function handles.
        arguments: replaced keywords by the name of the new argument.
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
            failed = any(isinstance(value, Exception) for value in kwargs.values())
            if not failed and (old or target is not function):
                what = f"{', '.join(f'{name}=' for name in old)} of " if old else "this call of "
                line = _line(target, args, kwargs)
                text = f"{what}pycomm.{function.__name__}() will be gone in two releases; write {line}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return target(*args, **kwargs)

        # For scripts that look up the defaults of old keywords.
        gone = dict.fromkeys(name for replaced in arguments.values() for name in replaced.names)
        made: Any = wrapper
        made.__kwdefaults__ = {**gone, **(function.__kwdefaults__ or {})}
        return cast(_F, made)

    return decorate


def settled(value: Any) -> Any:
    """Return an argument of a :func:`renamed` function; raise it if old keywords made it an error."""
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
            rest[new] = TypeError(f"{old} is given together with {new}={shown(rest[new])}, wanted {new}= alone")
            continue
        if rest.get(new) is not None:
            given[new] = rest[new]
        try:
            rest[new] = replaced.make(**given)
        except Exception as error:  # a foreign object may raise anything
            rest[new] = error
    return rest


def _line(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return a call as source text; values that are not plain are written as ``...``."""
    positional = [_written(value) for value in args]
    first = [text for i, text in enumerate(positional) if text != "..." or positional[i - 1 : i] != ["..."]]
    name, module = target.__name__, target.__module__
    is_public = not module.startswith("pycomm.") or hasattr(sys.modules["pycomm"], name)
    named = [f"{keyword}={_written(value)}" for keyword, value in kwargs.items()]
    return f"{'pycomm' if is_public else module}.{name}({', '.join([*first, *named])})"


def _written(value: Any) -> str:
    """Return a plain value, or one of our option classes with its non-default fields, as source text."""
    if isinstance(value, _PLAIN) and len(text := repr(value)) <= 80:
        return text
    is_option = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_option or type(value).__module__.split(".")[0] != "pycomm":
        return "..."
    named = [(f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init and f.repr]
    changed = [f"{f.name}={_written(found)}" for f, found in named if found is not f.default and found != f.default]
    return f"pycomm.{type(value).__name__}({', '.join(changed)})"


class MovedModules(MetaPathFinder):
    """Finder of modules by the names that they had before rooms were grouped: ``pycomm.reducer``, and all below it.

    Args:
        moved: new names of modules, by old ones, each without "pycomm.".
        documented: old names whose imports stay as they are. The others warn.
    """

    def __init__(self, moved: Mapping[str, str], documented: Collection[str]) -> None:
        self._moved, self._documented = moved, documented

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return how to import ``fullname``; ``None`` if it is no old name."""
        package, _, rest = fullname.partition(".")
        room, _, below = rest.partition(".")
        if package != "pycomm" or room not in self._moved:
            return None
        name = ".".join(filter(None, ("pycomm", self._moved[room], below)))
        if find_spec(name) is None:
            return None
        if room not in self._documented:
            # Frames of importlib do not count.
            warnings.warn(f"{fullname} is {name} now", DeprecationWarning, stacklevel=2)
        return spec_from_loader(fullname, _Alias(name))


class _Alias(Loader):
    """Loader that puts a module in place under a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._name)

    def get_code(self, _name: str) -> CodeType | None:
        """Return the code of the module, which ``python -m`` runs. Loaders of editable installations have none."""
        spec = find_spec(self._name)
        if spec is None or spec.origin is None:
            return None
        return compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
