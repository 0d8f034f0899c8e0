"""Checks of gradients before they are averaged."""

from __future__ import annotations

import torch

from pycomm.reducer.buckets import BucketInFlight, Slot
from pycomm.reducer.settings import Settings


def require_sendable(slot: Slot) -> None:
    """Raise RuntimeError or ValueError if the gradient of ``slot`` cannot be sent, or its bucket already was."""
    grad = slot.owner.grad
    if grad is None:
        raise RuntimeError(
            f"the gradient of {slot.name!r} has been removed by another hook on this parameter before it could be "
            "averaged: an optimizer that steps in backward does not work with attach"
        )
    if grad.is_sparse:
        raise ValueError(f"the gradient of {slot.name!r} is sparse; pycomm reduces dense gradients")
    if slot.flight is not None and slot.flight.work is not None:
        raise RuntimeError(
            f"the gradient of {slot.name!r} was accumulated {slot.fired} times in one backward pass, against "
            f"{slot.expected} in earlier passes, when it had already been sent; detach() and attach() to count again"
        )


def gradients_of(flight: BucketInFlight, settings: Settings, is_first_pass: bool) -> list[torch.Tensor | None]:
    """Return the gradients that the parameters of ``flight`` have, checked: hooks that count have looked at nothing.

    Args:
        flight: bucket that is about to be sent.
        settings: of the attach.
        is_first_pass: whether this is the first pass of the window.

    Raises:
        RuntimeError, ValueError: see :func:`require_sendable` and :func:`require_no_average`; or a sum that was handed
            out would be summed again.
    """
    grads = [slot.owner.grad for slot in flight.slots]
    for slot, grad in zip(flight.slots, grads, strict=True):
        if (grad is None and slot.fired > 0) or (grad is not None and grad.is_sparse):
            require_sendable(slot)
    if is_first_pass and not _is_linear(settings):
        for slot, grad, view in zip(flight.slots, grads, flight.bucket.views, strict=True):
            if grad is view and slot.fired > 0:
                require_no_average(slot, settings)
            elif grad is not None and not settings.average and slot.untouched():
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is the sum over the ranks that an earlier backward() left, and "
                    "would be summed again with those of this one. Several passes of one step need "
                    "attach(..., accumulate=n); otherwise call optimizer.zero_grad() between them"
                )
    return grads


def _is_linear(settings: Settings) -> bool:
    return settings.average and not settings.compression.transactional and settings.clip_local_norm is None


def require_no_average(slot: Slot, settings: Settings) -> None:
    """Raise RuntimeError if the first pass of a window has accumulated into an average that was handed out.

    The mean over the ranks of an average plus a fresh gradient is correct; its sum, and error feedback of
    it, are meaningless.
    """
    if _is_linear(settings):
        return
    grad, flight = slot.owner.grad, slot.flight
    assert grad is not None
    assert flight is not None
    if grad is flight.bucket.views[slot.index] and slot.grad_version() == slot.version + slot.fired:
        raise RuntimeError(
            f"backward() ran again on the averaged gradient of {slot.name!r}. Several passes of one step need "
            "attach(..., accumulate=n); a pass that is not a step of this optimizer (a generator's through its "
            "discriminator, a penalty) belongs in `with reducer.paused():`; otherwise call optimizer.zero_grad() first"
        )
