"""Optimizers to be given master weights, and steps of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import pycomm
from pycomm.optim.masters import MasterWeights
from tests.optim.stepping import Params, give_gradients, parameters

Build = Callable[[Any], torch.optim.Optimizer]
HALF = [torch.float16, torch.bfloat16]

KERNELS: dict[str, Build] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "SGD plain": functools.partial(torch.optim.SGD, lr=0.01, maximize=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "LARS": functools.partial(pycomm.LARS, lr=0.1, weight_decay=0.1, trust_coefficient=0.02),
    "LAMB": functools.partial(pycomm.LAMB, lr=0.01, weight_decay=0.1),
}


class MySGD(torch.optim.SGD):
    """Steps another way, for all that is known of it."""


OTHERS: dict[str, Build] = {
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.1, weight_decay=0.1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01, t0=2),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "MySGD": functools.partial(MySGD, lr=0.01, momentum=0.9, nesterov=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4),
}
ALL = {**KERNELS, **OTHERS}


def make(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[Params, torch.optim.Optimizer, MasterWeights]:
    params = parameters_for(name, dtype, seed)
    optimizer = ALL[name](params)
    return params, optimizer, pycomm.master_weights(optimizer)


def parameters_for(name: str, dtype: torch.dtype, seed: int = 0) -> Params:
    params = parameters(dtype, seed)
    return params[:2] if name == "LBFGS" else params  # which wants gradients for all, and contiguous ones


def step_on(
    optimizer: torch.optim.Optimizer,
    params: Params,
    steps: Iterable[int],
    dtype: torch.dtype,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Take steps with gradients in ``dtype``, whatever the parameters are in."""
    for step in steps:
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(functools.partial(_closure, optimizer, params, dtype))
        else:
            give_gradients(params, step, dtype)
            optimizer.step()
        after()


def _closure(optimizer: torch.optim.Optimizer, params: Params, dtype: torch.dtype) -> torch.Tensor:
    optimizer.zero_grad()
    loss = sum(((p.to(dtype) - 0.5) ** 2).sum().float() for p in params)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss


def mixed_model(dtype: torch.dtype) -> Any:
    """Norms in float32, as usual."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)
    model[1].float()
    return model
