"""Admission: only the very processes that the store names are let in, and who is missing is named."""

from __future__ import annotations

import fcntl
import gc
import json
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from pycomm import CommError
from pycomm.collectives.transport import rendezvous
from pycomm.collectives.transport.rendezvous import Peers, host_identity, process_behind
from tests.transport.meetings import close_all, swap_in_threads, swap_memory


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys_memory(size: int) -> None:
    outcomes = swap_in_threads(size)
    for outcome in outcomes:
        assert isinstance(outcome, Peers), outcome
    identities = [[(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in outcome.memory] for outcome in outcomes]
    assert all(row == identities[0] for row in identities)
    assert len(set(identities[0])) == size
    close_all(outcomes)


def address_of(store: Store, rank: int) -> bytes:
    key = f"pycomm/hello/{rank}"
    while not store.check([key]):
        time.sleep(0.001)
    return bytes.fromhex(json.loads(store.get(key))["address"])


STRANGERS = """
import os, socket, sys, time
address, count, user = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if user:
    os.setgid(user), os.setuid(user)
strangers = []
for i in range(count):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(address)
    strangers.append(stranger)
    if i % 3 == 1:  # one greets as rank 1, with memory; others say half of it, or nothing
        fd = os.memfd_create("impostor")
        socket.send_fds(stranger, [(1).to_bytes(4, "little")], [fd])
    elif i % 3 == 2:
        stranger.sendall(b"he")
print("ready", flush=True)
given = b""
for stranger in strangers:
    stranger.settimeout(20)
    try:
        given += stranger.recv(100)
    except OSError:
        pass
print(len(given), flush=True)
"""


def strangers_at(address: bytes, count: int, user: int = 0) -> subprocess.Popen[str]:
    """Another process with ``count`` connections; the ones it has made when this returns."""
    command = [sys.executable, "-c", STRANGERS, address.hex(), str(count), str(user)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "user", [0, pytest.param(65534, marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root"))]
)
def test_strangers_get_nothing_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Of the same user (0: as we are), or of another one: thirty that connect, and greet, or are silent."""
    receiving = rendezvous._receive
    waited: list[Any] = []

    def receive(connection: socket.socket, num_bytes: int) -> tuple[int, int] | None:
        waited.append(connection)
        return receiving(connection, num_bytes)

    monkeypatch.setattr(rendezvous, "_receive", receive)
    started: list[subprocess.Popen[str]] = []
    outcomes = swap_in_threads(2, lambda store: started.append(strangers_at(address_of(store, 0), 30, user)))
    assert all(isinstance(outcome, Peers) for outcome in outcomes), outcomes
    assert len(waited) == 2, "a stranger was listened to"
    out, _ = started[0].communicate(timeout=30)
    assert out == "0\n", "a stranger was given something"
    close_all(outcomes)


def test_a_greeting_of_another_process_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides look at who is at the other end before they say anything."""
    monkeypatch.setattr(rendezvous, "process_behind", lambda connection: os.getpid() + 1)
    outcomes = swap_in_threads(2, timeout=1.0)
    assert all(isinstance(outcome, CommError) for outcome in outcomes), outcomes
    assert "another process has the place of rank 0" in str(outcomes[1])


def test_the_kernel_says_who_is_there() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert process_behind(ours) == os.getpid()


def test_memory_that_could_shrink_is_not_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        for sealed, size in ((False, 4096), (True, 8192), (True, 4096)):
            memory = os.memfd_create("anybody", os.MFD_ALLOW_SEALING)
            os.ftruncate(memory, size)
            if sealed:
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, rendezvous._SEALS)
            socket.send_fds(ours, [rendezvous._HELLO.pack(3)], [memory])
            taken = rendezvous._receive(theirs, 4096)
            assert (taken is not None) == (sealed and size == 4096)
            os.close(memory)
        assert taken is not None
        assert taken[0] == 3
        os.close(taken[1])
        with open("/dev/null") as other:
            socket.send_fds(ours, [rendezvous._HELLO.pack(3)], [other.fileno()])
            assert rendezvous._receive(theirs, 4096) is None


def test_a_host_is_its_namespaces_too() -> None:
    parts = host_identity().split("/")
    for kind in ("net", "pid", "user"):
        assert os.readlink(f"/proc/self/ns/{kind}") in parts
    assert not any(re.match("mnt|uts", part) for part in parts)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces want root")
@pytest.mark.parametrize("kind", ["--pid", "--user", "--net"])
def test_another_namespace_is_another_host(kind: str) -> None:
    program = "from pycomm.collectives.transport.rendezvous import host_identity; print(host_identity())"
    command = ["unshare", kind, "--fork", sys.executable, "-c", program]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    if made.returncode != 0 and "unshare" in made.stderr:
        pytest.skip(f"this system makes no namespaces: {made.stderr}")
    assert made.stdout.strip()
    assert made.stdout.strip() != host_identity()


@pytest.mark.behavior(
    "Starting and launching",
    "`rank ... did not arrive`",
    "It did not call `attach` or `Communicator(...)` within the timeout: slow, dead, or elsewhere in the script.",
)
def test_a_missing_rank_is_named() -> None:
    with pytest.raises(CommError, match=r"rank 0: rendezvous: rank 1 did not arrive after \d+\.\d+ s") as caught:
        swap_memory(HashStore(), 0, 2, 0.5)
    assert (caught.value.rank, caught.value.peer, caught.value.operation) == (0, 1, "rendezvous")


def test_a_rank_that_fails_between_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of the timeout: the reason is there at once."""
    make = rendezvous.anonymous_memory

    def fail_once(num_bytes: int) -> int:
        if num_bytes <= mmap.PAGESIZE:  # tried before the ranks greet each other
            return make(num_bytes)
        monkeypatch.setattr(rendezvous, "anonymous_memory", make)
        raise OSError(24, "too many of everything")

    monkeypatch.setattr(rendezvous, "anonymous_memory", fail_once)
    started = time.monotonic()
    outcomes = swap_in_threads(3, timeout=60.0)
    assert time.monotonic() - started < 30
    close_all(outcomes)
    assert sum(isinstance(outcome, CommError) and "too many of everything" in str(outcome) for outcome in outcomes) == 2
    assert sum(type(outcome) is OSError for outcome in outcomes) == 1


def test_no_descriptor_leaks_from_a_failed_meeting() -> None:
    gc.collect()  # what earlier tests have left to it is not to be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CommError):
        swap_memory(HashStore(), 0, 2, 0.2)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
