"""Trainings that can be interrupted: models, optimizers and data that depend on everything that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.reducer.attaching import grouped

METHODS: dict[str, Any] = {
    "dense": None,
    "topk": pycomm.TopK(0.05),
    "dgc": pycomm.DGC(0.05, momentum=0.9),
    "powersgd": pycomm.PowerSGD(2),
    "onebit": pycomm.OneBit(),
    "qsgd": pycomm.QSGD(15),
}


class Net(nn.Module):
    """With dropout, statistics, a buffer that is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.head(self.body(x)) * (1.0 + 1e-3 * (self.calls % 3))


class Training:
    """One rank's training, by name of optimizer and compression.

    Args:
        optimizer: "sgd", "adamw", "lamb", "fused", "masters" or "half".
        method: a key of METHODS.
    """

    def __init__(self, optimizer: str = "sgd", method: str = "dense", **options: Any) -> None:
        torch.manual_seed(7)
        self.model = Net()
        if optimizer in ("masters", "half"):
            self.model = self.model.to(torch.bfloat16)
        self.optimizer = make_optimizer(optimizer, self.model, method)
        self.scaler = pycomm.LossScaler(2.0**10, growth_interval=4) if optimizer == "masters" else None
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 8, 14], gamma=0.7)
        self.generator = torch.Generator().manual_seed(rank())
        options = {"timeout": 30, "loss_scaler": self.scaler, **options}
        self.reducer = pycomm.attach(self.optimizer, self.model, compression=METHODS[method], **grouped(**options))
        self.losses: list[float] = []

    @property
    def more(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.generator}

    def step(self) -> None:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        x = torch.randn(8, 12, generator=self.generator) + 0.01 * noise
        x = x.to(next(self.model.parameters()).dtype)
        loss = (self.model(x) - 1.0).float().square().mean()
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.losses.append(loss.item())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def digest(self) -> str:
        """Return a digest of all bits of the state that matter."""
        tensors = dict(self.model.state_dict(keep_vars=False))
        found = hashlib.sha256(repr((self.losses[-5:], self.scheduler.get_last_lr(), self.model.calls)).encode())
        for name, value in sorted(tensors.items(), key=lambda item: item[0]):
            if isinstance(value, torch.Tensor):
                found.update(name.encode() + bits(value))
        for entry in self.optimizer.state_dict()["state"].values():
            for key, value in sorted(entry.items()):
                found.update(key.encode() + (bits(value) if isinstance(value, torch.Tensor) else repr(value).encode()))
        for entry in contributions(self.reducer).values():
            for key, value in sorted(entry.items()):
                found.update(key.encode() + bits(value))
        found.update(repr((random.getstate(), self.scaler and self.scaler.state_dict())).encode())
        return found.hexdigest()


def make_optimizer(name: str, model: nn.Module, method: str) -> torch.optim.Optimizer:
    momentum = 0.0 if method == "dgc" else 0.9
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "lamb":
        return pycomm.LAMB(model.parameters(), lr=1e-2)
    if name == "half":
        return torch.optim.Adam(model.parameters(), lr=1e-2)
    weights = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=momentum)
    if name == "fused":
        pycomm.fuse(optimizer)
    if name == "masters":
        pycomm.master_weights(optimizer)
    return optimizer


@contextmanager
def training(*args: Any, **options: Any) -> Iterator[Training]:
    made = Training(*args, **options)
    try:
        yield made
    finally:
        made.reducer.detach()


def contributions(reducer: pycomm.Reducer) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's state of compression: name -> key -> tensor."""
    (state,) = reducer.state_dict()["ranks"].values()
    return dict(state)


def seed(number: int) -> None:
    """Seed all generators of this process."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def rank() -> int:
    return dist.get_rank()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
