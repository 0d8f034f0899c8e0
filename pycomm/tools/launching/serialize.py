"""Serialization of functions, arguments and results between processes.

Pickle sends functions and classes by name. Those defined in an interactive session (a notebook, a prompt, ``-c``,
standard input) cannot be imported elsewhere, and lambdas and nested functions have no global name: cloudpickle, if
installed, sends these as code.
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
    """An object cannot be sent to another process; the message says why, and what helps."""


def serialize(what: str, things: Any) -> bytes:
    """Pickle ``things``, by name if possible, else as code.

    Args:
        what: names ``things`` in errors.
    """
    file = io.BytesIO()
    try:
        _ByName(file).dump(things)
    except Exception as error:  # whatever the pickling of foreign objects raises
        return _by_code(what, things, error)
    return file.getvalue()


def deserialize(serialized: bytes) -> Any:
    return pickle.loads(serialized)


def interactive_sources() -> Sources:
    """Return the source lines typed in an interactive session, for tracebacks in other processes."""
    # Entries of files have a modification time.
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def add_sources(sources: Sources) -> None:
    """Make ``sources`` available to this process's tracebacks."""
    linecache.cache.update(sources)


class _InteractiveError(pickle.PicklingError):
    """An object has a name that another process cannot import."""


class _ByName(pickle.Pickler):
    """Pickler that refuses functions and classes of an interactive session."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._interactive = _is_interactive()

    def reducer_override(self, obj: Any) -> Any:
        if self._interactive and isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise _InteractiveError(f"{obj.__qualname__!r} is defined in an interactive session")
        return NotImplemented


def _is_interactive() -> bool:
    """Return whether ``__main__`` may hold objects that a rank cannot import from its file."""
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
