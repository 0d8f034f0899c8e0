"""What a gradient must be when its hook is called, to be averaged."""

from __future__ import annotations

from pycomm.reducer.buckets import Slot
from pycomm.reducer.settings import Settings
from pycomm.torch_internals import version_of


def require_sendable(slot: Slot) -> None:
    """RuntimeError or ValueError if the gradient of ``slot`` cannot be sent, or its bucket is on its way already."""
    grad = slot.param.grad
    if grad is None:
        raise RuntimeError(
            f"the gradient of {slot.name!r} has been taken away by another hook on this parameter, before it could be "
            "averaged: an optimizer that steps in backward does not go with attach"
        )
    if grad.is_sparse:
        raise ValueError(f"the gradient of {slot.name!r} is sparse; pycomm reduces dense gradients")
    if slot.flight is not None and slot.flight.work is not None:
        raise RuntimeError(
            f"the gradient of {slot.name!r} was accumulated {slot.fired} times in one backward pass, where earlier "
            f"passes had {slot.expected}, and had been sent already; detach() and attach() again to learn anew"
        )


def require_no_average(slot: Slot, settings: Settings) -> None:
    """RuntimeError if the first pass of a window has added to an average that was handed out.

    Sums and error feedback of an average plus a fresh gradient mean nothing; means of it are right.
    """
    linear = settings.average and not settings.compression.transactional and settings.clip_local_norm is None
    if linear or slot.fired > 1:
        return
    grad, flight = slot.param.grad, slot.flight
    assert grad is not None
    assert flight is not None
    if grad is flight.bucket.views[slot.index] and version_of(grad) == slot.version + 1:
        raise RuntimeError(
            f"backward() ran again on the averaged gradient of {slot.name!r}. Several passes of one step want "
            "attach(..., accumulate=n); a pass that is not a step of this optimizer (a generator's through its "
            "discriminator, a penalty) belongs into `with reducer.paused():`; otherwise optimizer.zero_grad() first"
        )
