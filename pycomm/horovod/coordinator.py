"""Agreement of ranks on the operations to run, by rounds in which each rank announces its requests.

A round is one all-gather of messages of a fixed size; over shared memory it takes a few microseconds. Messages name
known operations by numbers. New operations follow in a second all-gather, with name and signature. In Horovod one rank
collects all announcements and answers. Here every rank receives all of them, in the same rounds and order, and reaches
the same decisions on its own: nothing is sent back.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pycomm.collectives.communicator import Communicator
from pycomm.untrusted import ANYTHING, ListOf, parse

Key = tuple[str, int]
"""Name of an operation, and its number among those without a name of their own (0 if it has one)."""

ALLREDUCE = "allreduce"
ALLGATHER = "allgather"
BROADCAST = "broadcast"
ALLTOALL = "alltoall"
REDUCESCATTER = "reducescatter"
BARRIER = "barrier"
JOIN = "join"
REFUSED = "refused"
SIZES_DIFFER = (ALLGATHER, ALLTOALL)
"""Kinds whose tensors may differ in their first dimension from rank to rank."""


@dataclass(frozen=True)
class RequestTerms:
    """Terms of an operation that all ranks must have in common.

    Attributes:
        kind: one of the names above.
        op: name of the reduction, as ``Communicator`` calls it, or "adasum"; empty if nothing is reduced.
        root: rank within the process set that is broadcast from.
        prescale, postscale: factors before and after the reduction.
        detail: anything else that must be equal, as text.
    """

    kind: str
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    detail: str = ""

    def __str__(self) -> str:
        parts = [self.kind]
        if self.op:
            parts.append(f"op={self.op}")
        if self.kind == BROADCAST:
            parts.append(f"root={self.root}")
        if self.prescale != 1.0:
            parts.append(f"prescale_factor={self.prescale!r}")
        if self.postscale != 1.0:
            parts.append(f"postscale_factor={self.postscale!r}")
        if self.detail:
            parts.append(self.detail)
        return " ".join(parts)


@dataclass(eq=False)
class Request:
    """Request of this rank: one operation on one tensor, or on a group of them.

    Attributes:
        key: key by which the ranks match it.
        terms: settings that must be the same on all ranks.
        tensors: the inputs.
        outputs: tensors for the results; ``None`` before the run if their sizes depend on other ranks.
        signature: text that is equal on all ranks if their requests agree; built from the other attributes.
        splits: of an alltoall, number of rows for each rank.
        refusal: error of this rank, by which the others do not wait for it.
        ready: on GPUs, events after which the inputs are computed.
        parts: of an allgather, number of rows of each tensor from each rank.
        result: result in addition to the outputs.
        since: time of its creation, by ``time.monotonic()``.
    """

    key: Key
    terms: RequestTerms
    tensors: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    signature: str = ""
    splits: list[int] | None = None
    refusal: str = ""
    ready: list[Any] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.done, self.since = False, time.monotonic()
        self._ending = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()

        if self.refusal:
            self.signature = f"{REFUSED} {self.refusal}"
        else:
            forms = tuple((x.dtype, x.shape, x.device.type) for x in self.tensors)
            self.signature = _signature_of(self.terms, forms)

    def end(self, error: Exception | None = None) -> None:
        """Note that it has ended, and wake those that wait. Does nothing the second time."""
        with self._ending:
            if self.done:
                return
            self.error = error
            self.tensors = ()
            self.done = True
        self._gate.release()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end for at most ``seconds``; return whether it has ended."""
        if not self.done and self._gate.acquire(timeout=seconds):
            self._gate.release()  # for the next who waits
        return self.done


Form = tuple[torch.dtype, torch.Size, str]
"""Dtype, shape and kind of device of a tensor."""


@functools.lru_cache(maxsize=4096)
def _signature_of(terms: RequestTerms, forms: tuple[Form, ...]) -> str:
    return " ".join([str(terms), *(_described(form, terms.kind in SIZES_DIFFER) for form in forms)])


def _described(form: Form, free: bool) -> str:
    dtype, shape, device = form
    dims = list(map(str, shape))
    if free and dims:
        dims[0] = "*"
    where = "" if device == "cpu" else f"@{device}"
    return f"{str(dtype)[6:]}{where}[{','.join(dims)}]"


@functools.lru_cache(maxsize=1024)
def terms_of(kind: str, op: str, before: float, after: float, detail: str = "") -> RequestTerms:
    """Return the terms of a reduction."""
    return RequestTerms(kind, op, 0, before, after, detail)


def zeros_for(signature: str) -> list[torch.Tensor]:
    """Return the zeros that a joined rank contributes to an allreduce with this ``signature``."""
    made = []
    for word in signature.split(" "):
        if word.endswith("]") and "=" not in word:
            head, dims = word[:-1].split("[")
            dtype = getattr(torch, head.split("@")[0])
            made.append(torch.zeros([int(d) for d in dims.split(",") if d], dtype=dtype))
    return made


def kind_of(signature: str) -> str:
    """Return the kind of operation that ``signature`` is of."""
    return signature.split(" ", 1)[0]


def op_of(signature: str) -> str:
    """Return the reduction of ``signature``; empty if it has none."""
    return next((word[3:] for word in signature.split(" ") if word.startswith("op=")), "")


_MOST_KNOWN = 4096
_SUMS = ("sum", "mean")
_NOT_PLAIN = (JOIN, REFUSED)
_LONGEST = 400  # characters of a signature in a message
_WORDS = 256
_HEAD = 2  # words: how many numbers follow, and how many bytes of JSON
_MOST = (_WORDS - _HEAD) // 2
_MOST_NEW = 512
_NEW = ListOf(ANYTHING, 3)

New = list[tuple[str, int, str]]


@dataclass
class Response:
    """Operation to run: all ranks have announced it or joined.

    Attributes:
        key: its name and number.
        signature: its signature, the same on all ranks.
        error: why no rank runs it; empty if all do.
        absent: ranks that have joined, and contribute zeros.
        last: of a join, the rank that came last.
    """

    key: Key
    signature: str
    error: str = ""
    absent: tuple[int, ...] = ()
    last: int = -1


class Coordinator:
    """Coordinator of ``size`` ranks. Its whole state, including numbers of names, follows from the announcements."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._known: dict[int, tuple[str, str]] = {}
        self._next = 0
        self._pending: dict[Key, dict[int, str]] = {}  # signatures by rank
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
        """Forget the least recently used names that are not pending.

        Only at the end of a round, as ranks announce by number what was known at its beginning.
        """
        if len(self._numbers) <= _MOST_KNOWN:
            return
        pending = {name for name, _ in self._pending}
        for known, number in list(self._numbers.items()):
            if len(self._numbers) <= _MOST_KNOWN:
                return
            if known[0] in pending:
                self._numbers.move_to_end(known)  # so that later rounds do not check it again
            else:
                del self._numbers[known], self._known[number]

    def agreed(self, numbers: Sequence[int], counts: Sequence[int]) -> list[Response] | None:
        """Return the responses if all ranks have announced the same and nothing else is pending; else ``None``."""
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
        pending = self._pending.setdefault(key, {})
        pending[rank] = signature
        if kind_of(signature) == JOIN:
            self._joined[rank] = key
            self._last = rank
        elif self._is_complete(pending):
            self._complete.append(key)

    def responses(self) -> list[Response]:
        """End a round: return the operations to run now, in the same order on all ranks."""
        keys, self._complete = self._complete, []
        everybody = len(self._joined) == self._size
        if self._joined:
            keys = [key for key, pending in self._pending.items() if self._is_complete(pending)]
            keys.sort(key=lambda key: key in self._joined.values())  # operations first, then the join itself
        responses = [self._respond(key) for key in keys]
        if everybody:
            self._joined.clear()
        self._forget_oldest()
        return responses

    def waiting(self) -> dict[Key, list[int]]:
        """Return the ranks that each pending operation waits for. On any thread."""
        return {
            key: [rank for rank in range(self._size) if rank not in pending and rank not in self._joined]
            for key, pending in list(self._pending.items())
        }

    def _is_complete(self, pending: dict[int, str]) -> bool:
        there = len(pending)
        if there == self._size or not self._joined:
            return there == self._size
        if any(kind_of(signature) == JOIN for signature in pending.values()):
            return False
        return all(rank in pending or rank in self._joined for rank in range(self._size))

    def _respond(self, key: Key) -> Response:
        signatures = self._pending.pop(key)
        first = signatures[min(signatures)]
        absent = tuple(rank for rank in range(self._size) if rank not in signatures)
        error = _difference(key, signatures) or (_unjoinable(key, first, absent) if absent else "")
        if error:  # of a join: nobody has joined
            self._joined = {rank: joined for rank, joined in self._joined.items() if joined != key}
        return Response(key, first, error, absent, self._last if kind_of(first) == JOIN else -1)


def full_name(key: Key) -> str:
    """Return the name of an operation for messages."""
    name, count = key
    return f"{name}.{count}" if count else name


def _difference(key: Key, signatures: dict[int, str]) -> str:
    """Return the error in the ranks' announcements; empty if there is none."""
    ranks = sorted(signatures)
    first = signatures[ranks[0]]
    for rank in ranks:
        if kind_of(signatures[rank]) == REFUSED:
            return f"{full_name(key)}: rank {rank} {signatures[rank].split(' ', 1)[1]}"
    for rank in ranks:
        if signatures[rank] != first:
            mine, theirs = _shortened(signatures[rank], first)
            return f"{full_name(key)}: the ranks disagree: {mine!r} on rank {rank}, {theirs!r} on rank {ranks[0]}"
    return ""


def _shortened(one: str, other: str) -> tuple[str, str]:
    """Return both signatures, without the words that they have in common if they are long."""
    if max(len(one), len(other)) > _LONGEST:
        mine, theirs = one.split(" "), other.split(" ")
        one, other = (" ".join(x for x in a if x not in b) for a, b in ((mine, set(theirs)), (theirs, set(mine))))
    return one[:_LONGEST], other[:_LONGEST]


def _unjoinable(key: Key, signature: str, absent: tuple[int, ...]) -> str:
    """Return why ranks that have joined cannot be left out; empty if they can."""
    if kind_of(signature) == ALLREDUCE and op_of(signature) in _SUMS:
        return ""
    return (
        f"{full_name(key)}: rank {absent[0]} has called join(), and contributes zeros to an allreduce by Sum or "
        f"Average only, which this is not: {signature[:_LONGEST]!r}"
    )


class Rounds:
    """Rounds of the ranks of ``communicator``, which nothing else uses meanwhile."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._transport, self._timeout = communicator.channel.transport, communicator.channel.timeout
        self.coordinator = Coordinator(communicator.size)
        self._mine = np.zeros(_WORDS, np.uint32)
        self._all = np.zeros(_WORDS * communicator.size, np.uint32)
        self._words, self._read = memoryview(self._mine.data), memoryview(self._all.data)
        self._sent, self._heard = self._words.cast("B"), self._read.cast("B")
        self._starts = range(0, len(self._heard), 4 * _WORDS)

    def run(self, fresh: deque[Request]) -> tuple[list[Response], bool]:
        """Announce the ``fresh`` requests; return the responses, and whether any rank announced something.

        Collective. Removes the announced requests; what exceeds the message remains for the next round.
        """
        new: New = []
        text = self._write(fresh, new)
        self._transport.all_gather(self._all, self._mine, self._timeout)
        if not text and (agreed := self._agreed()) is not None:
            return agreed, True
        heads = [(self._read[at], self._read[at + 1]) for at in range(0, len(self._read), _WORDS)]
        texts = self._exchange(text, max(length for _, length in heads)) if any(length for _, length in heads) else []
        for rank, (count, length) in enumerate(heads):
            begin = rank * _WORDS + _HEAD
            for at in range(begin, begin + 2 * count, 2):
                self.coordinator.announce(rank, self._read[at], self._read[at + 1])
            new_ones = parse(texts[rank][:length], ListOf(_NEW), f"the requests of rank {rank}") if length else []
            for name, number, signature in new_ones:
                self.coordinator.announce_new(rank, name, number, signature)
                self.coordinator.register(name, signature)
        return self.coordinator.responses(), any(count or length for count, length in heads)

    def _agreed(self) -> list[Response] | None:
        """Return the responses if all ranks have announced the same known operations; else ``None``."""
        end = _HEAD + 2 * self._words[0]
        if end == _HEAD:
            return None
        mine = self._sent[: 4 * end]
        for start in self._starts:
            if self._heard[start : start + 4 * end] != mine:
                return None
        words = self._words[_HEAD:end].tolist()
        return self.coordinator.agreed(words[::2], words[1::2])

    def _write(self, fresh: deque[Request], new: New) -> bytes:
        words, at = self._words, _HEAD
        while fresh and len(new) < _MOST_NEW and at < _HEAD + 2 * _MOST:
            request = fresh.popleft()
            name, count = request.key
            number = self.coordinator.number_of(name, request.signature)
            if number is None:
                new.append((name, count, request.signature))
            else:
                words[at], words[at + 1] = number, count
                at += 2
        text = json.dumps(new).encode() if new else b""
        words[0], words[1] = (at - _HEAD) // 2, len(text)
        return text

    def _exchange(self, text: bytes, longest: int) -> list[bytes]:
        padded = np.zeros(longest, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        everyones = np.empty((self._communicator.size, longest), np.uint8)
        self._transport.all_gather(everyones, padded, self._timeout)
        return [row.tobytes() for row in everyones]
