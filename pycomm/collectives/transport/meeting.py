"""Meeting of the ranks of a group through the group's store.

Every rank stores its greeting, or the error in its arguments, under one key. A rank that has read all greetings
confirms that under a name derived from all of them, so the ranks continue only if they have read the same greetings. A
rank that fails, or tries again, replaces its greeting; waiting ranks notice. Attempts are not counted: each one starts
afresh.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pycomm.collectives.transport import late_ranks
from pycomm.collectives.transport.board import Board, StoreError
from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store
from pycomm.untrusted import escaped, parse, require

_SLOWEST_POLL = 0.2  # seconds
_SLOWEST_ANSWER = 2.0  # seconds that the store gets to answer even after the deadline
_LATE_REPORT = 1.0  # seconds by which the reason of a failure may arrive later than its consequences
_STRANGERS_AFTER = 3.0  # seconds of waiting after which to ask whether a rank is doing something else
_LONGEST_REASON = 2000  # characters
_LONGEST_GREETING = 1 << 16  # bytes
_GREETING = {"nonce": str, "problem?": str, "no_memory?": str}
_NO_GREETING = "-"  # once all have read it; without libuv, torch's store takes 0.2 s to give out an empty value

T = TypeVar("T")


class Meeting:
    """Attempt to bring ``size`` ranks together through ``store`` within ``timeout`` seconds.

    Args:
        stranger: returns why a late rank will never arrive, if the store shows that.
        lost: returns the fate of a rank known not to arrive.

    Attributes:
        name: name of this attempt, set once :meth:`greet` has returned; unique in the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        stranger: Callable[[int], str | None] | None = None,
        lost: Callable[[int], str | None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = ""
        self._store = PrefixStore("pycomm", store)
        self._stranger, self._lost = stranger, lost
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._over: list[str] = []  # keys to delete in the end
        self._board = Board(f"pycomm-store-{rank}")

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._board.close()

    def left(self) -> float:
        """Return the number of seconds left until the deadline."""
        return max(0.001, self._deadline - time.monotonic())

    def failed(self, peer: int | None, what: str) -> CommError:
        """Return the error that says ``what`` went wrong in this meeting."""
        elapsed = time.monotonic() - self._started
        return CommError.during(
            "rendezvous", f"{what} after {elapsed:.2f} s", rank=self.rank, peer=peer, elapsed=elapsed
        )

    def greet(self, mine: dict[str, Any], shape: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
        """Return the greetings of all ranks, in rank order. Returns or raises once all ranks have read all of them.

        Args:
            mine: this rank's greeting; an error in its arguments is stored under "problem".
            shape: shape of a greeting without a problem, see :func:`pycomm.untrusted.parse`.
        """
        key = f"hello/{self.rank}"
        mine = {**mine, "nonce": secrets.token_hex(16)}
        self._ask("its own greeting", lambda: self._store.set(key, json.dumps(mine)))
        try:
            greetings = self._greetings()
            while not self._all_have_read(greetings):
                greetings = self._greetings()
        except BaseException as error:
            if self.name:  # other ranks may have seen this rank's confirmation and continued
                self.report(error)
            raise
        finally:
            with contextlib.suppress(CommError):
                self._ask("its own greeting", lambda: self._store.set(key, _NO_GREETING), _SLOWEST_ANSWER)
        for rank, greeting in enumerate(greetings):
            if "problem" in greeting and rank != self.rank:
                raise ValueError(f"rank {rank} could not take part: {escaped(greeting['problem'])}")
        for rank, greeting in enumerate(greetings):
            with self._well_formed(rank):
                require(greeting, {} if "problem" in greeting else dict(shape), "it")
        return greetings

    def share(self, subject: str, mine: dict[str, Any], shape: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what all ranks say about ``subject``, in rank order, after the greeting. A failure is to be reported.

        Args:
            subject: part of the keys in the store, once in a meeting.
            mine: what this rank says.
            shape: its shape, see :func:`pycomm.untrusted.parse`.
        """
        keys = [f"{subject}/{self.name}/{rank}" for rank in range(self.size)]
        self._ask(subject, lambda: self._store.set(keys[self.rank], json.dumps(mine)))
        self._over.append(keys[self.rank])
        began = time.monotonic()
        while (rank := self._ask(subject, lambda: self._first_without(keys))) is not None:
            self.back_off(rank)
            time.sleep(min(_SLOWEST_POLL, (time.monotonic() - began) / 20))
        said = []
        for rank, data in enumerate(self._ask(subject, lambda: self._store.multi_get(keys))):
            with self._well_formed(rank):
                if len(data) > _LONGEST_GREETING:
                    raise ValueError(f"{len(data)} bytes")
                said.append(parse(data, shape, "it"))
        return said

    def report(self, error: BaseException) -> None:
        """Report this rank's failure to ranks that have continued after the greeting."""
        text = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        key = f"problem/{self.name}"

        def tell() -> None:
            if not self._store.check([key]):  # only the first reason is reported
                self._store.set(key, f"{self.rank} {text}")

        with contextlib.suppress(CommError):
            self._ask("what went wrong", tell, _SLOWEST_ANSWER)

    def check(self, late: bool = False) -> None:
        """Raise CommError if another rank has reported a failure.

        Args:
            late: wait a moment for a report that may still arrive.
        """
        key = f"problem/{self.name}"
        give_up = time.monotonic() + (_LATE_REPORT if late else 0.0)
        while not self._ask("what went wrong", lambda: self._store.check([key])):
            if time.monotonic() >= give_up:
                return
            time.sleep(0.02)
        report: bytes = self._ask("what went wrong", lambda: self._store.get(key))
        rank, _, text = report.decode("utf-8", "replace").partition(" ")
        if rank != str(self.rank):
            raise self.failed(int(rank) if rank.isdigit() else None, f"rank {rank} could not take part: {text}")

    def back_off(self, rank: int) -> None:
        """Sleep for a moment before polling ``rank`` again."""
        self.check()
        self._require_not_lost(rank)
        if time.monotonic() >= self._deadline:
            raise self.failed(rank, f"rank {rank} did not connect")
        time.sleep(0.01)

    def end(self) -> None:
        """Delete this attempt's keys, once every rank has continued; stores that cannot delete keep them."""
        with contextlib.suppress(CommError, RuntimeError, NotImplementedError):
            for key in (f"read/{self.name}/{self.rank}", *self._over):
                self._ask("what is over", functools.partial(self._store.delete_key, key), _SLOWEST_ANSWER)

    def _greetings(self) -> list[dict[str, Any]]:
        """Return the greetings of all ranks, once there are all of them."""
        found: list[dict[str, Any] | None] = []
        began = time.monotonic()

        def missing() -> int | None:
            nonlocal found
            rank = self._first_without([f"hello/{rank}" for rank in range(self.size)])
            if rank is None:
                found = self._current()
                rank = found.index(None) if None in found else None
            if rank is not None and time.monotonic() - began > _STRANGERS_AFTER:
                self._require_no_strangers()
            return rank

        self._poll(missing)
        return [greeting for greeting in found if greeting is not None]

    def _first_without(self, keys: list[str]) -> int | None:
        """Return the first rank whose key, in ``keys``, is not in the store; ``None`` if all are there.

        A request for each rank, made by each rank, would keep the store busy where there are many ranks.
        """
        if self._store.check(keys):
            return None
        first = bisect.bisect_left(range(self.size), True, key=lambda rank: not self._store.check(keys[: rank + 1]))
        return first if first < self.size else None

    def _current(self) -> list[dict[str, Any] | None]:
        """Return the greetings as they are now, all of which have been there before; ``None`` for one that is over."""
        texts = self._store.multi_get([f"hello/{rank}" for rank in range(self.size)])
        return [self._parsed(rank, data) for rank, data in enumerate(texts)]

    def _parsed(self, rank: int, data: bytes) -> dict[str, Any] | None:
        if data == _NO_GREETING.encode():
            return None
        with self._well_formed(rank):
            if len(data) > _LONGEST_GREETING:
                raise ValueError(f"{len(data)} bytes")
            greeting: dict[str, Any] = parse(data, _GREETING, "it")
        return greeting

    def _require_no_strangers(self) -> None:
        """Raise ValueError if a rank will never arrive."""
        for rank in range(self.size):
            why = self._stranger(rank) if self._stranger is not None and rank != self.rank else None
            if why is not None:
                raise ValueError(why)

    @contextlib.contextmanager
    def _well_formed(self, rank: int) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            what = str(error).removeprefix("it is malformed: ")
            raise self.failed(rank, f"what the store holds for rank {rank} is malformed ({what})") from None

    def _all_have_read(self, greetings: Sequence[dict[str, Any]]) -> bool:
        """Wait until all ranks have read ``greetings``; return false if a rank has replaced its greeting meanwhile."""
        nonces = " ".join(greeting["nonce"] for greeting in greetings)
        self.name = hashlib.sha256(nonces.encode()).hexdigest()[:32]
        keys = [f"read/{self.name}/{rank}" for rank in range(self.size)]
        self._ask("the others", lambda: self._store.set(keys[self.rank], ""))
        changed = False

        def missing() -> int | None:
            nonlocal changed
            waiting_for = self._first_without(keys)
            if waiting_for is None:
                return None
            nonces_now = [None if greeting is None else greeting["nonce"] for greeting in self._current()]
            if nonces_now == [greeting["nonce"] for greeting in greetings]:
                return waiting_for
            # A rank that continues removes its greeting, but only after all have read it: hence the second check.
            changed = self._first_without(keys) is not None
            return None

        self._poll(missing)
        return not changed

    def _poll(self, missing: Callable[[], int | None]) -> None:
        """Call ``missing``, which asks the store, until it names no more ranks."""
        began = time.monotonic()
        named_at = began + late_ranks.NAMED_AFTER
        while (rank := self._ask("a rank", missing)) is not None:
            now = time.monotonic()
            self._require_not_lost(rank)
            if now >= self._deadline:
                raise self.failed(rank, f"rank {rank} did not arrive")
            if now >= named_at:
                late_ranks.name_absent(self.rank, self.size, self._ask("the others", self._absent), now - began)
                named_at = now + late_ranks.NAMED_AGAIN
            time.sleep(min(_SLOWEST_POLL, 0.001 + (now - began) / 20))

    def _absent(self) -> list[int]:
        keys = {rank: f"hello/{rank}" for rank in range(self.size) if rank != self.rank}
        over = _NO_GREETING.encode()
        return [rank for rank, key in keys.items() if not self._store.check([key]) or self._store.get(key) == over]

    def _require_not_lost(self, rank: int) -> None:
        what = None if self._lost is None else self._lost(rank)
        if what is not None:
            raise self.failed(rank, what)

    def _ask(self, about: str, question: Callable[[], T], patience: float | None = None) -> T:
        """Return the result of ``question``; see :meth:`Board.ask`.

        Args:
            about: subject of the question, for messages.
            question: calls the store.
            patience: seconds to wait for the answer; up to the deadline if ``None``.
        """
        try:
            return self._board.ask(question, max(_SLOWEST_ANSWER, self.left()) if patience is None else patience)
        except StoreError as error:
            raise self.failed(None, f"the process group's store, asked about {about}, {error},") from None
