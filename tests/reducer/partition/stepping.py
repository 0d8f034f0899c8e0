"""Parameters, gradients and optimizers whose steps are compared, whole and by parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm

SHAPES = ((37, 29), (29,), (2, 3, 5, 7), (), (411,), (0, 3), (64, 48))
SHARDS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "optimizer, all gradients": {"shard": "optimizer", "grads": "full"},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1, maximize=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "LARS": lambda params: pycomm.LARS(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "LAMB": lambda params: pycomm.LAMB(params, lr=0.01, weight_decay=0.01),
}


class Weights(nn.Module):
    """Parameters of many shapes, whose gradients are what :func:`backward` is told."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES)
        image = self.weights[2]
        image.data = image.data.to(memory_format=torch.channels_last)

    def forward(self) -> torch.Tensor:
        return torch.stack([p.float().sum() for p in self.weights]).sum()


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def backward(params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor], scale: float = 1.0) -> None:
    products = [(p * g).sum().float() for p, g in zip(params, grads, strict=True)]
    (torch.stack(products).sum() * scale).backward()


def values_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return copies of the parameters, and of what ``state_dict()`` has."""
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    return [
        params,
        {i: {k: torch.as_tensor(v).clone() for k, v in e.items() if v is not None} for i, e in state.items()},
    ]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """Compare what :func:`values_of` has returned, to the bit."""
    assert all(torch.equal(one, other) for one, other in zip(found[0], wanted[0], strict=True))
    assert found[1].keys() == wanted[1].keys()
    for number, entry in wanted[1].items():
        assert found[1][number].keys() == entry.keys()
        assert all(torch.equal(found[1][number][key], value) for key, value in entry.items()), number


def own_span(param: torch.Tensor, reducer: pycomm.Reducer) -> slice:
    """Return this rank's own elements of ``param``, in memory order."""
    partition = reducer._table.partition
    assert partition is not None
    return slice(*partition.span_of(param))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def rank() -> int:
    return dist.get_rank()


def assert_unusable_until_loaded(
    reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, use: Callable[[], Any], model: nn.Module
) -> None:
    """Check what is left after a rank was lost in a step: ``use``, a forward of ``model``, raises, and so do steps."""
    fresh = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="mixture"):
        use()
    with pytest.raises(RuntimeError, match="mixture"):
        optimizer.step()
    reducer.detach()
    with pytest.raises(RuntimeError, match="mixture"):
        use()
    model.load_state_dict(fresh)
    use()
