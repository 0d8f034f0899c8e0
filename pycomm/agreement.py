"""Agreement of ranks: all of them go on, or all raise.

What ranks do together begins with one small message of each: what came of its own part, a result or an error, and what
has to be the same on all. Every rank reads all messages and comes to the same verdict: its own error if it has one,
else the first rank's that failed, else the first difference. Nothing else has been sent by then, so that the next call
works.

Messages travel over whatever the ranks have in common: a channel, a process group, a store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from pycomm.errors import CommError, attempt, text_of
from pycomm.untrusted import ANYTHING, parse

T = TypeVar("T")

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns what every rank passes, in rank order. Collective."""

Lines = Mapping[str, Sequence[str]]
"""Text that has to be the same on all ranks, line by line; the keys, such as "setting", name a line in errors."""

_MESSAGE = {"problem": str, "kind": str, "told": ANYTHING}
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, OSError, RuntimeError, TypeError, ValueError)
}


@dataclass(frozen=True)
class Words:
    """Words in which ranks learn of each other's errors and differences.

    Attributes:
        failed: says that ``{rank}`` could not do ``{what}`` because of a ``{problem}``.
        differ: says that line ``{index}`` of the ``{kind}`` is ``{here!r}`` on ``{rank}``, ``{there!r}`` on rank 0.
        error: class of these errors.
        keeps_kind: whether another rank's error is quoted in one of the same kind (OSError, say).
        tells_lost: whether a CommError is told as well. It cannot be where ranks gather by what has failed.
    """

    failed: str = "rank {rank} could not {what}: {problem}"
    differ: str = "the ranks disagree: {kind} {index} is {here!r} on rank {rank}, {there!r} on rank 0"
    error: type[Exception] = ValueError
    keeps_kind: bool = False
    tells_lost: bool = False


def agreed(
    gather: Gather,
    outcome: T | Exception,
    what: str = "attach",
    lines: Callable[[T], Lines] = lambda _: {},
    words: Words = Words(),  # frozen
) -> T:
    """Return this rank's outcome if every rank succeeded, with the same lines. Collective.

    Args:
        gather: the ranks.
        outcome: the result of this rank, or its error: see :func:`pycomm.errors.attempt`.
        what: verb for the message about another rank, which "could not" do it.
        lines: returns what the result must have in common with those of the other ranks.
        words: of the errors.

    Raises:
        Exception: this rank's own error.
        ValueError: another rank has an error, or other lines, of which the first that differs is named. On every rank.
    """
    require_same(exchanged(gather, outcome, what, lines, words), what, words)
    assert not isinstance(outcome, Exception)
    return outcome


def exchanged(
    gather: Gather,
    outcome: T | Exception,
    what: str,
    tell: Callable[[T], Any] = lambda outcome: outcome,
    words: Words = Words(),  # frozen
) -> list[Any]:
    """Return what ``tell`` makes of every rank's outcome, which travels as JSON, if every rank succeeded. Collective.

    Arguments and errors are those of :func:`agreed`.
    """
    told = outcome if isinstance(outcome, Exception) else attempt(lambda: tell(outcome))
    if isinstance(told, CommError) and not words.tells_lost:
        raise told  # the other ranks cannot be told
    if isinstance(told, Exception):
        mine = {"problem": text_of(told), "kind": _kind_of(told), "told": None}
    else:
        mine = {"problem": "", "kind": "", "told": told}
    messages = gather(json.dumps(mine).encode())
    if isinstance(told, Exception):
        raise told
    return results_in(messages, what, words)


def results_in(messages: Sequence[bytes], what: str, words: Words = Words()) -> list[Any]:
    """Return what every rank has told in ``messages``, those of :func:`exchanged`; raise an error if one has failed."""
    everyones = [parse(text, _MESSAGE, f"what rank {rank} has told") for rank, text in enumerate(messages)]
    for rank, message in enumerate(everyones):
        if message["kind"]:
            kind = _KINDS.get(message["kind"], RuntimeError) if words.keeps_kind else words.error
            raise kind(words.failed.format(rank=rank, what=what, problem=message["problem"]))
    return [message["told"] for message in everyones]


def require_same(everyones: Sequence[Lines], what: str, words: Words = Words(), hint: str = "") -> None:
    """Raise an error that names the first line in which a rank differs from rank 0, with a ``hint``, if one does."""
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
    everyones = exchanged(gather, {kind: list(lines)}, "compare")
    require_same(everyones, "compare", hint=hint)


def rows_of_all(
    gather: Callable[[list[int]], Sequence[Sequence[int]]],
    outcome: Sequence[int] | Exception,
    width: int,
    same: str,
    disagree: Callable[[], object],
) -> list[list[int]]:
    """Return the numbers of every rank: one message of a fixed size, unless ranks disagree. Collective.

    Args:
        gather: returns the row of every rank, all of ``1 + width`` numbers of 64 bits.
        outcome: numbers of this rank, at most ``width``, or its error.
        width: length of every rank's row, which is filled up with zeros.
        same: text that must be the same on all ranks; only its digest travels.
        disagree: called on all ranks if one has an error or another text; exchanges the words, and raises.
    """
    row = [0] * (1 + width)
    if not isinstance(outcome, Exception):
        row[: 1 + len(outcome)] = [_digest(same), *outcome]
    rows = gather(row)
    if any(each[0] != rows[0][0] or each[0] == 0 for each in rows):
        disagree()
    return [list(each[1:]) for each in rows]


def prepared(prepare: Callable[[], T], refuse: Callable[[str], object]) -> T:
    """Return the result of ``prepare``; if it raises, first ``refuse`` the operation that other ranks call with it."""
    try:
        return prepare()
    except Exception as error:  # torch raises anything
        refuse(str(error) or type(error).__name__)
        raise


def _digest(text: str) -> int:
    """Return 64 bits of a hash, with a sign, that are not 0."""
    found = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True) | 1


def _kind_of(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
