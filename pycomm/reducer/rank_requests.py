"""Requests of one rank that all ranks obey: whether they can be made now, with these settings."""

from __future__ import annotations

import logging

from pycomm.reducer.engine import Engine

_LOG = logging.getLogger("pycomm")


def request_veto(engine: Engine, reason: str) -> None:
    """Have this rank ask, in this reduction or the next, that its step is discarded on all ranks.

    Raises:
        RuntimeError: it is too late.
        ValueError: the settings do not go with it.
    """
    table, settings = engine.table, engine.settings
    if settings.backup > 0:
        raise ValueError("veto_step() does not go with backup: ranks go on without waiting for all gradients")
    if settings.loss_scaler is None and (table.on_gpu or table.partition is not None):
        raise ValueError(
            "veto_step() on a GPU, or with shard, requires attach(..., loss_scaler=...), which leaves out the step"
        )
    if 0 < engine.num_launched == len(table.flights) and engine.is_waited_for():
        raise RuntimeError(
            "veto_step() too late: all gradients of this backward() have been sent; call it before backward(), or in a "
            "hook of a parameter"
        )
    if not engine.progress.is_used:
        raise RuntimeError(
            "veto_step() after backward(): the averages have been handed out; call it before or during backward()"
        )
    if engine.flags.just_stepped:
        _LOG.warning("veto_step() after optimizer.step(): it is the next step that will be left out")
    engine.flags.veto = reason


def require_skippable(engine: Engine) -> None:
    """Raise ValueError if a rank cannot take part with weight zero, unless all have set weights by samples."""
    if engine.window.weights.in_use:
        return
    unsuitable = {
        "gradients on a GPU": engine.table.on_gpu,
        'on_failure="shrink"': engine.settings.survives,
        "full_grad=None": engine.settings.full_grad is None,
    }
    for what, is_unsuitable in unsuitable.items():
        if is_unsuitable:
            raise ValueError(
                f"skip_batch() with {what} requires reducer.set_weight(num_samples) before each backward() on all "
                "ranks, as the others have to know this rank's weight before they send"
            )
