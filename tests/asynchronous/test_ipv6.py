"""Ranks that have met at an address of IPv6: servers, averagers, newcomers, and hosts that have no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import pycomm
from pycomm import CommError
from pycomm.training.asynchronous import wire
from tests.hosts import link_local_address, on_hosts
from tests.on_ranks import Pools
from tests.ranks import free_port


def meet(port: int, size: int, host: str = "::1") -> None:
    """Leave the group of the pool, and meet as a script does under a launcher that names an address of IPv6."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ.update(place)
    if rank < size:
        os.environ["RANK"] = str(rank)
        dist.init_process_group("gloo")
    else:
        os.environ.pop("RANK", None)
        time.sleep(0.5)


def small() -> tuple[torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return torch.optim.SGD(model.parameters(), lr=0.01), model


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
    return loss


def serve(port: int, came: Path) -> bool:
    """A server, a worker, and one more worker that has no process group; whether parameters have come back."""
    meet(port, 2)
    optimizer, model = small()
    server = pycomm.parameter_server(optimizer, model, timeout=20)
    before = loss_of(model).item()
    if not dist.is_initialized():
        came.touch()
    while server.is_worker and not came.exists():
        time.sleep(0.05)
    for _ in range(5 if server.is_worker else 0):
        with server.step():
            loss_of(model).backward()
    if server.is_worker:
        server.pull()
    server.close()
    return not server.is_worker or loss_of(model).item() < before


def test_a_parameter_server(new_ranks: Pools, tmp_path: Path) -> None:
    assert new_ranks(3).run(serve, free_port("::1"), tmp_path / "came", timeout=60) == [True] * 3


def serve_between_hosts(host: str, port: int) -> bool:
    meet(port, 2, host)
    with on_hosts("ab"):
        optimizer, model = small()
        server = pycomm.parameter_server(optimizer, model, timeout=20)
        if server.is_worker:
            before = loss_of(model).item()
            with server.step():
                loss_of(model).backward()
            server.pull()
        server.close()
    return not server.is_worker or loss_of(model).item() < before


def test_a_parameter_server_at_a_link_local_address(new_ranks: Pools) -> None:
    assert new_ranks(2).run(serve_between_hosts, link_local_address(), free_port("::1"), timeout=60) == [True] * 2


def join(how: str, port: int, address: str) -> int:
    """Two ranks, and one that joins them; the largest number of ranks at a time."""
    meet(port, 2)
    optimizer, model = small()
    joins = not dist.is_initialized()
    handle: Any
    if how == "local_sgd":
        handle = pycomm.local_sgd(
            optimizer, model, every=1, on_failure="shrink", timeout=20, join=address if joins else None
        )
    elif joins:
        handle = pycomm.join(address, optimizer, model, tuning=pycomm.Tuning(timeout=20))
    else:
        handle = pycomm.attach(optimizer, model, survive=pycomm.Survive(), tuning=pycomm.Tuning(timeout=20))
    deadline, size = time.monotonic() + 30, 2
    while size < 3 and time.monotonic() < deadline:
        size = len(handle.world)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        time.sleep(0.05)
    handle.detach()
    return size


@pytest.mark.parametrize("how", ["attach", "local_sgd"])
@pytest.mark.parametrize("address", ["[::1]:{}", "::1:{}"])
def test_newcomers(how: str, address: str, new_ranks: Pools) -> None:
    port = free_port("::1")
    assert new_ranks(3).run(join, how, port, address.format(port), timeout=60) == [3, 3, 3]


@pytest.mark.parametrize("address", ["::1", "[::1]", "[::1]29500", "[10.0.0.1]:29500"])
def test_addresses_that_are_none(address: str) -> None:
    optimizer, model = small()
    for join in (
        lambda: pycomm.join(address, optimizer, model),
        lambda: pycomm.local_sgd(optimizer, model, every=1, on_failure="shrink", join=address),
    ):
        with pytest.raises(ValueError, match="join is .*wanted the address of the process group's store"):
            join()


def test_nobody_listens() -> None:
    optimizer, model = small()
    port = free_port("::1")
    with pytest.raises(CommError, match=rf"no store listens at \[::1\]:{port}"):
        pycomm.join(f"[::1]:{port}", optimizer, model, tuning=pycomm.Tuning(timeout=1))


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_the_listener_of_workers(host: str) -> None:
    """A stranger is refused, a worker comes in, and it closes."""
    listener = wire.WorkerListener(host, b"secret")
    assert listener.address[0] == host
    name = r"\[::1\]" if host == "::1" else host
    with pytest.raises(OSError, match=rf"{name}:\d+: it was refused there: PYCOMM_SECRET differs"):
        wire.connect(listener.address, b"another")
    connection = wire.connect(listener.address, b"secret")
    wire.send(connection, hello=1)
    (inside,) = listener.admitted()
    assert wire.receive(inside) == {"hello": 1}
    for one in (connection, inside, listener):
        one.close()
    with pytest.raises(OSError):  # noqa: PT011  # refused, or reset
        wire.connect(listener.address, b"secret")


ONLY_IPV6 = """
import os, torch, torch.distributed as dist, pycomm
def work():
    x = torch.ones(3)
    dist.all_reduce(x)
    with pycomm.Communicator(transport="torch", timeout=20) as communicator:
        communicator.all_reduce(x)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=20).close()
    return x.tolist(), os.environ["MASTER_ADDR"]
if __name__ == "__main__":
    print(pycomm.launch(work, 2, timeout=60))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and iproute2")
def test_a_host_without_ipv4(tmp_path: Path) -> None:
    """Ranks of ``launch``, in a network namespace whose loopback device has ::1 only."""
    script = tmp_path / "script.py"
    script.write_text(ONLY_IPV6)
    only = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "
    command = ["unshare", "--net", "bash", "-c", f"{only} {sys.executable} {script}"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if made.returncode != 0 and ("unshare:" in made.stderr or "RTNETLINK" in made.stderr):
        pytest.skip(f"this system makes no such namespaces: {made.stderr}")
    assert made.stdout.strip() == str([([4.0] * 3, "::1")] * 2), made.stderr


def test_a_store_at_an_address_of_ipv6_is_found_again() -> None:
    """The listener of newcomers connects anew to the store that it was given."""
    port = free_port("::1")
    keeper = TCPStore("::1", port, is_master=True, wait_for_workers=False)
    assert keeper.host == "::1"
    assert TCPStore(keeper.host, keeper.port, is_master=False, wait_for_workers=False).add("key", 1) == 1
