"""torch's pipeline schedules on "pycomm", against one process that has all stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from tests.backend.worlds import on_world
from tests.models import mean_square

BATCHES, WIDTH = 4, 5
STAGES_PER_RANK = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
BOTH_WAYS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules in which the last rank has the two stages in the middle, and the first rank the first and the last."""


def stages_of(rank: int, size: int, name: str) -> list[int]:
    if STAGES_PER_RANK[name] == 1:
        return [rank]
    return [rank, 2 * size - 1 - rank] if name in BOTH_WAYS else [rank, size + rank]


@pytest.mark.parametrize("name", STAGES_PER_RANK)
@on_world(2)
def test_gradients_equal_one_process(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size * STAGES_PER_RANK[name])]
    x, target = torch.randn(2, 2 * BATCHES, WIDTH).unbind()
    whole = nn.Sequential(*copy.deepcopy(blocks))
    loss = mean_square(whole(x), target)
    loss.backward()

    mine = stages_of(rank, size, name)
    stages = [PipelineStage(blocks[i], i, len(blocks), torch.device("cpu")) for i in mine]
    made: Any = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
    schedule = made(stages if STAGES_PER_RANK[name] > 1 else stages[0], BATCHES, loss_fn=mean_square)
    losses: list[torch.Tensor] = []
    last = len(blocks) - 1 in mine
    schedule.step(*((x,) if 0 in mine else ()), target=target if last else None, losses=losses if last else None)
    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for i in mine:
        expected = [param.grad for param in whole[i].parameters()]
        torch.testing.assert_close([param.grad for param in blocks[i].parameters()], expected)
