"""Times of layers: each layer has its own, in the order of the profile; how long they are is no test's business."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from bench.planning.timing import time_layers


class _Slow(torch.autograd.Function):
    """Identity that takes its time, in both directions."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return grad


class _Sleeper(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Slow.apply(super().forward(x))
        return out


def test_the_layer_that_takes_time_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), _Sleeper(2, 2), nn.Linear(2, 2))
    found = time_layers(model, (torch.zeros(4, 2),), ["0", "1", "2", "3"], steps=1)
    assert len(found) == 4
    # Sleeps are lower bounds, whatever else the machine does.
    assert found[2][0] >= 0.05
    assert found[2][1] >= 0.1
    assert all(seconds >= 0 for layer in found for seconds in layer)


def test_layers_before_any_parameter_and_losses() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    found = time_layers(model, (torch.zeros(3, 2, 2),), ["0", "1"], lambda out: out.square().mean(), steps=1)
    assert len(found) == 2
    assert found[0][1] == 0


def test_layers_that_are_not_run() -> None:
    with pytest.raises(ValueError, match="is no layer of the model"):
        time_layers(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(1, 2),), ["7"])
