"""broadcast_parameters and broadcast_optimizer_state on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal


@on_ranks(2)
def test_parameters() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))
    model[1].running_mean.fill_(rank)
    pointers = [p.data_ptr() for p in model.parameters()]
    pycomm.broadcast_parameters(model, src=1)
    assert_replicas_equal(model)
    assert model[1].running_mean.tolist() == [1.0] * 3
    assert [p.data_ptr() for p in model.parameters()] == pointers, "in place"
    state: dict[str, Any] = {
        "a": torch.full((3, 2), rank).t(),
        "flag": torch.tensor([rank == 0]),
        "epoch": 7,
        "none": torch.empty(0),
    }
    pycomm.broadcast_parameters(state)
    assert state["a"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert state["flag"].item() is True
    with pytest.raises(ValueError, match=r"parameter or buffer 0 is 'x: \[2\] torch.float32' on rank 1, 'x: \[1\]"):
        pycomm.broadcast_parameters({"x": torch.zeros(rank + 1)})
    with pytest.raises(ValueError, match="src is 2, wanted 0 <= src < 2"):
        pycomm.broadcast_parameters(model, src=2)
    with pytest.raises(TypeError, match="model_or_state_dict is a list"):
        pycomm.broadcast_parameters([torch.zeros(3)])  # type: ignore[arg-type]


@on_ranks(2)
def test_optimizer_state() -> None:
    rank = dist.get_rank()
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], lr=0.1 * (rank + 1), momentum=0.9)
    if rank == 1:
        optimizer.state[p]["momentum_buffer"] = torch.arange(4.0)  # fp32 state of an fp16 parameter
    pycomm.broadcast_optimizer_state(optimizer, src=1)
    buffer = optimizer.state[p]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert buffer.tolist() == [0, 1, 2, 3]
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["params"][0] is p
    # What only others have is dropped.
    if rank == 0:
        optimizer.state.clear()
    pycomm.broadcast_optimizer_state(optimizer, src=0)
    assert not optimizer.state.get(p)
    two_groups = torch.optim.SGD([{"params": [p]}, {"params": [nn.Parameter(torch.zeros(1))] * (1 - rank)}], lr=1.0)
    with pytest.raises(ValueError, match="optimizer parameter group 1 is '0 parameters' on rank 1, '1 parameters'"):
        pycomm.broadcast_optimizer_state(two_groups)
