"""WorkerGroup of ``bench.matrices``: a step of a byte-level GPT by Muon, whole on each rank or shared out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from bench.harness.ranks import join_group
from pycomm.tools.cli.demo.model import ByteGPT, loss_of

WHOLE = "torch.optim.Muon, attach"
TORCH = "torch.optim.Muon, DDP"
GATHERED = "torch.optim.Muon, DDP, matrices dealt, all_gather after the step"
SHARED = 'torch.optim.Muon, attach, shard="optimizer"'
WAYS = (WHOLE, SHARED, TORCH, GATHERED)
_CONTEXT, _HEADS = 64, 4
_MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.01}
_ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01, "betas": (0.9, 0.95)}


class MatricesRank:
    """Rank with all ways side by side, each with a model of its own."""

    def __init__(self, port: int, width: int, layers: int, batch: int) -> None:
        self.rank, self._size = join_group(port)
        generator = torch.Generator().manual_seed(self.rank)
        self._text = torch.randint(256, (batch, _CONTEXT + 1), generator=generator)
        self._models: dict[str, nn.Module] = {}
        self._steps: dict[str, Callable[[], None]] = {}
        self._forwards: dict[str, nn.Module] = {}
        self._optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        self._reducers: list[pycomm.Reducer] = []
        for way in WAYS:
            torch.manual_seed(0)
            model = self._models[way] = ByteGPT(width, layers, _CONTEXT, _HEADS)
            {WHOLE: self._ours, SHARED: self._ours, TORCH: self._torch, GATHERED: self._gathered}[way](way, model)

    def _ours(self, way: str, model: nn.Module) -> None:
        shard = "optimizer" if way == SHARED else None
        matrices, others = matrices_and_others(model)
        optimizers = [muon(matrices, **_MUON), torch.optim.AdamW(others, **_ADAMW)]
        for optimizer in optimizers:
            self._reducers.append(pycomm.attach(optimizer, model, shard=shard, tuning=pycomm.Tuning(check_replicas=0)))
        self._note(way, model, optimizers)

    def _torch(self, way: str, model: nn.Module) -> None:
        matrices, others = matrices_and_others(model)
        optimizers = [muon(matrices, **_MUON), torch.optim.AdamW(others, **_ADAMW)]
        self._note(way, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizers)

    def _gathered(self, way: str, model: nn.Module) -> None:
        """Deal matrices of one shape in turns: each rank steps its own, and sends them to the others."""
        matrices, others = matrices_and_others(model)
        dealt = sorted(matrices, key=lambda p: (p.numel(), p.shape))
        parts = [dealt[rank :: self._size] for rank in range(self._size)]
        optimizers = [muon(parts[self.rank], **_MUON), torch.optim.AdamW(others, **_ADAMW)]
        longest = max(sum(p.numel() for p in part) for part in parts)
        mine, everyones = torch.zeros(longest), [torch.zeros(longest) for _ in parts]

        def gather() -> None:
            with torch.no_grad():
                _copy(parts[self.rank], mine, out=True)
                dist.all_gather(everyones, mine)
                for part, theirs in zip(parts, everyones, strict=True):
                    _copy(part, theirs, out=False)

        self._note(way, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizers, gather)

    def _note(
        self,
        way: str,
        forward: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        after: Callable[[], None] | None = None,
    ) -> None:
        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()
            if after is not None:
                after()

        self._forwards[way], self._optimizers[way], self._steps[way] = forward, optimizers, step

    def _backward(self, way: str) -> None:
        forward = self._forwards[way]
        forward.zero_grad()
        loss_of(forward(self._text[:, :-1]), self._text[:, 1:]).backward()  # type: ignore[no-untyped-call]

    def verify(self) -> None:
        """Check that four steps lead all ways to the same parameters, up to bfloat16's rounding, on all ranks.

        Raises:
            AssertionError: they do not.
        """
        for way in WAYS:
            for _ in range(4):
                self._backward(way)
                self._steps[way]()
        wanted = torch.cat([p.detach().flatten() for p in self._models[TORCH].parameters()])
        for way, model in self._models.items():
            mine = torch.cat([p.detach().flatten() for p in model.parameters()])
            first = mine.clone()
            dist.broadcast(first, src=0)
            if not torch.equal(mine, first):
                raise AssertionError(f"{way}: the ranks' parameters differ")
            if float((mine - wanted).norm() / wanted.norm()) > 0.01:
                raise AssertionError(f"{way}: the parameters are not the same as with {TORCH}")

    def turn(self, way: str, count: int) -> list[dict[str, float]]:
        """Return seconds of each of ``count`` iterations: "whole", its "step" alone, and the step's processor "cpu"."""
        taken = []
        for _ in range(count):
            dist.barrier()
            begun = time.perf_counter()
            self._backward(way)
            stepped, cpu = time.perf_counter(), time.process_time()
            self._steps[way]()
            taken.append({"cpu": time.process_time() - cpu, "step": time.perf_counter() - stepped})
            taken[-1]["whole"] = time.perf_counter() - begun
        return taken

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of the optimizers' state on this rank, by way."""
        return {
            way: sum(
                value.nbytes
                for optimizer in optimizers
                for entry in optimizer.state.values()
                for value in entry.values()
                if isinstance(value, torch.Tensor)
            )
            for way, optimizers in self._optimizers.items()
        }

    def close(self) -> None:
        for reducer in self._reducers:
            reducer.detach()
        dist.destroy_process_group()


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices, for Muon; and vectors, embeddings and the head, for AdamW."""
    ends = [part for name, part in model.named_modules() if isinstance(part, nn.Embedding) or name == "head"]
    apart = {id(p) for part in ends for p in part.parameters()}
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in apart]
    return matrices, [p for p in model.parameters() if p.dim() != 2 or id(p) in apart]


def muon(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Return torch's Muon of ``params``, which must be matrices."""
    make: Any = torch.optim.Muon  # torch 2.9
    optimizer: torch.optim.Optimizer = make(params, **options)
    return optimizer


def _copy(params: list[nn.Parameter], flat: torch.Tensor, out: bool) -> None:
    """Copy ``params`` out to ``flat``, or back."""
    sizes = [p.numel() for p in params]
    for p, part in zip(params, torch.split(flat[: sum(sizes)], sizes), strict=True):
        target, source = (part.view_as(p), p) if out else (p, part.view_as(p))
        target.copy_(source)
