"""Schedules between GPUs, by a stand-in for NCCL's sends and receives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pycomm import kernels, schedule
from pycomm.collectives.transport.gpu_program import GpuProgram
from pycomm.schedule.program import program_of
from tests.transport.nccl_ranks import NOW, Fake, requires_emulator, run_ranks
from tests.transport.test_collectives import contribution
from tests.transport.test_nccl_transport import transports
from tests.transport.test_schedules import ALGORITHMS, digest, require_same_bits, results

pytestmark = requires_emulator

SIZES = (1, 2, 3, 4, 5)


def place(x: torch.Tensor, rank: int) -> Any:
    from tests.emulator.arrays import DeviceArray

    return DeviceArray(x, rank % 2, 1)


@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm(fake: Fake, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    members = transports(size)
    dtypes = (torch.float32, torch.bfloat16, torch.int64) if size < 4 else (torch.float32,)

    def run_rank(rank: int, name: str) -> list[str]:
        program = program_of(schedule.by_name(name, size), rank)

        def run(x: torch.Tensor, op: str) -> None:
            GpuProgram(program, place(x, rank), op, kernels.Scratch()).run(members[rank], 0, NOW["timeout"])

        return results(rank, size, dtypes, run, largest=1000)

    for name in ALGORITHMS:
        require_same_bits(run_ranks(size, partial(run_rank, name=name)))
    for member in members:
        member.close()


def test_arguments(fake: Fake) -> None:
    program = program_of(schedule.ring(1), 0)

    def refused(error: type[Exception], says: str, x: Any, op: str = "sum") -> None:
        with pytest.raises(error, match=says):
            GpuProgram(program, x, op, kernels.Scratch())

    refused(ValueError, "op is 'median', wanted", place(torch.ones(4), 0), "median")
    refused(
        TypeError,
        "op 'mean' requires a floating dtype, x has int32",
        place(torch.ones(4, dtype=torch.int32), 0),
        "mean",
    )
    refused(TypeError, "x has dtype bool", place(torch.ones(4, dtype=torch.bool), 0))
    refused(ValueError, "x is not contiguous", place(torch.ones(4, 4)[:, 1], 0))


def test_a_part_of_an_array(fake: Fake) -> None:
    """Elements around it stay."""
    members = transports(2)

    def run(rank: int) -> str:
        whole = torch.full((3, 100), -1.0)
        whole[1] = contribution(rank, 100, torch.float32)
        program = program_of(schedule.halving_doubling(2), rank)
        program_on = GpuProgram(program, place(whole[1], rank), "sum", kernels.Scratch())
        program_on.run(members[rank], 0, NOW["timeout"])
        assert (whole[0] == -1).all()
        assert (whole[2] == -1).all()
        return digest(whole[1])

    first, second = run_ranks(2, run)
    assert first == second == digest(contribution(0, 100, torch.float32) + contribution(1, 100, torch.float32))
