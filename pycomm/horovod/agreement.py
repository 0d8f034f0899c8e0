"""Agreement of the ranks of a process set on calls that are more than one operation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pycomm.errors import attempt, text_of
from pycomm.horovod.errors import InvalidRequestError
from pycomm.horovod.handles import single
from pycomm.horovod.operations import submit_allgather, waited
from pycomm.horovod.process_sets import ProcessSet

T = TypeVar("T")


def agreed(
    outcome: T | Exception, what: str, process_set: ProcessSet, lines: Callable[[T], Sequence[str]] = lambda _: ()
) -> T:
    """Return this rank's outcome if every rank of ``process_set`` succeeded, with the same ``lines``. Collective.

    Args:
        outcome: the result of this rank, or its error.
        what: name of the call.
        process_set: the ranks.
        lines: description of the result, which must be the same on all ranks.

    Raises:
        InvalidRequestError: on every rank: another rank had an error, or another description, of which the first line
            that differs is named. This rank's own error is raised as it is.
    """
    own = outcome if isinstance(outcome, Exception) else attempt(lambda: list(lines(outcome)))
    said = [text_of(own), []] if isinstance(own, Exception) else ["", own]
    mine = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    request = waited(submit_allgather([mine], f"agreement on {what}", process_set, wake=False))
    everyone = [json.loads(part.numpy().tobytes()) for part in torch.split(single(request), request.parts[0])]
    if isinstance(outcome, Exception):
        raise outcome
    if isinstance(own, Exception):
        raise own
    for rank, (problem, _) in enumerate(everyone):
        if problem:
            raise InvalidRequestError(f"{what}: rank {rank} of the set cannot take part: {problem}")
    for rank, (_, theirs) in enumerate(everyone):
        if theirs != everyone[0][1]:
            pairs = zip(everyone[0][1], theirs, strict=False)
            first, other = next(((a, b) for a, b in pairs if a != b), ("fewer or more", "of them"))
            raise InvalidRequestError(
                f"{what}: the ranks disagree: {other!r} on rank {rank} of the set, {first!r} on rank 0 of it"
            )
    return outcome
