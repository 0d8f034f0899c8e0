"""Messages of selected entries, one of each rank. Contract: csrc/kernels/entries.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm._native import EntryLayout
from pycomm.checks import instance, length, pair
from pycomm.kernels.arrays import Scratch, num_threads

__all__ = ["EntryLayout", "Gathered", "Taken", "add_entries", "pack_entries", "unpack_entries"]


@dataclass(frozen=True)
class Taken:
    """Arrays that a message of entries is made from, and arrays that change while it is made.

    Attributes:
        values, indices: the entries, as :func:`pycomm.kernels.sparsify` gives them.
        flat: the sums that they were taken from; at the indices it receives the rounding error, or 0.
        finite: for each parameter, whether its sums are finite.
        largest: the largest magnitude of ``values``, one float32; needed where they are sent as float16.
        velocity: set to 0 at the indices; ``None``: there is none.
        keeps: for each entry, whether its velocity stays; ``None``: no entry's does.
        fingerprint: bits that are sent with the codes; ``None`` stands for zeros.
    """

    values: Any
    indices: Any
    flat: Any
    finite: Any
    largest: Any | None = None
    velocity: Any | None = None
    keeps: Any | None = None
    fingerprint: Any | None = None


@dataclass(frozen=True)
class Gathered:
    """Messages of all ranks, and what :func:`unpack_entries` reads from them.

    Attributes:
        messages: uint8, ``layout.num_bytes`` of each rank.
        indices: int32, ``layout.count`` of each rank.
        verdict: uint8; ``layout.verdict_places`` gives the offsets of its parts, and its size.
    """

    layout: EntryLayout
    num_ranks: int
    messages: Any
    indices: Any
    verdict: Any


def pack_entries(message: Any, taken: Taken, gathered: Gathered) -> None:
    """Write this rank's ``message``, remove its entries from the sums, and prepare ``gathered`` to receive all ranks'.

    Raises:
        TypeError, ValueError: dtypes or sizes do not match, or the indices do not ascend; on a GPU the
            latter is raised by a later call.
    """
    instance("taken", taken, Taken)
    instance("gathered", gathered, Gathered)
    t = taken
    _native.pack_entries(
        gathered.layout,
        message,
        gathered.verdict,
        gathered.num_ranks,
        t.values,
        t.indices,
        t.largest,
        t.flat,
        t.velocity,
        t.keeps,
        t.finite,
        t.fingerprint,
    )


def unpack_entries(gathered: Gathered, factor: Any, most: float, *, scratch: Scratch | None = None) -> None:
    """Unpack the indices in ``gathered.messages``, and write the verdict on the step.

    The step is finite if all ranks say so and the sum over the ranks of their largest magnitudes, times
    ``factor`` (a number or one float32), is at most ``most``.

    Raises:
        TypeError, ValueError: sizes do not match, or ``messages`` holds something else; on a GPU the latter
            is raised by a later call.
    """
    instance("gathered", gathered, Gathered)
    g = gathered
    _native.unpack_entries(g.layout, g.messages, g.num_ranks, factor, most, g.indices, g.verdict, scratch)


def add_entries(
    gathered: Gathered,
    factor: Any,
    out: Any,
    states: Sequence[tuple[Any, Any]] = (),
    *,
    finite: Any | None = None,
    used: Any | None = None,
    ends: Any | None = None,
    last_sources: Any | None = None,
) -> None:
    """Write the sum over the ranks of their entries, times ``factor``, to ``out``, in the order of the ranks.

    Args:
        out: floating array of ``layout.limit`` elements.
        states: at most two pairs ``(now, before)`` of arrays of sums; ``before`` may be ``out``.
        finite: one bool, whether the step is finite on all ranks and in all buckets; ``None``: it is. If it
            is not, the states are restored from ``before``, and ``out`` is NaN wherever an entry was sent.
        used: for each parameter, whether its change of state stays; ``None``: all do.
        ends: int64, where each parameter ends in ``out``; required with ``used``.
        last_sources: int64, one for each rank: receives the verdict's sources if the step is not finite.

    Raises:
        TypeError, ValueError: dtypes or sizes do not match, or :func:`unpack_entries` cannot have written
            the indices in ``gathered``; on a GPU the latter is raised by a later call.
    """
    instance("gathered", gathered, Gathered)
    length("states", states)
    g = gathered
    _native.add_entries(
        g.layout,
        g.messages,
        g.num_ranks,
        g.indices,
        factor,
        out,
        [pair("states", state, "as it is, and as it was") for state in states],
        finite,
        used,
        ends,
        last_sources,
        g.verdict,
        num_threads(),
    )
