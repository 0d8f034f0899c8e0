"""Links of workers to servers that are lost, are slow or were given up."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import CommError
from pycomm.errors import text_of
from pycomm.training.asynchronous import server_meeting, serving, wire, worker
from pycomm.training.asynchronous.core import Core
from pycomm.training.asynchronous.parameter_server import ParameterServer
from pycomm.training.asynchronous.worker import Outbox
from tests.asynchronous.runs import Run, work
from tests.hosts import on_hosts
from tests.on_ranks import Pools

TIMEOUT = 110.0


def server_of(size: int, **options: Any) -> tuple[nn.Module, ParameterServer]:
    torch.manual_seed(0)
    model = nn.Linear(size, 1, bias=False)
    return model, pycomm.parameter_server(torch.optim.SGD(model.parameters(), 1.0), model, **{"timeout": 20, **options})


def read_slowly(folder: str) -> bool:
    """Take so long to read that the server goes on, and the other worker pushes meanwhile; whether it was torn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_READ_LIMIT", 0.5)
        model, server = server_of(1000, checkpoint=folder)
        weight = next(model.parameters())
        if dist.get_rank() == 1:
            real, calls = torch._foreach_copy_, list[int]()

            def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
                half = sources[0].numel() // 2
                targets[0][:half] = sources[0][:half]
                if not calls:
                    time.sleep(1.5)
                calls.append(1)
                targets[0][half:] = sources[0][half:]

            patch.setattr(torch, "_foreach_copy_", copy)
            before = weight.detach().clone()
            server.pull()
            patch.setattr(torch, "_foreach_copy_", real)
            server.close()
            return len(set((weight.detach() - before).mul(16).round().view(-1).tolist())) > 1
        if server.is_worker:
            time.sleep(0.2)
            server.pull()
            weight.grad = torch.ones_like(weight)
            server.push()
        server.close()
        return False


def test_what_is_read_slowly_is_not_torn(new_ranks: Pools, tmp_path: Path) -> None:
    assert new_ranks(3).run(read_slowly, str(tmp_path), timeout=TIMEOUT) == [False] * 3


def lose_parameters_on_their_way(folder: str) -> dict[str, Any]:
    """Be on a host of one's own, and lose the connection between an answer and the parameters that follow it."""
    real, calls = wire.receive_array, list[int]()

    def receive(connection: Any, out: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) % 3 == 0:
            connection.close()
        real(connection, out)

    with on_hosts("ABC"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "receive_array", receive)
        return work(Run({"checkpoint": folder}))


def test_parameters_that_are_lost_on_their_way_come_again(new_ranks: Pools, tmp_path: Path) -> None:
    told = new_ranks(3).run(lose_parameters_on_their_way, str(tmp_path), timeout=TIMEOUT)
    assert told[0]["stats"]["pushes"] == 2 * 8


def written_slowly(error: BaseException) -> str:
    """Return the text of ``error``, half a second late, after which a worker without a connection has given up."""
    time.sleep(0.5)
    return text_of(error)


def lose_one_of_two_servers() -> tuple[str, ...]:
    """Server 0 ends with an error; the worker learns of it, whatever it does next, and server 1 does not wait."""
    _, server = server_of(10, servers=2, timeout=5)
    said = []
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Core, "pull", lambda *_: 1 / 0)
            patch.setattr(server_meeting, "text_of", written_slowly)
            with pytest.raises(ZeroDivisionError):
                server.close()
    elif dist.get_rank() == 1:
        server.close()
    else:
        for act in (server.pull, server.pull, server.stats, server.close):
            with pytest.raises(CommError, match="server 0") as caught:
                act()
            said.append(str(caught.value))
        assert "server 0 cannot go on: division by zero" in said[0], said
        server.close()
        time.sleep(8.0)  # it lives on, without anything that the servers could wait for
    return tuple(said)


def test_a_worker_that_closes_after_an_error_leaves_all_servers(new_ranks: Pools) -> None:
    begun = time.monotonic()
    new_ranks(3).run(lose_one_of_two_servers, timeout=TIMEOUT)
    assert time.monotonic() - begun < 40.0


def descriptors_left() -> int:
    """How many descriptors more there are after several servers than after the first."""
    counts = []
    for _ in range(4):
        _, server = server_of(10)
        server.close()
        del _, server
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[0]


def test_nothing_stays_open(rank_pools: Pools) -> None:
    assert rank_pools(3).run(descriptors_left, timeout=TIMEOUT) == [0, 0, 0]


def train_compressed(hosts: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Train with gradients that are compressed by a method with a seed, in an order that does not matter."""
    with on_hosts(hosts):
        told = work(Run({"mode": "sync", "compression": pycomm.RandomK(0.2, seed=5)}))
    return told["stats"], torch.cat([p.reshape(-1) for p in told["parameters"]])


def test_what_is_compressed_is_the_same_over_any_link(rank_pools: Pools) -> None:
    here = rank_pools(3).run(train_compressed, "AAA", timeout=TIMEOUT)
    there = rank_pools(3).run(train_compressed, "ABC", timeout=TIMEOUT)
    for (stats, parameters), (others, other) in zip(here[1:], there[1:], strict=True):
        torch.testing.assert_close(parameters, other, rtol=1e-12, atol=1e-12)
        assert stats["bytes_sent"] == others["bytes_sent"]
    as_they_are = rank_pools(3).run(work, Run({"mode": "sync"}), timeout=TIMEOUT)
    assert not torch.allclose(here[1][1], torch.cat([p.reshape(-1) for p in as_they_are[1]["parameters"]]))


def take_zeros(model: torch.nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def send_what_nobody_can_read(message: torch.Tensor) -> str:
    """Be the worker that sends ``message`` as a gradient, or the one that goes on; or the server."""
    model, server = server_of(1000, compression=pycomm.TopK(0.1), timeout=20)
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outbox, "send", lambda _, connection, is_shared: wire.send_array(connection, message))
            server.pull()
            take_zeros(model)
            server.push()
            with pytest.raises(CommError, match="server 0") as caught:
                server.pull()
            with pytest.raises(CommError):
                server.close()
        return str(caught.value)
    if server.is_worker:
        for _ in range(5):
            with server.step():
                take_zeros(model)
                time.sleep(0.1)
    server.close()
    return str(server.stats()["steps" if server.is_worker else "pushes"])


@pytest.mark.parametrize("num_bytes", [0, 10, 20_000], ids=["nothing", "little", "more than a shard can have"])
def test_a_worker_whose_gradient_cannot_be_read_is_lost(new_ranks: Pools, num_bytes: int) -> None:
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    pushes, said, steps = new_ranks(3).run(send_what_nobody_can_read, message, timeout=TIMEOUT)
    assert (pushes, steps) == ("5", "5")
    assert "it has ended" in said


def push_what_is_too_large() -> str:
    model, server = server_of(10, compression=pycomm.BF16())
    said = ""
    if server.is_worker:
        server.pull()
        next(model.parameters()).grad = torch.full((1, 10), torch.finfo(torch.float32).max)
        with pytest.raises(ValueError, match="overflow") as caught:
            server.push()
        said = str(caught.value)
    server.close()
    return said


def test_a_gradient_that_overflows_on_its_way_is_not_pushed(rank_pools: Pools) -> None:
    _, said = rank_pools(2).run(push_what_is_too_large, timeout=TIMEOUT)
    assert "overflow in BF16()" in said
