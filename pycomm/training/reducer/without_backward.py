"""Reductions without a backward pass: flushed windows, written gradients, missing batches; and vetoes."""

from __future__ import annotations

import logging

import torch

from pycomm.errors import CommError
from pycomm.training.reducer.engine import Engine
from pycomm.training.reducer.passes import Passes
from pycomm.training.reducer.window import meets_weights
from pycomm.training.reductions.phase import Phase, Role

_LOG = logging.getLogger("pycomm")


def request_veto(engine: Engine, reason: str) -> None:
    """Request that the step of this reduction, or of the next one, is discarded on all ranks."""
    table, settings = engine.table, engine.settings
    if settings.loss_scaler is None and (table.on_gpu or table.partition is not None):
        raise ValueError(
            "veto_step() on a GPU, or with shard, requires attach(..., loss_scaler=...), which leaves out the step"
        )
    state = engine.step_state
    if 0 < state.launched == len(table.buckets) and engine.is_waited_for():
        raise RuntimeError(
            "veto_step() too late: all gradients of this backward() have been sent; call it before backward(), or in a "
            "hook of a parameter"
        )
    is_shown = state.phase is Phase.AVERAGED and any(slot.owner.grad is not None for slot in table.slots())
    if is_shown and not state.is_used:  # else the step of the last averages was left out
        raise RuntimeError(
            "veto_step() after backward(): the averages have been handed out; call it before or during backward()"
        )
    if state.phase is Phase.STEPPED:
        _LOG.warning("veto_step() after optimizer.step(): it is the next step that will be left out")
    engine.comparison.requests.veto = reason


def require_skippable(engine: Engine) -> None:
    """Raise ValueError if settings exclude a rank of weight zero, unless weights by samples are in use."""
    if engine.window.weights.in_use:
        return
    unsuitable = {
        "gradients on a GPU": engine.table.on_gpu,
        "survive": engine.settings.survive is not None,
    }
    for what, is_unsuitable in unsuitable.items():
        if is_unsuitable:
            raise ValueError(
                f"skip_batch() with {what} requires reducer.set_weight(num_samples) before each backward() on all "
                "ranks, as the others have to know this rank's weight before they send"
            )


class WithoutBackward:
    """Reductions that the user requests; to other ranks they look like the end of a backward pass."""

    def __init__(self, engine: Engine, passes: Passes) -> None:
        self._engine, self._passes = engine, passes
        self._table, self._window, self._state = engine.table, engine.window, engine.step_state

    def is_averaged(self) -> bool:
        """Return whether this step's averages have been handed out, and no other step has begun."""
        return self._state.phase is Phase.AVERAGED and any(slot.holds_average() for slot in self._table.slots())

    def flush(self) -> None:
        """Reduce a window that ended early; see ``Reducer.flush``."""
        if self.is_averaged():
            return
        self._prepare()
        if self._state.is_open:
            self._reduce(Role.BATCH, with_next=False)
        else:
            self._join(Role.BATCH)

    def reduce_written(self) -> None:
        """Average what is in ``.grad``; see ``Reducer.reduce``."""
        self._prepare()
        was_open = self._state.is_open
        if not was_open and not self._state.is_used:
            self._engine.ledger.require_written()
        self._table.takes_written = True
        try:
            self._reduce(Role.WRITTEN, with_next=not was_open)
        finally:
            self._table.takes_written = False

    def skip_batch(self) -> None:
        """Take part in the other ranks' reduction with weight zero; see ``Reducer.skip_batch``."""
        self._require_no_gradients()
        require_skippable(self._engine)
        self._prepare()
        self._table.drop_gradients()
        self._join(Role.SKIPS)

    def _join(self, role: Role) -> None:
        """Take part without gradients in a reduction in which others may have some, and may weight them."""
        if not self._window.weights.in_use:
            self._table.drop_gradients()
            if self._reduce(role, with_next=False, joins=True):
                return
        if self._any_passes():
            self._table.drop_gradients()
            self._reduce(role, with_next=None)

    def _meets_weights(self) -> bool:
        """Return whether others set their first weights in this reduction, which this rank then uses, too."""
        engine, weights, table = self._engine, self._window.weights, self._table
        if engine.communicator.size == 1 or not table.buckets or table.on_gpu or engine.members.survives:
            return False
        if meets_weights(engine.communicator, table.buckets, engine.launch_ahead):
            weights.set(0, 0)
        return weights.in_use

    def _require_no_gradients(self) -> None:
        """Raise RuntimeError if this rank has had a batch in this step."""
        settings = self._engine.settings
        self._passes.forget_lost()
        if self._state.is_open:
            raise RuntimeError(
                f"skip_batch() after {self._state.passes} of {settings.passes} backward passes: the window has "
                "gradients already; leave that backward() out and call reducer.flush() when the window ends"
            )
        # After a step that a scaler has skipped, averages may remain until zero_grad().
        if self.is_averaged() and settings.loss_scaler is None:
            raise RuntimeError(
                "skip_batch() after backward(): the gradients of this step have been averaged; call it in place of "
                "forward and backward"
            )

    def require_whole_steps(self) -> None:
        """Raise ValueError, on every rank, if steps need every rank, so that no rank can stay absent."""
        if self._table.partition is not None:
            error = ValueError(
                f"stay_absent() cannot be combined with shard={self._engine.settings.shard}: in each step every rank "
                "steps its own parameters; call skip_batch() and optimizer.step() as often as the others step"
            )
            self._passes.stop(error)
            raise error

    def take_part(self, *, absent: bool) -> bool:
        """Take part in a reduction with the present gradients.

        Args:
            absent: whether this rank has no data: it contributes nothing, keeps no average, and takes no step. Its
                gradients are dropped.

        Returns:
            Whether all ranks are absent.
        """
        if absent:  # then its parameters and steps are not compared
            self._passes.forget_lost()
            self._state.cleared()
            self._table.drop_gradients()
        self._reduce(Role.ABSENT if absent else Role.BATCH, with_next=True)
        if absent:
            self._table.drop_gradients()
            self._state.uses_averages()
        return self._all_absent(absent)

    def _all_absent(self, absent: bool) -> bool:
        """Return whether all ranks are ``absent``, after a reduction without gradients; if so, adopt the last step.

        Collective; but if any rank had a gradient, which all ranks know, nothing is sent.
        """
        if any(any(sent.exchange.used()) for sent in self._table.buckets):
            return False
        found = torch.tensor([not absent, self._state.steps])
        self._engine.communicator.all_reduce(found, "max")
        if found[0]:
            return False
        self._state.resumes(self._state.reductions, int(found[1]))
        self._engine.comparison.fingerprint.forget_received()
        return True

    def reduce_now(self) -> None:
        """Reduce the present gradients, unless their averages wait for a step; see ``Reducer.reduce_now``."""
        there = any(slot.owner.grad is not None for slot in self._table.slots())
        if there and not self._state.is_open and not self._state.is_used:
            self._engine.ledger.require_all_averaged()
        else:
            self.take_part(absent=False)

    def _prepare(self) -> None:
        self._passes.require_taking_part()
        self._passes.forget_lost()
        self._passes.admit_newcomer()

    def _any_passes(self) -> bool:
        """Fix the scales of a window that ends early; return whether any rank has had a pass in it. Collective."""
        self._window.fix_scales(with_next=False)
        while True:
            try:
                return self._window.weights.any_passes()
            except CommError as error:
                self._engine.members.recover(self._engine, error)  # raises the error if no rank may be lost
                self._window.weights.sum_again()

    def _reduce(self, role: Role, *, with_next: bool | None, joins: bool = False) -> bool:
        """Reduce the present gradients; ``with_next`` as in ``Engine.begin_pass``.

        If this rank ``joins`` without any, and others have weights that it did not know of, return ``False`` instead.
        """
        with self._passes.stopping():
            self._passes.forget_lost()
            if self._state.is_sending:
                raise RuntimeError("a reduction inside backward(): call it when backward() has returned")
            self._passes.begin_reduction(role, with_next=with_next)
            try:
                if joins and self._meets_weights():
                    self._state.pass_fails()
                    return False
                self._engine.launch_rest()
            except BaseException:
                self._state.pass_fails()
                raise
        self._passes.reduce()
        return True
