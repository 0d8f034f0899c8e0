"""How a function, what it is given and what it returns travel between processes.

By pickle, which sends functions and classes as names. What was defined in an interactive session (a notebook, a prompt,
``-c``, standard input) has a name that nobody can import elsewhere, and lambdas and functions inside functions have
none: these travel as code, by cloudpickle, where it is installed.
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import pickle
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from pycomm.tools.launching.processes import script_of

Sources = Mapping[str, Any]
"""Entries of ``linecache``."""

_INSTALL = "pip install 'pycomm-torch[notebook]'"


class SerializationError(TypeError):
    """Something cannot be sent to another process; the message says why, and what helps."""


def serialize(what: str, things: Any) -> bytes:
    """Return ``things``, pickled by name where names do, else by code.

    Args:
        what: names ``things`` in errors.

    Raises:
        SerializationError: they cannot be pickled, or only by cloudpickle, which is not installed.
    """
    file = io.BytesIO()
    try:
        _ByName(file).dump(things)
    except Exception as error:  # whatever the pickling of foreign objects raises
        return _by_code(what, things, error)
    return file.getvalue()


def deserialize(serialized: bytes) -> Any:
    """Return what was serialized."""
    return pickle.loads(serialized)


def interactive_sources() -> Sources:
    """Return the lines that an interactive session has of what was typed, by which tracebacks elsewhere show them."""
    # Entries of files have the time of their last change.
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def add_sources(sources: Sources) -> None:
    """Let tracebacks of this process show lines of ``sources``."""
    linecache.cache.update(sources)


class _InteractiveError(pickle.PicklingError):
    """An object has a name that another process cannot import."""


class _ByName(pickle.Pickler):
    """Pickler that refuses what lives in an interactive session."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._interactive = _is_interactive()

    def reducer_override(self, obj: Any) -> Any:
        if self._interactive and isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise _InteractiveError(f"{obj.__qualname__!r} is defined in an interactive session")
        return NotImplemented


def _is_interactive() -> bool:
    """Return whether ``__main__`` may hold what no file has, and a rank that imports its file would not find."""
    main = sys.modules["__main__"]
    from_file = script_of(main) is not None or getattr(main, "__spec__", None) is not None
    return not from_file or hasattr(sys, "ps1")


def _by_code(what: str, things: Any, reason: Exception) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        raise SerializationError(
            f"{what} cannot be sent to another process: {_in_words(reason)}{_advice(reason)}"
        ) from reason
    import cloudpickle  # type: ignore[import-untyped]

    try:
        serialized: bytes = cloudpickle.dumps(things)
    except Exception as error:
        raise SerializationError(f"{what} cannot be sent to another process: {_in_words(error)}") from error
    return serialized


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _advice(reason: Exception) -> str:
    if isinstance(reason, _InteractiveError):
        where = "; to send it as code, install cloudpickle"
    elif isinstance(reason, pickle.PicklingError | AttributeError):  # of functions and classes without a global name
        where = "; define it at the top level of a module, or install cloudpickle to send it as code"
    else:
        return ""
    return f"{where} ({_INSTALL})"
