"""How the ranks of a group come together: what they say to each other through the group's store.

Every rank has one place in the store, its greeting: who it is, or what is wrong with its arguments. A
rank that has read everybody's greeting says so under a name that follows from all of them, so ranks go
on together only if they have read the same; one that fails, or comes again, has another greeting, and
who waits notices. Nothing counts attempts, so whatever becomes of one attempt the next one starts fresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store
from pycomm.worker import Worker

_SLOWEST_POLL = 0.2  # seconds
_SLOWEST_ANSWER = 2.0  # seconds, that a question gets even when the time is over
_LATE_REPORT = 1.0  # seconds, for the reason of a failure to come after its consequences
_LONGEST_REASON = 2000  # characters
_LONGEST_GREETING = 1 << 16  # bytes

T = TypeVar("T")


class Meeting:
    """One attempt to bring ``size`` ranks together through ``store``, within ``timeout`` seconds.

    Attributes:
        name: of this attempt, once :meth:`greet` has returned; unlike all others that the store has seen.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.name = ""
        self._store = PrefixStore("pycomm", store)
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        # A store whose server hangs answers never, and some of its calls know no timeout.
        self._asker = Worker(f"pycomm-store-{rank}")

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._asker.stop(patience=0.0)

    def left(self) -> float:
        """How many seconds there still are."""
        return max(0.001, self._deadline - time.monotonic())

    def failed(self, peer: int | None, what: str) -> CommError:
        elapsed = time.monotonic() - self._started
        return CommError.during(
            "rendezvous", f"{what} after {elapsed:.2f} s", rank=self.rank, peer=peer, elapsed=elapsed
        )

    def greet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Everybody's greeting, by rank; returns, or raises, once all ranks have read all of them.

        What is wrong with a rank's arguments is in its greeting as "problem".

        Raises:
            CommError: a rank did not come in time, the store failed, or holds no greeting.
            ValueError: another rank has a problem.
        """
        key = f"hello/{self.rank}"
        mine = {**mine, "nonce": secrets.token_hex(16)}
        self._ask("its own greeting", lambda: self._store.set(key, json.dumps(mine)))
        try:
            greetings = self._greetings()
            while not self._all_have_read(greetings):
                greetings = self._greetings()
        except BaseException as error:
            if self.name:  # others may have seen that it had read all, and have gone on
                self.report(error)
            raise
        finally:
            with contextlib.suppress(CommError):
                self._ask("its own greeting", lambda: self._store.set(key, ""), _SLOWEST_ANSWER)
        for rank, greeting in enumerate(greetings):
            if "problem" in greeting and rank != self.rank:
                raise ValueError(f"rank {rank} could not take part: {greeting['problem']}")
        return greetings

    def report(self, error: BaseException) -> None:
        """Tell the others, who may be on their way through what comes after the greeting, why this rank fails."""
        text = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        key = f"problem/{self.name}"

        def tell() -> None:
            if not self._store.check([key]):  # the first reason is the one to tell
                self._store.set(key, f"{self.rank} {text}")

        with contextlib.suppress(CommError):
            self._ask("what went wrong", tell, _SLOWEST_ANSWER)

    def check(self, late: bool = False) -> None:
        """Raise what another rank reported; ``late``: it may take a moment to come.

        Raises:
            CommError: a rank has failed.
        """
        key = f"problem/{self.name}"
        give_up = time.monotonic() + (_LATE_REPORT if late else 0.0)
        while not self._ask("what went wrong", lambda: self._store.check([key])):
            if time.monotonic() >= give_up:
                return
            time.sleep(0.02)
        told: bytes = self._ask("what went wrong", lambda: self._store.get(key))
        rank, _, text = told.decode("utf-8", "replace").partition(" ")
        if rank != str(self.rank):
            raise self.failed(int(rank) if rank.isdigit() else None, f"rank {rank} could not take part: {text}")

    def wait_a_little(self, rank: int) -> None:
        """For who polls until ``rank`` does something: a moment, unless there is no sense in waiting on.

        Raises:
            CommError: the time is over, or a rank has failed.
        """
        self.check()
        if time.monotonic() >= self._deadline:
            raise self.failed(rank, f"rank {rank} did not connect")
        time.sleep(0.01)

    def end(self) -> None:
        """Take back what only this attempt needed, once every rank has gone on; stores that cannot delete keep it."""
        with contextlib.suppress(CommError, RuntimeError, NotImplementedError):
            key = f"read/{self.name}/{self.rank}"
            self._ask("what is over", lambda: self._store.delete_key(key), _SLOWEST_ANSWER)

    def _greetings(self) -> list[dict[str, Any]]:
        greetings: list[dict[str, Any] | None] = [None] * self.size

        def missing() -> int | None:
            for rank in range(self.size):
                if greetings[rank] is None:
                    greetings[rank] = self._read(rank)
                if greetings[rank] is None:
                    return rank
            return None

        self._poll(missing)
        return [greeting for greeting in greetings if greeting is not None]

    def _read(self, rank: int) -> dict[str, Any] | None:
        """``rank``'s greeting; ``None`` while there is none."""
        key = f"hello/{rank}"
        data: bytes = self._store.get(key) if self._store.check([key]) else b""
        if not data:
            return None
        if len(data) > _LONGEST_GREETING:
            self._malformed(rank, f"{len(data)} bytes")
        try:
            greeting = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._malformed(rank, str(error))
        if not isinstance(greeting, dict) or not isinstance(greeting.get("nonce"), str):
            self._malformed(rank, "no greeting of pycomm")
        return greeting

    def _malformed(self, rank: int, what: str) -> NoReturn:
        raise self.failed(rank, f"what the store holds for rank {rank} is malformed ({what})")

    def _all_have_read(self, greetings: Sequence[dict[str, Any]]) -> bool:
        """Wait for that; false where a rank has another greeting meanwhile."""
        nonces = " ".join(greeting["nonce"] for greeting in greetings)
        self.name = hashlib.sha256(nonces.encode()).hexdigest()[:32]
        keys = [f"read/{self.name}/{rank}" for rank in range(self.size)]
        self._ask("the others", lambda: self._store.set(keys[self.rank], ""))
        changed = False

        def unread() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

        def missing() -> int | None:
            nonlocal changed
            waiting_for = unread()
            if not waiting_for:
                return None
            theirs = [self._read(rank) for rank in range(self.size)]
            same = [
                there is not None and there["nonce"] == here["nonce"]
                for there, here in zip(theirs, greetings, strict=True)
            ]
            if all(same):
                return waiting_for[0]
            # Who goes on takes its greeting back, but not before all have read: so that is looked at again.
            changed = bool(unread())
            return None

        self._poll(missing)
        return not changed

    def _poll(self, missing: Callable[[], int | None]) -> None:
        """Return once ``missing`` names no rank any more; it asks the store."""
        began = time.monotonic()
        while (rank := self._ask("a rank", missing)) is not None:
            now = time.monotonic()
            if now >= self._deadline:
                raise self.failed(rank, f"rank {rank} did not arrive")
            time.sleep(min(_SLOWEST_POLL, 0.001 + (now - began) / 20))

    def _ask(self, about: str, question: Callable[[], T], patience: float | None = None) -> T:
        work = self._asker.submit(question)
        if not work.ends_within(max(_SLOWEST_ANSWER, self.left()) if patience is None else patience):
            raise self.failed(None, f"the process group's store did not answer, asked about {about},")
        try:
            answer: T = work.wait()
        except RuntimeError as error:  # torch's DistStoreError is one, and so is CommError
            if isinstance(error, CommError):
                raise
            raise self.failed(None, f"the process group's store failed, asked about {about}: {error},") from error
        return answer
