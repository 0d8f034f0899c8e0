"""Runs with a parameter server, and what one process makes of the order in which their events happened."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.asynchronous.parameter_server import ParameterServer, traced
from tests.models import mean_square, perceptron

STEPS = 8


@dataclass
class Run:
    """Arguments of a run, in which each worker makes ``steps`` steps."""

    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    steps: int = STEPS
    dtype: torch.dtype = torch.float64
    slow: int = -1
    """Rank of a worker that is slower than the others."""
    timeout: float = 50.0


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return perceptron(6, 5, 3, dtype=dtype)


def optimizer_of(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    params = model.parameters()
    match run.optimizer:
        case "momentum":
            return torch.optim.SGD(params, 0.05, momentum=0.9)
        case "adam":
            return torch.optim.Adam(params, 0.01)
        case "adagrad":
            return torch.optim.Adagrad(params, 0.05)
        case "lars":
            return pycomm.LARS(params, 0.5, trust_coefficient=0.02)
        case _:
            return torch.optim.SGD(params, 0.05)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return mean_square(model(x.to(next(model.parameters()).dtype)), x[:, :3])


def weight_of(rank: int, step: int) -> float:
    return 1.0 + (rank + step) % 3


def serve(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> ParameterServer:
    """Start a parameter server, which may write a trace."""
    return (traced if "trace" in options else pycomm.parameter_server)(optimizer, model, **options)


def work(run: Run) -> dict[str, Any]:
    """Take part as this rank does; what it has to tell."""
    rank, model = dist.get_rank(), model_of(run.dtype)
    optimizer = optimizer_of(run, model)
    pauses = random.Random(rank)
    server = serve(optimizer, model, **{"timeout": run.timeout, **run.options})
    if server.is_worker:
        for step in range(run.steps):
            with server.step(weight_of(rank, step)):
                loss_of(model, rank, step).backward()
            time.sleep(pauses.uniform(0, 0.01) * (10 if rank == run.slow else 1))
        server.pull()
    server.close()
    return {"stats": server.stats(), "parameters": [p.detach().clone() for p in model.parameters()]}


class Simulation:
    """State machine in float64 over traced orders of events: written apart from the implementation.

    Args:
        run: what was run.
        pieces: for each server, which elements of all parameters, laid one after the other, it holds.
    """

    def __init__(self, run: Run, pieces: list[slice]) -> None:
        self._run, self._pieces, self._model = run, pieces, model_of()
        self.now = torch.cat([p.detach().reshape(-1) for p in self._model.parameters()])
        self._velocity = torch.zeros_like(self.now)
        self._moments = torch.zeros(2, len(self.now), dtype=torch.float64)
        self._squares = torch.zeros_like(self.now)
        self._updates = [0] * len(pieces)
        self._pulled: dict[tuple[int, int, int], tuple[int, torch.Tensor]] = {}  # by server, worker and step
        self._collected: list[list[tuple[float, float, torch.Tensor]]] = [[] for _ in pieces]
        self._workers: list[int] = []  # of each server
        self._residuals: dict[int, torch.Tensor] = {}  # of each worker

    def go(self, orders: list[list[dict[str, Any]]], workers: int) -> None:
        """Let all events happen; those of several servers as soon as they can."""
        self._workers = [workers] * len(orders)
        left = [list(order) for order in orders]
        while any(left):
            before = sum(map(len, left))
            for server, events in enumerate(left):
                while events and self._happen(server, events[0]):
                    events.pop(0)
            assert sum(map(len, left)) < before, "no event can happen"

    def _happen(self, server: int, event: dict[str, Any]) -> bool:
        worker, step = event["worker"], event.get("number", 0) - 1
        if event["event"] == "pull":
            self._pulled[server, worker, step] = self._updates[server], self.now[self._pieces[server]].clone()
        elif event["event"] == "push":
            if any((other, worker, step) not in self._pulled for other in range(len(self._pieces))):
                return False
            self._push(server, worker, step)
        else:
            self._workers[server] -= 1
            self._update_if_due(server)
        return True

    def _gradient(self, worker: int, step: int) -> torch.Tensor:
        there = torch.cat([self._pulled[server, worker, step][1] for server in range(len(self._pieces))])
        nn.utils.vector_to_parameters(there, self._model.parameters())
        self._model.zero_grad()
        loss_of(self._model, worker, step).backward()
        return torch.cat([p.grad.reshape(-1) for p in self._model.parameters() if p.grad is not None])

    def _sent(self, worker: int, g: torch.Tensor, piece: slice) -> torch.Tensor:
        """Return what arrives of a gradient: of each matrix the largest entries, and what was left of them before."""
        method = self._run.options.get("compression")
        if method is None:
            return g[piece]
        left = self._residuals.setdefault(worker, torch.zeros_like(g))
        sent, begin = torch.zeros_like(g), 0
        for p in self._model.parameters():
            inside, begin = slice(begin, begin + p.numel()), begin + p.numel()
            if piece.start <= inside.start < piece.stop:
                left[inside] += g[inside]
                count = max(1, round(method.ratio * p.numel())) if p.dim() > 1 else p.numel()
                chosen = left[inside].abs().topk(count).indices + inside.start
                sent[chosen], left[chosen] = left[chosen], 0.0
        return sent[piece]

    def _push(self, server: int, worker: int, step: int) -> None:
        mode, piece = self._run.options.get("mode", pycomm.Async()), self._pieces[server]
        version, then = self._pulled[server, worker, step]
        stale = self._updates[server] - version
        if isinstance(mode, pycomm.Sync) and mode.quorum is None and stale > 0:
            return
        g = self._sent(worker, self._gradient(worker, step), piece)
        if mode.compensation == "dc":
            strength: Any = mode.strength
            if mode.adaptive:
                mean = mode.decay * self._squares[piece] + (1 - mode.decay) * g**2
                self._squares[piece] = mean
                strength = strength / torch.sqrt(mean + mode.eps)
            g = g + strength * g * g * (self.now[piece] - then)
        rate = 1 / max(1, stale) if mode.compensation == "lr" else 1.0
        self._collected[server].append((weight_of(worker, step), rate, g))
        self._update_if_due(server)

    def _update_if_due(self, server: int) -> None:
        mode, needed = self._run.options.get("mode"), 1
        if isinstance(mode, pycomm.Sync):
            needed = mode.quorum or max(1, self._workers[server] - mode.backup)
        if len(self._collected[server]) >= needed:
            self._update(server)

    def _update(self, server: int) -> None:
        piece, found = self._pieces[server], self._collected[server]
        weights = sum(samples * rate for samples, rate, _ in found)
        g = torch.stack([samples * rate * g for samples, rate, g in found]).sum(0) / weights
        rate = weights / sum(samples for samples, _, _ in found)
        self._collected[server] = []
        self._updates[server] += 1
        if self._run.optimizer == "adam":
            n, (first, second) = self._updates[server], self._moments
            first[piece] = 0.9 * first[piece] + 0.1 * g
            second[piece] = 0.999 * second[piece] + 0.001 * g * g
            size = (second[piece] / (1 - 0.999**n)).sqrt() + 1e-8
            self.now[piece] -= 0.01 * rate * first[piece] / (1 - 0.9**n) / size
        elif self._run.optimizer == "adagrad":
            self._moments[0][piece] += g * g
            self.now[piece] -= 0.05 * rate * g / (self._moments[0][piece].sqrt() + 1e-10)
        else:
            momentum = 0.9 if self._run.optimizer == "momentum" else 0.0
            self._velocity[piece] = momentum * self._velocity[piece] + g
            self.now[piece] -= 0.05 * rate * self._velocity[piece]


def read_trace(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
