"""Backward passes: beginning, each gradient, the last gradient, and end; paused passes; hooks of the training loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from pycomm.errors import HALF_SENT, CommError, DamageError
from pycomm.optim.guard import StepWatch, training_alone
from pycomm.optim.module_hooks import BeforeForward, ForwardWatch, ModuleZeroGradWatch, ZeroGradHook, hook_forward
from pycomm.optim.parameters import Writes, parameter_ids
from pycomm.optim.skips import listen_to_skips, stop_listening
from pycomm.optim.wrappers import refuse_active_wrapper
from pycomm.torch_internals import current_graph_task
from pycomm.training.reducer.autograd_hooks import BackwardWatch, GradientHook, Uncovered
from pycomm.training.reducer.buckets import Slot, forget_wide
from pycomm.training.reducer.changes import ArrivalOrder, ParameterChanges
from pycomm.training.reducer.engine import Engine
from pycomm.training.reductions.phase import Role

_LOG = logging.getLogger("pycomm")

_UNUSED = (
    "optimizer.step() has not used the last averaged gradients: their pass is in the residuals and velocities of "
    "compression, but in no parameter. A backward() that is not a step of this optimizer (a generator's through its "
    "discriminator, a penalty, a saliency map) belongs in `with reducer.paused():`; several passes of one step need "
    "attach(..., accumulate=n); a step that is left out on purpose needs reducer.skip_step()"
)

_MOST_LOCAL_UPDATES = 4
"""Number of local parameter updates, without a reduction in between, that raises an error."""


class Passes:
    """Driver of the engine. Autograd calls it by a hook on each parameter, and at the end of each backward pass.

    Attributes:
        changes: handling of parameters that are added, unfrozen or replaced.
    """

    def __init__(self, engine: Engine) -> None:
        self._communicator, self._settings = engine.communicator, engine.settings
        self._engine, self._table, self._window, self._state = engine, engine.table, engine.window, engine.step_state
        self._ledger = engine.ledger
        self._watch = BackwardWatch(self._begin, self._all_gradients_arrived, self._end, self._failed)
        self.changes = ParameterChanges(engine, self.hook_parameters, self.stop)
        self._order = ArrivalOrder(engine)
        self._hookless: list[Slot] = []
        self._owner: Any = None
        self._handles: list[Any] = []
        self._uncovered: Uncovered | None = None
        self._forwards: ForwardWatch | None = None
        self._local_writes: tuple[int, Writes] | None = None  # since that reduction
        self._has_told = False  # of averages that no step has used

    # Parameters.

    def hook_parameters(self, slots: Iterable[Slot]) -> None:
        """Hook the parameters of ``slots``, which are in buckets."""
        for slot in slots:
            if slot.hook is not None:
                slot.count_in(slot.hook.counter)
            elif slot.param.requires_grad:
                slot.hook = GradientHook(self, Passes._on_gradient, slot, slot.param, self._state.gate)
                slot.count_in(slot.hook.counter)
            else:  # frozen: only the user may write its gradient
                self._hookless.append(slot)

    def hook_model(self, owner: object) -> None:
        """Hook the optimizer and the module. These hooks keep ``owner`` alive; hooks of parameters do not."""
        self._owner = owner
        optimizer, module = self._table.optimizer, self._table.module
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self.stepped()),
            ZeroGradHook(optimizer, self.note_zero_grad),
            StepWatch(self.before_other_step, self.after_other_step),
        ]
        listen_to_skips(optimizer, self._state.leaves_out_step, self._engine.outcome.is_left_out)
        if self._settings.accumulates:
            self._handles.append(ModuleZeroGradWatch(self._note_module_zero_grad))
        if module is not None:
            self._uncovered = Uncovered(module, self._table.covers)
            self._forwards = ForwardWatch(module, self.note_forward, self.before_forward)
            before = BeforeForward(self.before_forward, notes_copies=True)
            self._handles += [hook_forward(module, before), self._forwards]

    def unhook(self) -> None:
        for slot in self._table.slots():
            if slot.hook is not None:
                slot.hook.remove()
        for handle in self._handles:
            handle.remove()
        stop_listening(self._table.optimizer)
        if self._uncovered is not None:
            self._uncovered.close()
        self._owner = None

    def before_forward(self) -> None:
        """Refuse wrappers that average these parameters, too; add new parameters if no window is open."""
        if current_graph_task() != -1:
            return  # inside backward: a checkpointed piece is being recomputed
        state = self._state
        if torch.is_grad_enabled() and not state.paused:
            self._engine.statistics.phases.trace.begin_forward()
        refuse_active_wrapper(lambda: dict(self._table.named()))
        state.forward_begins()
        self.forget_lost()
        if not (state.is_open or state.reason or state.paused):
            if self._hookless:
                slots, self._hookless = self._hookless, []
                self.hook_parameters(slots)
            self.changes.find_new()
            self._refuse_local_updates()
            module = self._table.module
            if (
                torch.is_grad_enabled()
                and self.changes.places.look(self._table)
                and module is not None
                and self._uncovered
            ):
                self._uncovered.watch(module)

    def _refuse_local_updates(self) -> None:
        """Raise RuntimeError if parameters have been changed by gradients that are not averaged, again and again."""
        if not self._engine.comparison.loop.has_used:
            return
        reductions = self._state.reductions
        if self._local_writes is None or self._local_writes[0] != reductions:
            self._local_writes = reductions, Writes([slot.local for slot in self._table.slots()])
        elif (number := self._local_writes[1].count()) >= _MOST_LOCAL_UPDATES:
            with self.stopping():
                raise RuntimeError(
                    f"rank {self._communicator.rank}: gradients were computed and parameters changed {number} times, "
                    "and no backward() or reduce() of all ranks has averaged any: put gradients that backward() did "
                    "not make (torch.autograd.grad, torch.func.grad) into .grad and call reducer.reduce() before using "
                    "them, or run what this rank does alone inside `with reducer.paused():`"
                )

    def note_forward(self, output: Any, called: str) -> None:
        """Note a forward of the part ``called``, whose ``output`` shows later whether a backward followed."""
        if current_graph_task() == -1 and not self._state.paused:
            self._engine.comparison.loop.note_forward(output, called)

    def note_zero_grad(self) -> None:
        """Note a call of ``optimizer.zero_grad()``: a step begins."""
        self._state.loop_begins()
        if not self._state.paused:
            self._engine.comparison.loop.num_zero_grads += 1
        if self._state.is_open:
            self._note_cleared(set(parameter_ids(self._table.optimizer)))

    def _note_module_zero_grad(self, module: torch.nn.Module) -> None:
        """Note that ``module`` clears its gradients, which may include gradients of an open window."""
        if self._state.is_open:
            self._note_cleared(set(map(id, module.parameters())))

    def _note_cleared(self, ids: set[int]) -> None:
        """Discard the window if clearing the gradients of the parameters with these ``ids`` clears all gradients."""
        slots = self._table.slots()
        forget_wide(slot for slot in slots if id(slot.param) in ids)
        if all(id(slot.param) in ids for slot in slots):
            self._discard_window()

    def _discard_window(self) -> None:
        self._window.weights.forget_passes()
        self._engine.comparison.loop.num_cleared += self._state.cleared()

    # Passes of this rank alone.

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep backward passes inside local to this rank; see ``Reducer.paused``."""
        self.forget_lost()
        if self._state.is_open:
            raise RuntimeError(
                "paused() inside an accumulation window: its gradients would be mixed; call flush() first"
            )
        self._state.paused += 1
        self._engine.comparison.loop.has_paused = True
        self._state.gate.close()
        try:
            with training_alone():
                yield
        finally:
            self._state.paused -= 1

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check a step of the attached optimizer before it begins, and after each run of a closure if it has one.

        A closure runs the last backward pass of a window itself. Averages count as used before its first run, because
        some optimizers (SAM) use the existing gradients before they ask for new ones. A class that calls its base
        class's step runs the hooks twice, of which only the outermost counts.
        """
        state = self._state
        if not state.step_begins():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._require_averaged()
            return None
        state.uses_averages()
        evaluate: Callable[[], Any] = closure

        def checked_closure() -> Any:
            depth = state.depth
            loss = evaluate()
            state.closure_ends(depth)
            self._require_averaged(in_closure=True)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked_closure}
        return (args[0], checked_closure, *args[2:]), kwargs

    def _require_averaged(self, *, in_closure: bool = False) -> None:
        """Raise RuntimeError if ``optimizer.step()`` would use gradients that have not been averaged.

        Collective only if the last reduction has found that the replicas differ; ``in_closure`` puts that off, as the
        step may have changed the parameters for it.
        """
        self._engine.statistics.phases.trace.begin_step()
        self._require_closed()
        self._ledger.require_no_local("optimizer.step() would move this rank's parameters alone")
        self._table.require_no_unknown_gradients()
        with self.stopping():
            self._engine.comparison.require_suitable(in_step=True)
            self._ledger.require_step()
        if not in_closure:
            self._engine.comparison.before_step()
            self._look_again()
        self._state.uses_averages()

    def _require_closed(self) -> None:
        """Raise RuntimeError if a step would leave gradients of an open window behind."""
        self.forget_lost()
        if self._state.is_open:
            cleared = self._engine.comparison.loop.num_cleared
            before = f"; gradients of {cleared} earlier passes were cleared inside the window" if cleared else ""
            raise RuntimeError(
                f"optimizer.step() after {self._state.passes} of {self._settings.passes} backward passes: "
                f"these gradients have not been averaged; call reducer.flush() first{before}"
            )

    def _look_again(self) -> None:
        """See ``Engine.look_again``."""
        try:
            self._engine.look_again()
        except DamageError as error:
            self._note_damage(error)
            raise

    def _note_damage(self, error: DamageError) -> None:
        if self._engine.members.survives and error.ranks:
            self._state.stops(str(error))  # the others continue without this rank

    def before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the step of another optimizer than the attached one, if it holds attached parameters.

        It may be inside the attached optimizer, such as SAM's base optimizer. A wrapper around that only calls it.
        """
        if optimizer is self._table.optimizer or self._communicator.size == 1:
            return
        has_paused = self._engine.comparison.loop.has_paused
        with self.stopping():
            self._ledger.require_step_of_other(optimizer, has_paused=has_paused)
        self.changes.before_other_step(optimizer)
        if has_paused or not self.changes.steps_attached(optimizer):
            return
        if self._counts():
            self._engine.statistics.phases.trace.begin_step()
            self._require_closed()
            self._engine.comparison.before_step()
        self._look_again()

    def after_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of another optimizer as a step of the attached parameters, if it has them."""
        if optimizer is self._table.optimizer or self._communicator.size == 1:
            return
        if self._counts() and self.changes.steps_attached(optimizer):
            self._state.uses_averages(is_attached=False)
            self._note_step()

    def _counts(self) -> bool:
        """Return whether a step of another optimizer that holds attached parameters counts as this Reducer's step.

        Not inside a step of the attached one, nor after a pass of this rank alone. With all_parameters the parameters
        may belong to several optimizers, of which only one reports its steps.
        """
        is_own = self._state.is_stepping or self._engine.comparison.loop.has_paused
        return not (is_own or self._settings.tuning.all_parameters)

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Raise an error from inside on the other ranks, too."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.stop(error)
            raise

    def refuse_gradient(self, param: torch.Tensor, problem: str) -> NoReturn:
        """Raise RuntimeError, also on other ranks, that the gradient of ``param`` has a ``problem``."""
        name = next((repr(name) for name, each in self._table.named() if each is param), None)
        what = name or f"a parameter of shape {list(param.shape)}"
        error = RuntimeError(f"rank {self._communicator.rank}: the gradient of {what} {problem}")
        self.stop(error)
        raise error

    def stepped(self) -> None:
        if not self._state.step_ends():
            return
        with self.stopping():
            # Again: hooks that run after pycomm's may have set numbers.
            self._engine.comparison.require_suitable(in_step=True)
        self._look_again()  # if closures have put it off
        self._note_step()

    def _note_step(self) -> None:
        self._engine.statistics.phases.trace.end_step()
        self._engine.comparison.after_step()
        self._state.stepped()
        if self._table.buckets:
            self._engine.comparison.loop.note_step(self._table.buckets[0].slots[0])

    # Callbacks of autograd.

    def _on_gradient(self, slot: Slot) -> None:
        state = self._state
        if state.paused > 0:
            self._ledger.note_local(slot)
            return
        state.firing = slot
        try:
            self._watch.touch()
            if slot.sent is not None:
                self._order.note(slot)
                self._engine.take(slot)
        except (RuntimeError, ValueError) as error:
            self.stop(error)
            raise
        finally:
            state.firing = None
        if self._engine.may_count():
            state.gate.open()
        else:
            state.gate.close()

    def _begin(self) -> None:
        self.forget_lost()
        self.admit_newcomer()
        self.require_right_pass()
        self._state.pass_begins(self._settings.is_last(self._state.passes))
        self._prepare_buckets(with_next=True)

    def begin_reduction(self, role: Role, *, with_next: bool | None) -> None:
        """Begin a reduction without a pass; ``with_next`` as in ``Engine.begin_pass``."""
        self.require_right_pass()
        self._state.reduces(role)
        self._prepare_buckets(with_next=with_next)

    def _prepare_buckets(self, *, with_next: bool | None) -> None:
        try:
            if not self._state.is_open and self._order.apply():
                self.hook_parameters(self._table.slots())
            self._engine.begin_pass(with_next=with_next)
        except BaseException:
            self._state.pass_fails()
            raise

    def _all_gradients_arrived(self) -> None:
        if not self._state.is_sending:
            return
        # Known buckets first, before _end looks for new parameters: ranks may have launched different numbers of
        # buckets by now, but always in the same order.
        try:
            with self.stopping():
                self._engine.launch_rest()
        except BaseException:
            if self._communicator.size == 1:
                self._engine.drop_launched()
            else:
                self._failed()
            raise

    def _end(self) -> None:
        for sent in self._table.buckets:
            sent.counts.end_pass()
        is_last = self._state.is_sending
        if not is_last:
            self._engine.take_late()
            self._window.weights.note_pass()
        self._state.pass_ends(holds=self._holds_gradients(None))
        if is_last:
            self.reduce()
        else:
            self._engine.statistics.phases.trace.end_backward()
        if self._uncovered is not None:
            self._uncovered.warn()

    def _failed(self) -> None:
        if self._state.launched > 0:
            self.stop(RuntimeError(HALF_SENT))
        else:
            self._state.pass_fails()

    def reduce(self) -> None:
        """Complete the reduction, including new parameters."""
        announced = self._engine.comparison.announces_new and bool(self._table.buckets)
        if self._forwards is not None and self._state.has_pass:
            self._forwards.trained(self._engine.comparison.loop.has_forwards)
        try:
            self._engine.reduce(None if announced else self.changes.find_new, self.changes.admit_late)
        except DamageError as error:
            self._note_damage(error)
            raise
        except CommError as error:
            if not self._engine.members.survives:  # otherwise all ranks have agreed on the cause
                number, rank = self._state.reductions + 1, self._communicator.rank
                error.args = (f"{error}; rank {rank} was in reduction {number}",)
            raise
        except ValueError as error:
            raise self.changes.explained(error) from None
        self.changes.drop_replaced()
        self._order.agree()

    def admit_newcomer(self) -> None:
        """Admit a waiting newcomer between two steps."""
        if not self._state.is_open and not self._state.reason:
            self._engine.members.admit_newcomer(self._engine)

    # Errors.

    def require_taking_part(self) -> None:
        """Raise RuntimeError if this rank has stopped after an earlier error."""
        if self._state.reason:
            raise RuntimeError(f"this Reducer no longer takes part after an earlier error: {self._state.reason}")

    def require_right_pass(self) -> None:
        """Raise RuntimeError if a reduction may not begin now."""
        self.require_taking_part()
        state = self._state
        self._ledger.require_no_local("this backward() would add to it", state.firing)
        # With all_parameters the parameters may belong to several optimizers, of which only one reports its steps.
        if not (state.is_open or self._settings.tuning.all_parameters or state.is_used or state.steps == 0):
            if state.owes_step():
                raise RuntimeError(_UNUSED)
            self._tell_of_unused()
        self._table.require_as_attached()

    def stop(self, error: Exception) -> None:
        """Stop taking part, and raise ``error`` on ranks that are in this reduction or about to enter it."""
        if self._state.reason or self._communicator.size == 1 or torch.compiler.is_compiling():
            return
        self._state.stops(str(error))
        self._engine.members.leave(f"gave up: {error}")
        self._communicator.channel.abandon(str(error), in_step=not self._engine.is_waited_for())

    def _tell_of_unused(self) -> None:
        """Log, once, that a pass begins although no step has used the last averages."""
        if not self._has_told and self._communicator.rank == 0 and not self._state.is_stepping:
            self._has_told = True
            _LOG.warning(
                "backward() runs again before an optimizer.step() has used the last averages: a pass that is no "
                "training step of this optimizer (a generator's through its discriminator, a norm of gradients) "
                "belongs in `with reducer.paused():`, and several passes of one step need attach(..., accumulate=n)"
            )

    def _holds_gradients(self, firing: Slot | None) -> bool:
        """Return whether a parameter holds a gradient of this window; ``firing`` has just got one of the next pass."""
        return any(
            slot.has_wide or (slot.owner.grad is not None and (slot is not firing or slot.holds_average()))
            for slot in self._table.slots()
        )

    def forget_lost(self) -> None:
        """Discard a window whose gradients have been cleared. Recover from a pass that ended with an exception.

        Raises RuntimeError if other ranks wait for the rest of that pass.
        """
        state = self._state
        if state.is_open and state.holds and not self._holds_gradients(state.firing):
            self._discard_window()
        if not self._watch.take_abandoned() or state.launched == 0:
            return
        if self._communicator.size > 1:
            raise RuntimeError(HALF_SENT)
        self._engine.drop_launched()
