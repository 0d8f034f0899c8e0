"""Methods by name: what ``compression`` of ``attach`` and of others may be."""

from __future__ import annotations

from typing import Any

from pycomm import compression as methods
from pycomm.compression.base import Compression
from pycomm.compression.dense import NoCompression

_NAMED = ("FP16", "BF16", "FP8", "Int8", "Int4", "OneBit", "QSGD", "TernGrad", "PowerSGD", "DGC")
"""Methods that need no arguments, in addition to "auto"."""


def _auto() -> Compression:
    from pycomm.training.cost.auto import Auto

    return Auto()


def refuse_local_norm(method: Compression, whose: str) -> None:
    """Raise ValueError if ``method`` clips a rank's whole gradient, which ``whose`` does not know before it sends."""
    if method.clip_local_norm is not None:
        raise ValueError(
            f"clip_local_norm={method.clip_local_norm} works with pycomm.attach only: {whose} does not know the whole "
            "gradient before it sends; clip_norm clips each parameter's"
        )


def checked_method(compression: Any) -> Compression:
    """Return the method that ``compression`` means: an object, a name or ``None``."""
    if compression is None:
        return NoCompression()
    if isinstance(compression, str):
        named = {"auto": "auto"} | {name.lower(): name for name in _NAMED}
        if compression not in named:
            names = ", ".join(map(repr, named))
            raise ValueError(
                f"compression is {compression!r}, wanted one of {names}; an object such as pycomm.TopK(0.01); or None"
            )
        made: Compression = _auto() if compression == "auto" else getattr(methods, named[compression])()
        return made
    if isinstance(compression, type) or not isinstance(compression, Compression):
        raise TypeError(f"compression is {compression!r}, wanted an object such as pycomm.TopK(0.01), a name or None")
    return compression
