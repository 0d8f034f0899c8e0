"""Bound of what is sent and not yet received."""

from __future__ import annotations

import os

import pycomm._native as _native

VARIABLE = "PYCOMM_BUFFER_BYTES"
_DEFAULT_BYTES = 1 << 30


def buffer_limit() -> int:
    """Return how many bytes a rank may buffer: what the environment says, else 1 GiB or a quarter of the memory.

    Raises:
        ValueError: the environment variable is no number of bytes.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(_DEFAULT_BYTES, _native.available_memory() // 4)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"the environment variable {VARIABLE} is {text!r}, wanted a number of bytes")
    return int(text)
