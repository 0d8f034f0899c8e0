"""WorkerGroup of ``bench.matrices.losses``: a byte-level language model, trained by one method."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from bench.harness.learning_rate import learning_rate_rule
from bench.harness.ranks import join_group
from bench.matrices.ranks import matrices_and_others, muon
from pycomm.tools.cli.demo.model import ByteGPT, loss_of, random_starts, read_corpus, windows

BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 8, 64, 64, 2, 2
RANK = 4
"""Columns of low-rank factors: 1/13 of the bytes of a matrix of 64 rows and 256 columns."""
EVERY = 30
_WINDOWS, _WINDOWS_SEED = 256, 1
_OTHERS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}
"""AdamW of what is no hidden matrix, beside Muon."""

Training = list[tuple[torch.optim.Optimizer, Any]]


@dataclass(frozen=True)
class Method:
    """Method of training.

    Attributes:
        start: makes the optimizers of a model for a learning rate, each with the handle of what averages.
        rates: learning rates to choose from.
    """

    start: Callable[[nn.Module, float], Training]
    rates: Sequence[float]


def _adamw(model: nn.Module, rate: float) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    return [(optimizer, pycomm.attach(optimizer, model))]


def _muon(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    matrices, others = matrices_and_others(model)
    return [muon(matrices, lr=rate, weight_decay=0.01), torch.optim.AdamW(others, **_OTHERS)]


def _attached(model: nn.Module, rate: float, compression: pycomm.PowerSGD | None = None) -> Training:
    return [(each, pycomm.attach(each, model, compression=compression)) for each in _muon(model, rate)]


def _local(model: nn.Module, rate: float) -> Training:
    def averaged(optimizer: torch.optim.Optimizer) -> Any:
        own = nn.ParameterList(optimizer.param_groups[0]["params"])
        return pycomm.local_sgd(optimizer, own, every=EVERY, outer=pycomm.Nesterov(0.8, 0.5))

    return [(each, averaged(each)) for each in _muon(model, rate)]


_RATES = (1e-2, 2e-2, 5e-2, 1e-1)
METHODS = {
    "AdamW": Method(_adamw, (1e-3, 3e-3, 1e-2, 2e-2)),
    "Muon": Method(_attached, _RATES),
    f"Muon, PowerSGD({RANK})": Method(lambda model, rate: _attached(model, rate, pycomm.PowerSGD(RANK)), _RATES),
    f"Muon, local_sgd every {EVERY} (MuLoCo)": Method(_local, _RATES),
}


class Trainee:
    """One rank."""

    def __init__(self, port: int) -> None:
        self._rank, _ = join_group(port)
        self._corpus = read_corpus()

    def train(self, method: str, rate: float, seed: int, steps: int) -> dict[str, float]:
        """Train; return the "loss" on text that was not trained on, "bytes" that a step sends, and "cpu" seconds."""
        torch.manual_seed(seed)
        model = ByteGPT(WIDTH, LAYERS, CONTEXT, HEADS)
        training = METHODS[method].start(model, rate)
        rule = learning_rate_rule(steps)
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rule) for optimizer, _ in training]
        begun = time.process_time()
        for step in range(steps):
            where = random_starts(self._corpus.train, CONTEXT, (BATCH,), seed + 1000 * self._rank + 100_000 * step)
            inputs, targets = windows(self._corpus.train, where, CONTEXT)
            model.zero_grad()
            loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for (optimizer, _), schedule in zip(training, schedules, strict=True):
                optimizer.step()
                schedule.step()
        seconds = time.process_time() - begun
        for _, handle in training:
            if not isinstance(handle, pycomm.Reducer):
                handle.meet()
        sent = sum(float(handle.stats()["bytes_sent"]) for _, handle in training) / steps
        for _, handle in training:
            handle.detach()
        self._verify(model)
        return {"loss": self._validate(model), "bytes": sent, "cpu": seconds / steps}

    def _verify(self, model: nn.Module) -> None:
        """Raise AssertionError if the ranks' parameters differ."""
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(mine, first):
            raise AssertionError("the ranks' parameters differ")

    def _validate(self, model: nn.Module) -> float:
        starts = random_starts(self._corpus.validation, CONTEXT, (_WINDOWS,), _WINDOWS_SEED)
        with torch.no_grad():
            parts = [windows(self._corpus.validation, part, CONTEXT) for part in torch.split(starts, 64)]
            return sum(float(loss_of(model(x), y)) * len(x) for x, y in parts) / _WINDOWS

    def close(self) -> None:
        dist.destroy_process_group()
