"""Messages of selected entries, one of each rank. Contract: csrc/kernels/entries.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm._native import EntryLayout
from pycomm.checks import instance, length, pair
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads

__all__ = ["EntryLayout", "Gathered", "Taken", "add_entries", "pack_entries", "unpack_entries"]


@dataclass(frozen=True)
class Taken:
    """Arrays that a message of entries is made of, and those that change when it is.

    Attributes:
        values, indices: the entries, as :func:`pycomm.kernels.sparsify` gives them.
        flat: the sums that they were taken from; gets what is left there: the rounding error, or 0.
        finite: for each parameter, whether its sums are finite.
        largest: the largest magnitude of ``values``, one float32; needed where they are sent as float16.
        velocity: gets 0 at the indices; ``None``: there is none.
        keeps: for each entry, whether its velocity stays; ``None``: no entry's does.
        fingerprint: bits that travel with the codes; ``None`` stands for zeros.
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
    """Messages of all ranks, and what :func:`unpack_entries` finds in them.

    Attributes:
        messages: uint8, ``layout.num_bytes`` of each rank.
        indices: int32, ``layout.count`` of each rank.
        verdict: uint8; ``layout.verdict_places`` says where what lies in it, and how many bytes it has.
    """

    layout: EntryLayout
    num_ranks: int
    messages: Any
    indices: Any
    verdict: Any


def pack_entries(message: Any, taken: Taken, gathered: Gathered) -> None:
    """Write this rank's ``message``, take what it holds out of the sums, and prepare ``gathered`` for the others'.

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
        TypeError, ValueError: sizes do not match, or the messages are none; on a GPU the latter is raised
            by a later call.
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
        finite: one bool, whether the step is finite on all ranks and in all buckets: if not, the state of
            before is put back, and what was sent comes out as NaN. ``None``: it is.
        used: for each parameter, whether its change of state stays; ``None``: all do.
        ends: int64, where each parameter ends in ``out``; needed with ``used``.
        last_sources: int64, one for each rank: becomes the verdict's if the step is not finite.

    Raises:
        TypeError, ValueError: dtypes or sizes do not match, or the indices in ``gathered`` are none that
            :func:`unpack_entries` writes; on a GPU the latter is raised by a later call.
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
