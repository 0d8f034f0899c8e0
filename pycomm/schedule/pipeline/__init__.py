"""Pipelines as tables: generated, verified, priced, and exchanged with torch. Requires numpy only.

    table = pipeline.one_f_one_b(4, 16)                        # who does what, in which order
    proof = pipeline.verify(table)                             # everything once, in order, without a deadlock
    pipeline.simulate(table, forward=1.0, backward=2.0).bubble  # the fraction of time in which ranks idle

See docs/parallel.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pycomm.schedule.pipeline.build import dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from pycomm.schedule.pipeline.cells import from_csv, picture, to_csv
from pycomm.schedule.pipeline.simulate import Simulation, simulate
from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Action, Pipeline
from pycomm.schedule.pipeline.verify import Proof, verify
from pycomm.schedule.verify import ScheduleError

_MAKERS: dict[str, Callable[..., Pipeline]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
}

_PATTERN = re.compile(r"(\w+)(?:\(\s*([0-9]{1,9})\s*\))?")


def names() -> list[str]:
    """Return the names of the pipelines that :func:`by_name` knows."""
    return list(_MAKERS)


def by_name(schedule: str, ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline ``schedule``; the stages per rank of "interleaved" may follow: "interleaved(4)".

    Raises:
        ValueError: there is no such name, or the pipeline cannot be made of such sizes.
    """
    match = _PATTERN.fullmatch(schedule.strip()) if isinstance(schedule, str) else None
    if match is None or match[1] not in _MAKERS:
        raise ValueError(f"schedule is {schedule!r}, wanted one of {', '.join(_MAKERS)}")
    if match[2] is None:
        return _MAKERS[match[1]](ranks, microbatches)
    if match[1] != "interleaved":
        raise ValueError(f"schedule is {schedule!r}: {match[1]} takes no parameter")
    return interleaved(ranks, microbatches, int(match[2]))


__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "FORWARD",
    "WEIGHTS",
    "Action",
    "Pipeline",
    "Proof",
    "ScheduleError",
    "Simulation",
    "by_name",
    "dualpipe_v",
    "from_csv",
    "gpipe",
    "interleaved",
    "names",
    "one_f_one_b",
    "picture",
    "simulate",
    "to_csv",
    "verify",
    "zero_bubble_h1",
    "zero_bubble_v",
]
