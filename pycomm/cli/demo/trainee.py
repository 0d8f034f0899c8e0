"""Run on one rank: a model, its optimizer, and one way to average its gradients."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.cli.demo.messages import Outcome
from pycomm.cli.demo.model import loss_of
from pycomm.cli.demo.settings import Method
from pycomm.launching import PATIENCE

_LEARNING_RATE = 1e-3
_BETAS = (0.9, 0.99)
_RAMP_STEPS = 30
_FINAL_FRACTION = 0.1


def learning_rate_rule(steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: a linear ramp, then half a cosine down to a tenth."""
    ramp = max(1, min(_RAMP_STEPS, steps // 5))

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / ramp) * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * cosine)

    return factor


class Trainee:
    """Trainee: trains ``model`` and keeps account of every step."""

    def __init__(self, model: nn.Module, method: Method, steps: int) -> None:
        self.model = model
        self.outcome = Outcome(method.label)
        self._last_gradient = 0.0
        # Before the averaging's own hooks, which may already send: the clock starts when a gradient is there.
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=_BETAS, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, learning_rate_rule(steps))
        self._forward: nn.Module = model
        self._reducer: pycomm.Reducer | None = None
        self._ddp_bytes = 0
        if method.uses_ddp:
            # DDP at its best: its default copies every gradient once more.
            self._forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if dist.get_world_size() > 1:
                self._ddp_bytes = sum(p.nbytes for p in model.parameters())
        else:
            self._reducer = pycomm.attach(self._optimizer, model, compression=method.compression, timeout=PATIENCE)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Do an ordinary training step, and take account of it."""
        start = time.perf_counter()
        loss = loss_of(self._forward(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        averaged = time.perf_counter()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        outcome = self.outcome
        outcome.seconds.append(time.perf_counter() - start)
        outcome.waits.append(averaged - self._last_gradient)
        outcome.losses.append(loss.item())
        self._ask_reducer()

    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.detach()

    def _note_gradient(self, _parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def _ask_reducer(self) -> None:
        outcome = self.outcome
        if self._reducer is None:
            outcome.reported_waits.append(0.0)
            outcome.bytes_sent.append(self._ddp_bytes * len(outcome.losses))
        else:
            stats = self._reducer.stats()
            outcome.reported_waits.append(stats["wait_seconds"] - sum(outcome.reported_waits))
            outcome.bytes_sent.append(stats["bytes_sent"])


def average_over_ranks(outcome: Outcome) -> None:
    """Replace this rank's accounts with the mean over the ranks. Collective."""
    columns = [outcome.losses, outcome.seconds, outcome.waits, outcome.reported_waits]
    table = torch.tensor(columns, dtype=torch.float64)
    dist.all_reduce(table)
    means = (table / dist.get_world_size()).tolist()
    outcome.losses, outcome.seconds, outcome.waits, outcome.reported_waits = means


def first_difference(model: nn.Module) -> str | None:
    """Name a parameter or buffer that is not bitwise equal on all ranks; ``None`` if all are. Collective."""
    state = model.state_dict()
    mine = torch.tensor([list(_digest(tensor)) for tensor in state.values()], dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for i, name in enumerate(state):
        for rank, theirs in enumerate(everyone):
            if not torch.equal(theirs[i], everyone[0][i]):
                return f"{name!r} differs between ranks 0 and {rank}"
    return None


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest()
