"""The ranks of ``bench.gpu``: what an operation costs, and a training step, with and without pycomm, and by DDP.

Processes of their own, also where there is one rank: one that dies takes no other figure with it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import pycomm
from bench.gpu.models import Training, Workload
from bench.gpu.timing import Turn
from bench.harness.ranks import join_group
from bench.harness.timing import interleave

NONE = "without attach"
DDP = "DDP, gradient_as_bucket_view"
DDP_BF16 = "DDP, bf16_compress_hook"
DENSE = "attach"
FP16 = "attach, FP16()"
TOPK = "attach, TopK(0.001)"
WAYS = (NONE, DENSE, FP16, TOPK)
WAYS_BESIDE_DDP = (NONE, DDP, DDP_BF16, DENSE, FP16, TOPK)

_COMPRESSION: dict[str, Callable[[], Any]] = {
    DENSE: pycomm.NoCompression,
    FP16: pycomm.FP16,
    TOPK: lambda: pycomm.TopK(0.001),
}
_WARM_UP_STEPS = 4  # which a capture requires; DDP and attach have sorted their buckets after two
_EXPOSURES = 3
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class AttachRank:
    """Rank that averages in one way after the other: by pycomm, which it attaches and detaches, by DDP, or not.

    Args:
        own_host: whether NCCL is told that the rank is on a host of its own.
    """

    def __init__(self, port: int, workload: Workload, device: str, own_host: bool) -> None:
        self.rank, self._size = join_group(port)
        if own_host:
            os.environ["NCCL_HOSTID"] = str(self.rank)
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        torch.backends.cudnn.benchmark = True
        self._captured = workload.captured
        self._training = Training(workload, self._device, self.rank)
        self._module = self._training.model
        self._run: Callable[[], None] = self._step
        self._nccl: dist.ProcessGroup | None = None
        self._reducer: pycomm.Reducer | None = None

    def verify(self, ways: Sequence[str]) -> None:
        """Check the averages of the ranks' gradients, in the steps that are timed.

        Raises:
            AssertionError: a way computes something else, or top-k something that is not finite.
        """
        wanted = self._gradients(NONE)
        if self._size > 1:
            on_host = wanted.cpu()
            dist.all_reduce(on_host)
            wanted.copy_(on_host).div_(self._size)
        for way in ways[1:]:
            got = self._gradients(way)
            if way == TOPK:
                correct = bool(got.isfinite().all() and got.any())
            else:
                correct = bool((got - wanted).norm() <= self._training.tolerance * wanted.norm())
            if not correct:
                raise AssertionError(f"{way}: the averaged gradient is wrong")

    def turn(self, way: str, steps: int) -> dict[str, Any]:
        """Return the mean seconds of ``steps`` steps that follow each other, and what else they show.

        ``host_seconds``: until the first of them is enqueued; ``active``: whether pycomm does anything in them;
        ``peak_bytes``: memory allocated at most by torch, and by NCCL for pycomm's buckets.
        """
        self._prepare(way)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        dist.barrier()
        start = time.perf_counter()
        self._run()
        host_seconds = time.perf_counter() - start
        for _ in range(steps - 1):
            self._run()
        self._wait()
        seconds = (time.perf_counter() - start) / steps
        stats = {} if self._reducer is None else self._reducer.stats()
        peak_bytes = None
        if self._on_gpu and not self._captured:  # the memory of a graph is not counted
            peak_bytes = torch.cuda.max_memory_allocated(self._device) + stats.get("registered_bytes", 0)
        found = {"seconds": seconds, "host_seconds": host_seconds, "active": stats.get("steps", 0) > 0}
        return {**found, "peak_bytes": peak_bytes, "miss_rate": stats.get("miss_rate")}

    def profile(self, way: str, trace: str | None = None) -> dict[str, Any]:
        """Return what is not timed in turns, as looking takes time itself; write the profiler's ``trace``, if named.

        ``kernels`` and ``launches``: what the GPU runs in a step, and calls that start it; ``exposed_seconds``: from
        the last gradient of ``backward`` until the stream may go on, the median of several steps.
        """
        self._prepare(way)
        # A graph does not run hooks.
        exposed = None if self._captured else median(self._exposed_seconds() for _ in range(_EXPOSURES))
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] * self._on_gpu
        with torch.profiler.profile(activities=kinds) as profiler:
            self._run()
            self._wait()
        if trace is not None and self.rank == 0:
            profiler.export_chrome_trace(trace)
        events = profiler.events() or []
        on_device = [event for event in events if event.device_type.name == "CUDA"]
        kernels = sum(not getattr(event, "is_user_annotation", False) for event in on_device)
        launches = sum(event.name.startswith(_LAUNCHES) for event in events)
        return {"exposed_seconds": exposed, "kernels": kernels, "launches": launches}

    def close(self) -> None:
        self._synchronize(NONE)
        dist.destroy_process_group()

    def _exposed_seconds(self) -> float:
        marks: list[Any] = []

        def mark(*_: object) -> None:
            if self._on_gpu:
                marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        parameters = list(self._training.model.parameters())
        with torch.autograd.graph.register_multi_grad_hook(parameters, mark):
            self._training.backward(self._module)
        mark()
        self._training.optimizer.step()
        self._wait()
        seconds: float = marks[0].elapsed_time(marks[1]) / 1e3 if self._on_gpu else marks[1] - marks[0]
        return seconds

    def _synchronize(self, way: str) -> None:
        self._run = self._step  # a graph goes before the communicator that it uses
        self._module = self._training.model
        gc.collect()
        if self._reducer is not None:
            self._reducer.detach()
        self._reducer = None
        if way in _COMPRESSION:
            model, optimizer = self._training.model, self._training.optimizer
            self._reducer = pycomm.attach(optimizer, model, compression=_COMPRESSION[way]())
            if self._reducer._idle:
                # One rank has nothing to average; what its hooks and buckets cost is what is measured here.
                self._reducer._install()
        elif way != NONE:
            self._wrap(way)

    def _wrap(self, way: str) -> None:
        if self._on_gpu and self._nccl is None:
            self._nccl = dist.new_group(backend="nccl")
        model = self._training.model
        module = DistributedDataParallel(model, process_group=self._nccl, gradient_as_bucket_view=True)
        if way == DDP_BF16:
            module.register_comm_hook(self._nccl, bf16_compress_hook)
        self._module = module

    def _prepare(self, way: str) -> None:
        """Step a way until all of its steps do the same work; capture one if captured steps are what is launched."""
        self._synchronize(way)
        if not self._captured:
            for _ in range(_WARM_UP_STEPS):
                self._step()
        else:
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_STEPS):
                    self._step()
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._run = graph.replay
            self._run()  # the first launch loads the graph
        self._wait()

    def _step(self) -> None:
        self._training.backward(self._module)
        self._training.optimizer.step()

    def _gradients(self, way: str) -> torch.Tensor:
        """Return the gradients of a step; cuDNN takes kernels that add in the same order each time."""
        torch.backends.cudnn.deterministic = True
        self._prepare(way)
        self._run()
        torch.backends.cudnn.deterministic = False
        grads = [p.grad for p in self._training.model.parameters() if p.grad is not None]
        return torch.cat([grad.reshape(-1) for grad in grads]).double()

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class NcclRank:
    """Rank that all-reduces on its GPU, by pycomm and by torch.distributed."""

    def __init__(self, port: int) -> None:
        self.rank, _ = join_group(port)
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._communicator = pycomm.Communicator()
        self._nccl = dist.new_group(backend="nccl") if dist.is_nccl_available() else None

    def measure(self, num_bytes: int, rounds: int) -> dict[str, Any]:
        """Return for each side the seconds of a call on the GPU, one per round, and the median of those on the host."""
        x = torch.randn(num_bytes // 4, device=self._device)
        calls: dict[str, Callable[[], object]] = {"pycomm": lambda: self._communicator.all_reduce(x)}
        if self._nccl is not None:
            calls["torch"] = lambda: dist.all_reduce(x, group=self._nccl)
        before = x.clone()
        for name, call in calls.items():
            call()
            if not torch.equal(x, before):
                raise AssertionError(f"{name}: the sum over one rank is not what was there")
        turns = {name: Turn([call] * 20, self._device) for name, call in calls.items()}
        for turn in turns.values():
            turn.warm_up()
        samples = interleave(turns, rounds)
        return {
            name: {"seconds": list(samples[name].seconds), "host_seconds": turn.host_seconds}
            for name, turn in turns.items()
        }

    def close(self) -> None:
        self._communicator.close()
        dist.destroy_process_group()
