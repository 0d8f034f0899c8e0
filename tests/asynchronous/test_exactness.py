"""What a parameter server computes is what one process computes, event by event, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.training.asynchronous.core import Core, Piece, ShardOptimizer
from pycomm.training.asynchronous.modes import Compensator, StaleSynchronousRules
from tests.asynchronous.runs import Run, Simulation, loss_of, model_of, read_trace, work
from tests.on_ranks import Pools

TIMEOUT = 110.0
SIZE = 4

RUNS = {
    "async": Run(),
    "async, Adam": Run(optimizer="adam"),
    "async, Adagrad": Run(optimizer="adagrad"),
    "async, two servers": Run({"servers": 2}),
    "divided by staleness": Run({"mode": pycomm.Async("lr")}),
    "delay compensation": Run({"mode": pycomm.Async("dc")}, "sgd"),
    "adaptive, two servers": Run({"mode": pycomm.Async("dc", strength=0.5, adaptive=True, decay=0.9), "servers": 2}),
    "stale synchronous": Run({"mode": pycomm.StaleSynchronous(1)}, slow=2),
    "softsync": Run({"mode": pycomm.Sync(quorum=2)}),
    "softsync, divided": Run({"mode": pycomm.Sync(quorum=3, compensation="lr")}, "sgd"),
    "softsync, delay compensation": Run({"mode": pycomm.Sync(quorum=2, compensation="dc", strength=0.5)}, "sgd"),
    "sync": Run({"mode": pycomm.Sync()}, "adam"),
    "sync, backup": Run({"mode": pycomm.Sync(backup=1)}, slow=3),
    "async, TopK": Run({"compression": pycomm.TopK(0.2)}),
    "softsync, TopK, two servers": Run(
        {"mode": pycomm.Sync(quorum=2), "servers": 2, "compression": pycomm.TopK(0.1)}, "adam"
    ),
    "delay compensation, TopK": Run({"mode": pycomm.Async("dc"), "compression": pycomm.TopK(0.3)}, "sgd"),
}


def trained(pool: Any, run: Run) -> list[dict[str, Any]]:
    return pool.run(work, run, timeout=TIMEOUT)


def pieces_of(run: Run) -> list[slice]:
    num_servers = run.options.get("servers", 1)
    size = sum(p.numel() for p in model_of().parameters())
    cuts = [size * k // num_servers for k in range(num_servers + 1)]
    if num_servers == 2 and "compression" in run.options:
        cuts[1] = 30  # the end of the first matrix
    return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


def flat(told: dict[str, Any]) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in told["parameters"]])


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_mode_is_its_simulation(rank_pools: Pools, run: Run, tmp_path: Path) -> None:
    servers = run.options.get("servers", 1)
    traced = replace(run, options={**run.options, "trace": str(tmp_path / "trace")})
    told = trained(rank_pools(SIZE), traced)
    orders = [read_trace(tmp_path / f"trace.{server}") for server in range(servers)]
    simulation = Simulation(run, pieces_of(run))
    simulation.go(orders, SIZE - servers)
    for server, piece in enumerate(pieces_of(run)):
        mine = flat(told[server])[piece]
        torch.testing.assert_close(mine, simulation.now[piece], rtol=1e-12, atol=1e-12)
    pushes = (SIZE - servers) * run.steps
    for server in range(servers):
        stats = told[server]["stats"]
        assert stats["pushes"] == sum(stats["staleness"].values()) == pushes
        assert stats["duplicates"] == 0
        if isinstance(mode := run.options.get("mode"), pycomm.StaleSynchronous):
            # Of each other worker, no more gradients than the bound and the one that it may just be pushing.
            assert max(map(int, stats["staleness"])) <= 2 * (2 * mode.staleness + 1)
    assert {worker["stats"]["steps"] for worker in told[servers:]} == {run.steps}


def with_a_schedule(folder: str, samples: float | None) -> float:
    """The learning rate after 16 updates, of servers that were made twice: the second goes on from the first one's."""
    rate = 0.0
    for _ in range(2):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        server = pycomm.parameter_server(optimizer, model, checkpoint=folder, timeout=60)
        server.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), samples=samples)
        if server.is_worker:
            for step in range(4):
                with server.step(3.0):
                    loss_of(model, 0, step).backward()
        server.close()
        rate = optimizer.param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize(("samples", "steps"), [(None, 16), (12.0, 4)])
def test_schedules_step_on_servers(rank_pools: Pools, tmp_path: Path, samples: float | None, steps: int) -> None:
    rates = rank_pools(3).run(with_a_schedule, str(tmp_path), samples, timeout=TIMEOUT)
    assert rates == [0.5**steps, 1.0, 1.0]


@pytest.mark.parametrize("optimizer", ["lars", "momentum"])
def test_float32_and_optimizers_that_look_at_whole_parameters(rank_pools: Pools, optimizer: str) -> None:
    run = Run({"servers": 2, "mode": "sync"}, optimizer, dtype=torch.float32)
    told = trained(rank_pools(SIZE), run)
    assert torch.equal(flat(told[2]), flat(told[3])), "workers that pull last have the same"
    assert not torch.equal(
        flat(told[2]), torch.cat([p.detach().reshape(-1) for p in model_of(torch.float32).parameters()])
    )


def in_half(dtype: torch.dtype, compression: Any) -> None:
    """One worker against a server's float32 parameters in one process, of which it has rounded ones."""
    model, there = model_of(dtype), model_of(torch.float32)
    with torch.no_grad():
        for p, rounded in zip(there.parameters(), model.parameters(), strict=True):
            p.copy_(rounded)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    server = pycomm.parameter_server(optimizer, model, compression=compression, timeout=60)
    masters = torch.optim.Adam(there.parameters(), 0.01)
    if server.is_worker:
        for step in range(6):
            with server.step():
                for p, master in zip(model.parameters(), there.parameters(), strict=True):
                    assert p.dtype == dtype
                    torch.testing.assert_close(p, master.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
                loss_of(model, 0, step).backward()
            for p, master in zip(model.parameters(), there.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            masters.step()
        assert server.stats()["bytes_sent"] >= 6 * 53 * 2
    server.close()
    assert next(model.parameters()).dtype == dtype


@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=["plain", "compressed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_of_half_types_servers_have_float32(rank_pools: Pools, dtype: torch.dtype, compression: Any) -> None:
    rank_pools(2).run(in_half, dtype, compression, timeout=TIMEOUT)


def push_infinity(options: dict[str, Any]) -> None:
    model = model_of()
    server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.1), model, timeout=60, **options)
    if server.is_worker:
        server.pull()
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, 0, 0).backward()
        gradient = model.get_parameter("2.weight").grad
        assert gradient is not None
        kept, gradient[1, 2] = gradient.clone(), float("inf")
        with pytest.raises(ValueError, match=r"gradient of '2\.weight' is not finite"):
            server.push()
        assert server.stats()["steps"] == 0
        assert all(each["pushes"] == 0 for each in server.stats()["servers"])
        gradient.copy_(kept)
        server.push()
        server.pull()
        assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert all(torch.isfinite(p).all() for p in model.parameters())
    server.close()


@pytest.mark.parametrize(
    "options", [{"servers": 2}, {"servers": 2, "compression": pycomm.Int8()}], ids=["plain", "int8"]
)
def test_a_gradient_that_is_not_finite_goes_to_no_server(rank_pools: Pools, options: dict[str, Any]) -> None:
    rank_pools(3).run(push_infinity, options, timeout=TIMEOUT)


def test_a_worker_that_comes_late_counts_from_the_beginning() -> None:
    """When it came is in no trace: a simulation would wait for others than the run did."""
    mode = StaleSynchronousRules(1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    shard = ShardOptimizer(torch.optim.SGD([parameter], 0.1), [Piece(0, 0, 2)], torch.zeros(2))
    core = Core(shard, mode, Compensator(pycomm.StaleSynchronous(1)), torch.float64)
    for worker in (1, 2):
        mode.join(worker)
    core.join(1, "a")
    for number in (1, 2):
        core.push(1, number, 1.0, torch.ones(2))
    assert not mode.may_pull(1)
    core.join(2, "b")
    assert not mode.may_pull(1)
    core.join(2, "another process")
    assert mode.may_pull(1), "this one begins where the slowest is"
