"""Models under DistributedDataParallel with pycomm's hook, and what each should come to."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.ddp import HookHandle, register
from tests.reducer.attaching import attached
from tests.reducer.models import loss_of, sgd

Loss = Callable[[nn.Module, int, int], torch.Tensor]


class OutOfOrder(nn.Module):
    """Layers that are used in another order than they are registered in: DistributedDataParallel sorts them anew.

    Each is larger than DistributedDataParallel's first bucket, so that there are several.
    """

    def __init__(self, width: int = 280) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = nn.Linear(width, 5), nn.Linear(12, width), nn.Linear(width, width)
        self.spare = nn.Linear(width, width)
        self.double()

    def forward(self, x: torch.Tensor, spare: bool = True) -> Any:
        inside = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.spare(inside)) if spare else inside)


@contextlib.contextmanager
def wrapped(model: nn.Module, compression: Any = None, scaler: Any = None, **options: Any) -> Iterator[Any]:
    """``(ddp_model, handle)``; the handle is removed at the end."""
    ddp_model = DistributedDataParallel(model, **options)
    handle = register(ddp_model, compression=compression, loss_scaler=scaler, timeout=30)
    try:
        yield ddp_model, handle
    finally:
        handle.remove()


def step(ddp_model: Any, number: int, loss: Loss = loss_of) -> dict[str, torch.Tensor]:
    """The gradients of one backward pass."""
    ddp_model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # static_graph's, about its first pass
        loss(ddp_model, dist.get_rank(), number).backward()
    return {name: p.grad.clone() for name, p in ddp_model.module.named_parameters() if p.grad is not None}


def attached_steps(model: nn.Module, compression: Any, numbers: range, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients that ``attach`` would give in the same steps, each without moving the parameters."""
    optimizer = sgd(model, 0.0)
    gradients = []
    with attached(optimizer, model, compression=compression, **options):
        for number in numbers:
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), number).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
    return gradients


def residuals_of(handle: HookHandle | pycomm.Reducer) -> dict[str, torch.Tensor]:
    """What the ranks together have not sent yet, by parameter."""
    own = handle.state_dict()["ranks"][str(dist.get_rank())]
    total = {name: entry["residual"].clone() for name, entry in own.items() if "residual" in entry}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total
