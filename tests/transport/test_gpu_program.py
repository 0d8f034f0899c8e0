"""Schedules and all-to-alls between GPUs, by a stand-in for NCCL's sends and receives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pycomm import kernels, schedule
from pycomm.collectives.transport.gpu_program import GpuProgram, all_to_all
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


def test_all_that_comes_in_a_round_is_added_up_in_float32(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    members = transports(3)
    everyones = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(3)]

    def run(rank: int) -> torch.Tensor:
        x = everyones[rank].clone()
        program = GpuProgram(program_of(schedule.direct(3), rank), place(x, rank), "sum", kernels.Scratch())
        program.run(members[rank], 0, NOW["timeout"])
        return x

    wanted = torch.stack(everyones).float()
    assert all(torch.equal(x, (wanted[0] + wanted[1] + wanted[2]).bfloat16()) for x in run_ranks(3, run))
    for member in members:
        member.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_to_all(fake: Fake, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    members = transports(size)

    def run(rank: int) -> None:
        for length in (0, 1, 50):
            x = torch.arange(size * length).to(dtype) + rank
            out = torch.zeros_like(x)
            all_to_all(members[rank], place(out, rank), place(x, rank), 0, NOW["timeout"])
            wanted = [torch.arange(size * length).to(dtype)[rank * length :][:length] + p for p in range(size)]
            assert torch.equal(out, torch.cat(wanted))

    run_ranks(size, run)
    for member in members:
        member.close()


def test_arguments_of_all_to_all(fake: Fake) -> None:
    members = transports(2)

    def refused(error: type[Exception], says: str, out: torch.Tensor, x: torch.Tensor) -> None:
        with pytest.raises(error, match=says):
            all_to_all(members[0], place(out, 0), place(x, 0), 0, NOW["timeout"])

    refused(TypeError, "x has dtype bool and out bool, wanted both one of", *[torch.ones(4, dtype=torch.bool)] * 2)
    refused(TypeError, "x has dtype float32 and out int32", torch.ones(4, dtype=torch.int32), torch.ones(4))
    refused(ValueError, "x has 3 elements and out 3, wanted both the same multiple of 2", torch.ones(3), torch.ones(3))
    refused(ValueError, "x has 4 elements and out 2, wanted both the same", torch.ones(2), torch.ones(4))
    refused(ValueError, "x is not contiguous", torch.ones(4), torch.ones(4, 4)[:, 1])
    for member in members:
        member.close()
