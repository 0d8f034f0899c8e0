"""Who is let in: only processes of the same user that hold the token; and who is missed."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from pycomm import CommError
from pycomm.transport import rendezvous
from pycomm.transport.rendezvous import Meeting, Peers, meet


def meet_in_threads(size: int, disturb: object = None, timeout: float = 10.0) -> list[object]:
    """``meet`` with ranks as threads; outcomes by rank. ``disturb(store)`` runs before the ranks above 0."""
    store = HashStore()
    outcomes: list[object] = [None] * size

    disturbed = threading.Event()

    def run_disturbance() -> None:
        if callable(disturb):
            disturb(store)
        disturbed.set()

    def run(rank: int) -> None:
        if rank > 0:
            disturbed.wait()
        try:
            outcomes[rank] = meet(Meeting.begin(store, rank, size, timeout))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    threads.append(threading.Thread(target=run_disturbance))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def close_all(outcomes: list[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Peers):
            outcome.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys_memory(size: int) -> None:
    outcomes = meet_in_threads(size)
    for outcome in outcomes:
        assert isinstance(outcome, Peers), outcome
    identities = [
        [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in outcome.memory]
        for outcome in outcomes
        if isinstance(outcome, Peers)
    ]
    assert all(row == identities[0] for row in identities)
    assert len(set(identities[0])) == size
    close_all(outcomes)


def address_of(store: HashStore, rank: int) -> bytes:
    import json

    while not store.check([f"pycomm/1/hello/{rank}"]):
        time.sleep(0.001)
    return bytes.fromhex(json.loads(store.get(f"pycomm/1/hello/{rank}"))["address"])


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connects and says nothing, one has a wrong token, one sends half a greeting."""
    monkeypatch.setattr(rendezvous, "_SLOWEST_HELLO", 0.2)
    seen = []

    def disturb(store: HashStore) -> None:
        address = address_of(store, 0)
        strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for stranger in strangers:
            stranger.connect(address)
        fd = os.memfd_create("impostor")
        socket.send_fds(strangers[1], [rendezvous._HELLO.pack(b"x" * 32, 1)], [fd])
        strangers[2].sendall(b"hello")
        os.close(fd)
        connected.extend(strangers)

    connected: list[socket.socket] = []
    outcomes = meet_in_threads(2, disturb)
    assert all(isinstance(outcome, Peers) for outcome in outcomes), outcomes
    for stranger in connected:
        stranger.settimeout(5)
        with stranger:
            try:
                seen.append(stranger.recv(100))
            except OSError as error:
                seen.append(error)
    assert len(seen) == 3
    assert not any(isinstance(answer, bytes) and answer for answer in seen), "a stranger was given something"
    close_all(outcomes)


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_runs_as_same_user", lambda connection: False)
    outcomes = meet_in_threads(2, timeout=1.0)
    assert all(isinstance(outcome, CommError) for outcome in outcomes), outcomes


def test_same_user_is_read_from_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert rendezvous._runs_as_same_user(ours)


def test_a_missing_rank_is_named() -> None:
    store = HashStore()
    with pytest.raises(CommError, match=r"rank 0: rendezvous: rank 1 did not arrive after \d+\.\d+ s") as caught:
        meet(Meeting.begin(store, 0, 2, 0.5))
    assert (caught.value.rank, caught.value.peer, caught.value.operation) == (0, 1, "rendezvous")


def test_other_hosts_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = iter(["here", "there"])
    monkeypatch.setattr(rendezvous, "host_identity", lambda: next(identities))
    assert meet_in_threads(2) == [None, None]
    versions = iter(["1.0", "1.1"])
    monkeypatch.setattr(rendezvous, "host_identity", lambda: "here")
    monkeypatch.setattr(rendezvous._native, "build_info", lambda: {"version": next(versions)})
    for outcome in meet_in_threads(2):
        assert isinstance(outcome, ValueError)
        assert "rank 1 runs pycomm 1." in str(outcome)


def test_no_descriptor_leaks_from_a_failed_meeting() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = HashStore()
    with pytest.raises(CommError):
        meet(Meeting.begin(store, 0, 2, 0.2))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
