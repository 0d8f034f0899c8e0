"""Sockets at which processes listen while each part runs, compared with the table in ``docs/listening.md``."""

from __future__ import annotations

import _socket
import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.asynchronous.runs import model_of
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.ranks import free_port

PAGE = Path(__file__).parents[1] / "docs" / "listening.md"
ACCEPTS = 0x10000  # flag of a listening Unix socket
LISTENS = "0A"  # state of a listening TCP socket


def listening() -> set[str]:
    """Return the listening sockets of this process: "unix <name or path>", or "tcp <address> <port>"."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[6]}]" in own and int(fields[3], 16) & ACCEPTS:
            found.add(f"unix {fields[7] if len(fields) > 7 else ''}")
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and fields[3] == LISTENS:
                host, port = fields[1].split(":")
                words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
                found.add(f"tcp {ipaddress.ip_address(b''.join(words))} {int(port, 16)}")
    return found


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """Yield the sockets that begin to listen in the block; the set is complete at its end."""
    before, found, is_over = listening(), set[str](), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0005):
            found.update(listening() - before)

    def listen(one: socket.socket, *backlog: int) -> None:
        _socket.socket.listen(one, *backlog)
        found.update(listening() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:  # to see also what listens for a moment only
            patch.setattr(socket.socket, "listen", listen, raising=False)
            yield found
    finally:
        is_over.set()
        thread.join()


def kinds(found: set[str]) -> set[str]:
    """Return the table's names of such sockets."""
    return {"Unix socket" if one.startswith("unix") else f"TCP {one.split()[1]}" for one in found}


def row_of(part: str) -> list[str]:
    """Return the row of the table for a part, its three columns after the first."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if "|" in line
    ]
    (row,) = [row for row in rows if part in row[0]]
    return row[1:]


def test_the_watch_sees_sockets() -> None:
    with watched() as found:
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("\0pycomm-test-of-listening")
        unix.listen()
        four, six = socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)
        wanted = {f"tcp 127.0.0.1 {four.getsockname()[1]}", f"tcp ::1 {six.getsockname()[1]}"}
        assert wanted | {"unix @pycomm-test-of-listening"} <= listening()
        while not wanted <= found:
            pass
        for one in (unix, four, six):
            one.close()
    assert kinds(found) == {"Unix socket", "TCP 127.0.0.1", "TCP ::1"}


def step(model: torch.nn.Module) -> None:
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()


def attach() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model)
    step(model)
    optimizer.step()
    reducer.detach()


def shrink() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, survive=pycomm.Survive())
    step(model)
    optimizer.step()
    reducer.detach()


def communicator() -> None:
    with pycomm.Communicator() as made:
        made.all_reduce(torch.ones(3))


def server() -> None:
    model = model_of()
    with pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=20) as made:
        if made.is_worker:
            made.pull()


def checkpoint() -> None:
    model = model_of()
    reducer = pycomm.attach(torch.optim.SGD(model.parameters(), 0.1), model)
    folder = f"/dev/shm/pycomm-listening-{os.getppid()}"
    pycomm.save(folder, reducer, step=1).wait()
    pycomm.load(folder, reducer)
    reducer.detach()
    if dist.get_rank() == 0:
        subprocess.run(["rm", "-r", folder], check=True)
    dist.barrier()


def on_any_rank(found: set[str]) -> set[str]:
    """Return the kinds of sockets that listened on any rank."""
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, sorted(kinds(found)))
    return {kind for one in everyones for kind in one}


SHARED = '(transports "shared_memory" and "hierarchical")'


@pytest.mark.parametrize("call", [attach, shrink, communicator, checkpoint])
@on_ranks(2)
def test_ranks_of_one_host(call: Callable[[], None]) -> None:
    listens, where, _ = row_of(SHARED)
    assert (listens, where) == ("Unix socket while ranks meet", "this network namespace")
    before = listening()
    with watched() as found:
        call()
    assert on_any_rank(found) == {"Unix socket"}, found
    assert listening() <= before


@pytest.mark.parametrize("call", [attach, communicator])
@on_ranks(2)
def test_ranks_of_several_hosts(call: Callable[[], None]) -> None:
    """They use torch's own connections: pycomm opens nothing besides what it opens on one host."""
    with on_hosts("AB"), watched() as found:
        call()
    gloo = {kind for kind in on_any_rank(found) if kind.startswith("TCP")}
    assert gloo <= {"TCP 127.0.0.1"}, "Gloo's, at the address of GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize("has_secret", [False, True])
@on_ranks(2)
def test_servers(has_secret: bool) -> None:
    assert row_of("a server")[:2] == ["Unix socket while it serves", "this network namespace"]
    assert row_of("the same, with a secret")[0] == "TCP while it serves"
    before = listening()
    with on_hosts("AB") if has_secret else contextlib.nullcontext(), watched() as found:
        server()
    wanted = {"Unix socket"} | ({"TCP 127.0.0.1"} if has_secret else set())
    assert on_any_rank(found) == wanted, found
    assert listening() <= before


@on_ranks(2)
def test_servers_of_one_host_with_a_secret() -> None:
    with pytest.MonkeyPatch.context() as patch, watched() as found:
        patch.setenv("PYCOMM_SECRET", "nobody else can come here")
        server()
    assert on_any_rank(found) == {"Unix socket"}, found


def only_tests(folder: Path) -> Path:
    """Return a folder with the tests but without the sources, so that the installed package is imported."""
    folder.mkdir()
    (folder / "tests").symlink_to(Path(__file__).parent)
    return folder


HOROVOD = """
import os, sys, threading, time
from tests.test_listening import kinds, watched
with watched() as found:
    import pycomm.horovod as hvd
    hvd.init()
    hvd.barrier()
    hvd.shutdown()
print(sorted(kinds(found)), any("/pycomm-horovod-" in one for one in found))
"""


@pytest.mark.timeout(90)
def test_horovod_under_mpirun(tmp_path: Path) -> None:
    listens, where, _ = row_of("`pycomm.horovod` under `mpirun`")
    assert listens == "Unix socket while ranks meet"
    assert "a folder of this user alone" in where
    tmp_path.chmod(0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PMIX_NAMESPACE": f"listening {free_port()}"}
    environment = {**environment, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    scripts = only_tests(tmp_path / "scripts")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HOROVOD],
            env={**environment, "OMPI_COMM_WORLD_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            cwd=scripts,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = [rank.communicate(timeout=80)[0].strip() for rank in ranks]
    assert re.fullmatch(r"\['TCP 127.0.0.1', 'Unix socket'\] True", first), "torch's store, on the loopback device only"
    assert re.fullmatch(r"\[('TCP 127.0.0.1', )?'Unix socket'\] False", second)
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


LAUNCH = """
import pycomm
from tests.test_listening import kinds, listening, watched
def work():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    return sorted(kinds(listening()))
if __name__ == "__main__":
    with watched() as found:
        inside = pycomm.launch(work, 2, timeout=60)
    print(sorted(kinds(found)), inside)
"""


@pytest.mark.timeout(90)
def test_launch(tmp_path: Path) -> None:
    assert row_of("`pycomm.launch`")[:2] == ["TCP: torch's store", "loopback device"]
    script = tmp_path / "script.py"
    script.write_text(LAUNCH)
    place = only_tests(tmp_path / "scripts")
    made = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=80,
        check=True,
        env={**os.environ, "PYTHONPATH": str(place)},
    )
    assert made.stdout.strip() == "['TCP 127.0.0.1'] [['TCP 127.0.0.1'], ['TCP 127.0.0.1']]", made.stderr
