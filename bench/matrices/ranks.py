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

WHOLE = "pycomm.Muon, attach"
TORCH = "torch.optim.Muon, DDP"
GATHERED = "torch.optim.Muon, DDP, matrices dealt, all_gather after the step"
SHARED = 'pycomm.Muon, attach, shard="optimizer"'
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
        optimizer = pycomm.Muon(pycomm.muon_groups(model, adamw=_ADAMW), **_MUON)
        shard = "optimizer" if way == SHARED else None
        self._reducers.append(pycomm.attach(optimizer, model, shard=shard, tuning=pycomm.Tuning(check_replicas=0)))
        self._note(way, model, [optimizer], optimizer.step)

    def _torch(self, way: str, model: nn.Module) -> None:
        matrices, others = pycomm.muon_groups(model, adamw=_ADAMW)
        optimizers = [_torch_muon(matrices["params"]), torch.optim.AdamW(others["params"], **_ADAMW)]

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        self._note(way, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizers, step)

    def _gathered(self, way: str, model: nn.Module) -> None:
        """Deal matrices of one shape in turns: each rank steps its own, and sends them to the others."""
        matrices, others = pycomm.muon_groups(model, adamw=_ADAMW)
        dealt = sorted(matrices["params"], key=lambda p: (p.numel(), p.shape))
        parts = [dealt[rank :: self._size] for rank in range(self._size)]
        optimizers = [_torch_muon(parts[self.rank]), torch.optim.AdamW(others["params"], **_ADAMW)]
        longest = max(sum(p.numel() for p in part) for part in parts)
        mine, everyones = torch.zeros(longest), [torch.zeros(longest) for _ in parts]

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                _copy(parts[self.rank], mine, out=True)
                dist.all_gather(everyones, mine)
                for part, theirs in zip(parts, everyones, strict=True):
                    _copy(part, theirs, out=False)

        self._note(way, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizers, step)

    def _note(
        self, way: str, forward: nn.Module, optimizers: list[torch.optim.Optimizer], step: Callable[[], None]
    ) -> None:
        self._forwards[way], self._optimizers[way], self._steps[way] = forward, optimizers, step

    def _backward(self, way: str) -> None:
        forward = self._forwards[way]
        forward.zero_grad()
        loss_of(forward(self._text[:, :-1]), self._text[:, 1:]).backward()  # type: ignore[no-untyped-call]

    def verify(self) -> None:
        """Check that four steps lead all ways to the same parameters, up to bfloat16's rounding, on all ranks.

        Three of them are the trial of ``shard``.

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
                raise AssertionError(f"{way}: the parameters are not those of {TORCH}")

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


def _torch_muon(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    muon: Any = torch.optim.Muon  # torch 2.9
    optimizer: torch.optim.Optimizer = muon(params, **_MUON)
    return optimizer


def _copy(params: list[torch.Tensor], flat: torch.Tensor, out: bool) -> None:
    """Copy ``params`` out to ``flat``, or back."""
    sizes = [p.numel() for p in params]
    for p, part in zip(params, torch.split(flat[: sum(sizes)], sizes), strict=True):
        target, source = (part.view_as(p), p) if out else (p, part.view_as(p))
        target.copy_(source)
