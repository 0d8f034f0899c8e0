"""Steps that a loss scaler leaves out: who has to know of them is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from pycomm.torch_internals import watch_grad_scalers

# The callbacks are methods of what the optimizer keeps alive: held strongly, they would keep their own key alive.
_listeners: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakMethod[Callable[[], None]]]
_listeners = weakref.WeakKeyDictionary()


def listen_to_skips(optimizer: torch.optim.Optimizer, skipped: Callable[[], None]) -> None:
    """Call the bound method ``skipped`` when a LossScaler or torch's GradScaler leaves out a step of ``optimizer``."""
    _listeners[optimizer] = weakref.WeakMethod(skipped)
    watch_grad_scalers(_listeners.__contains__, tell_skip)


def stop_listening(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`listen_to_skips`."""
    _listeners.pop(optimizer, None)


def tell_skip(optimizer: torch.optim.Optimizer) -> None:
    """Tell who listens that a step of ``optimizer`` was left out."""
    reference = _listeners.get(optimizer)
    skipped = None if reference is None else reference()
    if skipped is not None:
        skipped()
