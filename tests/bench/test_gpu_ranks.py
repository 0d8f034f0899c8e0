"""Ranks of bench.gpu as on a GPU: this process's memory, and stand-ins for events, streams and graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.gpu import ranks
from bench.gpu.models import TINY_WORKLOADS, Workload
from bench.gpu.ranks import DDP, DENSE, NONE, TOPK, AttachRank

GPT = Workload("GPT", TINY_WORKLOADS[0].blocks, 2, 8, gpt=True)
CAPTURED = Workload("ResNet-5", (1,), 2, 32, half=True, captured=True)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


class Stream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)


@pytest.fixture
def make(one_rank_group: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload], AttachRank]:
    """Makes a rank of a workload, whose graphs take the step anew."""
    monkeypatch.setattr(ranks, "join_group", lambda _: (0, 1))

    def new(workload: Workload) -> AttachRank:
        rank = AttachRank(0, workload, "cpu", own_host=False)
        rank._on_gpu, rank._nccl = True, dist.group.WORLD

        class Graph:
            def replay(self) -> None:
                rank._step()

        replacements: dict[str, Any] = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph}
        replacements |= dict.fromkeys(("stream", "graph"), lambda _: contextlib.nullcontext())
        replacements |= {"current_stream": Stream, "synchronize": lambda _: None}
        replacements |= {"reset_peak_memory_stats": lambda _: None, "max_memory_allocated": lambda _: 1000}
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        return rank

    return new


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
def test_a_rank_on_a_gpu(make: Callable[[Workload], AttachRank]) -> None:
    rank = make(GPT)
    rank.verify((NONE, DDP, DENSE, TOPK))
    found = {way: rank.turn(way, 2) for way in (NONE, DDP, DENSE, TOPK)}
    assert [turn["active"] for turn in found.values()] == [False, False, True, True]
    assert all(0.0 < turn["host_seconds"] <= 2 * turn["seconds"] for turn in found.values())
    assert [turn["peak_bytes"] for turn in found.values()] == [1000] * 4  # no NCCL has registered anything
    assert [turn["miss_rate"] is None for turn in found.values()] == [True, True, True, False]
    shown = rank.profile(DENSE)
    assert shown["exposed_seconds"] > 0.0
    assert shown["kernels"] == shown["launches"] == 0
    rank._synchronize(NONE)


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling")
def test_a_captured_step(make: Callable[[Workload], AttachRank]) -> None:
    """It is the graph that is verified and timed; it is gone before the communicator, and no hook is asked."""
    rank = make(CAPTURED)
    rank.verify((NONE, DENSE))
    found = rank.turn(DENSE, 1)
    assert (found["active"], found["peak_bytes"]) == (True, None)
    assert rank._run.__name__ == "replay"
    assert rank.profile(DENSE)["exposed_seconds"] is None
    rank._synchronize(NONE)
    assert rank._run == rank._step


def test_wrong_averages_are_noticed(make: Callable[[Workload], AttachRank], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make(GPT)
    own = rank._gradients

    def halved(way: str) -> torch.Tensor:
        return own(way) * (0.5 if way == DDP else 1.0)

    monkeypatch.setattr(rank, "_gradients", halved)
    with pytest.raises(AssertionError, match="DDP, gradient_as_bucket_view: the averaged gradient is wrong"):
        rank.verify((NONE, DDP))
    rank._synchronize(NONE)
