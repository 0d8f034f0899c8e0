"""Who may come in to a server, and what strangers, impostors and workers that are out of their mind can do: nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pycomm.training.asynchronous import wire
from pycomm.training.asynchronous.serving import Serving
from pycomm.training.asynchronous.wire import SharedMemory
from pycomm.untrusted import COUNT
from tests.asynchronous.cores import SIZE, core_of

KEY = b"a secret of the job"
REAL = socket.create_connection


@pytest.fixture
def listener() -> Iterator[wire.WorkerListener]:
    made = wire.WorkerListener("127.0.0.1", KEY)
    yield made
    made.close()


def come_in(listener: wire.WorkerListener) -> None:
    """Come in as a worker of another host does, and leave."""
    with contextlib.closing(wire.connect(listener.address, KEY)) as worker:
        assert wire.ready({}, listener.wakeup, 10.0)[1]
        (inside,) = listener.admitted()
        wire.send(worker, hello=1)
        assert wire.receive(inside) == {"hello": 1}
        inside.close()


# Who may come in.


@pytest.mark.timeout(60)
def test_who_knows_the_secret_comes_in_and_nobody_else(listener: wire.WorkerListener) -> None:
    come_in(listener)
    with pytest.raises(OSError, match="it was refused there: PYCOMM_SECRET differs"):
        wire.connect(listener.address, b"another secret")
    come_in(listener)
    assert not wire.ready({}, listener.wakeup, 0.0)[1]


def answer(behave: Callable[[socket.socket], None]) -> tuple[str, int]:
    """Listen as somebody else does at the port of a server that has died; return the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            one, _ = listener.accept()
            with one:
                behave(one)

    threading.Thread(target=serve, daemon=True).start()
    address: tuple[str, int] = listener.getsockname()
    return address


def prove_nothing(one: socket.socket) -> None:
    """Say what a server does, as far as that is possible without the secret."""
    one.sendall(b"pycomm 1" + bytes(32))
    one.recv(64, socket.MSG_WAITALL)
    one.sendall(random.randbytes(32))


def reflect(one: socket.socket) -> None:
    """Say to the worker what it says itself."""
    one.sendall(b"pycomm 1" + bytes(32))
    one.sendall(one.recv(64, socket.MSG_WAITALL)[32:])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (lambda one: one.sendall(b"\0\0\0\5hello"), "the connection has ended before a proof|reset"),
        (lambda one: one.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 20), "another program answers there"),
        (lambda one: one.sendall(random.randbytes(100_000)), "another program answers there"),
        (lambda one: one.close(), "the connection has ended before a proof|reset"),
        (lambda one: one.recv(1), r"no proof came in 0.3 s|ended before|reset"),
        (lambda one: time.sleep(2), r"no proof came in 0.3 s"),
        (prove_nothing, "the program that answers there does not know the secret"),
        (reflect, "the program that answers there does not know the secret"),
    ],
)
def test_a_foreign_answer_is_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch, behave: Callable[[socket.socket], None], message: str
) -> None:
    monkeypatch.setattr(wire, "_PROOF_LIMIT", 0.3)
    with pytest.raises(OSError, match=rf"127.0.0.1:\d+: .*({message})"):
        wire.connect(answer(behave), KEY)


@pytest.mark.timeout(60)
def test_the_proof_of_a_worker_is_of_no_use_at_another_address(listener: wire.WorkerListener) -> None:
    """A stranger holds the port of a server that has died, and passes everything on to another server of the job."""
    passed = []

    def relay(victim: socket.socket) -> None:
        with REAL(listener.address) as server:
            for source, target, num_bytes in ((server, victim, 40), (victim, server, 64), (server, victim, 32)):
                content = source.recv(num_bytes, socket.MSG_WAITALL)
                passed.append(len(content))
                target.sendall(content)

    with pytest.raises(OSError, match="it was refused there"):
        wire.connect(answer(relay), KEY)
    assert passed == [40, 64, 32]
    assert not wire.ready({}, listener.wakeup, 0.2)[1]
    come_in(listener)


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_kernel_tells_users_apart_on_one_host(listener: wire.WorkerListener) -> None:
    """A stranger connects to the server's Unix socket; and a worker to the stranger's."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ended_well = False
        try:
            os.setgid(12345)
            os.setuid(12345)
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(listener.name)
                try:
                    one.sendall(b"hello")
                    ended_well = one.recv(1) == b""
                except ConnectionError:
                    ended_well = True
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(listener.name + b"-stranger")
                one.listen()
                theirs.send(b"!")
                theirs.recv(1)
        finally:
            os._exit(0 if ended_well else 1)
    assert ours.recv(1) == b"!"
    with pytest.raises(ConnectionError, match="another user listens there"):
        wire.connect_here(listener.name + b"-stranger")
    ours.send(b"!")
    assert os.waitpid(child, 0)[1] == 0
    assert not wire.ready({}, listener.wakeup, 0.2)[1]
    ours.close()
    theirs.close()


# How many.


@pytest.mark.timeout(60)
def test_connections_that_prove_nothing_take_little(listener: wire.WorkerListener) -> None:
    """500 of them, and 100,000 random bytes."""
    rng = random.Random(0)
    before, flood = len(os.listdir("/proc/self/fd")), []
    for _ in range(500):
        one = socket.create_connection(listener.address)
        one.sendall(rng.randbytes(200))
        flood.append(one)
        assert [thread.name for thread in threading.enumerate() if "pycomm" in thread.name] == [
            "pycomm-worker-listener"
        ]
    come_in(listener)
    assert len(os.listdir("/proc/self/fd")) - before - len(flood) <= 64 + 1
    for one in flood:
        one.close()
    come_in(listener)


@pytest.mark.timeout(60)
def test_what_is_slow_to_prove_itself_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, listener: wire.WorkerListener
) -> None:
    """One byte now and then does not make more time."""
    monkeypatch.setattr(wire, "_PROOF_LIMIT", 0.5)
    with socket.create_connection(listener.address) as slow:
        slow.settimeout(10.0)
        assert len(slow.recv(40, socket.MSG_WAITALL)) == 40
        until = time.monotonic() + 10.0
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < until


WITHOUT_DESCRIPTORS = """
import os, resource, socket, sys, threading, time
import encodings.idna
from pycomm.training.asynchronous import wire
listener = wire.WorkerListener("127.0.0.1", b"a secret of the job")
held = [socket.create_connection(listener.address) for _ in range(10)]
time.sleep(0.3)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))  # one more, for that of the list
late = socket.socket()
late.connect(listener.address)  # there is no descriptor left to accept it with
begun = time.process_time()
time.sleep(1.0)
spent = time.process_time() - begun
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
wire.connect(listener.address, b"a secret of the job")
print(spent < 0.5, len(listener.admitted()))
"""


@pytest.mark.timeout(60)
def test_without_a_descriptor_left_it_pauses_and_goes_on() -> None:
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=50, check=False, cwd="/"
    )
    assert made.stdout.split() == ["True", "1"], made.stderr


# What those that are inside may say.


@dataclass
class Server:
    """Server in a thread of this process."""

    listener: wire.WorkerListener
    serving: Serving
    thread: threading.Thread

    def greet(self, number: int, process: int = 0, **more: Any) -> wire.Connection:
        connection = wire.connect_here(self.listener.name)
        hello: dict[str, Any] = {
            "worker": number,
            "life": f"life {number}",
            "host": "here",
            "process": process,
            "memory": None,
            "acknowledged": 0,
        }
        wire.send(connection, ask="hello", **{**hello, **more})
        return connection

    def worker(self, number: int, process: int = 0, **more: Any) -> wire.Connection:
        connection = self.greet(number, process, **more)
        assert connection.poll(10.0)
        assert wire.receive(connection).keys() == {"memory"}
        return connection

    def step(self, connection: wire.Connection, number: int, size: int = SIZE, pause: float = 0.0) -> None:
        """Take a step, with ``pause`` seconds between pull and push if the server has not answered the pull at once."""
        wire.send(connection, ask="pull", number=number)
        is_soon = connection.poll(pause)
        wire.receive(connection, {"version": COUNT})
        wire.receive_array(connection, torch.empty(size, dtype=torch.float64))
        if not is_soon:
            time.sleep(pause)
        wire.send(connection, ask="push", number=number, samples=1.0)
        wire.send_array(connection, torch.ones(size, dtype=torch.float64))
        assert wire.receive(connection) == {"pushed": number}

    def end(self, *connections: wire.Connection) -> None:
        for connection in connections:
            wire.send(connection, ask="close")
            assert wire.receive(connection) == {"closed": True}
            connection.close()
        self.thread.join(20.0)
        assert not self.thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as ended:

        def start(*expected: int, mode: str = "async", timeout: float = 30.0, size: int = SIZE) -> Server:
            listener, memory = wire.WorkerListener(), SharedMemory(size * 8)
            serving = Serving(core_of(mode, size=size), memory, listener, "here", set(expected), timeout, 0)
            thread = threading.Thread(target=serving.run, daemon=True)
            thread.start()
            ended.callback(memory.close)
            ended.callback(listener.close)
            return Server(listener, serving, thread)

        yield start


HELLO: dict[str, Any] = {
    "ask": "hello",
    "worker": 1,
    "life": "x",
    "host": "here",
    "process": 0,
    "memory": None,
    "acknowledged": 0,
}
MALFORMED: list[dict[str, Any]] = [
    {},
    {"ask": None},
    {"ask": "eval"},
    {"ask": ["push"]},
    {**HELLO, "worker": [1]},
    {**HELLO, "worker": -5},
    {**HELLO, "memory": "/etc/passwd"},
    {**HELLO, "process": 2**31},
    {**HELLO, "life": {}},
    {**HELLO, "acknowledged": "1"},
    {"ask": "push", "number": 1, "samples": float("nan")},
    {"ask": "push", "number": 1, "samples": 0.0},
    {"ask": "push", "number": 1, "samples": float("inf")},
    {"ask": "push", "number": "1", "samples": 1.0},
    {"ask": "push", "number": 10**30, "samples": 1.0},
    {"ask": "push"},
    {"ask": "pull", "number": None},
    {"ask": "pull", "number": True},
]


def await_text(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 5.0
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "`worker ... is lost, the others go on: ...`",
    "Look at that worker's output. It may come back.",
)
@pytest.mark.timeout(90)
def test_who_is_malformed_is_dropped_by_name_and_the_others_go_on(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    good = (server := serve(1)).worker(1)
    for number, message in enumerate(MALFORMED):
        for is_known in (False, True):
            connection = server.worker(100 + number) if is_known else wire.connect_here(server.listener.name)
            with caplog.at_level(logging.WARNING, "pycomm"):
                wire.send(connection, **message)
                with pytest.raises((EOFError, OSError)):
                    wire.receive(connection)
            connection.close()
            if is_known:
                await_text(caplog, f"worker {100 + number} is lost")
        server.step(good, number + 1)
    nested = b"[" * 100_000
    for content in (nested, b"\xff\xfe", b"null", b"7" * 5000):
        connection = server.worker(50)
        connection.finish(connection.sending(content))
        with pytest.raises((EOFError, OSError)):
            wire.receive(connection)
        connection.close()
    server.step(good, len(MALFORMED) + 1)
    server.end(good)


@pytest.mark.timeout(60)
def test_no_worker_can_shrink_memory_that_others_use(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(1)
    with contextlib.closing(SharedMemory(SIZE * 8)) as memory:
        good = server.worker(1, memory=memory.path)
        with open(memory.path, "r+b") as file, pytest.raises(PermissionError):
            file.truncate(0)
    for size, flags in ((SIZE * 8, 0), (SIZE * 8 + 1, os.MFD_ALLOW_SEALING)):
        descriptor = os.memfd_create("unsealed", flags)
        os.ftruncate(descriptor, size)
        bad = server.greet(2, memory=f"/proc/{os.getpid()}/fd/{descriptor}")
        with pytest.raises((EOFError, OSError)):
            wire.receive(bad)
        bad.close()
        os.close(descriptor)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        problem = f"{path} is not sealed, or has {size} bytes, wanted sealed memory of {SIZE * 8}"
        await_text(caplog, f"worker 2 is lost, the others go on: {problem}")
    server.end(good)


@pytest.mark.timeout(90)
def test_whatever_a_worker_sends_ends_only_itself(serve: Callable[..., Server]) -> None:
    """100,000 random bytes after the hello, and lengths of messages that nobody has room for."""
    server, rng = serve(1), random.Random(1)
    good = server.worker(1)
    for number in range(100):
        connection = server.worker(10 + number)
        content = rng.randbytes(1000)
        if number % 3 == 0:
            content = struct.pack("!Q", rng.choice((2**62, 2**40, 1 << 21))) + content
        if number % 3 == 1:  # a message of the right length, in which all is wrong
            content = struct.pack("!Q", len(content)) + content
        with contextlib.suppress(OSError):
            connection._socket.send(content)
        connection.close()
    server.step(good, 1)
    for size in (0, 1, SIZE * 8 - 1, SIZE * 8 + 1, 2**20 + 1):  # of an array
        connection = server.worker(7)
        wire.send(connection, ask="push", number=1, samples=1.0)
        with contextlib.suppress(OSError):
            connection.finish(connection.sending(bytes(size)))
        with pytest.raises((EOFError, OSError)):
            wire.receive(connection)
        connection.close()
    server.step(good, 2)
    server.end(good)


def ask_without_end(connection: wire.Connection) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            wire.send(connection, ask="stats")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (ask_without_end, "it has read no answer for 1 s"),
        (lambda one: one._socket.send(struct.pack("!Q", 1000) + b"{"), "nothing of its message has come for 1 s"),
        (lambda one: one._socket.send(b"\0\0"), "nothing of its message has come for 1 s"),
    ],
    ids=["reads no answers", "half a message", "half a length"],
)
def test_who_stops_within_a_message_is_dropped_and_the_others_do_not_wait(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    behave: Callable[[wire.Connection], None],
    message: str,
) -> None:
    monkeypatch.setattr("pycomm.training.asynchronous.serving.STALLED", 1.0)
    monkeypatch.setattr(wire, "STALLED", 0.1)
    server, number = serve(1), 1
    good, bad = server.worker(1), server.worker(2)
    behave(bad)
    monkeypatch.setattr(wire, "STALLED", 10.0)
    while "worker 2 is lost" not in caplog.text:
        server.step(good, number)
        number += 1
    assert f"worker 2 is lost, the others go on: {message}" in caplog.text
    assert number > 10, "the good worker has gone on in the meantime"
    bad.close()
    server.end(good)


@pytest.mark.timeout(60)
def test_parameters_do_not_change_while_a_slow_worker_receives_them(serve: Callable[..., Server]) -> None:
    size = 1 << 20
    server = serve(1, 2, size=size)
    good, slow, other = server.worker(1), server.worker(2), server.worker(3)
    before = server.serving._core.shard.memory.clone()
    for one in (slow, other):
        wire.send(one, ask="pull", number=1)
        assert wire.receive(one, {"version": COUNT})["version"] == 0
    for number in range(1, 4):
        server.step(good, number, size)
    assert not torch.equal(server.serving._core.shard.memory, before)
    for one in (other, slow):
        out = torch.empty(size, dtype=torch.float64)
        wire.receive_array(one, out)
        assert torch.equal(out, before)
    server.end(good, slow, other)


@pytest.mark.timeout(60)
def test_who_asks_on_without_an_answer_is_dropped(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(1, 2, mode="ssp")
    good, bad = server.worker(1), server.worker(2)
    with contextlib.suppress(EOFError, OSError):
        for number in range(1, 100):  # more than the other worker's pace allows
            wire.send(bad, ask="pull", number=number)
            wire.send(bad, ask="push", number=number, samples=1.0)
            wire.send_array(bad, torch.ones(SIZE, dtype=torch.float64))
        while True:
            bad.finish(bad.receiving(1 << 20))
    await_text(caplog, "worker 2 is lost, the others go on: 'push' came before it had the answers to earlier requests")
    bad.close()
    server.step(good, 1)
    server.end(good)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
def test_nothing_counts_that_comes_after_close(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    server = serve(1, 2, mode=mode)
    with contextlib.closing(SharedMemory(SIZE * 8)) as memory:
        good, bad = server.worker(1, memory=memory.path), server.worker(2)
    wire.send(good, ask="pull", number=1)  # pushes and ends wait until it has read
    wire.receive(good)
    wire.send(bad, ask="close")
    with contextlib.suppress(OSError):  # it is dropped at once
        wire.send(bad, ask="push", number=1, samples=1.0)
        wire.send_array(bad, torch.ones(SIZE, dtype=torch.float64))
    await_text(caplog, "worker 2 is lost, the others go on: 'push' came after close")
    wire.send(good, ask="read")
    wire.send(good, ask="push", number=1, samples=1.0)
    assert wire.receive(good) == {"pushed": 1}
    bad.close()
    server.end(good)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "`process ... is refused: ...`",
    "Two processes were started with one rank.",
)
@pytest.mark.timeout(60)
def test_nobody_takes_the_number_of_a_living_worker(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """The worker itself may connect again, and another process in its place once it has ended."""
    server = serve(1)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        first = server.worker(1, process=child)
        thief = server.greet(1, process=os.getpid(), life="another")
        with pytest.raises((EOFError, OSError)):
            wire.receive(thief)
        await_text(caplog, f"process {os.getpid()} is refused: worker 1 is process {child}, which is alive")
        server.step(first, 1)
        again = server.greet(1, process=child, acknowledged=1)
        assert wire.receive(again).keys() == {"memory"}
        assert server.serving.stats()["lost"] == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    later = server.worker(1, process=os.getpid(), life="another")
    for one in (first, thief, again):
        one.close()
    server.end(later)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "`worker ...: ... of its pushes ...`",
    "A restarted server has lost them.",
)
@pytest.mark.timeout(60)
def test_pushes_that_the_server_does_not_know_are_counted_and_the_worker_goes_on(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(1, 2)
    knows_less, same = server.worker(1, acknowledged=5), server.worker(2)
    await_text(caplog, "worker 1: 5 of its pushes came after the checkpoint from which this server has restarted")
    assert "worker 2:" not in caplog.text
    server.step(knows_less, 6)
    server.step(same, 1)
    stats = server.serving.stats()
    assert (stats["pushes"], stats["lost"], stats["duplicates"]) == (2, 5, 0)
    server.end(knows_less, same)


@pytest.mark.timeout(60)
def test_who_says_nothing_does_not_hold_up_the_end(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycomm.training.asynchronous.serving._HANDSHAKE", 0.5)
    server = serve(1)
    silent = wire.connect_here(server.listener.name)
    good = server.worker(1)
    server.step(good, 1)
    server.end(good)
    silent.close()


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "stop a worker, or cut its network",
    "Lost after the `timeout`, once others wait for it.",
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_here", [True, False], ids=["of this host", "of another host"])
def test_a_stopped_worker_does_not_hold_up_the_end(serve: Callable[..., Server], is_here: bool) -> None:
    server = serve(1, 2, mode="ssp", timeout=3.0)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        os.kill(child, signal.SIGSTOP)
        stopped = server.worker(2, process=child, host="here" if is_here else "there")
        good = server.worker(1)
        for number in range(1, 6):  # more than the other's staleness allows, until that one is left behind
            server.step(good, number, pause=1.0)  # the wait for the other does not count as its own silence
        server.end(good)
        stopped.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
