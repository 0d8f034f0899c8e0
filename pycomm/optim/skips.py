"""Notification of steps that a loss scaler skips, and steps without gradients that it must not refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycomm.torch_internals import watch_grad_scalers

# The optimizer keeps the callbacks' objects alive: strong references would keep their own key alive.
_listeners: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.WeakMethod[Callable[[], Any]]]]
_listeners = weakref.WeakKeyDictionary()


def listen_to_skips(
    optimizer: torch.optim.Optimizer, skipped: Callable[[], None], is_left_out: Callable[[], bool] | None = None
) -> None:
    """Call the bound method ``skipped`` when a LossScaler or torch's GradScaler skips a step of ``optimizer``.

    ``is_left_out``: bound method that returns whether the step has no gradients on purpose. GradScaler, which requires
    some, then finds that none is infinite.
    """
    _listeners[optimizer] = [weakref.WeakMethod(each) for each in (skipped, is_left_out) if each is not None]
    watch_grad_scalers(_listeners.__contains__, notify_skip, _is_left_out)


def stop_listening(optimizer: torch.optim.Optimizer) -> None:
    _listeners.pop(optimizer, None)


def notify_skip(optimizer: torch.optim.Optimizer) -> None:
    """Notify the listener that a step of ``optimizer`` was skipped."""
    _call(optimizer, 0)


def _is_left_out(optimizer: torch.optim.Optimizer) -> bool:
    return bool(_call(optimizer, 1))


def _call(optimizer: torch.optim.Optimizer, number: int) -> Any:
    references = _listeners.get(optimizer, [])[number : number + 1]
    for method in (reference() for reference in references):
        return None if method is None else method()
