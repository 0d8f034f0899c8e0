"""WorkerGroup of ``bench.training``: whole steps of a multi-layer perceptron, with and without communication."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from bench.harness.memory import give_back, mapped_bytes, memory_file_bytes
from bench.harness.ranks import join_group
from bench.training.monitoring import cost_of_monitoring
from pycomm.ddp import HookHandle, register

NONE = "no communication"
MEET = "a barrier after backward"
DDP = "DDP"
DDP_VIEWS = "DDP, gradient_as_bucket_view"
BACKEND = "DDP over pycomm"
BACKEND_VIEWS = "DDP over pycomm, views"
DENSE = "pycomm"
SHARD = "pycomm, shard=optimizer"
SHRINK = "pycomm, survive"
FP16 = "pycomm, FP16"
TOPK = "pycomm, TopK(0.01)"
HOOK = "DDP, pycomm's hook"
HOOK_TOPK = "DDP, pycomm's hook, TopK(0.01)"
WAYS = (NONE, MEET, DDP, DDP_VIEWS, BACKEND, BACKEND_VIEWS, HOOK, DENSE, SHARD, SHRINK, FP16, TOPK, HOOK_TOPK)

METHODS: dict[str, Any] = {
    **{type(method).__name__: method for method in (pycomm.FP16(), pycomm.QSGD(), pycomm.Int8(), pycomm.Int4())},
    **{type(method).__name__: method for method in (pycomm.FP8(), pycomm.OneBit(), pycomm.DGC())},
    "TopK(0.01)": pycomm.TopK(0.01),
    "RandomK(0.01)": pycomm.RandomK(0.01),
    "ChunkTopK(64)": pycomm.ChunkTopK(64),
    "PowerSGD(2)": pycomm.PowerSGD(2),
}
"""Methods of compression by the ways that use them with attach."""

_UNSYNCHRONIZED = (NONE, MEET)

_ATTACH: dict[str, dict[str, Any]] = {
    DENSE: {},
    SHARD: {"shard": "optimizer"},
    SHRINK: {"survive": pycomm.Survive()},
    FP16: {"compression": pycomm.FP16()},
    TOPK: {"compression": pycomm.TopK(0.01)},
    **{way: {"compression": method} for way, method in METHODS.items()},
}
_HOOK_COMPRESSION: dict[str, Any] = {HOOK: None, HOOK_TOPK: pycomm.TopK(0.01)}
_TINY = (8, 8, 2)


def make_model(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLU between them; always the same parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")  # gradients of many layers do not vanish
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Replica:
    """Model and its optimizer on this rank, kept equal to the others' in one of the ``WAYS``."""

    def __init__(self, way: str, widths: Sequence[int], batch: int) -> None:
        self.model = make_model(widths)
        # DGC has momentum of its own, and ChunkTopK's decay takes its place.
        momentum = 0.0 if isinstance(METHODS.get(way), pycomm.DGC | pycomm.ChunkTopK) else 0.9
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._inputs = torch.randn(batch, widths[0], generator=generator)
        self._targets = torch.randint(widths[-1], (batch,), generator=generator)
        self._module: nn.Module = self.model
        self.reducer: pycomm.Reducer | HookHandle | None = None
        self._meeting: pycomm.Communicator | None = None
        self.synchronize(way)

    def synchronize(self, way: str) -> None:
        """Switch to averaging in this way, and undo the previous way."""
        if isinstance(self.reducer, pycomm.Reducer):
            self.reducer.detach()
        elif self.reducer is not None:
            self.reducer.remove()
        elif self._meeting is not None:
            self._meeting.close()
        self.reducer, self._meeting, self._module = None, None, self.model
        if way in _ATTACH:
            self.reducer = pycomm.attach(self.optimizer, self.model, **_ATTACH[way])
        elif way == MEET:
            self._meeting = pycomm.Communicator()
        elif way != NONE:
            self._module = DistributedDataParallel(
                self.model,
                process_group=dist.new_group(backend="pycomm") if way in (BACKEND, BACKEND_VIEWS) else None,
                gradient_as_bucket_view=way in (DDP_VIEWS, BACKEND_VIEWS),
            )
            if way in _HOOK_COMPRESSION:
                self.reducer = register(self._module, compression=_HOOK_COMPRESSION[way])

    def backward(self) -> None:
        """Compute the gradients of this rank's batch, averaged if the way does."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._module(self._inputs), self._targets)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.backward()
        if self._meeting is not None:
            self._meeting.barrier()
        self.optimizer.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return copies of the gradients, by name."""
        return {name: _grad_of(parameter).clone() for name, parameter in self.model.named_parameters()}

    def kept_back(self) -> dict[str, torch.Tensor]:
        """Return what error feedback on all ranks together has not sent yet, as part of the average, by name."""
        if self.reducer is None:
            return {}
        state = self.reducer.state_dict()["ranks"][str(dist.get_rank())]
        sums = {name: entry["residual"].clone() for name, entry in state.items() if "residual" in entry}
        for residual in sums.values():
            dist.all_reduce(residual)
        return sums

    def counters(self) -> tuple[float, int]:
        """Return the seconds that backward has been held up, and the bytes sent, so far."""
        if self.reducer is None:
            return 0.0, 0
        stats = self.reducer.stats()
        return stats["wait_seconds"], stats["bytes_sent"]


class StepRank:
    """Rank with several ways side by side, each with a model of its own."""

    def __init__(self, port: int, widths: list[int], batch: int, ways: Sequence[str] = WAYS) -> None:
        self.rank, _ = join_group(port)
        self._replicas = {way: Replica(way, widths, batch) for way in ways}

    def verify(self) -> None:
        """Check averages against the ranks' own gradients, summed in float64.

        Twice, as pycomm sends while backward runs only from the second pass on.

        Raises:
            AssertionError: a way computes something else.
        """
        self._replicas[NONE].backward()
        own = self._replicas[NONE].gradients()
        wanted = {name: _average(grad) for name, grad in own.items()}
        magnitudes = {name: _average(grad.abs()) for name, grad in own.items()}
        for _ in range(2):
            for way in WAYS:
                if way not in (*_UNSYNCHRONIZED, SHARD):  # shards have averages of their own part only
                    _verify_way(way, self._replicas[way], wanted, magnitudes)
        self._verify_shard()

    def _verify_shard(self) -> None:
        """Check that ranks that step together, and have no averages, take the step of those that have."""
        found = []
        for way in (DENSE, SHARD):
            self._replicas[way].step()
            found.append(torch.cat([p.detach().reshape(-1) for p in self._replicas[way].model.parameters()]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)

    def turn(self, way: str, steps: int) -> dict[str, Any]:
        """Return the seconds of each of ``steps`` steps; and on average those waited, its thread's, and bytes sent."""
        replica = self._replicas[way]
        replica.step()  # brings back what the caches and the allocator lost to the other ways
        waited, sent = replica.counters()
        dist.barrier()
        begun = time.thread_time()
        seconds = [_timed(replica.step) for _ in range(steps)]
        host = time.thread_time() - begun
        waited_then, sent_then = replica.counters()
        totals = {"wait": waited_then - waited, "sent": sent_then - sent, "host": host}
        return {"seconds": seconds, **{name: total / steps for name, total in totals.items()}}

    def monitoring(self, way: str, steps: int) -> dict[str, float]:
        """Return what looking at ``way`` costs; see :func:`cost_of_monitoring`."""
        replica = self._replicas[way]
        assert isinstance(replica.reducer, pycomm.Reducer)
        return cost_of_monitoring(replica.reducer, replica.step, steps)

    def check_replicas(self) -> None:
        """Check after training that all ranks hold the same parameters, and that those are finite.

        Raises:
            AssertionError: they do not.
        """
        for way in (way for way in self._replicas if way not in _UNSYNCHRONIZED):
            mine = torch.cat([p.detach().view(-1) for p in self._replicas[way].model.parameters()])
            first = mine.clone()
            dist.broadcast(first, src=0)
            if not torch.equal(mine, first) or not bool(mine.isfinite().all()):
                raise AssertionError(f"{way}: replicas differ or are not finite after training")

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.synchronize(NONE)
        dist.destroy_process_group()


class OverheadRank:
    """Rank that attaches to its optimizer and detaches again, to measure the cost of being attached alone."""

    def __init__(self, port: int, widths: list[int], batch: int) -> None:
        self.rank, _ = join_group(port)
        self._replica = Replica(NONE, widths, batch)

    def verify(self) -> None:
        """Check that gradients are the same to the bit, attached or not.

        Raises:
            AssertionError: they are not.
        """
        found = []
        for way in (NONE, DENSE):
            self._replica.synchronize(way)
            self._replica.backward()
            found.append(self._replica.gradients())
        if any(not torch.equal(found[0][name], found[1][name]) for name in found[0]):
            raise AssertionError("attach with one rank changes gradients")

    def turn(self, way: str, steps: int) -> list[float]:
        """Return the seconds of each of ``steps`` steps."""
        self._replica.synchronize(way)
        self._replica.step()
        return [_timed(self._replica.step) for _ in range(steps)]

    def close(self) -> None:
        self._replica.synchronize(NONE)
        dist.destroy_process_group()


class MemoryRank:
    """Rank that measures what a way keeps in memory between steps; one way only, so that nothing of another is left."""

    def __init__(self, port: int, widths: list[int], batch: int) -> None:
        self.rank, _ = join_group(port)
        self._widths, self._batch = widths, batch

    def measure(self, way: str) -> dict[str, int]:
        """Return bytes of memory that is this rank's (shared memory counts where it was made).

        ``fixed``, what the way takes with a tiny model; ``added``, with this one; ``gradients``, this one's gradients.
        """
        self._growth(way, _TINY)  # imports, threads, pools: there once, whatever is synchronized
        fixed, _ = self._growth(way, _TINY)
        added, gradients = self._growth(way, self._widths)
        return {"fixed": fixed, "added": added, "gradients": gradients}

    def _growth(self, way: str, widths: Sequence[int]) -> tuple[int, int]:
        """Return the growth from a model that has trained without communication to the same after training with it.

        Gradients and momentum are in place before.
        """
        replica = Replica(NONE, widths, self._batch)
        for _ in range(3):
            replica.step()
        before = _own_bytes()
        replica.synchronize(way)
        for _ in range(3):
            replica.step()
        after = _own_bytes()
        gradients = sum(_grad_of(p).nbytes for p in replica.model.parameters())
        replica.synchronize(NONE)
        return after - before, gradients

    def close(self) -> None:
        dist.destroy_process_group()


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "every parameter takes part"
    return parameter.grad


def _average(grad: torch.Tensor) -> torch.Tensor:
    total = grad.double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).float()


def _verify_way(
    way: str, replica: Replica, wanted: dict[str, torch.Tensor], magnitudes: dict[str, torch.Tensor]
) -> None:
    """Check that one backward gives the average, and that error feedback keeps what it lacks of it.

    Roundings are in proportion to the ranks' terms (``magnitudes``, their average), not to their sum,
    in which they may cancel. float16 has 11 bits; its terms are rounded, and then their sum.
    """
    before = replica.kept_back()
    replica.backward()
    after = replica.kept_back()
    relative = 2.0**-9 if way == FP16 else 2.0**-20
    for name, got in replica.gradients().items():
        missing = wanted[name] + before.get(name, 0.0) - got - after.get(name, 0.0)
        terms = magnitudes[name] + before.get(name, torch.zeros(())).abs()
        tolerance = relative * terms + 2.0**-22 * terms.max()
        if not bool((missing.abs() <= tolerance).all()):
            raise AssertionError(f"{way}: the averaged gradient of {name} is wrong")


def _own_bytes() -> int:
    """Return this process's part of the memory that is mapped, and all of the anonymous shared files that it has open.

    What only the allocator holds is given back first. The files are reserved also where nobody has touched them yet.
    """
    give_back()
    return mapped_bytes() + sum(memory_file_bytes().values())
