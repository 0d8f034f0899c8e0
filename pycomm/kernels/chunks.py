"""The largest elements of every chunk, with a few bits each. Contract: csrc/kernels/chunks.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm.checks import instance
from pycomm.kernels.accumulate import Decay, Momentum, arguments_of
from pycomm.kernels.arrays import Scratch, empty, look, num_threads


@dataclass(frozen=True)
class Chunks:
    """Format of the ``k`` largest elements of every ``chunk`` elements, in int32 words.

    Attributes:
        k: entries of a chunk, at most ``chunk``; a shorter last chunk has at most all of its elements.
        chunk: elements of a chunk, a power of two up to 65536.
        bits: size of a value, 2, 4 or 8: a sign and a level.
    """

    k: int
    chunk: int = 4096
    bits: int = 2

    def num_words(self, count: int) -> int:
        """Return how many int32 words ``count`` elements take.

        A chunk of n elements, of which k are sent, takes 32 + k + floor((n - 1) / 2**low) + 1 + k (low + bits) bits,
        rounded up to words, with low = floor(lg(n / k)), or 0 where n < 2 k.
        """
        return _native.chunk_words(self.k, self.chunk, self.bits, count)


def pack_chunks(
    x: Any, config: Chunks, out: Any | None = None, *, remainder: Any | None = None, decay: float = 1.0
) -> Any:
    """Pack the largest elements of every chunk of ``x`` (float32): exact selection, ties to the lowest index.

    Args:
        config: see :class:`Chunks`.
        out: ``config.num_words(len(x))`` int32 words to write to.
        remainder: float32 array, which may be ``x`` itself: receives what was not packed, times ``decay``.

    Raises:
        TypeError, ValueError: a wrong dtype or size, settings out of range.
    """
    instance("config", config, Chunks)
    if out is None:
        out = empty(x, (config.num_words(look("x", x)[0]),), "int32")
    _native.pack_chunks(x, config.k, config.chunk, config.bits, out, remainder, decay, num_threads())
    return out


def accumulate_chunks(
    acc: Any,
    residual: Any | None,
    grads: Sequence[Any],
    scale: Any,
    config: Chunks,
    out: Any,
    *,
    packing_decay: float = 1.0,
    clip: float | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    scratch: Scratch | None = None,
) -> Any:
    """Do what :func:`accumulate` does, and then :func:`pack_chunks` with ``acc`` as ``x`` and remainder.

    On a CPU in one pass.

    Args:
        acc, residual, grads, scale, clip, momentum, decay: as for :func:`accumulate`; ``acc`` is float32.
        config, out: as for :func:`pack_chunks`. packing_decay: its ``decay``.

    Returns:
        As :func:`accumulate`.

    Raises:
        TypeError, ValueError: as :func:`accumulate` and :func:`pack_chunks`.
    """
    instance("config", config, Chunks)
    finite = empty(acc, (len(grads),), "bool")
    terms = arguments_of(clip, acc, residual, momentum, decay, finite, scale)
    _native.accumulate_chunks(
        *(grads, terms, config.k, config.chunk, config.bits, out, packing_decay, scratch, num_threads())
    )
    return finite


def unpack_chunks(
    words: Sequence[Any], config: Chunks, out: Any, scale: Any = 1.0, *, scratch: Scratch | None = None
) -> None:
    """Write the sum of several arrays from :func:`pack_chunks`, times ``scale``, to ``out`` (float32).

    Raises:
        TypeError, ValueError: as :func:`pack_chunks`; or :func:`pack_chunks` cannot have made the words, which may be
            found when ``out`` has been overwritten. On a GPU a later call of any kernel raises that error.
    """
    instance("config", config, Chunks)
    _native.unpack_chunks(words, config.k, config.chunk, config.bits, out, scale, scratch, num_threads())
