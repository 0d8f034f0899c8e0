"""Agreement of ranks: all of them continue, or all raise.

Every collective call begins with one small message from each rank: the result or error of its own preparation, and
what must be the same on all ranks. Every rank reads all messages and reaches the same verdict: its own error if it has
one, else the error of the first rank that failed, else the first difference. Nothing else has been sent by then, so
the next call works. The messages travel over a channel, a process group or a store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from pycomm.errors import CommError, attempt, text_of
from pycomm.untrusted import ANYTHING, escaped, parse

T = TypeVar("T")

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns the bytes that each rank passes, in rank order. Collective."""

Lines = Mapping[str, Sequence[str]]
"""Text that must be the same on all ranks, line by line; errors name a line by its key, such as "setting"."""

_MESSAGE = {"problem": str, "kind": str, "value": ANYTHING}
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, OSError, RuntimeError, TypeError, ValueError)
}


@dataclass(frozen=True)
class Words:
    """Format strings and type of the errors about other ranks.

    Attributes:
        failed: ``{rank}`` could not do ``{what}`` because of a ``{problem}``.
        differ: line ``{index}`` of the ``{kind}`` is ``{here!r}`` on ``{rank}``, ``{there!r}`` on rank 0.
        error: class of these errors.
        keeps_kind: whether an error about another rank has the type of that rank's own error (OSError, say).
        shares_lost: whether a CommError is shared too. It cannot be if it broke the link that the ranks gather over.
    """

    failed: str = "rank {rank} could not {what}: {problem}"
    differ: str = "the ranks disagree: {kind} {index} is {here!r} on rank {rank}, {there!r} on rank 0"
    error: type[Exception] = ValueError
    keeps_kind: bool = False
    shares_lost: bool = False


def agreed(
    gather: Gather,
    outcome: T | Exception,
    what: str = "attach",
    lines: Callable[[T], Lines] = lambda _: {},
    words: Words = Words(),  # frozen
) -> T:
    """Return this rank's outcome if every rank succeeded, with the same lines. Collective.

    Args:
        gather: gathers messages of these ranks.
        outcome: this rank's result or error: see :func:`pycomm.errors.attempt`.
        what: verb for the message about another rank, which "could not" do it.
        lines: returns the parts of the result that must be the same on all ranks.
        words: texts of the errors.

    Raises:
        Exception: this rank's own error.
        ValueError: on every rank: another rank failed, or the lines differ. Names the first difference.
    """
    require_same(exchanged(gather, outcome, what, lines, words), what, words)
    assert not isinstance(outcome, Exception)
    return outcome


def exchanged(
    gather: Gather,
    outcome: T | Exception,
    what: str,
    select: Callable[[T], Any] = lambda outcome: outcome,
    words: Words = Words(),  # frozen
) -> list[Any]:
    """Return ``select(outcome)`` of every rank, sent as JSON, if every rank succeeded. Collective.

    Arguments and errors are as for :func:`agreed`.
    """
    value = outcome if isinstance(outcome, Exception) else attempt(lambda: select(outcome))
    if isinstance(value, CommError) and not words.shares_lost:
        raise value  # there is no link left to share it over
    mine = {"problem": "", "kind": "", "value": value}
    if isinstance(value, Exception):
        kind = next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "RuntimeError")
        mine = {"problem": text_of(value), "kind": kind, "value": None}
    messages = gather(json.dumps(mine).encode())
    if isinstance(value, Exception):
        raise value
    return results_in(messages, what, words)


def results_in(messages: Sequence[bytes], what: str, words: Words = Words()) -> list[Any]:
    """Return the values in the ``messages`` of :func:`exchanged`; raise an error if a rank failed."""
    everyones = [parse(text, _MESSAGE, f"the message of rank {rank}") for rank, text in enumerate(messages)]
    for rank, message in enumerate(everyones):
        if message["kind"]:
            kind = _KINDS.get(message["kind"], RuntimeError) if words.keeps_kind else words.error
            raise kind(words.failed.format(rank=rank, what=what, problem=escaped(message["problem"])))
    return [message["value"] for message in everyones]


def require_same(everyones: Sequence[Lines], what: str, words: Words = Words(), hint: str = "") -> None:
    """Raise an error, with a ``hint``, if a rank's lines differ from rank 0's; the error names the first difference."""
    for kind in dict.fromkeys(kind for lines in everyones for kind in lines):
        first = everyones[0].get(kind, ())
        for rank, lines in enumerate(everyones):
            pairs = zip_longest(lines.get(kind, ()), first, fillvalue="nothing")
            for index, (here, there) in enumerate(pairs):
                if here != there:
                    found = {"kind": kind, "index": index, "here": here, "there": there}
                    raise words.error(words.differ.format(rank=rank, what=what, **found) + hint)


def check_same_lines(gather: Gather, lines: Sequence[str], kind: str, hint: str = "") -> None:
    """Raise ValueError on every rank if a rank's ``lines`` differ from rank 0's, naming the first one. Collective."""
    require_same(exchanged(gather, {kind: list(lines)}, "compare"), "compare", hint=hint)


def rows_of_all(
    gather: Callable[[list[int]], Sequence[Sequence[int]]],
    outcome: Sequence[int] | Exception,
    width: int,
    same: str,
    disagree: Callable[[], object],
) -> list[list[int]]:
    """Return the numbers of every rank: one message of a fixed size, unless ranks disagree. Collective.

    Args:
        gather: returns the row of every rank, each of ``1 + width`` 64-bit integers.
        outcome: this rank's numbers, at most ``width``, or its error.
        width: length of every rank's row, padded with zeros.
        same: text that must be the same on all ranks; only its digest is sent.
        disagree: called on all ranks if one has an error or another text; exchanges the texts, and raises.
    """
    row = [0] * (1 + width)
    if not isinstance(outcome, Exception):
        number = int.from_bytes(digest(same), "little", signed=True) | 1  # 0 is an error
        row[: 1 + len(outcome)] = [number, *outcome]
    rows = gather(row)
    if any(each[0] != rows[0][0] or each[0] == 0 for each in rows):
        disagree()
    return [list(each[1:]) for each in rows]


def prepared(prepare: Callable[[], T], refuse: Callable[[str], object]) -> T:
    """Return the result of ``prepare``; if it raises, first ``refuse`` the operation that the other ranks call."""
    try:
        return prepare()
    except Exception as error:  # torch raises anything
        refuse(str(error) or type(error).__name__)
        raise


def digest(text: str) -> bytes:
    """Return an eight-byte hash of ``text``."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
