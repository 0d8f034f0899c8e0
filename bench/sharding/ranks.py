"""WorkerGroup of ``bench.sharding``: one optimizer phase, from each rank's gradients to the new parameters of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import pycomm
from bench.harness.ranks import join_group

WHOLE = "all_reduce, fused step"
OPTIMIZER = 'shard="optimizer"'
FULL = 'shard="optimizer", grads="full"'
ZERO = "ZeroRedundancyOptimizer over Gloo"
WAYS = (WHOLE, OPTIMIZER, FULL, ZERO)

_ATTACH: dict[str, dict[str, Any]] = {
    WHOLE: {},
    OPTIMIZER: {"shard": "optimizer"},
    FULL: {"shard": pycomm.Sharding("optimizer", grads="full")},
}
_BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has them


class _Weights(nn.Module):
    """Parameters of a model whose gradient is whatever :meth:`forward` is given, as ResNet-50's in number."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = max(1, round(millions * 1e6 / (800 * 640)))
        self.weights = nn.ParameterList(nn.Parameter(0.1 * torch.randn(800, 640)) for _ in range(count))

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        products = [(w * torch.randn(w.shape, generator=generator)).sum() for w in self.weights]
        return torch.stack(products).sum()


class ShardingRank:
    """Rank with all ways side by side, each with a model of its own."""

    def __init__(self, port: int, millions: float) -> None:
        self.rank, _ = join_group(port)
        self._phases: dict[str, Callable[[], None]] = {}
        self._models: dict[str, nn.Module] = {}
        self._reducers: list[pycomm.Reducer] = []
        for way in WAYS:
            model = self._models[way] = _Weights(millions)
            self._phases[way] = self._zero(model) if way == ZERO else self._ours(way, model)

    def _ours(self, way: str, model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if way == WHOLE:
            pycomm.fuse(optimizer)
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(check_replicas=0), **_ATTACH[way])
        self._reducers.append(reducer)
        self._backward(model)
        optimizer.step()
        grads = [torch.randn_like(p) for p in model.parameters()]

        def phase() -> None:
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad
            reducer.reduce()
            optimizer.step()

        return phase

    def _zero(self, model: nn.Module) -> Callable[[], None]:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3, fused=True)
        self._backward(model)
        buckets = list(_flat_gradients(model))
        for flat in buckets:
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        optimizer.step()

        def phase() -> None:
            for flat in buckets:
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
            optimizer.step()

        return phase

    def _backward(self, model: nn.Module) -> None:
        model(torch.Generator().manual_seed(1 + self.rank)).backward()

    def verify(self) -> None:
        """Check that one step has led all ways to the same parameters, on all ranks.

        Raises:
            AssertionError: it has not.
        """
        wanted = [p.detach() for p in self._models[WHOLE].parameters()]
        for way, model in self._models.items():
            for got, want in zip(model.parameters(), wanted, strict=True):
                # Adam's first step has the sign of the gradient, which rounding turns where ranks' gradients cancel.
                close = torch.isclose(got, want, 1e-5, 1e-6).float().mean() > 0.999
                if not (close if way == ZERO else torch.equal(got, want)):
                    raise AssertionError(f"{way}: the parameters are not the same as with {WHOLE}")
            first = torch.cat([p.detach().view(-1) for p in model.parameters()])
            mine = first.clone()
            dist.broadcast(first, src=0)
            if not torch.equal(mine, first):
                raise AssertionError(f"{way}: the ranks' parameters differ")

    def turn(self, way: str, count: int) -> list[float]:
        """Return the seconds of each of ``count`` phases."""
        self._phases[way]()  # brings back what the caches lost to the other ways
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self._phases[way]()
            seconds.append(time.perf_counter() - start)
        return seconds

    def state_bytes(self) -> dict[str, float]:
        """Return the bytes of the optimizer's state for each rank, by way; what ranks share counts once."""
        count = sum(p.numel() for p in self._models[WHOLE].parameters())
        size = dist.get_world_size()
        return {way: 8.0 * count / (1 if way == WHOLE else size) for way in WAYS}

    def close(self) -> None:
        for reducer in self._reducers:
            reducer.detach()
        dist.destroy_process_group()


def _flat_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Lay the gradients into flat buckets, as views; yield these."""
    run: list[torch.Tensor] = []
    params = list(model.parameters())[::-1]
    for i, param in enumerate(params):
        run.append(param)
        if i + 1 == len(params) or sum(p.numel() for p in run) * 4 + params[i + 1].numel() * 4 > _BUCKET_BYTES:
            flat = torch.cat([p.grad.view(-1) for p in run if p.grad is not None])
            for p, part in zip(run, torch.split(flat, [p.numel() for p in run]), strict=True):
                p.grad = part.view(p.shape)
            yield flat
            run = []
