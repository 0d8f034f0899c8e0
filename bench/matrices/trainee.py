"""WorkerGroup of ``bench.matrices.losses``: a byte-level language model, trained by one method."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from bench.harness.learning_rate import learning_rate_rule
from bench.harness.ranks import join_group
from pycomm.tools.cli.demo.model import ByteGPT, loss_of, random_starts, read_corpus, windows

BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 8, 64, 64, 2, 2
RANK = 4
"""Columns of low-rank factors: 1/13 of the bytes of a matrix of 64 rows and 256 columns."""
EVERY = 30
_WINDOWS, _WINDOWS_SEED = 256, 1
_OTHERS = {"lr": 3e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}
"""AdamW of what is no hidden matrix, beside Muon and Dion."""

Training = tuple[torch.optim.Optimizer, Any]


@dataclass(frozen=True)
class Method:
    """Method of training.

    Attributes:
        start: makes the optimizer of a model for a learning rate, and the handle of what averages.
        rates: learning rates to choose from.
    """

    start: Callable[[torch.nn.Module, float], Training]
    rates: Sequence[float]


def _muon(model: torch.nn.Module, rate: float) -> pycomm.Muon:
    return pycomm.Muon(pycomm.muon_groups(model, adamw=_OTHERS), lr=rate, weight_decay=0.01)


def _adamw(model: torch.nn.Module, rate: float) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    return optimizer, pycomm.attach(optimizer, model)


def _dense(model: torch.nn.Module, rate: float) -> Training:
    optimizer = _muon(model, rate)
    return optimizer, pycomm.attach(optimizer, model)


def _power_sgd(model: torch.nn.Module, rate: float) -> Training:
    optimizer = _muon(model, rate)
    return optimizer, pycomm.attach(optimizer, model, compression=pycomm.PowerSGD(RANK))


def _dion(model: torch.nn.Module, rate: float, rank: int = RANK) -> Training:
    groups = pycomm.muon_groups(model, adamw=_OTHERS)
    optimizer = pycomm.Dion(groups, lr=rate, rank=rank, weight_decay=0.01)
    return optimizer, pycomm.attach(optimizer, model, compression=optimizer.factors)


def _local(model: torch.nn.Module, rate: float) -> Training:
    optimizer = _muon(model, rate)
    return optimizer, pycomm.local_sgd(optimizer, model, every=EVERY, outer=pycomm.Nesterov(0.8, 0.5))


_RATES = (1e-2, 2e-2, 5e-2, 1e-1)
_DION_RATES = (3e-3, 5e-3, 1e-2, 2e-2)
METHODS = {
    "AdamW": Method(_adamw, (1e-3, 3e-3, 1e-2, 2e-2)),
    "Muon": Method(_dense, _RATES),
    f"Muon, PowerSGD({RANK})": Method(_power_sgd, _RATES),
    f"Dion, rank {RANK}": Method(_dion, _DION_RATES),
    f"Dion, rank {4 * RANK}": Method(lambda model, rate: _dion(model, rate, 4 * RANK), _DION_RATES),
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
        optimizer, handle = METHODS[method].start(model, rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_rule(steps))
        begun = time.process_time()
        for step in range(steps):
            where = random_starts(self._corpus.train, CONTEXT, (BATCH,), seed + 1000 * self._rank + 100_000 * step)
            inputs, targets = windows(self._corpus.train, where, CONTEXT)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        seconds = time.process_time() - begun
        if isinstance(handle, pycomm.LocalAverager):
            handle.meet()
        sent = float(handle.stats()["bytes_sent"]) / steps
        handle.detach()
        self._verify(model)
        return {"loss": self._validate(model), "bytes": sent, "cpu": seconds / steps}

    def _verify(self, model: torch.nn.Module) -> None:
        """Raise AssertionError if the ranks' parameters differ."""
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = mine.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(mine, first):
            raise AssertionError("the ranks' parameters differ")

    def _validate(self, model: torch.nn.Module) -> float:
        starts = random_starts(self._corpus.validation, CONTEXT, (_WINDOWS,), _WINDOWS_SEED)
        with torch.no_grad():
            parts = [windows(self._corpus.validation, part, CONTEXT) for part in torch.split(starts, 64)]
            return sum(float(loss_of(model(x), y)) * len(x) for x, y in parts) / _WINDOWS

    def close(self) -> None:
        dist.destroy_process_group()
