"""Handover of a pipeline's gradients to the Reducers that average them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from pycomm.optim.attached import attached_to


def left_over(module: nn.Module) -> str:
    """Return why the gradients of ``module`` cannot be averaged now; "" if they can."""
    parameters = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
    if not attached_to(parameters):
        return ""
    return (
        "a parameter has a gradient from an earlier step: call optimizer.zero_grad() first, with set_to_none=True. "
        "attach(accumulate=...) is not for pipelines: microbatches are what is accumulated"
    )


@contextlib.contextmanager
def averaged_once(module: nn.Module) -> Iterator[None]:
    """Average the gradients of ``module`` once, at the end, however many backward passes run inside.

    A pipeline runs a backward pass per stage and microbatch, and with a table that splits the weights' gradients off,
    torch stores these without autograd's hooks. So the passes inside are this rank's own, and what they leave is
    handed to autograd again in one pass at the end, which :func:`pycomm.attach` sees as any other. Gradients that were
    there before are set aside meanwhile, as torch divides whatever it finds by the number of microbatches. After an
    error they are what they were.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    reducers = attached_to(parameters)
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    for p, _ in before:
        p.grad = None
    try:
        with contextlib.ExitStack() as stack:
            for reducer in reducers:
                stack.enter_context(reducer.paused())
            yield
    except BaseException:
        for p in parameters:
            p.grad = None
        for p, grad in before:
            p.grad = grad
        raise
    averaged = {id(p) for p in parameters if any(reducer.knows(p) for reducer in reducers)}
    arrived = [(p, p.grad) for p in parameters if p.grad is not None and id(p) in averaged]
    for p, _ in arrived:
        p.grad = None
    if arrived:
        torch.autograd.backward([p for p, _ in arrived], [grad for _, grad in arrived])
    for p, grad in before:
        p.grad = grad if p.grad is None else grad + p.grad
