"""``buffers=`` of methods that average parameters less often: statistics are the mean over the ranks, or are named."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.asynchronous.local_averager import LocalAverager
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import logged

TIMEOUT = 100.0
MEETINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DiLoCo": {"outer": pycomm.Nesterov()},
    "elastic": {"outer": pycomm.Elastic()},
    "fragments": {"fragments": 2},
    "shrink": {"on_failure": "shrink"},
}


class Normed(nn.Module):
    """Model with running statistics, their count, and tables that never change."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("table", torch.randn(1000))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("scale", torch.rand(3, 5, dtype=torch.float64).t())
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step)) + 3 * rank


def train(model: nn.Module, step: int) -> None:
    """Run a pass; on rank r further r forwards, which count."""
    rank = dist.get_rank()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        for number in range(rank):
            model(rows(1000 + number, rank).to(dtype))
    model(rows(step, rank).to(dtype)).square().mean().backward()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def of_all(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return the buffers of all ranks."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, state_of(model))
    return everyones


def mean_of(everyones: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return what all become: means of what differs, computed in float64, and the first one's counts."""
    found = dict(everyones[0])
    for name in ("norm.running_mean", "norm.running_var"):
        found[name] = torch.stack([each[name].double() for each in everyones]).mean(0).to(found[name].dtype)
    return found


def check(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """Compare the buffers; those that are equal on all ranks to the bit."""
    for name, buffer in model.named_buffers():
        atol = 0.0 if "running" not in name else 1e-6
        torch.testing.assert_close(buffer, wanted[name], rtol=atol, atol=atol)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "train a model with buffers",
    'Each rank keeps its own. `buffers="average"` makes them equal.',
)
@pytest.mark.parametrize("kind", MEETINGS)
@on_ranks(3, timeout=TIMEOUT)
def test_statistics_are_the_mean_of_all_ranks_after_each_meeting(kind: str) -> None:
    model = Normed()
    constant = {name: state_of(model)[name] for name in ("table", "mask", "scale")}
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    handle = pycomm.local_sgd(optimizer, model, every=2, buffers="average", timeout=60, **MEETINGS[kind])
    meets = {1, 2} if kind == "fragments" else {2}
    for step in range(6):
        train(model, step)
        everyones, version = of_all(model), model.get_buffer("table")._version
        assert len({each["norm.running_mean"].sum().item() for each in everyones}) == 3
        optimizer.step()
        optimizer.zero_grad()
        met = step % 2 + 1 in meets
        check(model, mean_of(everyones) if met else everyones[dist.get_rank()])
        assert model.get_buffer("table")._version == version
        if met:
            after = of_all(model)
            assert all(torch.equal(each[name], after[0][name]) for each in after for name in each)
    for name, value in constant.items():
        assert torch.equal(model.get_buffer(name), value)
    handle.detach()
    with pytest.raises(RuntimeError, match="detached"):
        handle.meet()


@on_ranks(2, timeout=TIMEOUT)
def test_with_a_delay_statistics_are_the_mean_of_those_at_the_beginning() -> None:
    """Also where training goes on from a state that was saved while a mean was under way."""
    rank, ends = dist.get_rank(), []
    for interrupted in (False, True):
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        options: dict[str, Any] = {"every": 4, "delay": 2, "buffers": "average", "timeout": 60}
        handle, taken = pycomm.local_sgd(optimizer, model, **options), []
        for step in range(9):
            if interrupted and step == 5:  # the meeting after the fourth step is under way
                state, weights = handle.state_dict(), model.state_dict()
                handle.detach()
                model = Normed()
                optimizer = torch.optim.SGD(model.parameters(), 0.02)
                handle = pycomm.local_sgd(optimizer, model, **options)
                model.load_state_dict(weights)
                handle.load_state_dict(state)
            train(model, step)
            own = of_all(model)
            taken.append(own)
            optimizer.step()
            optimizer.zero_grad()
            check(model, mean_of(taken[3]) if step == 5 else own[rank])
        ends.append(state_of(model))
        handle.detach()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@on_ranks(3, timeout=TIMEOUT)
def test_broadcast_gives_all_the_lowest_ranks() -> None:
    for call in (pycomm.local_sgd, pycomm.gossip):
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        handle = call(optimizer, model, every=1, buffers="broadcast", timeout=60)
        for step in range(2):
            train(model, step)
            everyones = of_all(model)
            optimizer.step()
            assert all(torch.equal(buffer, everyones[0][name]) for name, buffer in model.named_buffers())
        handle.detach()


@on_ranks(3, timeout=TIMEOUT)
def test_gossip_gives_all_the_mean_in_each_mixing() -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    handle = pycomm.gossip(optimizer, model, topology="ring", every=2, buffers="average", timeout=60)
    for step in range(5):
        train(model, step)
        everyones = of_all(model)
        optimizer.step()
        optimizer.zero_grad()
        check(model, mean_of(everyones) if step % 2 else everyones[dist.get_rank()])
    handle.average()
    check(model, mean_of(everyones))
    assert of_all(model)[0].keys() == everyones[0].keys()
    handle.detach()


def hear(kind: str) -> tuple[list[str], bool]:
    """Return what was logged, and whether this rank kept its statistics."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with logged() as found:
        handle: Any
        if kind == "gossip":
            handle = pycomm.gossip(optimizer, model, timeout=60)
        elif kind == "no difference":
            handle = pycomm.local_sgd(optimizer, model.eval(), every=2, timeout=60)
        elif kind == "their own":
            handle = pycomm.local_sgd(optimizer, model, every=2, per_rank=("norm.*", "lr"), timeout=60)
        else:
            handle = pycomm.local_sgd(optimizer, model, every=2, **MEETINGS[kind], timeout=60)
        for step in range(6):
            train(model, step)
            before = state_of(model)
            optimizer.step()
            kept = all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        handle.detach()
    return found, kept


@pytest.mark.parametrize("kind", [*MEETINGS, "gossip", "no difference", "their own"])
def test_a_difference_is_logged_once(rank_pools: Pools, kind: str) -> None:
    (first, kept), *others = rank_pools(3).run(hear, kind, timeout=TIMEOUT)
    assert kept
    assert others == [([], True)] * 2
    if kind in ("no difference", "their own"):
        assert first == []
        return
    call = "gossip" if kind == "gossip" else "local_sgd"
    assert len(first) == 1
    assert "buffer 'norm.running_mean', and 2 more, differs between the ranks: each keeps its own." in first[0]
    assert f'{call}(..., buffers="average")' in first[0]


@on_ranks(2, timeout=TIMEOUT)
def test_buffers_of_each_rank_are_neither_sent_nor_compared() -> None:
    rank = dist.get_rank()
    for call in (pycomm.local_sgd, pycomm.gossip):
        model: Any = Normed()
        model.register_buffer("cache", torch.full((3 + rank,), float(rank)))  # another shape on each rank
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        handle = call(optimizer, model, every=1, buffers="average", per_rank=("cache", "*.running_mean"), timeout=60)
        train(model, 0)
        everyones = of_all(model)
        optimizer.step()
        assert model.cache.tolist() == [rank] * (3 + rank)
        wanted = mean_of(everyones) | {name: everyones[rank][name] for name in ("cache", "norm.running_mean")}
        check(model, wanted)
        handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_arguments_are_checked_on_all_ranks() -> None:
    rank = dist.get_rank()
    for call in (pycomm.local_sgd, pycomm.gossip, pycomm.parameter_server):
        options: dict[str, Any] = {"timeout": 60} if call is pycomm.parameter_server else {"every": 1, "timeout": 60}
        for wrong, problem in (
            ({"buffers": "sum"}, "buffers is 'sum', wanted one of local, broadcast, average"),
            ({"buffers": "average" if rank else "local"}, "the ranks disagree"),
            ({"per_rank": ("running_mean",)}, "per_rank has 'running_mean', wanted buffers"),
            ({"per_rank": "norm.running_mean"}, "per_rank is 'norm.running_mean'"),
        ):
            model = Normed()
            with pytest.raises((TypeError, ValueError), match=problem):
                call(torch.optim.SGD(model.parameters(), 0.02), model, **options, **wrong)


@pytest.mark.parametrize("kind", ["local_sgd", "gossip"])
@on_ranks(3, timeout=TIMEOUT, fresh=True)
def test_a_buffer_that_is_not_finite_is_named_on_every_rank_and_spreads_to_none(kind: str) -> None:
    rank, model = dist.get_rank(), cast(Any, Normed())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    handle = getattr(pycomm, kind)(optimizer, model, every=1, buffers="average", timeout=20)
    train(model, 0)
    optimizer.step()
    train(model, 1)
    if rank == 1:
        model.norm.running_var[2] = torch.nan
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"no mean: 'norm.running_var' is not finite on rank 1"):
        optimizer.step()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)
    assert bool(model.norm.running_var.isfinite().all()) == (rank != 1)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_a_buffer_that_changes_its_size_on_one_rank_is_named_on_all() -> None:
    model: Any = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    handle = pycomm.local_sgd(optimizer, model, every=1, buffers="average", timeout=20)
    if dist.get_rank() == 1:
        model.table = torch.ones(7)
    train(model, 0)
    with pytest.raises(ValueError, match=r"'table: \[7\] torch.float32' on rank 1"):
        optimizer.step()
    handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_a_failed_call_keeps_no_buffers_from_the_next_one() -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with pytest.raises(ValueError, match="disagree") as kept:
        pycomm.parameter_server(optimizer, model, servers=1, mode="sync" if dist.get_rank() else "async", timeout=30)
    handle = pycomm.local_sgd(optimizer, model, every=1, buffers="average", timeout=60)
    for step in range(2):
        train(model, step)
        everyones = of_all(model)
        optimizer.step()
        check(model, mean_of(everyones))
        if step == 0:
            handle.detach()
            handle = pycomm.local_sgd(optimizer, model, every=1, buffers="average", timeout=60)
    handle.detach()
    reducer = pycomm.attach(optimizer, model, buffers="average")
    train(model, 2)
    assert len({each["norm.running_mean"].sum().item() for each in of_all(model)}) == 1
    reducer.detach()
    assert kept.value is not None


def come(port: int) -> dict[str, torch.Tensor]:
    model: Any = Normed()
    with torch.no_grad():
        model.norm.running_mean.fill_(9.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    options: dict[str, Any] = {"every": 2, "buffers": "average", "on_failure": "shrink", "timeout": 60}
    handle = pycomm.local_sgd(optimizer, model, join=f"127.0.0.1:{port}", **options)
    return together(handle, model, 6)


def stay() -> dict[str, torch.Tensor]:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    options: dict[str, Any] = {"every": 2, "buffers": "average", "on_failure": "shrink", "timeout": 60}
    handle = pycomm.local_sgd(optimizer, model, **options)
    while len(handle.world) < 3:
        together(handle, model, 2, ends=False)
    return together(handle, model, 6)


def together(handle: LocalAverager, model: nn.Module, steps: int, *, ends: bool = True) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        model(rows(handle.stats()["steps"], 0)).square().mean().backward()
        handle.optimizer.step()
        handle.optimizer.zero_grad()
        if not ends and len(handle.world) == 3:
            break
    if ends:
        handle.detach()
    return state_of(model)


def test_one_that_comes_has_the_others_buffers_and_meets_with_its_own(new_ranks: Pools) -> None:
    members = new_ranks(2)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(members.outcomes, stay, timeout=TIMEOUT)
        newcomer = threads.submit(new_ranks(1).outcomes, come, members.port, timeout=TIMEOUT)
        outcomes = [*first.result(), *newcomer.result()]
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        for name, value in outcome.result.items():  # all have seen the same
            torch.testing.assert_close(value, outcomes[0].result[name], rtol=1e-6, atol=1e-6)
    assert outcomes[2].result["norm.running_mean"].abs().max() < 5.0


# Servers.


def serve(mode: str, how: str, hosts: str, folder: str) -> dict[str, Any]:
    """Return what this rank pushed and pulled, step by step, and its buffers at the end."""
    with on_hosts(hosts) if hosts else contextlib.nullcontext():
        model = Normed(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.02)
        options: dict[str, Any] = {"checkpoint": folder} if folder else {}
        server = pycomm.parameter_server(optimizer, model, mode=mode, buffers=how, timeout=30, **options)
        told: dict[str, Any] = {"pushed": [], "pulled": []}
        if server.is_worker:
            for step in range(4):
                server.pull()
                told["pulled"].append(state_of(model))
                optimizer.zero_grad()
                train(model, step)
                told["pushed"].append(state_of(model))
                server.push()
            server.stats()  # once the server has the last push
            store = dist.distributed_c10d._get_default_store()
            key = f"all have pushed/{mode}/{how}/{hosts}/{folder}"
            store.add(key, 1)
            while store.add(key, 0) < dist.get_world_size() - 1:
                pass
            server.pull()
        server.close()
        told["end"], told["answer"] = state_of(model), model.eval()(rows(99, 0).double())
        return told


@pytest.mark.parametrize("hosts", ["", "ABC"], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("how", ["average", "broadcast"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_pull_the_mean_of_what_they_pushed(rank_pools: Pools, mode: str, how: str, hosts: str) -> None:
    served, first, second = rank_pools(3).run(serve, mode, how, hosts, "", timeout=TIMEOUT)

    def combined(step: int) -> dict[str, torch.Tensor]:
        both = [each["pushed"][step] for each in (first, second)]
        return mean_of(both) if how == "average" else both[0]

    assert not torch.equal(first["pushed"][0]["norm.running_mean"], second["pushed"][0]["norm.running_mean"])
    for name, initial in Normed(torch.float64).named_buffers():
        for told in (served, first, second):
            torch.testing.assert_close(told["end"][name], combined(-1)[name], rtol=1e-12, atol=1e-12)
        if mode == "sync":
            for step in range(3):
                for told in (first, second):
                    pulled = told["pulled"][step + 1][name]
                    torch.testing.assert_close(pulled, combined(step)[name], rtol=1e-12, atol=1e-12)
        if "norm" not in name:
            assert all(torch.equal(told["end"][name], initial) for told in (served, first, second))
    assert torch.equal(served["answer"], first["answer"])
    assert torch.equal(served["answer"], second["answer"])
    assert served["end"]["norm.num_batches_tracked"] == first["pushed"][-1]["norm.num_batches_tracked"]


def resume(folder: str) -> list[dict[str, torch.Tensor]]:
    """Return the buffers at the end of a run, and what the next one begins with."""
    ends = [serve("sync", "average", "", folder)["end"]]
    model = Normed(torch.float64)
    server = pycomm.parameter_server(
        torch.optim.SGD(model.parameters(), 0.02), model, mode="sync", buffers="average", checkpoint=folder, timeout=30
    )
    if server.is_worker:
        server.pull()
    server.close()
    return [*ends, state_of(model)]


def test_a_server_that_is_started_again_has_the_buffers(rank_pools: Pools, tmp_path: Path) -> None:
    for before, after in rank_pools(3).run(resume, str(tmp_path), timeout=TIMEOUT):
        assert before["norm.running_mean"].abs().sum() > 0
        for name, value in before.items():
            assert torch.equal(after[name], value)


def hear_a_worker(per_rank: tuple[str, ...]) -> list[str]:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with logged() as found:
        server = pycomm.parameter_server(optimizer, model, per_rank=per_rank, timeout=30)
        if server.is_worker:
            for step in range(5):
                with server.step():
                    train(model, step)
        server.close()
    return found


def test_workers_log_buffers_that_servers_do_not_have(rank_pools: Pools) -> None:
    served, *workers = rank_pools(3).run(hear_a_worker, (), timeout=TIMEOUT)
    assert served == []
    for found in workers:
        assert len(found) == 1
        assert "buffer 'norm.running_mean', and 2 more, differs between this worker and the servers" in found[0]
        assert 'parameter_server(..., buffers="average")' in found[0]
    assert rank_pools(3).run(hear_a_worker, ("norm.*",), timeout=TIMEOUT) == [[], [], []]


@on_ranks(2, timeout=TIMEOUT)
def test_a_workers_buffer_that_changes_its_size_is_an_error_and_nothing_is_pushed() -> None:
    model: Any = Normed()
    server = pycomm.parameter_server(torch.optim.SGD(model.parameters(), 0.02), model, buffers="average", timeout=20)
    if server.is_worker:
        with server.step():
            train(model, 0)
        table = model.table
        server.pull()
        model.table = torch.ones(7)
        train(model, 1)
        with pytest.raises(ValueError, match="the buffers have .* bytes, and had .*: nothing was pushed"):
            server.push()
        model.table = table
        with server.step():
            train(model, 2)
        assert server.stats()["servers"][0]["pushes"] == 2
    server.close()
