"""Notification of steps that a loss scaler skips."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from pycomm.torch_internals import watch_grad_scalers

# The optimizer keeps the callbacks' objects alive: strong references would keep their own key alive.
_listeners: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakMethod[Callable[[], None]]]
_listeners = weakref.WeakKeyDictionary()


def listen_to_skips(optimizer: torch.optim.Optimizer, skipped: Callable[[], None]) -> None:
    """Call the bound method ``skipped`` when a LossScaler or torch's GradScaler skips a step of ``optimizer``."""
    _listeners[optimizer] = weakref.WeakMethod(skipped)
    watch_grad_scalers(_listeners.__contains__, notify_skip)


def stop_listening(optimizer: torch.optim.Optimizer) -> None:
    _listeners.pop(optimizer, None)


def notify_skip(optimizer: torch.optim.Optimizer) -> None:
    """Notify the listener that a step of ``optimizer`` was skipped."""
    reference = _listeners.get(optimizer)
    skipped = None if reference is None else reference()
    if skipped is not None:
        skipped()
