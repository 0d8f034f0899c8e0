"""Coordinator: what all ranks have announced, and what of it can be done now.

Horovod has one rank that collects everybody's announcements and answers. Here every rank hears all announcements, in
the same rounds and order, and comes to the same answers by itself: nothing has to be sent back. All of its state, the
numbers of known names among it, follows from what it was told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pycomm.horovod.requests import ALLREDUCE, JOIN, REFUSED, Key, kind_of, op_of

_MOST_KNOWN = 4096
_SUMS = ("sum", "mean")
_NOT_PLAIN = (JOIN, REFUSED)
_LONGEST = 400  # characters of a signature in a message


@dataclass
class Pending:
    """Operation that some ranks have announced: their signatures by rank."""

    signatures: dict[int, str] = field(default_factory=dict)


@dataclass
class Response:
    """Operation that every rank has announced, or need not.

    Attributes:
        key: its name and number.
        signature: what the ranks have in common.
        error: why nobody does it; empty if all do.
        absent: ranks that have joined, and contribute zeros.
        last: of a join, the rank that came last.
    """

    key: Key
    signature: str
    error: str = ""
    absent: tuple[int, ...] = ()
    last: int = -1


class Coordinator:
    """Coordinator of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._known: dict[int, tuple[str, str]] = {}
        self._next = 0
        self._pending: dict[Key, Pending] = {}
        self._complete: list[Key] = []
        self._joined: dict[int, Key] = {}
        self._last = -1

    # Names that are known have numbers, by which they are announced.

    def number_of(self, name: str, signature: str) -> int | None:
        """Return the number of a name with this signature; ``None`` if it is not known."""
        return self._numbers.get((name, signature))

    def register(self, name: str, signature: str) -> int:
        """Return the number of a name with this signature, which it gets if it has none."""
        number = self._numbers.get((name, signature))
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[name, signature] = number
            self._known[number] = (name, signature)
        return number

    def _forget_oldest(self) -> None:
        """Forget the names that have not been asked for the longest, unless they are pending.

        At the end of a round only: what ranks have announced in it by number was known to them when it began.
        """
        if len(self._numbers) <= _MOST_KNOWN:
            return
        pending = {name for name, _ in self._pending}
        for known, number in list(self._numbers.items()):
            if len(self._numbers) <= _MOST_KNOWN:
                return
            if known[0] in pending:
                self._numbers.move_to_end(known)  # so that it is not looked at in every round
            else:
                del self._numbers[known], self._known[number]

    def agreed(self, numbers: Sequence[int], counts: Sequence[int]) -> list[Response] | None:
        """Return what can be done now, if all ranks have announced the same; ``None`` if it takes the whole way.

        The usual case, when nothing else is pending: no notes have to be taken.
        """
        if self._pending or self._joined:
            return None
        found = [self._known[number] for number in numbers]
        if any(signature.startswith(_NOT_PLAIN) for _, signature in found):
            return None
        for known in found:
            self._numbers.move_to_end(known)
        return [Response((name, count), text) for (name, text), count in zip(found, counts, strict=True)]

    # A round: announce() for every announcement, by rising rank, then responses().

    def announce(self, rank: int, number: int, count: int) -> None:
        """Note that ``rank`` announces the operation that is known by ``number``, the ``count``-th of its name."""
        known = self._known[number]
        self._numbers.move_to_end(known)
        self.announce_new(rank, known[0], count, known[1])

    def announce_new(self, rank: int, name: str, count: int, signature: str) -> None:
        """Note that ``rank`` announces an operation."""
        key = (name, count)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = Pending()
        pending.signatures[rank] = signature
        if kind_of(signature) == JOIN:
            self._joined[rank] = key
            self._last = rank
        elif self._is_complete(pending):
            self._complete.append(key)

    def responses(self) -> list[Response]:
        """End a round: return what can be done now, in the order in which all ranks do it."""
        responses = self._responses()
        self._forget_oldest()
        return responses

    def _responses(self) -> list[Response]:
        keys, self._complete = self._complete, []
        if self._joined:
            keys = [key for key, pending in self._pending.items() if self._is_complete(pending)]
            everybody = len(self._joined) == self._size
            keys.sort(key=lambda key: key in self._joined.values())  # operations first, then the join itself
            responses = [self._respond(key) for key in keys]
            if everybody:
                self._joined.clear()
            return responses
        return [self._respond(key) for key in keys]

    def waiting(self) -> dict[Key, list[int]]:
        """Return the ranks that each pending operation waits for. On any thread."""
        return {
            key: [rank for rank in range(self._size) if rank not in pending.signatures and rank not in self._joined]
            for key, pending in list(self._pending.items())
        }

    def _is_complete(self, pending: Pending) -> bool:
        there = len(pending.signatures)
        if there == self._size or not self._joined:
            return there == self._size
        if any(kind_of(signature) == JOIN for signature in pending.signatures.values()):
            return False
        return all(rank in pending.signatures or rank in self._joined for rank in range(self._size))

    def _respond(self, key: Key) -> Response:
        signatures = self._pending.pop(key).signatures
        first = signatures[min(signatures)]
        absent = tuple(rank for rank in range(self._size) if rank not in signatures)
        error = _difference(key, signatures) or (_unjoinable(key, first, absent) if absent else "")
        if error:  # of a join: nobody has joined
            self._joined = {rank: joined for rank, joined in self._joined.items() if joined != key}
        return Response(key, first, error, absent, self._last if kind_of(first) == JOIN else -1)


def full_name(key: Key) -> str:
    """Return the name of an operation for people."""
    name, count = key
    return f"{name}.{count}" if count else name


def _difference(key: Key, signatures: dict[int, str]) -> str:
    """Return what is wrong with what the ranks have announced; empty if nothing is."""
    ranks = sorted(signatures)
    first = signatures[ranks[0]]
    for rank in ranks:
        if kind_of(signatures[rank]) == REFUSED:
            return f"{full_name(key)}: rank {rank} {signatures[rank].split(' ', 1)[1]}"
    for rank in ranks:
        if signatures[rank] != first:
            mine, theirs = signatures[rank][:_LONGEST], first[:_LONGEST]
            return f"{full_name(key)}: the ranks disagree: {mine!r} on rank {rank}, {theirs!r} on rank {ranks[0]}"
    return ""


def _unjoinable(key: Key, signature: str, absent: tuple[int, ...]) -> str:
    """Return why ranks that have joined cannot be left out; empty if they can."""
    if kind_of(signature) == ALLREDUCE and op_of(signature) in _SUMS:
        return ""
    return (
        f"{full_name(key)}: rank {absent[0]} has called join(), and what it could contribute to an allreduce by Sum or "
        f"Average, zeros, means nothing to {signature[:_LONGEST]!r}"
    )
