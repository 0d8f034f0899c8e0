"""Handling of backward passes: each gradient, the last gradient, and the end of the pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pycomm.counting import PassGate
from pycomm.errors import CommError
from pycomm.reducer.autograd_hooks import GradientHook, ModelHooks
from pycomm.reducer.backward import BackwardWatch
from pycomm.reducer.buckets import Slot
from pycomm.reducer.damage import DamageError
from pycomm.reducer.engine import Engine
from pycomm.reducer.local_passes import LocalPasses
from pycomm.reducer.wrappers import refuse_active_wrapper
from pycomm.torch_internals import current_graph_task

HALF_SENT = (
    "the last backward() ended with an exception after part of its gradients had been sent: the ranks are out of step; "
    "restart from a checkpoint"
)
"""Text of the error after which no rank can go on."""


class Passes:
    """Driver of the engine, called by autograd: by a hook on each parameter and at the end of each backward pass.

    Attributes:
        model_hooks: hooks on the optimizer and the module, once they are installed.
        stopped: error after which this rank no longer takes part; empty while it does.
    """

    def __init__(self, engine: Engine) -> None:
        self._communicator, self._settings = engine.communicator, engine.settings
        self._engine, self._table, self._window, self._progress = engine, engine.table, engine.window, engine.progress
        self._watch = BackwardWatch(self._begin, self._all_gradients_arrived, self._end, self._failed)
        self._local = LocalPasses()
        self._gate = PassGate(current_graph_task)
        self._hooks: list[GradientHook] = []
        self.model_hooks: ModelHooks | None = None
        self.stopped = ""

    # Parameters.

    def hook(self, slots: list[Slot]) -> None:
        """Give ``slots`` buckets, and listen to their gradients."""
        self._table.make_buckets(slots, self._engine.lanes, self._settings)
        for slot in slots:
            slot.hook = GradientHook(self, Passes._on_gradient, slot, slot.param, slot.counter(self._gate))
            self._hooks.append(slot.hook)

    def unhook(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        if self.model_hooks is not None:
            self.model_hooks.remove()

    def find_new_parameters(self) -> None:
        """Admit parameters that were added or unfrozen. Collective, if there are any."""
        if self._table.has_new():
            self._engine.stand_down()
            self._table.find_new(self._communicator)
            self.hook(self._table.admit())

    def before_forward(self) -> None:
        """Refuse wrappers that average these parameters too; admit new parameters if a window may begin here."""
        if current_graph_task() != -1:
            return  # inside backward: a checkpointed piece is being recomputed
        refuse_active_wrapper(lambda: dict(self._table.named()))
        self.forget_abandoned()
        if not self._window.is_open and not self.stopped and not self._local.depth:
            self.find_new_parameters()

    # Passes of this rank alone.

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep backward passes inside local to this rank; see ``Reducer.paused``."""
        if self._window.is_open:
            raise RuntimeError(
                "paused() inside an accumulation window: its gradients would be mixed; call flush() first"
            )
        self._local.depth += 1
        self._gate.close()
        try:
            yield
        finally:
            self._local.depth -= 1

    def require_averaged(self) -> None:
        """Raise RuntimeError if ``optimizer.step()`` would use gradients that have not been averaged.

        Sends nothing: distributed checkpointing calls step() on its own to create optimizer state.
        """
        self.forget_abandoned()
        if self._window.is_open:
            raise RuntimeError(
                f"optimizer.step() after {self._window.num_passes} of {self._settings.passes} backward passes: "
                "these gradients have not been averaged; call reducer.flush() first"
            )
        self._local.require_gone("optimizer.step() would move this rank's parameters alone")
        self._table.require_no_unknown_gradients()
        self._progress.stepped()

    def stepped(self) -> None:
        """Note that ``optimizer.step()`` has returned."""
        if not self._window.is_open and not self.stopped:
            self._engine.stand_in()

    # Callbacks of autograd.

    def _on_gradient(self, slot: Slot) -> None:
        if self._local.depth > 0:
            self._local.note(slot)
            return
        self._engine.firing = slot
        try:
            self._watch.touch()
            self._engine.take(slot)
        except (RuntimeError, ValueError) as error:
            self._stop(error)
            raise
        finally:
            self._engine.firing = None
        if self._engine.may_count():
            self._gate.open()
        else:
            self._gate.close()

    def _begin(self) -> None:
        self.forget_abandoned()
        self._open_door()
        self._window.begin_pass()
        self._require_right_pass()
        self._engine.begin_pass()

    def _all_gradients_arrived(self) -> None:
        if not self._window.sending:
            return
        # Known buckets first, before _end looks for new parameters: ranks may differ in how many buckets they have
        # launched by now, but not in their order.
        try:
            self._engine.launch_rest()
        except (RuntimeError, ValueError) as error:
            self._stop(error)
            raise

    def _end(self) -> None:
        for flight in self._table.flights:
            flight.counts.end_pass()
        self._window.end_pass()
        if self._window.sending:
            self.find_new_parameters()
            self._reduce()
            self._window.complete = True
        else:
            self._engine.phases.end_backward()
        if self.model_hooks is not None:
            self.model_hooks.warn_of_uncovered()

    def _failed(self) -> None:
        if self._engine.has_launched():
            self._stop(RuntimeError(HALF_SENT))

    def flush(self) -> None:
        """Reduce a ragged last window; see ``Reducer.flush``."""
        self.require_taking_part()
        self._engine.stand_down()
        self._open_door()
        if not self._end_early():
            return
        if not self._window.is_open:  # other ranks have gradients: this one takes part without any
            self._table.drop_gradients()
        self._engine.expect_gradients()
        self._reduce()

    def take_part(self, *, absent: bool) -> bool:
        """Take part in a reduction with the gradients that there are: to other ranks it is as if a window ended here.

        Args:
            absent: this rank has no data: it contributes nothing, keeps no average, and will not step. Gradients that
                it has are dropped.

        Returns:
            Whether all ranks are absent.
        """
        self._engine.set_absent(absent)
        try:
            self._begin_without_pass(absent)
            self.find_new_parameters()
            self._reduce()
            self._window.complete = True
            if absent:
                self._table.drop_gradients()
                self._progress.stepped()
            return self._engine.agree_on_end(absent)
        finally:
            self._engine.set_absent(False)

    def _begin_without_pass(self, absent: bool) -> None:
        try:
            self.forget_abandoned()
            if absent:
                self._window.close()
                self._table.drop_gradients()
            self._window.sending = True
            self._require_right_pass()
            self._engine.begin_pass()
            self._engine.launch_rest()
        except (RuntimeError, ValueError) as error:
            self._stop(error)
            raise

    def _reduce(self) -> None:
        try:
            self._engine.reduce()
        except DamageError as error:
            if self._engine.survival is not None and error.ranks:
                self.stopped = str(error)  # the others go on, and must not meet this rank again
            raise

    def _open_door(self) -> None:
        if not self._window.is_open and not self.stopped:
            self._engine.open_door()

    def _end_early(self) -> bool:
        while True:
            try:
                return self._window.end_early(self._engine.committed_steps)
            except CommError as error:
                self._engine.recover(error)  # raises it, if no rank may be lost

    # Errors.

    def require_taking_part(self) -> None:
        """Raise RuntimeError if an earlier error has kept this rank from a reduction."""
        if self.stopped:
            raise RuntimeError(f"this Reducer no longer takes part after an earlier error: {self.stopped}")

    def _require_right_pass(self) -> None:
        self.require_taking_part()
        self._local.require_gone("this backward() would add to it", self._engine.firing)
        # With all_parameters the parameters may belong to several optimizers, of which only one reports its steps.
        if not self._window.is_open and not self._settings.all_parameters:
            self._progress.require_used()
        self._table.require_as_attached()

    def _stop(self, error: Exception) -> None:
        """Stop taking part, and tell the other ranks, which are about to enter this reduction or are in it."""
        if self.stopped or self._communicator.size == 1 or torch.compiler.is_compiling():
            return
        self.stopped = str(error)
        self._engine.give_up()
        if self._engine.survival is not None:
            self._engine.survival.leave(f"gave up: {self.stopped}")
        self._communicator.channel.abandon(self.stopped, in_step=not self._engine.is_waited_for())

    def forget_abandoned(self) -> None:
        """Recover from a pass that ended with an exception, if possible; else raise RuntimeError."""
        if not self._watch.abandoned() or not self._engine.has_launched():
            return
        if self._communicator.size > 1:
            raise RuntimeError(HALF_SENT)
        self._engine.drop_launched()
