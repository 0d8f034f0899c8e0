"""Methods by name: what ``compression`` of ``attach`` and of others may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycomm.compression import (
    BF16,
    DGC,
    FP8,
    FP16,
    QSGD,
    Compression,
    Int4,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    TernGrad,
)


def _auto() -> Compression:
    from pycomm.training.cost.auto import Auto

    return Auto()


_NAMED: Mapping[str, Callable[[], Compression]] = {
    "auto": _auto,
    **{kind.__name__.lower(): kind for kind in (FP16, BF16, FP8, Int8, Int4, OneBit, QSGD, TernGrad, PowerSGD, DGC)},
}
"""Methods that need no arguments."""


def refuse_local_norm(method: Compression, whose: str) -> None:
    """Raise ValueError if ``method`` clips a rank's whole gradient, which ``whose`` does not know before it sends."""
    if method.clip_local_norm is not None:
        raise ValueError(
            f"clip_local_norm={method.clip_local_norm} goes with pycomm.attach only: {whose} does not know the whole "
            "gradient before it sends; clip_norm clips each parameter's"
        )


def checked_method(compression: Any) -> Compression:
    """Return the method that ``compression`` means: an object, a name or ``None``."""
    if compression is None:
        return NoCompression()
    if isinstance(compression, str):
        if compression not in _NAMED:
            names = ", ".join(map(repr, _NAMED))
            raise ValueError(
                f"compression is {compression!r}, wanted one of {names}; an object such as pycomm.TopK(0.01); or None"
            )
        return _NAMED[compression]()
    if isinstance(compression, type) or not isinstance(compression, Compression):
        raise TypeError(f"compression is {compression!r}, wanted an object such as pycomm.TopK(0.01), a name or None")
    return compression
