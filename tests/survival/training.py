"""Training in which ranks are lost, and what the ranks that are left say about it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.compression import Compression
from tests.hosts import on_hosts
from tests.reducer.attaching import grouped

METHODS: dict[str, Compression | None] = {
    "dense": None,
    "topk": pycomm.TopK(0.05),
    "dgc": pycomm.DGC(0.05, momentum=0.9),
    "powersgd": pycomm.PowerSGD(2),
    "int8": pycomm.Int8(),
}
LR = 0.05


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process, which another one lets go on two seconds later."""
    child = os.fork()
    if child == 0:
        time.sleep(2.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def hang() -> None:
    time.sleep(4.0)


def fail() -> None:
    raise ValueError("a hook of the user's failed")


FAULTS: dict[str, Callable[[], None]] = {"die": die, "stop": stop, "hang": hang, "fail": fail}


@dataclass
class Plan:
    """What happens in a run: ``faults[(rank, step)]`` in a hook of backward, before the rank's last gradients."""

    method: str = "dense"
    steps: int = 12
    faults: Mapping[tuple[int, int], str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    weighted: bool = False
    hosts: str = ""
    set_to_none: bool = True
    founders: int = 0
    """Number of the first ranks, where others come."""


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a rank: one more for each rank, so that weights matter."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    x = torch.randn(8 + rank, 20, generator=generator)
    return x, 2 * x[:, :5]


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0) -> torch.Tensor:
    x, y = batch(rank, step, part)
    return nn.functional.mse_loss(model(x), y)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(plan: Plan) -> dict[str, Any]:
    """Train as ``plan`` says; what this rank has to tell. What a fault raises, and being left behind, are raised."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.0 if plan.method == "dgc" else 0.9)
    with on_hosts(plan.hosts) if plan.hosts else contextlib.nullcontext():
        reducer = pycomm.attach(
            optimizer,
            model,
            compression=METHODS[plan.method],
            accumulate=plan.accumulate,
            **grouped(on_failure="shrink", **{"timeout": 30, "check_replicas": 3, "bucket_mb": 0.004, **plan.options}),
        )
        with logged() as lines:
            told = run(plan, reducer, model, rank, range(plan.steps))
        told["logged"] = lines
        told["state"] = reducer.state_dict()["ranks"]
        reducer.detach()
    return told


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Have what is logged of the ranks that go on noted in the list that is yielded, without this rank's prefix."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage().partition("] ")[2])  # type: ignore[method-assign]
    handler.addFilter(lambda record: "ranks go on" in record.getMessage())
    logging.getLogger("pycomm").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("pycomm").removeHandler(handler)


def run(plan: Plan, reducer: pycomm.Reducer, model: nn.Module, rank: int, steps: range) -> dict[str, Any]:
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    reducer.on_change(lambda old, new: changes.append((old, new)))
    optimizer, losses = reducer.optimizer, []
    for step in steps:
        fault = FAULTS[plan.faults[rank, step]] if (rank, step) in plan.faults else None
        # The first layer's gradient comes last: the others are on their way.
        first = next(iter(model.parameters()))
        hook = first.register_hook(lambda _, fault=fault: fault()) if fault is not None else None
        optimizer.zero_grad(plan.set_to_none)
        for part in range(plan.accumulate):
            if plan.weighted:
                reducer.set_weight(8 + rank)
            loss = loss_of(model, rank, step, part)
            (loss if plan.weighted else loss / plan.accumulate).backward()
            losses.append(loss.item())
        if hook is not None:
            hook.remove()
        optimizer.step()
    stats = reducer.stats()
    return {
        "world": reducer.world,
        "digest": digest(model),
        "parameters": [p.detach().clone() for p in model.parameters()],
        "changes": changes,
        "losses": losses,
        "recoveries": stats["recoveries"],
        "stats": stats,
        "rank": reducer._communicator.rank,
    }


def expected(
    plan: Plan, worlds: list[tuple[int, ...]], rate: Callable[[int], float] = lambda _: LR
) -> list[torch.Tensor]:
    """What one process comes to that averages over ``worlds[step]``, in float64."""
    model = small_model().double()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        total = sum(8 + rank for rank in worlds[step]) * plan.accumulate
        for rank in worlds[step]:
            for part in range(plan.accumulate):
                x, y = batch(rank, step, part)
                loss = nn.functional.mse_loss(model(x.double()), y.double())
                share = (8 + rank) / total if plan.weighted else 1 / len(worlds[step]) / plan.accumulate
                (share * loss).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]
