"""The listener by which newcomers come in: who may, and what happens when a connection or a rank breaks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm import CommError
from pycomm.torch_internals import Store
from pycomm.training.elastic.join_requests import JoinClient, JoinListener, JoinRequest
from pycomm.training.elastic.liveness import this_process
from pycomm.training.elastic.membership import Membership
from tests.ranks import free_port


def let_in(store: TCPStore, listener: JoinListener) -> int:
    """Have this process ask, and be answered; return the number of its request."""
    asked = ask(store, this_process())
    request = look(listener)
    assert request is not None
    listener.skip_to(request.number)
    listener.answer(request.number, ANSWER)
    asked.result(20.0)
    return request.number


@pytest.fixture
def store() -> Iterator[Store]:
    port = free_port()
    keeper = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    del keeper


def break_connections(port: int) -> None:
    """Shut down all connections of this process to ``port``."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with copy:
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if copy.family == socket.AF_INET6 and not listens and copy.getpeername()[1] == port:
                copy.shutdown(socket.SHUT_RDWR)


def test_a_broken_connection_to_the_store_is_made_anew(store: TCPStore) -> None:
    listener = JoinListener(store, 0, [], "")
    listener.answer(1, {"a": 1})
    break_connections(store.port)
    with pytest.raises(RuntimeError):
        store.check(["something"])
    listener.answer(2, {"a": 2})
    assert listener._store.check(["answer/1", "answer/2"])
    listener.close()


def test_a_newcomer_whose_host_has_died_meanwhile_learns_it(store: TCPStore) -> None:
    invitation = {"agreement": ["name", "/proc/999999999/fd/3"], "world": [0, 1]}
    with pytest.raises(CommError, match="the rank that let it in has died"):
        Membership.accept(invitation, store, 1, 1.0)


def test_the_memory_of_a_newcomers_host_must_be_a_file(store: TCPStore) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb"):
        path = f"/proc/{os.getpid()}/fd/{reader}"
        with pytest.raises(ValueError, match=f"{path} is a FIFO, wanted a regular file"):
            Membership.accept({**ANSWER, "agreement": ["name", path]}, store, 1, 1.0)


LINES = [("setting", "every=1"), ("parameter", "weight: [2]")]
ANSWER = {
    "name": "group",
    "backends": "cpu:gloo",
    "agreement": ["agreement", ""],
    "world": [0, 1, 2],
    "round": 0,
    "epoch": 1,
    "numbers": 3,
    "processes": [[0, this_process()]],
}


@pytest.fixture
def listener(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinListener]:
    """Return the listener of ranks that know a secret."""
    monkeypatch.setenv("PYCOMM_SECRET", "what the ranks know")
    made = JoinListener(store, 0, LINES, "")
    yield made
    made.close()


def look(listener: JoinListener, seconds: float = 10.0) -> JoinRequest | None:
    """Return the request that fits, if one comes."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (found := listener.waiting()) is not None:
            return found
        time.sleep(0.01)
    return None


def ask(store: TCPStore, process: dict[str, Any], lines: list[tuple[str, str]] = LINES) -> Future[dict[str, Any]]:
    """Ask as a newcomer does that knows what the environment says now."""
    client = JoinClient(f"127.0.0.1:{store.port}", 0, 20.0)
    executor = ThreadPoolExecutor(1)
    asked = executor.submit(client.ask, process, lines)
    executor.shutdown(wait=False)
    return asked


def test_who_knows_the_secret_is_let_in_and_knows_the_ranks(store: TCPStore, listener: JoinListener) -> None:
    elsewhere = {**this_process(), "host": "another"}
    asked = ask(store, elsewhere)
    request = look(listener)
    assert request is not None
    assert request.process == elsewhere
    listener.answer(request.number, ANSWER)
    assert asked.result(20.0) == {**ANSWER, "request": request.number}


@pytest.mark.parametrize("known", [None, "what others know of it"])
def test_who_does_not_is_refused(
    store: TCPStore, listener: JoinListener, monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    if known is None:
        monkeypatch.delenv("PYCOMM_SECRET")
    else:
        monkeypatch.setenv("PYCOMM_SECRET", known)
    asked = ask(store, this_process())
    assert look(listener, 1.0) is None
    with pytest.raises(ValueError, match="it does not know PYCOMM_SECRET"):
        asked.result(20.0)


def test_a_request_of_another_number_or_another_process_is_not_signed(store: TCPStore, listener: JoinListener) -> None:
    """A stranger who has seen a request writes it once more, as it is and with a process of its own."""
    number = let_in(store, listener)
    seen = json.loads(listener._store.get(f"request/{number}"))
    for change in ({}, {"process": {**seen["process"], "host": "of the stranger"}}, {"proof": None}, {"nonce": "x"}):
        number = listener._store.add("requests", 1)
        listener._store.set(f"request/{number}", json.dumps({**seen, **change}))
        assert look(listener, 0.5) is None
        assert "refused" in json.loads(listener._store.get(f"answer/{number}"))["content"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": []}, r"content\.world is a list of 0, wanted one of >= 1"),
        ({"world": ["0"]}, r'content\.world\[0\] is "0", wanted an integer >= 0'),
        ({"processes": {"x": this_process()}}, r"content\.processes is an object, wanted a list"),
        ({"processes": [["x", this_process()]]}, r'content\.processes\[0\]\[0\] is "x", wanted an integer >= 0'),
        ({"numbers": 1.5}, r"content\.numbers is 1\.5, wanted an integer >= 0"),
    ],
)
def test_a_malformed_answer_is_an_error_that_names_the_key(
    store: TCPStore, listener: JoinListener, change: dict[str, Any], message: str
) -> None:
    asked = ask(store, this_process())
    request = look(listener)
    assert request is not None
    listener.answer(request.number, {**ANSWER, **change})
    with pytest.raises(ValueError, match=message):
        asked.result(20.0)


def test_an_answer_of_somebody_else_is_not_believed(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SECRET", "what the newcomer knows")
    asked = ask(store, this_process())
    monkeypatch.delenv("PYCOMM_SECRET")
    stranger = JoinListener(store, 0, LINES, "")
    request = look(stranger)
    assert request is not None
    stranger.answer(request.number, {**ANSWER, "agreement": ["x", "/etc/passwd"]})
    with pytest.raises(ValueError, match="whoever answers at .* does not know PYCOMM_SECRET"):
        asked.result(20.0)
    stranger.close()


def test_without_a_secret_only_processes_of_this_user_and_host_are_let_in(store: TCPStore) -> None:
    listener = JoinListener(store, 0, LINES, "")
    let_in(store, listener)
    for change, message in (
        ({"host": "another"}, "not on the host of the first rank, .*; set PYCOMM_SECRET on all ranks"),
        ({"pid": 1 << 22}, "it has ended, or belongs to another user"),
        ({"start": 0}, "it has ended, or belongs to another user"),
        ({"pid": "1"}, "the request is malformed: process.pid is"),
        ({"pid": -1}, "the request is malformed: process.pid is"),
        ({"pid": 2**31}, "the request is malformed: process.pid is 2147483648, wanted an integer"),
    ):
        asked = ask(store, {**this_process(), **change})
        assert look(listener, 1.0) is None
        with pytest.raises(ValueError, match=message):
            asked.result(20.0)
    listener.close()


@pytest.mark.parametrize("text", ["garbage", json.dumps({"process": {"host": "of the stranger", "pid": 2**62}})])
def test_a_request_that_is_overwritten_after_the_check_counts_as_it_was(
    store: TCPStore, listener: JoinListener, text: str
) -> None:
    asked = ask(store, this_process())
    request = look(listener)
    assert request is not None
    listener._store.set(f"request/{request.number}", text)
    assert look(listener) == request  # the next poll does not read it either
    assert listener.process_of(request.number) == this_process()
    assert listener.process_of(request.number + 1) is None
    listener.answer(request.number, ANSWER)
    assert asked.result(20.0)["request"] == request.number


@pytest.mark.parametrize("text", ["[" * 100_000, "5", "", "\0", "{}", '{"process": {}, "lines": {}}'])
def test_a_malformed_request_is_refused(store: TCPStore, listener: JoinListener, text: str) -> None:
    number = listener._store.add("requests", 1)
    listener._store.set(f"request/{number}", text)
    assert look(listener, 0.5) is None
    assert "the request is" in json.loads(listener._store.get(f"answer/{number}"))["content"]["refused"]
    asked = ask(store, this_process())
    assert look(listener) is not None
    listener.answer(number + 1, {"refused": "there is no room"})
    with pytest.raises(ValueError, match="refused this process: there is no room"):
        asked.result(20.0)


@pytest.mark.parametrize("proof", ["right", "wrong"])
def test_what_is_answered_cannot_write_to_the_terminal(
    store: TCPStore, listener: JoinListener, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    asked = ask(store, this_process())
    request = look(listener)
    assert request is not None
    if proof == "wrong":
        monkeypatch.setattr(listener._signer, "sign", lambda *_: "no proof")
    listener.answer(request.number, {"refused": "full\x1b]0;owned\x07"})
    with pytest.raises(ValueError, match=r"full\\x1b\]0;owned\\x07") as caught:
        asked.result(20.0)
    assert ("does not know PYCOMM_SECRET" in str(caught.value)) == (proof == "wrong")


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`the job at ... has ended, or its store can no longer be reached: ...`",
    "Start newcomers while the job runs.",
)
def test_a_job_that_ends_while_a_newcomer_waits() -> None:
    """Its store is in a process of its own, which ends once there is a request."""
    command = (
        "from torch.distributed import TCPStore; import time;"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True);"
        "store.wait(['pycomm/join/0/request/1'])"
    )
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        address = f"127.0.0.1:{int(job.stdout.readline())}"
        client = JoinClient(address, 0, 30.0)
        text = f"join: the job at {address} has ended, or its store can no longer be reached: "
        with pytest.raises(CommError, match=text):
            client.ask(this_process(), [])
        assert job.wait(30.0) == 0
    with pytest.raises(CommError, match=text):
        client.ask(this_process(), [])
