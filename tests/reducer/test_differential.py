"""Random trainings, attached, against one process that has all ranks' batches and averages by itself, in float64.

Each rank draws the same training. PYCOMM_FUZZ_SECONDS says for how long (`nox -s fuzz`: ten minutes).
"""

from __future__ import annotations

import copy
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached

SECONDS = float(os.environ.get("PYCOMM_FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("PYCOMM_FUZZ_SEED", "0"))
pytestmark = pytest.mark.timeout(math.ceil(SECONDS) + 90)
STEPS, INPUTS, OUTPUTS = 4, 5, 3

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, weight_decay=0.01),
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.05),
}
SHARDED = "sgd", "momentum", "adamw"
METHODS: dict[str, Any] = {
    "dense": None,
    "topk": pycomm.TopK(1.0),
    "randomk": pycomm.RandomK(1.0),
}


@dataclass
class Plan:
    """A training, as ``rng`` draws it."""

    rng: random.Random
    optimizer: str = field(init=False)
    method: str = field(init=False)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.seed, self.optimizer = rng.randrange(1 << 30), rng.choice(sorted(OPTIMIZERS))
        self.method = rng.choice(("dense", "dense", "topk", "randomk"))
        self.accumulate, self.clip = rng.choice((1, 1, 2, 3)), rng.choice((None, 0.1, 10.0))
        self.weighted, self.to_none = rng.random() < 0.4, rng.random() < 0.5
        self.scaler = rng.choice((None, None, "pycomm", "torch"))
        self.widths = [rng.choice((1, 4, 17, 60)) for _ in range(rng.randrange(1, 4))]
        self.norm, self.tied, self.frozen = rng.choice((None, "batch", "layer")), rng.random() < 0.2, rng.random() < 0.2
        self.options = {"bucket_mb": rng.choice((1e-4, 1e-3, 1.0)), "accumulate": self.accumulate}
        if self.method == "dense" and self.optimizer in SHARDED and rng.random() < 0.4:
            self.options["shard"] = "optimizer"
        if self.method == "dense" and "shard" not in self.options and rng.random() < 0.2:
            self.options["on_failure"] = "shrink"

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in vars(self).items() if key != "rng")

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        width = INPUTS
        for after in [max(width, 4) if self.norm else width for width in self.widths]:  # a norm of one number is 0
            # Without a bias that a norm takes away again: its gradients are nothing but rounding errors.
            layers.append(nn.Linear(width, after, bias=self.norm is None))
            if self.norm is not None:
                layers.append(nn.BatchNorm1d(after) if self.norm == "batch" else nn.LayerNorm(after))
            layers.append(nn.Tanh())
            width = after
        if self.tied:
            twice = nn.Linear(width, width)
            layers += [twice, nn.Tanh(), twice]
        model = nn.Sequential(*layers, nn.Linear(width, OUTPUTS)).double()
        if self.frozen:
            next(model.parameters()).requires_grad_(False)
        return model

    def size_of(self, rank: int, step: int, number: int) -> int:
        return 2 + random.Random(f"{self.seed}/{rank}/{step}/{number}").randrange(4)

    def loss(self, model: nn.Module, rank: int, step: int, number: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(self.seed + 1000 * rank + 10 * step + number)
        x = torch.randn(self.size_of(rank, step, number), INPUTS + OUTPUTS, generator=numbers, dtype=torch.float64)
        return (model(x[:, :INPUTS]) - x[:, INPUTS:]).square().mean()


class Alone:
    """The training in this process, on the batches of all ranks."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.model = plan, plan.model()
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = OPTIMIZERS[plan.optimizer](self._trained)
        self._buffers = [copy.deepcopy(self.model) for _ in range(dist.get_world_size())]

    def step(self, step: int) -> None:
        plan, ranks = self._plan, range(dist.get_world_size())
        passes = [(rank, number) for rank in ranks for number in range(plan.accumulate)]
        weights = [float(plan.size_of(rank, step, number)) if plan.weighted else 1.0 for rank, number in passes]
        total = sum(weights)
        wanted = [torch.zeros_like(p) for p in self._trained]
        for (rank, number), weight in zip(passes, weights, strict=True):
            gradients = torch.autograd.grad(plan.loss(self.model, rank, step, number), self._trained)
            for out, gradient in zip(wanted, gradients, strict=True):
                out.add_(gradient, alpha=weight / total)
        for p, gradient in zip(self._trained, wanted, strict=True):
            p.grad = gradient
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, plan.clip)
        self._optimizer.step()


def train(plan: Plan) -> None:
    rank, model, alone = dist.get_rank(), plan.model(), Alone(plan)
    optimizer = OPTIMIZERS[plan.optimizer]([p for p in model.parameters() if p.requires_grad])
    scaler: Any = None
    if plan.scaler is not None:
        scaler = (
            pycomm.LossScaler(1024.0) if plan.scaler == "pycomm" else torch.amp.GradScaler("cpu", init_scale=1024.0)
        )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    given = named if plan.frozen else model
    with attached(optimizer, given, compression=METHODS[plan.method], loss_scaler=scaler, **plan.options) as reducer:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=plan.to_none)
            for number in range(plan.accumulate):
                if plan.weighted:
                    reducer.set_weight(plan.size_of(rank, step, number))
                loss = plan.loss(model, rank, step, number)
                loss = loss if plan.weighted else loss / plan.accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if plan.clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                reducer.clip_grad_norm(plan.clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            alone.step(step)
            for (name, p), wanted in zip(model.named_parameters(), alone.model.parameters(), strict=True):
                assert torch.allclose(p, wanted, rtol=1e-7, atol=1e-9), (
                    f"{name} after step {step}: {p.flatten()[:4].tolist()} is not {wanted.flatten()[:4].tolist()}"
                )


def go_on(begun: float, seconds: float) -> bool:
    """Return whether rank 0 still has time. Collective."""
    flag = torch.tensor([time.monotonic() - begun < seconds])
    dist.broadcast(flag, 0)
    return bool(flag)


@on_ranks(2, 3, timeout=math.ceil(SECONDS) + 60.0)
def test_whatever_is_trained_one_process_would_have_come_to_the_same() -> None:
    begun, number = time.monotonic(), 0
    while go_on(begun, SECONDS / 2):
        plan = Plan(random.Random(f"{SEED}/{number}"))
        try:
            train(plan)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, training {number}: {plan}") from error
        number += 1
    assert number > 1


@on_ranks(2)
def test_a_difference_is_found() -> None:
    plan = Plan(random.Random("0/0"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "size_of", lambda *_: 3 + dist.get_rank())  # the reference has other batches
        with pytest.raises(AssertionError, match="is not"):
            train(plan)
