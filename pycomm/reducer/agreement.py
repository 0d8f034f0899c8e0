"""Agreement of the ranks on whether all of them can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pycomm.communicator import Communicator
from pycomm.errors import CommError, text_of

_T = TypeVar("_T")


def attempted(call: Callable[[], _T]) -> _T | Exception:
    """Return what ``call`` returns or raises, for :func:`agreed`."""
    try:
        return call()
    except Exception as error:  # what users pass may raise anything
        return error


def agreed(communicator: Communicator, outcome: _T | Exception, what: str = "attach") -> _T:
    """Return this rank's outcome if every rank succeeded; otherwise raise its error, or quote another rank's.

    Args:
        communicator: the ranks to ask. Collective.
        outcome: the result of this rank, or its error.
        what: verb for the message about another rank, which "could not" do it.
    """
    if isinstance(outcome, CommError):
        raise outcome  # the other ranks cannot be told
    problem = text_of(outcome) if isinstance(outcome, Exception) else ""
    problems = [text.decode() for text in communicator.channel.all_gather_bytes(problem.encode())]
    if isinstance(outcome, Exception):
        raise outcome
    for rank, text in enumerate(problems):
        if text:
            raise ValueError(f"rank {rank} could not {what}: {text}")
    return outcome
