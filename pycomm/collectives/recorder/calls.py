"""Lines of the script that operations belong to, for errors: ``if rank == 0: pycomm.save(...)`` is named with its line.

Nothing is noted before there is an error. Of one that all ranks have, they tell each other where their scripts are.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import pycomm._native as _native
from pycomm.collectives.recorder.dump import frame_of_script
from pycomm.errors import CommError
from pycomm.untrusted import one_line

_PATIENCE = 10.0
_MOST_BYTES = 1 << 16
_LONGEST_FILE, _LONGEST_SOURCE = 200, 100
_OF_STEPS = ("", "backward", "forward", "step", "fit", "train")
"""Names of calls that all ranks make in each step."""
_DID_NOT_COME = ("timed out waiting", "it has ended its training", "it closed its communicator", "closed meanwhile")
"""Parts of errors about a rank that did something else."""


def add_calls(error: BaseException, transport: Any, all_gather: Callable[..., None]) -> None:
    """Add to ``error``, raised as ranks called different operations, each rank's call in its script and what it tells.

    Collective. ``all_gather``: the transport's own, unrecorded, so that the last recorded operation is the failed one.
    """
    name, place = present_call()
    lines = name, one_line(f"{f'in {name}() ' if name else ''}at {place}"), transport.recorder.tells
    mine = "\n".join(lines).encode("utf-8", "replace")[:_MOST_BYTES]
    sizes = np.empty((transport.size, 1), np.int64)
    before, transport.skip_checks = transport.skip_checks, True  # all have this error, and do this next
    try:
        all_gather(sizes, np.array([len(mine)]), _PATIENCE)
        gathered = np.empty((transport.size, min(int(sizes.max()), _MOST_BYTES)), np.uint8)
        all_gather(gathered, np.frombuffer(mine.ljust(gathered.shape[1]), np.uint8), _PATIENCE)
    except CommError:
        return  # a rank was lost meanwhile
    finally:
        transport.skip_checks = before
    ranks: dict[tuple[str, str], list[int]] = {}
    rows = [f"{row.tobytes().decode('utf-8', 'replace').rstrip(' ')}\n\n".split("\n") for row in gathered]
    vars(error)["told"] = [row[2] for row in rows]
    for rank, (name, where, *_) in enumerate(rows):
        ranks.setdefault((one_line(name), one_line(where)), []).append(rank)
    if len(ranks) == 1:
        return
    called = {name for name, _ in ranks}
    lone = [name for name in called if name not in _OF_STEPS]
    what = f"call {lone[0]}()" if len(lone) == 1 < len(called) else "make the same calls, in the same order"
    places = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} {where}" for (_, where), of in ranks.items()]
    error.args = (f"{error}. All ranks must {what}. Where they are: {'; '.join(places)}",)


def add_call(error: CommError) -> None:
    """Add this rank's call to ``error``, about a rank that did not come, if perhaps only some ranks made the call."""
    name, place = present_call()
    if any(what in str(error) for what in _DID_NOT_COME) and name not in (*_OF_STEPS, error.operation):
        error.args = (f"{error}. All ranks must call {name}(), as this one does at {place}",)


def present_call() -> tuple[str, str]:
    """Return what the script has called on this thread, "" if that is not known, and the place of that call.

    On a thread of pycomm's it is the call that gave it the job.
    """
    mine, line = _call_in(sys._getframe()), _native.line_of_caller()
    if mine is not None or line is None:
        return mine or ("", "a line that is not known")
    place, source = _place(*line[:2]), linecache.getline(*line[:2]).strip()[:_LONGEST_SOURCE]
    # It may wait for the job, or still be there. A list, as this frame would be among frames that it refers to.
    others = list(filter(None, map(_call_in, sys._current_frames().values())))
    return next((call for call in others if call[1] == place), ("", f"{place} (`{source}`)"))


def _call_in(frame: FrameType | None) -> tuple[str, str] | None:
    found, called = frame_of_script(frame)
    if found is None:
        return None
    file, number = found.f_code.co_filename, found.f_lineno
    source = linecache.getline(file, number)
    # The first of them, but for decorators, whose names are not in the line.
    named = [name for name in called if re.search(rf"\b{re.escape(name)}\s*\(", source)]
    name = (named or called or [""])[0]
    return "forward" if name.startswith("_") else name if name.isidentifier() else "", _place(file, number)


def _place(file: str, number: int) -> str:
    return f"{'...' if len(file) > _LONGEST_FILE else ''}{file[-_LONGEST_FILE:]}:{number}"
