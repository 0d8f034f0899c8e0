"""State of compression: saved, resumed, handed out to another number of ranks, refused."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import attached, own_state
from tests.reducer.models import loss_of, make_model


def run_steps(reducer_options: dict[str, Any], steps: range, model: nn.Module, states: Any = None) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(0.1), **reducer_options) as reducer:
        if states is not None:
            reducer.load_state_dict(states)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        return reducer.state_dict()


def resume(path: str) -> None:
    rank = dist.get_rank()
    whole = make_model(dtype=torch.float32)
    run_steps({}, range(6), whole)

    model = make_model(dtype=torch.float32)
    torch.save(run_steps({}, range(3), model), f"{path}{rank}")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    restored = make_model(seed=5, dtype=torch.float32)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    state = torch.load(f"{path}{rank}", weights_only=True)
    assert (list(state["ranks"]), state["world_size"]) == ([str(rank)], 2)
    run_steps({}, range(3, 6), restored, state)
    for a, b in zip(whole.parameters(), restored.parameters(), strict=True):
        assert torch.equal(a, b)


def totals(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([own_state(s)[name]["residual"].double() for s in states]).sum(0)
        for name in own_state(states[0])
    }


def load_resharded(path: str, old_size: int) -> dict[str, Any]:
    states = [torch.load(f"{path}{rank}", weights_only=True) for rank in range(old_size)]
    return run_steps({}, range(0), make_model(dtype=torch.float32), states)


def test_state_resumes_and_is_resharded(rank_pools: Pools, tmp_path: Any) -> None:
    path = str(tmp_path / "state")
    rank_pools(2).run(resume, path)
    old = totals([torch.load(f"{path}{rank}", weights_only=True) for rank in range(2)])
    assert all(total.abs().sum() > 0 for total in old.values())
    for size in (1, 2, 3):
        new = totals(rank_pools(size).run(load_resharded, path, 2))
        for name in old:
            torch.testing.assert_close(new[name], old[name], rtol=1e-6, atol=1e-9)


@on_ranks(2)
def test_states_that_do_not_fit() -> None:
    rank = dist.get_rank()
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        state = reducer.state_dict()

        def loads(broken: Any, says: str, **options: Any) -> None:
            with pytest.raises(ValueError, match=says):
                reducer.load_state_dict(broken, **options)

        loads({}, "state is neither a Reducer.state_dict")
        loads({**state, "method": "DGC"}, "state is from compression DGC, wanted TopK")
        loads({**state, "format": 9}, "state has format 9")
        loads({**state, "ranks": {str(1 - rank): own_state(state)}}, "pass the list of all ranks'")
        loads({**state, "world_size": 3}, "pass the list of all ranks'")
        loads([state, state], "pass the list of all ranks'")
        loads([], "wanted one or all ranks of one world size")
        loads([state, {**state, "world_size": 3}], r"state lists ranks of world sizes \[2, 3\]")
        loads({**state, "ranks": {"a": {}}}, "its 'ranks' are not numbered")
        loads({**state, "ranks": 3}, "state is neither a Reducer.state_dict")

        def of(content: Any) -> dict[str, Any]:
            return {**state, "ranks": {str(rank): content}}

        mine = own_state(state)
        fewer = {name: entry for name, entry in mine.items() if name != "0.weight"}
        loads(of(fewer), r"missing \['0.weight'\], unknown \[\]")
        foreign = {**mine, "other": mine["0.weight"]}
        loads(of(foreign), r"missing \[\], unknown \['other'\]")
        reducer.load_state_dict(of({**fewer, "other": mine["0.weight"]}), strict=False)
        bent = {**mine, "0.weight": {"residual": torch.zeros(3)}}
        loads(of(bent), r"state\['0.weight'\]\['residual'\] is \[3\], wanted shape \[40, 12\]")
        reducer.load_state_dict(state)


@pytest.mark.parametrize("method", [None, "fp16", pycomm.QSGD(4)], ids=str)
@on_ranks(2)
def test_a_state_without_residuals_loads_on_any_number_of_ranks(method: Any) -> None:
    """Rank 0 saves, and all load."""
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=method) as reducer:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        states = [reducer.state_dict()]
        dist.broadcast_object_list(states, 0)
        assert list(states[0]["ranks"]) == ["0"]
        reducer.load_state_dict(states[0])
        reducer.load_state_dict({**states[0], "world_size": 7})
        assert reducer.state_dict()["steps"] == states[0]["steps"]


@on_ranks(2)
def test_states_that_are_none() -> None:
    """Contents of the wrong kind: an error that says where, and what was there before stays."""
    rank = str(dist.get_rank())
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        loss_of(model, dist.get_rank(), 0).backward()
        optimizer.step()
        state = reducer.state_dict()
        mine = own_state(state)

        def loads(broken: dict[str, Any], says: str) -> None:
            for options in ({}, {"strict": False}):
                with pytest.raises(ValueError, match=re.escape(says)):
                    reducer.load_state_dict({**state, **broken}, **options)

        def loads_entry(entry: Any, says: str) -> None:
            loads({"ranks": {rank: {**mine, "0.weight": entry}}}, f"state['ranks']['{rank}']['0.weight']{says}")

        for value in (0, -1, True, "2", 2.0, None):
            loads({"world_size": value}, f"state['world_size'] is {value!r}, wanted an int of at least 1")
        for value in (-1, False, "3", 1.5, None):
            loads({"steps": value}, f"state['steps'] is {value!r}, wanted an int of at least 0")
        for key in ("method", "world_size", "steps", "ranks", "format"):
            with pytest.raises(ValueError, match=r"state is neither a Reducer.state_dict\(\)"):
                reducer.load_state_dict({name: value for name, value in state.items() if name != key})
        loads({"ranks": {rank: [mine]}}, "its 'ranks' are not numbered")
        loads({"ranks": {rank: {**mine, 3: {}}}}, f"state['ranks']['{rank}'][3] is a dict, wanted tensors by key")
        loads_entry(None, " is a NoneType, wanted tensors by key")
        loads_entry(mine["0.weight"]["residual"], " is a Tensor, wanted tensors by key")
        for tensor in (None, [0.0] * 480, torch.zeros(40, 12, device="meta"), torch.zeros(40, 12).to_sparse()):
            loads_entry({"residual": tensor}, f"['residual'] is a {type(tensor).__name__}, wanted a dense tensor")
        complex_one = {"residual": torch.zeros(40, 12, dtype=torch.complex64)}
        loads({"ranks": {rank: {**mine, "0.weight": complex_one}}}, "has dtype torch.complex64, wanted torch.float32")
        after = own_state(reducer)
        assert all(torch.equal(after[name][key], entry[key]) for name, entry in mine.items() for key in entry)
        reducer.load_state_dict(state)


def distributed_checkpoint(folder: str, old_size: int) -> dict[str, torch.Tensor]:
    """Saved by ``old_size`` ranks, each of which has another residual; loaded by as many as there are."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        if size == old_size:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            before = own_state(reducer)
            state_dict_saver.save({"model": model, "reducer": reducer}, checkpoint_id=folder)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, rank, 9).backward()
                optimizer.step()
            state_dict_loader.load({"model": model, "reducer": reducer}, checkpoint_id=folder)
            for name, entry in own_state(reducer).items():
                assert torch.equal(entry["residual"], before[name]["residual"])
            assert reducer.state_dict()["steps"] == 3
            if rank == 0:
                dcp_to_torch_save(folder, f"{folder}.pt")
        else:
            reducer.load_state_dict(torch.load(f"{folder}.pt", weights_only=True)["reducer"])
        return {name: entry["residual"].double() for name, entry in own_state(reducer).items()}


def test_distributed_checkpoints_keep_every_ranks(rank_pools: Pools, tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = rank_pools(2).run(distributed_checkpoint, folder, 2)
    assert not torch.equal(saved[0]["0.weight"], saved[1]["0.weight"])
    for size in (1, 3):
        loaded = rank_pools(size).run(distributed_checkpoint, folder, 2)
        for name in saved[0]:
            total = sum(one[name] for one in loaded)
            torch.testing.assert_close(total, saved[0][name] + saved[1][name], rtol=1e-6, atol=1e-9)
