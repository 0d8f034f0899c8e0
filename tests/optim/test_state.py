"""What compression carries from step to step: saved, resumed, handed out to another number of ranks, refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.optim.models import attached, loss_of, make_model
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]


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
    assert (state["rank"], state["world_size"]) == (rank, 2)
    run_steps({}, range(3, 6), restored, state)
    for a, b in zip(whole.parameters(), restored.parameters(), strict=True):
        assert torch.equal(a, b)


def totals(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: sum(s["state"][name]["residual"].double() for s in states) for name in states[0]["state"]}


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


def bad_states() -> None:
    rank = dist.get_rank()
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        state = reducer.state_dict()

        def loads(broken: Any, says: str, **options: Any) -> None:
            with pytest.raises(ValueError, match=says):
                reducer.load_state_dict(broken, **options)

        loads({}, "is no Reducer.state_dict")
        loads({**state, "method": "DGC"}, "state is of compression DGC, attach was given TopK")
        loads({**state, "format": 9}, "state has format 9")
        loads({**state, "rank": 1 - rank}, "pass the list of all ranks'")
        loads({**state, "world_size": 3}, "pass the list of all ranks'")
        loads([state, state], "wanted every rank of one, once")
        loads([], "wanted every rank of one, once")
        fewer = {name: entry for name, entry in state["state"].items() if name != "0.weight"}
        loads({**state, "state": fewer}, r"missing \['0.weight'\], unknown \[\]")
        foreign = {**state["state"], "other": state["state"]["0.weight"]}
        loads({**state, "state": foreign}, r"missing \[\], unknown \['other'\]")
        reducer.load_state_dict({**state, "state": {**fewer, "other": state["state"]["0.weight"]}}, strict=False)
        bent = {**state["state"], "0.weight": {"residual": torch.zeros(3)}}
        loads({**state, "state": bent}, r"state\['0.weight'\]\['residual'\] is \[3\], wanted shape \[40, 12\]")
        reducer.load_state_dict(state)


def test_states_that_do_not_fit(two_ranks: RankPool) -> None:
    two_ranks.run(bad_states)
