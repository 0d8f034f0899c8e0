"""Collectives on arrays of a GPU where there is none: an error for every rank, and the communicator lives on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import kernels
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.skipif(kernels.cuda_devices()[0] > 0, reason="there is a GPU")


class OnGpu:
    """Array that looks like cupy's from outside."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


@on_ranks(2)
def test_every_rank_hears_what_is_missing() -> None:
    with pycomm.Communicator(timeout=20) as c:
        missing = "no NVIDIA driver|this build of pycomm has no CUDA|no GPU"
        for call in (lambda: c.all_reduce(OnGpu()), lambda: c.broadcast(OnGpu(), 0), lambda: c.send(OnGpu(), 0)):
            with pytest.raises(RuntimeError, match=f"rank 0 cannot use NCCL: .*({missing})"):
                call()
        x = torch.ones(3)
        c.all_reduce(x)
        assert x.tolist() == [dist.get_world_size()] * 3


@on_ranks(2)
def test_one_rank_on_a_gpu_the_other_not() -> None:
    with pycomm.Communicator(timeout=20) as c, pytest.raises(ValueError, match="the ranks disagree"):
        c.all_reduce(OnGpu() if dist.get_rank() == 0 else torch.ones(3))


@on_ranks(2)
def test_a_group_that_moves_no_cpu_tensors() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        with pytest.raises(ValueError, match="no backend for CPU tensors, only cuda:nccl: call init_process_group"):
            pycomm.Communicator(transport="torch")
