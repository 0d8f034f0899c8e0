"""Groups over TCP whose other rank is a bare socket: what they make of its bytes, and of its end."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import pycomm._native as _native
from pycomm import CommError
from pycomm.collectives.transport.tcp import DEAD_AFTER, dead_after

MEETING = 7
FRAME = struct.Struct("<IHHQQ24sIIII")
HEADING = struct.Struct("<IHHqqq")
GOODBYE, ABORT, MESSAGE = 1, 2, 3


def check_of(frame: bytes) -> int:
    """Return FNV-1a of a frame's bytes before the sum."""
    found = 2166136261
    for byte in frame[:-4]:
        found = (found ^ byte) * 16777619 % 2**32
    return found


def frame(kind: int = 4, number: int = 1, meeting: int = MEETING, magic: int = 0x01435950, extra: bytes = b"") -> bytes:
    """Return the frame of a barrier, or of another operation."""
    operation = bytes([kind, 5, 0, 0]) + bytes(20)
    raw = FRAME.pack(magic, 1, 0, meeting, number, operation, len(extra), 0, 0, 0)
    return raw[:-4] + struct.pack("<I", check_of(raw)) + extra


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]


class Pair:
    """Rank 0 of a group of two, and the other ends of its connections."""

    def __init__(self) -> None:
        data, self.data = connected()
        control, self.control = connected()
        sockets = [[-1, data.detach()]], [-1, control.detach()]
        self.group = _native.TcpGroup(0, MEETING, *sockets, ["here", "10.0.0.7:5"], 10.0)
        self.group.buffer_limit = 1 << 20

    def close(self) -> None:
        self.group.close("the test is over")
        self.data.close()
        self.control.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def numbers_of_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_of_both_sides_are_alike(pair: Pair) -> None:
    pair.data.sendall(frame())
    pair.group.barrier(5.0)
    magic, version, _, meeting, number, operation, extra, attached, _, check = FRAME.unpack(pair.data.recv(64))
    assert (magic, version, meeting, number, extra, attached) == (0x01435950, 1, MEETING, 1, 0, 0)
    assert operation[0] == 4
    assert (
        FRAME.pack(magic, version, 0, meeting, number, operation, extra, attached, 0, 0)[:-4] == frame()[:-4] or check
    )


def test_a_frame_byte_by_byte(pair: Pair) -> None:
    def send() -> None:
        for byte in frame():
            pair.data.sendall(bytes([byte]))

    thread = threading.Thread(target=send)
    thread.start()
    pair.group.barrier(5.0)
    thread.join()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (bytes(64), "something that is not an operation of this group"),
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(64), "something that is not an operation of this group"),
        (frame(meeting=8), "something that is not an operation of this group"),
        (frame()[:-1] + bytes([frame()[-1] ^ 1]), "something that is not an operation of this group"),
        (frame(number=3), "an operation out of its order"),
        (frame(kind=200), "an impossible operation"),
    ],
    ids=["zeros", "http", "meeting", "sum", "number", "kind"],
)
def test_bytes_that_are_no_operation(pair: Pair, content: bytes, wanted: str) -> None:
    pair.data.sendall(content)
    with pytest.raises(CommError, match=f"rank 1 sent {wanted}") as caught:
        pair.group.barrier(5.0)
    assert caught.value.peer == 1
    with pytest.raises(CommError, match="broken since an earlier failure"):
        pair.group.barrier(5.0)
    assert HEADING.unpack(pair.control.recv(HEADING.size))[1] == ABORT


def test_a_refusal(pair: Pair) -> None:
    pair.data.sendall(frame(kind=5, extra=b"x has 3 elements") + frame(number=2))
    with pytest.raises(ValueError, match="barrier: rank 1 could not take part: x has 3 elements"):
        pair.group.barrier(5.0)
    pair.group.barrier(5.0)


def test_an_end_without_a_word(pair: Pair) -> None:
    pair.data.close()
    pair.control.close()
    with pytest.raises(CommError, match=r"rank 1 died \(its connection to 10.0.0.7:5 is closed\)") as caught:
        pair.group.all_reduce(np.ones(5), "sum", 5.0)
    assert caught.value.peer == 1


@pytest.mark.parametrize(("subject", "cause", "peer"), [(GOODBYE, -1, 1), (ABORT, 1, 1), (ABORT, 5, 1), (ABORT, 0, 1)])
def test_last_words(pair: Pair, subject: int, cause: int, peer: int) -> None:
    words = b"it had enough"
    pair.control.sendall(HEADING.pack(0x31505950, subject, 0, cause, 0, len(words)) + words)
    pair.data.close()
    with pytest.raises(CommError, match=r"rank 1 gave up \(it had enough\)") as caught:
        pair.group.barrier(5.0)
    assert caught.value.peer == peer


@pytest.mark.parametrize(
    "content",
    [b"GET / HTTP/1.1\r\n\r\n".ljust(32), HEADING.pack(0x31505950, MESSAGE, 0, 0, 0, -5)],
    ids=["http", "length"],
)
def test_bytes_that_are_no_message(pair: Pair, content: bytes) -> None:
    pair.control.sendall(content)
    receipt = pair.group.post_receive(np.empty(4, np.float32), 1, 0)
    with pytest.raises(CommError, match="rank 1 sent something that is not a message of this group"):
        receipt.wait(5.0)


def test_nothing_is_left() -> None:
    Pair().close()  # the watch thread's own descriptors stay
    before = numbers_of_descriptors()
    for _ in range(20):
        Pair().close()
    assert numbers_of_descriptors() == before
    assert not [thread for thread in os.listdir("/proc/self/task") if name_of(thread) == "pycomm-watch"]


def name_of(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_dead_after_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEAD_AFTER, text)
    with pytest.raises(ValueError, match=f"{DEAD_AFTER} is '{text}', wanted a number of seconds"):
        dead_after()


def test_dead_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dead_after() == 10.0
    monkeypatch.setenv(DEAD_AFTER, "2.5")
    assert dead_after() == 2.5
