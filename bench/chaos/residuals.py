"""What becomes of a dead rank's residual: simulated in one process, with its price in bytes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pycomm.tools.cli.table import print_table

_RANKS, _STEPS, _SEEDS = 4, 600, 5
_RATIO = 0.01
_INTERVALS = (0.0, 30.0, 5.5)  # steps from one death to the next, on average; 0 for none
_SAMPLES = 16  # of each rank in each step


@dataclass(frozen=True)
class Outcome:
    """Loss and accuracy, on samples that were not trained on, of one seed."""

    loss: float
    accuracy: float


def _simulate(every: float, seed: int) -> Outcome:
    """Train virtual ranks with exact top-k and error feedback.

    Each ``every`` steps one dies, and another takes its place with an empty residual. If the residual were kept for it,
    there would be no difference to no death at all.
    """
    torch.manual_seed(seed)
    deaths, samples = random.Random(seed), torch.Generator().manual_seed(seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=samples)
    test, train = order[:400], order[400:]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    weights = parameters_to_vector(model.parameters()).detach()
    velocity = torch.zeros_like(weights)
    residuals = torch.zeros(_RANKS, len(weights))
    count, due = int(_RATIO * len(weights)), deaths.expovariate(1 / every) if every else math.inf
    for step in range(_STEPS):
        average = torch.zeros_like(weights)
        for residual in residuals:
            chosen = train[torch.randint(len(train), (_SAMPLES,), generator=samples)]
            model.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            residual += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            largest = residual.abs().topk(count).indices
            average[largest] += residual[largest] / _RANKS
            residual[largest] = 0.0
        velocity.mul_(0.9).add_(average)
        weights = weights - 0.05 * velocity
        vector_to_parameters(weights, model.parameters())
        while step >= due:
            due += deaths.expovariate(1 / every)
            residuals[deaths.randrange(_RANKS)] = 0.0
    with torch.no_grad():
        found = model(x[test])
        loss = nn.functional.cross_entropy(found, y[test]).item()
    return Outcome(loss, (found.argmax(1) == y[test]).double().mean().item())


def compare_fates(seed: int) -> dict[str, Any]:
    """Print and return what lost residuals come to over several seeds, and the bytes that keeping them takes."""
    found = {every: [_simulate(every, seed + number) for number in range(_SEEDS)] for every in _INTERVALS}
    rows = []
    for every, outcomes in found.items():
        losses = [outcome.loss for outcome in outcomes]
        accuracy = 100 * mean(outcome.accuracy for outcome in outcomes)
        what = f"a death each {every:g} steps" if every else "no deaths"
        rows.append([what, f"{mean(losses):.4f}", f"{stdev(losses):.4f}", f"{accuracy:.2f} %"])
    print(f"simulated: {_RANKS} ranks, top {100 * _RATIO:g} %, {_STEPS} steps, {_SEEDS} seeds")
    print_table(["residuals lost by", "loss", "spread of seeds", "accuracy"], rows)
    # An index and a value for each element that is sent. What a residual changes by, and what whoever reduces would
    # have to see to know it, is the rest of the gradient: nearly all of it, in 4 bytes an element.
    sent, kept = 8 * _RATIO, 8 * _RATIO + 4 * (1 - _RATIO)
    print(f"bytes a rank sends for each parameter and step: {sent:.2f}; {kept:.2f} if its residual is to outlive it")
    by_interval = {str(every): [outcome.loss for outcome in outcomes] for every, outcomes in found.items()}
    return {"losses": by_interval, "bytes_per_parameter": {"lost": sent, "kept": kept}}
