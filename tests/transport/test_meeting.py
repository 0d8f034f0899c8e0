"""Ranks come together whatever became of earlier attempts, and hear of each other's mistakes."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from pycomm import CommError
from pycomm.collectives.transport.meeting import Meeting
from pycomm.untrusted import COUNT
from tests.transport.meetings import greet, in_threads


def all_greet(store: HashStore, size: int, timeout: float = 20.0, **greeting: Any) -> list[Any]:
    return in_threads([partial(greet, store, rank, size, timeout, **greeting, me=rank) for rank in range(size)])


def test_all_read_the_same() -> None:
    store = HashStore()
    names = set()
    for _ in range(3):
        outcomes = all_greet(store, 4)
        assert [[g["me"] for g in greetings] for _, greetings in outcomes] == [[0, 1, 2, 3]] * 4
        assert len({name for name, _ in outcomes}) == 1
        names.add(outcomes[0][0])
    assert len(names) == 3, "a name was used twice"


def test_attempts_of_one_rank_alone_leave_no_trace() -> None:
    """However often a rank has tried by itself, the next meeting of all takes place."""
    store = HashStore()
    for _ in range(3):
        with pytest.raises(CommError, match="rank 0 did not arrive"):
            greet(store, 1, 2, 0.1)
    assert not any(isinstance(outcome, Exception) for outcome in all_greet(store, 2))


def test_no_empty_value_is_left_to_read() -> None:
    """TCPStore without libuv takes 0.2 s to give one out, to whoever comes first to the next meeting."""
    store = HashStore()
    all_greet(store, 2)
    assert all(store.get(f"pycomm/hello/{rank}") for rank in range(2))


def test_a_rank_that_comes_again_is_waited_for() -> None:
    """One gives up after the others have read its greeting, and comes back: they start over with the new one."""
    store = HashStore()
    stale = {"nonce": "of an attempt that ended", "me": 1}
    store.set("pycomm/hello/1", json.dumps(stale))

    def late() -> Any:
        time.sleep(0.5)
        return greet(store, 1, 2, 20.0, me=1)

    first, second = in_threads([lambda: greet(store, 0, 2, 20.0, me=0), late])
    assert first == second


def test_one_that_had_read_all_and_comes_again() -> None:
    """Three ranks: one gives up after it has said that it has read all, while another still has to read."""
    store = HashStore()
    greetings: list[dict[str, Any]] = [{"nonce": f"first of {rank}", "me": rank} for rank in range(3)]
    for rank in (0, 2):
        store.set(f"pycomm/hello/{rank}", json.dumps(greetings[rank]))
    began = time.monotonic()

    def steady() -> Any:
        return greet(store, 1, 3, 60.0, me=1)

    def comes_again() -> Any:
        with Meeting(HashStore(), 0, 3, 60.0) as earlier:  # its first attempt, as far as the others can see
            earlier._store = PrefixStore("pycomm", store)
            time.sleep(0.3)
            theirs = json.loads(store.get("pycomm/hello/1"))
            name = hashlib.sha256(" ".join([greetings[0]["nonce"], theirs["nonce"], greetings[2]["nonce"]]).encode())
            store.set(f"pycomm/read/{name.hexdigest()[:32]}/0", "")
        time.sleep(0.3)
        return greet(store, 0, 3, 60.0, me=0)

    def late() -> Any:
        time.sleep(1.0)
        return greet(store, 2, 3, 60.0, me=2)

    outcomes = in_threads([comes_again, steady, late])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert not isinstance(outcomes[0], Exception)
    assert time.monotonic() - began < 30


def test_a_problem_is_everybodys() -> None:
    store = HashStore()
    wrong = in_threads(
        [
            lambda: greet(store, 0, 3, 20.0),
            lambda: greet(store, 1, 3, 20.0, problem="its timeout is 0"),
            lambda: greet(store, 2, 3, 20.0),
        ]
    )
    for rank in (0, 2):
        assert isinstance(wrong[rank], ValueError)
        assert "rank 1 could not take part: its timeout is 0" in str(wrong[rank])
    assert not any(isinstance(outcome, Exception) for outcome in all_greet(store, 3))


@pytest.mark.parametrize("content", [b"\x00\xff", b"[]", b'{"nonce": 5}', b"[" * 100_000, b"x" * 200_000])
def test_what_is_no_greeting_is_named(content: bytes) -> None:
    store = HashStore()
    store.set("pycomm/hello/1", content.decode("latin-1"))
    with pytest.raises(CommError, match="what the store holds for rank 1 is malformed") as caught:
        greet(store, 0, 2, 5.0)
    assert caught.value.peer == 1


@pytest.mark.parametrize(
    ("greeting", "what"),
    [
        ({}, "it has no 'pid'"),
        ({"pid": "1"}, 'pid is "1", wanted an integer'),
        ({"pid": 1, "nonce": []}, "nonce is a list, wanted a string"),
    ],
)
def test_what_is_wrong_with_a_greeting_is_named(greeting: dict[str, Any], what: str) -> None:
    store = HashStore()
    store.set("pycomm/hello/1", json.dumps({"nonce": "a", **greeting}))

    def first() -> object:
        with Meeting(store, 0, 2, 5.0) as meeting:
            return meeting.greet({"pid": 0}, {"pid": COUNT})

    def second() -> None:
        """Confirm what rank 0 has read, as whoever wrote the greeting can."""
        while not store.check(["pycomm/hello/0"]):
            time.sleep(0.01)
        nonces = json.loads(store.get("pycomm/hello/0"))["nonce"] + " a"
        store.set(f"pycomm/read/{hashlib.sha256(nonces.encode()).hexdigest()[:32]}/1", "")

    outcome, _ = in_threads([first, second])
    assert isinstance(outcome, CommError)
    assert f"what the store holds for rank 1 is malformed ({what}" in str(outcome)


class HangingStore(HashStore):
    """Store whose ``check`` does not answer: a server that is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.released.wait(60)
        return False


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`the process group's store, asked about ...`",
    "The store's process, torchrun's agent or rank 0, has ended or hangs.",
)
def test_a_store_that_hangs_is_not_waited_for_for_ever() -> None:
    store = HangingStore()
    with Meeting(HashStore(), 0, 2, 0.5) as meeting:
        meeting._store = store  # type: ignore[assignment]
        with pytest.raises(CommError, match=r"the process group's store, asked about .*, did not answer, after"):
            meeting.greet({})
    store.released.set()


def test_a_store_that_fails_is_named() -> None:
    class FailingStore(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    with Meeting(HashStore(), 0, 2, 5.0) as meeting:
        meeting._store = FailingStore()  # type: ignore[assignment]
        with pytest.raises(CommError, match="store, asked about its own greeting, failed: connection reset"):
            meeting.greet({})
