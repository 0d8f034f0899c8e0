"""Connections between the ranks of several hosts: all get theirs, whoever else knocks, or learn why not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from pycomm.collectives.transport import connections
from pycomm.collectives.transport.authentication import split_address
from pycomm.collectives.transport.connections import (
    GREETING,
    Connections,
    exchange_connections,
    introduction,
    key_of,
)
from pycomm.collectives.transport.handshake import MAGIC, Handshake
from pycomm.collectives.transport.interfaces import Listener, listen
from pycomm.collectives.transport.meeting import Meeting
from pycomm.errors import CommError
from pycomm.untrusted import require
from tests.transport.meetings import in_threads

KEY = b"what the ranks know"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYCOMM_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PYCOMM_ADVERTISE", "PYCOMM_SECRET", "PYCOMM_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


class FakeMeeting:
    """Meeting whose ranks are threads: ``problems`` is the store."""

    def __init__(self, rank: int, size: int, problems: list[tuple[int, str]], timeout: float, name: str = "m") -> None:
        self.rank, self.size, self.name = rank, size, name
        self._problems, self._deadline = problems, time.monotonic() + timeout

    def left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def failed(self, peer: int | None, what: str) -> CommError:
        return CommError.during("rendezvous", what, rank=self.rank, peer=peer)

    def check(self, late: bool = False) -> None:
        for rank, text in self._problems[:1]:
            if rank != self.rank:
                raise self.failed(rank, f"rank {rank} could not take part: {text}")

    def back_off(self, rank: int) -> None:
        self.check()

    def report(self, error: BaseException) -> None:
        self._problems.append((self.rank, f"{type(error).__name__}: {error}"))


class Group:
    """Ranks of one process with a listener each."""

    def __init__(self, size: int, towards: str = "127.0.0.1", timeout: float = 20.0) -> None:
        self.size, self.timeout = size, timeout
        self.listeners = [listen(towards) for _ in range(size)]
        self.greetings = [introduction(listener) for listener in self.listeners]
        self.keys = [KEY] * size
        self.names = ["m"] * size
        self.problems: list[tuple[int, str]] = []

    def address(self, rank: int) -> tuple[str, int]:
        return split_address(self.listeners[rank].addresses[0], "it", "a rank")

    def one(self, rank: int) -> Connections:
        meeting = FakeMeeting(rank, self.size, self.problems, self.timeout, self.names[rank])
        return exchange_connections(meeting, self.listeners[rank], self.greetings, self.keys[rank], 2)

    def run(self, *others: Callable[[], Any], ranks: range | None = None) -> list[Any]:
        """What each rank returned or raised."""
        chosen = range(self.size) if ranks is None else ranks
        return in_threads([*(partial(self.one, rank) for rank in chosen), *others])[: len(chosen)]

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


@contextlib.contextmanager
def group_of(size: int, towards: str = "127.0.0.1", timeout: float = 20.0) -> Iterator[Group]:
    group = Group(size, towards, timeout)
    try:
        yield group
    finally:
        group.close()


def require_connected(outcomes: list[Any], kinds: int = 2) -> None:
    """Check that both ends of each connection are each other's, send a byte over each, and close them."""
    for outcome in outcomes:
        assert isinstance(outcome, Connections), outcome
    size = len(outcomes)
    for rank, outcome in enumerate(outcomes):
        assert [row[rank] for row in outcome.sockets] == [-1] * kinds
        assert outcome.addresses[rank] == ""
        for p in set(range(size)) - {rank}:
            for kind in range(kinds):
                os.write(outcome.sockets[kind][p], bytes([rank, p, kind]))
    for rank, outcome in enumerate(outcomes):
        for p in set(range(size)) - {rank}:
            for kind in range(kinds):
                descriptor = outcome.sockets[kind][p]
                assert os.read(descriptor, 10) == bytes([p, rank, kind])
                assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
                    if kind == 0:
                        assert split_address(outcome.addresses[p], "it", "a rank") == one.getpeername()[:2]
    for outcome in outcomes:
        outcome.close()
        outcome.close()  # nothing the second time
        assert outcome.sockets == [[-1] * size] * kinds


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_are_connected(size: int) -> None:
    with group_of(size) as group:
        require_connected(group.run())


def test_ipv6_alone() -> None:
    try:
        group = Group(3, "::1")
    except OSError:
        pytest.skip("this host has no IPv6")
    with contextlib.closing(group):
        assert all(listener.addresses[0].startswith("[::1]:") for listener in group.listeners)
        outcomes = group.run()
        assert outcomes[2].addresses[0] == group.listeners[0].addresses[0]
        require_connected(outcomes)


def test_a_real_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SECRET", "0123456789abcdef")
    store = HashStore()

    def rank(p: int) -> Connections:
        with Meeting(store, p, 3, 10.0) as meeting, listen("127.0.0.1") as listener:
            greetings = meeting.greet(introduction(listener), GREETING)
            return exchange_connections(meeting, listener, greetings, key_of(greetings), 3)

    require_connected(in_threads([partial(rank, p) for p in range(3)]), 3)


def last_acknowledgment(descriptor: int) -> int:
    """Return how many milliseconds ago the other side's kernel acknowledged something, or answered a probe."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        information = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    ago: int = struct.unpack_from("=I", information, 56)[0]
    return ago


def test_an_idle_connection_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a translator of addresses on the way does not forget it."""
    monkeypatch.setattr(connections, "_IDLE", 1)
    with group_of(2) as group:
        outcomes = group.run()
        for row in outcomes[1].sockets:
            before, now = -1, last_acknowledgment(row[0])
            while now >= before:  # the time limit of tests ends it where nothing is sent
                time.sleep(0.05)
                before, now = now, last_acknowledgment(row[0])
        for outcome in outcomes:
            outcome.close()


def hold(group: Group, held: list[socket.socket], count: int, words: bytes = b"") -> None:
    """Let strangers connect to rank 0, say ``words``, and stay."""
    for _ in range(count):
        held.append(socket.create_connection(group.address(0)))
        held[-1].sendall(words)


def knock(address: tuple[str, int], words: bytes = b"", reset: bool = False) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address) as one:
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        one.sendall(words)


WORDS = [
    b"",
    b"x",
    MAGIC[:5],
    MAGIC,
    MAGIC + bytes(30),
    MAGIC + bytes(72),
    MAGIC + struct.pack("!II", 1, 0) + bytes(64),
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(100_000),
]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("words", WORDS, ids=lambda words: f"{len(words)}-bytes")
def test_strangers_disturb_nobody(words: bytes, reset: bool) -> None:
    with group_of(3) as group:
        strangers = [partial(knock, group.address(p % 3), words, reset) for p in range(9)]
        require_connected(group.run(*strangers))


@pytest.mark.parametrize("words", WORDS[:5], ids=lambda words: f"{len(words)}-bytes")
def test_strangers_that_came_first_and_stay(words: bytes) -> None:
    held: list[socket.socket] = []
    with group_of(3) as group, contextlib.ExitStack() as stack:
        hold(group, held, 100, words)  # more than are kept
        for one in held:
            stack.enter_context(one)
        require_connected(group.run())


def test_a_hello_byte_by_byte() -> None:
    """What another rank sends may come in pieces."""
    real = Handshake._send

    def slowly(self: Any, content: bytes) -> Iterator[int]:
        for i in range(len(content)):
            yield from real(self, content[i : i + 1])
            yield select.POLLOUT

    with pytest.MonkeyPatch.context() as patch, group_of(3) as group:
        patch.setattr(Handshake, "_send", slowly)
        require_connected(group.run())


def test_another_key() -> None:
    with group_of(2, timeout=0.6) as group:
        group.keys[1] = b"another"
        outcomes = group.run()
    for outcome in outcomes:
        assert isinstance(outcome, CommError)
        assert "connecting to rank 0 failed" in str(outcome)
        assert "it refuses this rank: it is of another group, or PYCOMM_SECRET differs" in str(outcome)
    assert outcomes[0].peer == 1
    assert outcomes[1].peer == 0


def test_another_meeting() -> None:
    with group_of(2, timeout=0.6) as group:
        group.names[1] = "an earlier one"
        outcomes = group.run()
    assert all("it is of another group" in str(outcome) for outcome in outcomes)


def test_the_server_has_to_prove_itself_too() -> None:
    """A program that has the magic, but not the key, gets no connection, whatever it sends."""

    def impostor(server: socket.socket, words: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = server.accept()
                with one:
                    one.settimeout(2)
                    one.sendall(words)
                    while one.recv(1000):
                        pass

    for words in (MAGIC + bytes(32) + b"x" * 32, MAGIC + bytes(32) + bytes(32) + b"!", MAGIC + bytes(100)):
        with group_of(2, timeout=0.5) as group, socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=impostor, args=(server, words))
            thread.start()
            group.greetings[0]["tcp"] = [f"127.0.0.1:{server.getsockname()[1]}"]
            outcomes = group.run(ranks=range(1, 2))
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
        assert isinstance(outcomes[0], CommError)
        assert "another group" in str(outcomes[0])


def answering(server: socket.socket, words: bytes, after: bytes) -> None:
    """Be another program: answer ``words`` to what ends with ``after``."""
    with contextlib.suppress(OSError):
        while True:
            one, _ = server.accept()
            with one, contextlib.suppress(OSError):
                heard = b""
                while not heard.endswith(after):
                    more = one.recv(1000)
                    if not more:
                        break
                    heard += more
                one.sendall(words)


@contextlib.contextmanager
def program(words: bytes, after: bytes = b"") -> Iterator[int]:
    """Port of another program; it reads whole lines only if ``after`` is an end of line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answering, args=(server, words, after))
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("words", "after", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", "another program answers there: b'HTTP/1.1 400 Bad Request"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\r\n\r\n", "another program answers there: b'HTTP/1.1 400 Bad Request"),
        (b"SSH", b"", "another program answers there: b'SSH'"),
        (b"PYCTCP2\0" + bytes(99), b"", "another version of pycomm answers there"),
        (b"", b"", "it closes the connection before a proof"),
        (MAGIC + bytes(32), b"\r\n\r\n", "it closes the connection before a proof"),
        (MAGIC + bytes(99), b"\r\n\r\n", "it sends no proof"),
    ],
    ids=["http", "http-after-a-line", "ssh", "version", "silent", "late-magic", "late-bytes"],
)
def test_another_program_at_the_port(monkeypatch: pytest.MonkeyPatch, words: bytes, after: bytes, text: str) -> None:
    monkeypatch.setattr(connections, "_PATIENCE", 0.1)
    with group_of(2, timeout=1.0) as group, program(words, after) as port:
        group.greetings[0]["tcp"] = [f"127.0.0.1:{port}"]
        outcomes = group.run()
    for outcome in outcomes:
        assert isinstance(outcome, CommError)
        assert f"127.0.0.1:{port}: {text}" in str(outcome)
        assert "PYCOMM_SOCKET_IFNAME, PYCOMM_PORT_RANGE and PYCOMM_ADVERTISE" in str(outcome)


def test_the_other_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PATIENCE", 0.2)
    monkeypatch.setattr(connections, "_LAST_WORDS", 0.1)
    with group_of(3) as group, program(b"HTTP/1.1 400\r\n") as port, socket.create_server(("127.0.0.1", 0)) as silent:
        for greeting in group.greetings[:2]:
            others = [port, silent.getsockname()[1], 1]
            greeting["tcp"] = [*(f"127.0.0.1:{other}" for other in others), "no.such.host.invalid:7", *greeting["tcp"]]
        require_connected(group.run())


def test_all_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PATIENCE", 0.1)
    monkeypatch.setattr(connections, "_LAST_WORDS", 0.05)
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if address[0] == "10.9.9.9":
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        if address[0] == "10.9.9.8":
            raise BlockingIOError(errno.EINPROGRESS, "now in progress")
        real(self, address)

    class Patched(socket.socket):
        def connect(self, address: Any) -> None:
            connect(self, address)

    with group_of(2, timeout=1.5) as group, socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(vars(connections)["socket"], "socket", Patched)
        quiet = f"127.0.0.1:{silent.getsockname()[1]}"
        group.greetings[0]["tcp"] = ["127.0.0.1:1", "10.9.9.9:7", "10.9.9.8:7", quiet]
        outcomes = group.run()
    for outcome in outcomes:
        text = str(outcome)
        assert isinstance(outcome, CommError)
        assert "127.0.0.1:1: refused: nothing listens there" in text
        assert "10.9.9.9:7: prohibited: no route, or a firewall (No route to host)" in text
        assert "10.9.9.8:7: " in text
        assert f"{quiet}: it accepts connections, but no rank answers there" in text


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... did not connect to ...`",
    "Set `PYCOMM_SOCKET_IFNAME=eth0`. Firewalls: `PYCOMM_PORT_RANGE=50000-50100`. Translated addresses: "
    "`PYCOMM_ADVERTISE=host:port`.",
)
def test_who_waits_says_where_it_listens() -> None:
    """The rank that should connect does not even begin, and reports nothing."""
    with group_of(2, timeout=0.8) as group:
        (outcome,) = group.run(partial(knock, group.address(0), b"GET / HTTP/1.1"), ranks=range(1))
        assert isinstance(outcome, CommError)
        assert f"rank 1 did not connect to {group.listeners[0].addresses[0]}" in str(outcome)
    assert "another program answers there: b'GET / HTTP/1.1'" in str(outcome)
    assert outcome.peer == 1


def test_the_failure_of_another_rank_ends_it() -> None:
    began = time.monotonic()
    with group_of(3, timeout=60.0) as group:
        group.problems.append((2, "ValueError: it had no arguments"))
        outcomes = group.run(ranks=range(2))
    assert time.monotonic() - began < 30
    assert all("rank 2 could not take part: ValueError" in str(outcome) for outcome in outcomes)


def test_a_rank_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that connect to it give up a few times, and the connections in its queue are dead."""
    monkeypatch.setattr(connections, "_PATIENCE", 0.05)
    monkeypatch.setattr(connections, "_MOST_PATIENCE", 0.1)
    monkeypatch.setattr(connections, "_LAST_WORDS", 0.02)
    with group_of(3) as group:
        tried = threading.Event()
        tries = 0
        real = connections._Exchange._try_next

        def count(self: Any, dial: Any, why: str) -> None:
            nonlocal tries
            real(self, dial, why)
            tries += 1
            if tries >= 8:
                tried.set()
                monkeypatch.setattr(connections, "_PATIENCE", 5.0)
                monkeypatch.setattr(connections, "_MOST_PATIENCE", 5.0)

        monkeypatch.setattr(connections._Exchange, "_try_next", count)

        def late() -> Connections:
            tried.wait()
            return group.one(0)

        outcomes = in_threads([late, partial(group.one, 1), partial(group.one, 2)])
        require_connected(outcomes)


def test_a_retry_replaces_the_connection() -> None:
    """Rank 1 loses its first connection after the proofs, and connects again."""
    with group_of(2) as group, contextlib.ExitStack() as stack:
        meeting = FakeMeeting(1, 2, [], 20.0)

        def connected(kind: int) -> socket.socket:
            address = group.address(0)
            one = stack.enter_context(socket.socket())
            for event in Handshake(one, KEY, meeting.rank, meeting.name).as_client(address, 0, kind):
                select.select(
                    *([one] if event == select.POLLIN else [], [one] if event == select.POLLOUT else [], []), 5
                )
            return one

        def rank_1() -> list[socket.socket]:
            connected(1).close()
            return [connected(kind) for kind in (1, 0)][::-1]

        mine, theirs = in_threads([partial(group.one, 0), rank_1])
        for kind, one in enumerate(theirs):
            os.write(mine.sockets[kind][1], bytes([kind]))
            one.settimeout(5)
            assert one.recv(2) == bytes([kind])
        mine.close()


def test_a_rank_of_too_low_a_number_is_refused() -> None:
    """Only higher ranks connect; nobody connects to itself."""
    with group_of(2, timeout=0.5) as group:
        group.greetings[0]["tcp"] = group.greetings[1]["tcp"]  # as where both hosts have the same address
        outcomes = group.run()
    assert all("it refuses this rank" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        ([], "its addresses are not 1 to 16 of at most 100 characters"),
        (["10.0.0.1:1"] * 17, "its addresses are not 1 to 16"),
        (["x" * 99 + ":1"], "its addresses are not 1 to 16"),
        (["10.0.0.1"], "an address is '10.0.0.1', wanted the address of rank 0"),
        (["[fe80::1%nosuch0]:7"], "no address of rank 0 can be reached from here"),
    ],
)
def test_malformed_addresses(addresses: list[str], text: str) -> None:
    with group_of(2) as group:
        group.greetings[0]["tcp"] = addresses
        (outcome,) = group.run(ranks=range(1, 2))
    assert isinstance(outcome, CommError)
    assert text in str(outcome)
    assert group.problems[0][0] == 1


def test_too_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> None:
        raise OSError(errno.EMFILE, f"{count} are too many: ulimit -n")

    monkeypatch.setattr(connections, "require_descriptors", refuse)
    with group_of(3) as group:
        (outcome,) = group.run(ranks=range(1, 2))
    assert isinstance(outcome, OSError)
    assert "4 are too many" in str(outcome)
    assert "ulimit -n" in group.problems[0][1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED, errno.EPROTO, errno.EPERM])
def test_errors_of_accept_pass(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Failing(socket.socket):
        failures = 2

        def accept(self) -> Any:
            if Failing.failures:
                Failing.failures -= 1
                raise OSError(number, os.strerror(number))
            return super().accept()

    with group_of(3) as group:
        listener = group.listeners[0]
        wrapped = [Failing(fileno=one.detach()) for one in listener.sockets]
        for one in wrapped:
            one.setblocking(False)
        group.listeners[0] = Listener(list(wrapped), listener.addresses)
        require_connected(group.run())
    assert Failing.failures == 0


def test_signals_pass() -> None:
    """System calls that a signal interrupts go on."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        with group_of(2) as group:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            other = threading.Thread(target=lambda: outcomes.append(group.one(1)))
            outcomes: list[Any] = []
            other.start()
            mine = group.one(0)
            other.join()
            signal.setitimer(signal.ITIMER_REAL, 0)
            require_connected([mine, *outcomes])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_sandboxes_may_lack_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking(socket.socket):
        def setsockopt(self, level: int, *args: Any) -> None:
            if level == socket.SOL_SOCKET:
                raise OSError(errno.ENOPROTOOPT, "Protocol not available")
            super().setsockopt(level, *args)

    with group_of(2) as group:
        monkeypatch.setattr(vars(connections)["socket"], "socket", Lacking)
        outcomes = group.run()
        monkeypatch.undo()
        for outcome in outcomes:
            assert isinstance(outcome, Connections)
            outcome.close()


def test_introductions(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as listener:
        alone = [introduction(listener) for _ in range(2)]
        assert alone[0]["secret"] == ""
        assert alone[0]["key"] != alone[1]["key"]
        monkeypatch.setenv("PYCOMM_SECRET", "0123456789abcdef")
        secretive = introduction(listener)
        for greeting in (*alone, secretive):
            require(greeting, GREETING, "it")
            assert greeting["tcp"] == listener.addresses
        assert "0123456789abcdef" not in str(secretive)
        key = key_of([secretive, secretive])
        assert len(key) == 32
        monkeypatch.setenv("PYCOMM_SECRET", "short")  # the store's numbers count, too
        assert key != key_of([secretive, secretive])


def test_keys_depend_on_all_ranks() -> None:
    def key(*texts: str) -> bytes:
        return key_of([{"key": text, "secret": ""} for text in texts])

    found = [key("a", "b"), key("b", "a"), key("ab", ""), key("a", "b", ""), key("a", "c")]
    assert key("a", "b") == found[0]
    assert all(len(one) == 32 for one in found)
    assert all(one != other for one, other in pairwise(sorted(found)))


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        (["x", ""], "rank 1 has no PYCOMM_SECRET, rank 0 has one"),
        (["", "", "x"], "rank 0 has no PYCOMM_SECRET, rank 2 has one"),
        (["x", "x", "y\n"], r"the PYCOMM_SECRET of rank 2 differs from rank 0's: y\n and x"),
    ],
)
def test_ranks_with_differing_secrets(secrets: list[str], text: str) -> None:
    with pytest.raises(ValueError, match="PYCOMM_SECRET") as caught:
        key_of([{"key": "k", "secret": one} for one in secrets])
    assert str(caught.value) == text
