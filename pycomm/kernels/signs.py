"""One bit per element. Contract: csrc/kernels/signs.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm import checks
from pycomm.kernels.arrays import Scratch, empty, look, num_threads


def sign_words(count: int) -> int:
    """Return how many int32 words the signs of ``count`` elements take."""
    return -(-checks.count("count", count, 0) // 32)


def pack_signs(x: Any, magnitude: Any, out: Any | None = None, *, remainder: Any | None = None) -> Any:
    """Pack the sign bits of ``x`` (float32), 32 to an int32 word.

    Args:
        magnitude: array of one float32: the magnitude that each sign stands for.
        out: ``sign_words(len(x))`` int32 words to write to.
        remainder: float32 array, which may be ``x`` itself, to write ``x - sign(x) * magnitude`` to.

    Raises:
        TypeError, ValueError: a wrong dtype or size.
    """
    if out is None:
        out = empty(x, (sign_words(look("x", x)[0]),), "int32")
    _native.pack_signs(x, magnitude, out, remainder, num_threads())
    return out


def unpack_signs(
    words: Sequence[Any], magnitudes: Sequence[Any], out: Any, scale: Any = 1.0, *, scratch: Scratch | None = None
) -> None:
    """Write the sum of several arrays of signs, each times its magnitude, times ``scale``, to ``out`` (float32).

    Raises:
        TypeError, ValueError: a wrong dtype or size.
    """
    _native.unpack_signs(words, magnitudes, out, scale, scratch, num_threads())
