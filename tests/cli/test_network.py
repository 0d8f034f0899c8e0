"""Hosts of network namespaces: limited links between them, other hosts for pycomm, nothing left."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pycomm.tools.cli.demo import network

PAYLOAD = os.urandom(1 << 20)
MEGABITS = 200.0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    pytest.importorskip("pyroute2")
    with open_hosts(3) as made:
        yield made


def open_hosts(count: int) -> Any:
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(network._call, "unshare", network._CLONE_NEWNET).result()
        except OSError as error:
            pytest.skip(f"no network namespaces: {error}")
    return network.hosts(count, MEGABITS)


def on_host(path: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Begin ``function`` in a thread of its own on the host at ``path``; return what has its result."""

    def call() -> Any:
        network.move_to(path)
        return function(*arguments)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def serve(listener: socket.socket) -> bytes:
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        return stream.read()


def send(rank: int) -> None:
    with socket.create_connection((network.address(rank), network.PORT), timeout=30) as connection:
        connection.sendall(PAYLOAD)


def listen(rank: int) -> socket.socket:
    return socket.create_server((network.address(rank), network.PORT))


def test_every_host_reaches_every_other_one(hosts: list[str]) -> None:
    for to, sender in ((0, 1), (1, 2), (2, 0)):
        with on_host(hosts[to], listen, to).result() as listener:
            received = on_host(hosts[to], serve, listener)
            on_host(hosts[sender], send, to).result()
            assert received.result() == PAYLOAD


def test_what_leaves_a_host_is_limited(hosts: list[str]) -> None:
    for path in hosts:
        kinds = on_host(path, limits).result()
        assert kinds == [("tbf", MEGABITS * 1e6 / 8)]


def limits() -> list[tuple[str, float]]:
    from pyroute2 import IPRoute  # type: ignore[import-untyped]

    with IPRoute() as netlink:
        (device,) = netlink.link_lookup(ifname=network.DEVICE)
        queues = [queue for queue in netlink.get_qdiscs() if queue["index"] == device]
        return [
            (queue.get_attr("TCA_KIND"), queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"])
            for queue in queues
        ]


def test_hosts_are_namespaces_of_their_own_and_gone_afterwards() -> None:
    pytest.importorskip("pyroute2")
    named = set(os.listdir("/run/netns")) if Path("/run/netns").exists() else set()
    with open_hosts(2) as made:
        inodes = {os.stat(path).st_ino for path in made} | {os.stat("/proc/self/ns/net").st_ino}
        assert len(inodes) == 3
    assert not [path for path in made if os.path.exists(path)]
    assert named == (set(os.listdir("/run/netns")) if Path("/run/netns").exists() else set())


def test_more_ranks_than_a_byte_have_addresses() -> None:
    assert [network.address(rank) for rank in (0, 253, 254, 255)] == [
        "10.77.0.1",
        "10.77.0.254",
        "10.77.0.255",
        "10.77.1.0",
    ]


@pytest.mark.parametrize(
    ("code", "errors", "reason"),
    [(1, "unshare: unshare failed: Operation not permitted\n", "unshare: unshare failed: Operation not permitted")],
)
def test_a_namespace_that_is_not_allowed_is_said(
    code: int, errors: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, "", errors))
    assert network.become_root() == reason


def test_without_unshare_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    assert network.become_root() == "[Errno 2] No such file or directory: 'unshare'"


def test_other_users_start_the_command_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    monkeypatch.setattr(os, "execvp", lambda _name, words: started.append(words))
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "pycomm.tools.cli.main", "demo", "--kill"])
    network.become_root()
    (words,) = started
    assert words[:3] == ["unshare", "--user", "--map-root-user"]
    assert words[4:] == ["-m", "pycomm.tools.cli.main", "demo", "--kill"]


def test_root_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert network.become_root() is None
