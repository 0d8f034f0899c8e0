"""torchft's Manager over groups of "pycomm": replicas train together, one dies, another takes its place.

``nox -s newest_torch`` installs torchft, from 0.2 on.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as torch_c10d

import pycomm
from pycomm import torch_internals
from tests.on_ranks import Pools
from tests.reducer.models import average_gradients, close, loss_of, make_model, sgd

pytest.importorskip("torchft")

TOGETHER = 3
"""Steps of two replicas, after which the second one of them ends."""
PATIENCE = timedelta(seconds=30)


def group_over_pycomm() -> Any:
    from torchft.process_group import ProcessGroupWrapper

    class Group(ProcessGroupWrapper):
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            return pycomm.backend.make_group(store, rank, world_size, PATIENCE)

        def getBackendName(self) -> str:  # noqa: N802
            return "pycomm"

    return Group(timeout=PATIENCE)


def lighthouse_of_all(store: Any) -> tuple[Any, str]:
    """Start the lighthouse on rank 0; return it there, and its address."""
    from torchft._torchft import LighthouseServer

    if dist.get_rank() > 0:
        return None, store.get("lighthouse").decode()
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500)
    address = "http://127.0.0.1:" + server.address().rpartition(":")[2]
    store.set("lighthouse", address)
    return server, address


Told = dict[int, tuple[int, list[torch.Tensor]]]
"""By step: the number of replicas, and the parameters after it."""


def train() -> Told:
    """Train as the replica of this rank, which rank 1 leaves by SIGKILL, whereupon rank 2 comes."""
    from torchft.manager import Manager

    world: Any = dist.group.WORLD
    rank, store = dist.get_rank(), torch_internals.store_of(world)
    server, address = lighthouse_of_all(store)
    if rank == 2:
        store.wait(["gone"], PATIENCE)
    model = make_model(seed=rank)  # replicas that come get the parameters of those that train
    optimizer, told = sgd(model), Told()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    own = torch_c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": own.port, "hostname": "127.0.0.1"}
    manager = Manager(
        pg=group_over_pycomm(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        **dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), PATIENCE),
        **place,
        lighthouse_addr=address,
        replica_id=f"replica{rank}_",
    )
    while not store.check(["end"]):
        manager.start_quorum()
        optimizer.zero_grad()
        loss_of(model, rank, manager.current_step()).backward()
        for work in [manager.allreduce(param.grad) for param in model.parameters()]:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            params = [param.detach().clone() for param in model.parameters()]
            told[manager.current_step()] = manager.num_participants(), params
        if rank > 0 and sum(number == 2 for number, _ in told.values()) == TOGETHER:
            store.set("gone" if rank == 1 else "end", "")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    manager.shutdown(wait=False)
    if server is not None:
        time.sleep(1.0)  # the other's last call
        server.shutdown()
    return told


def test_a_replica_dies_and_another_takes_its_place(new_ranks: Pools) -> None:
    """Each step is that of the replicas which took part in it; all have the same bits."""
    outcomes = new_ranks(3).outcomes(train, timeout=120)
    assert all(outcomes[rank].error is None for rank in (0, 2)), [outcome.trace for outcome in outcomes]
    first, last = (outcomes[rank].result for rank in (0, 2))
    assert sum(number == 2 for number, _ in first.values()) >= 2 * TOGETHER
    model = make_model(seed=0)
    optimizer = sgd(model)
    for step in sorted(first):
        number, params = first[step]
        second = 2 if step in last and last[step][0] == 2 else 1
        losses: list[Any] = [
            partial(loss_of, rank=rank, step=step - 1) for rank in ([0, second] if number == 2 else [0])
        ]
        for name, grad in average_gradients(model, losses).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
        for mine, wanted in zip(params, model.parameters(), strict=True):
            close(mine, wanted)
        if step in last:
            assert all(map(torch.equal, params, last[step][1]))
