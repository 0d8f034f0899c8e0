"""The door by which newcomers come in, when a connection or a rank breaks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm import CommError
from pycomm.elastic.door import Door
from pycomm.elastic.membership import Membership
from pycomm.torch_internals import Store
from tests.ranks import free_port


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
    door = Door(store, 0, [], "")
    door.answer(1, {"a": 1})
    break_connections(store.port)
    with pytest.raises(RuntimeError):
        store.check(["something"])
    door.answer(2, {"a": 2})
    assert door._store.check(["answer/1", "answer/2"])
    door.close()


def test_a_newcomer_whose_host_has_died_meanwhile_learns_it(store: TCPStore) -> None:
    invitation = {"ledger": ["name", "/proc/999999999/fd/3"], "world": [0, 1]}
    with pytest.raises(CommError, match="the rank that let it in has died"):
        Membership.accept(invitation, store, 1, 1.0, calls_roll=False)
