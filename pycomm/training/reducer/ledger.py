"""Ledger: where each gradient of this rank came from, and errors about gradients that must not be sent or used.

A gradient that no reduction has made since the last step is local to this rank: it was written by hand, computed by
``torch.autograd.grad``, belongs to a parameter that is not averaged, or was used by a step already. A step on it would
change the parameters of this rank only. These checks read only local objects, and send nothing. The :class:`Slot`
of a parameter tells what its gradient is now: ``holds_average``, ``untouched``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.optim.guard import is_around
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import local_of
from pycomm.training.reducer.buckets import SentBucket, Slot
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options
from pycomm.training.reductions.phase import StepState

_INSTEAD = (
    "optimizer.step() would move this rank's parameters alone. For gradients that backward() did not make "
    "(torch.autograd.grad, torch.func.grad, p.grad = ...), call reducer.reduce() on all ranks before the step. For "
    "parameters that were not attached, write tuning=pycomm.Tuning(all_parameters=True), or detach() and attach() again"
)


class Ledger:
    """Origin of the gradients of one rank.

    Args:
        communicator: the ranks, for errors.

    Attributes:
        unused: ids of the parameters without a gradient on any rank in the last reduction.
    """

    def __init__(self, table: ParameterTable, settings: Options, state: StepState, communicator: Communicator) -> None:
        self._table, self._settings, self._state, self._communicator = table, settings, state, communicator
        self._local: WeakKeyDictionary[Slot, tuple[weakref.ref[torch.Tensor], int]] = WeakKeyDictionary()
        self._steps_of_others = WeakKeyDictionary[torch.optim.Optimizer, int]()  # reductions before the last one
        self.unused: set[int] = set()

    def hand_out(self, unused: set[int]) -> None:
        """Note that a reduction has written all gradients, except for the parameters with the ids ``unused``."""
        self.unused = unused

    # What is sent.

    def require_sendable(self, slot: Slot) -> None:
        """Raise RuntimeError or ValueError if the gradient of ``slot`` cannot be sent, or its bucket already was."""
        grad = slot.owner.grad
        if grad is None:
            raise RuntimeError(
                f"the gradient of {slot.name!r} has been removed by another hook on this parameter before it could be "
                "averaged: an optimizer that steps in backward does not work with attach. If that hook removes "
                "nothing, backward() made no gradient: register the hook after attach()"
            )
        if grad.is_sparse:
            raise ValueError(f"the gradient of {slot.name!r} is sparse; pycomm reduces dense gradients")
        if slot.sent is not None and slot.sent.work is not None:
            raise RuntimeError(
                f"the gradient of {slot.name!r} was accumulated {slot.fired} times in one backward pass, against "
                f"{slot.expected} in earlier passes, when it had already been sent; detach() and attach() to count "
                "again"
            )

    def sendable(self, sent: SentBucket) -> list[torch.Tensor | None]:
        """Return the gradients of the bucket ``sent``, checked here as the counting hooks check nothing."""
        grads, any_sparse = sent.bucket.grads()
        if any_sparse or any(grad is None for grad in grads):
            for slot, grad in zip(sent.slots, grads, strict=True):
                if (grad is None and slot.fired > 0) or (grad is not None and grad.is_sparse):
                    self.require_sendable(slot)
        if self._state.is_open or self._settings.is_linear:
            return grads
        for slot, grad, view in zip(sent.slots, grads, sent.bucket.views, strict=True):
            if grad is view and slot.fired > 0:
                self.require_no_average(slot)
            elif grad is not None and (self._settings.has_parts or not self._settings.average) and slot.untouched():
                kind, done = ("average", "averaged") if self._settings.average else ("sum", "summed")
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is the {kind} over the ranks that an earlier backward() left, and "
                    f"would be {done} again, together with the new gradients. For several passes per step, use "
                    "attach(..., accumulate=n); otherwise call optimizer.zero_grad() between them"
                )
        return grads

    def require_no_average(self, slot: Slot) -> None:
        """Raise RuntimeError if the first pass of a window has accumulated into an earlier average.

        The mean over the ranks of an average plus a new gradient is correct; a sum, or error feedback, is not.
        """
        is_average = slot.holds_average() and slot.grad_version() == slot.version + slot.fired
        if is_average and not self._settings.is_linear:
            raise RuntimeError(
                f"backward() ran again on the averaged gradient of {slot.name!r}. Several passes of one step need "
                "attach(..., accumulate=n); a pass that is not a step of this optimizer (a generator's through its "
                "discriminator, a penalty) belongs in `with reducer.paused():`; otherwise call optimizer.zero_grad() "
                "first"
            )

    def require_written(self) -> None:
        """Raise RuntimeError if ``.grad`` is still the last average, and averaging it again would be wrong."""
        for slot in () if self._settings.is_linear else self._table.slots():
            if slot.owner.grad is not None and slot.untouched():
                raise RuntimeError(
                    f"reduce() would average the gradient of {slot.name!r} again: backward() has averaged it, and "
                    "optimizer.step() has not used it yet"
                )

    def require_all_averaged(self) -> None:
        """Raise RuntimeError if a parameter without a gradient on any rank has got one since."""
        for sent in self._table.buckets:
            for slot, used in zip(sent.slots, sent.exchange.used(), strict=True):
                grad = slot.owner.grad
                if not used and grad is not None and bool(grad.any()):
                    raise RuntimeError(
                        f"the gradient of {slot.name!r} has not been averaged: it was set after the others had been. "
                        "Set .grad before backward(), on all ranks, or leave backward() out and set all of them"
                    )

    # What paused passes have left.

    def note_local(self, slot: Slot) -> None:
        """Note that a paused pass has accumulated the gradient of ``slot``, if it has one."""
        if (grad := slot.owner.grad) is not None:
            self._local[slot] = weakref.ref(grad), slot.grad_version()

    def require_no_local(self, why: str, firing: Slot | None = None) -> None:
        """Raise RuntimeError if such a gradient is still in ``.grad``.

        Args:
            why: why it must have been cleared, for the message.
            firing: slot whose gradient the current pass has already accumulated.
        """
        suspects = [slot for slot in self._local if self._may_be_local(slot, slot is firing)]
        if suspects:
            # A gradient that is all zeros was cleared by zero_grad(set_to_none=False) or grad.data.zero_(). The host
            # waits once for all counts.
            grads = [grad for slot in suspects if (grad := slot.owner.grad) is not None]
            nonzero = torch.stack([grad.count_nonzero() for grad in grads]).tolist()
            for slot, count in zip(suspects, nonzero, strict=True):
                if count > 0 or slot is firing:
                    raise RuntimeError(
                        f"the gradient of {slot.name!r} is still what a backward() inside reducer.paused() left, which "
                        f"is never averaged: {why}; call optimizer.zero_grad() first"
                    )
        self._local.clear()

    def _may_be_local(self, slot: Slot, added_to: bool) -> bool:
        reference, version = self._local[slot]
        grad = slot.owner.grad
        if grad is None or reference() is not grad:
            return False
        return not added_to or slot.grad_version() == version + 1  # else it was zeroed before this pass added to it

    # What steps use.

    def require_step(self) -> None:
        """Raise RuntimeError if a parameter of the optimizer has a gradient that was not averaged since the last step.

        Zeros are harmless: distributed checkpointing steps on them to create optimizer state.
        """
        table, has_averages = self._table, self._state.has_averages
        if has_averages and not self.unused and not table.has_new():
            return
        names = {id(param): name for name, param in table.named()}
        for param in optimizer_parameters(table.optimizer):
            if param.grad is None or table.ignored.covers(param):
                continue
            name = names.get(id(param))
            averaged = has_averages and name is not None and id(param) not in self.unused
            if averaged or not bool(local_of(param.grad).any()):
                continue
            if name is None:
                name, why = self._name_of(param), "pycomm does not know this parameter, which came after attach()"
            elif has_averages:
                why = "it was set after the others had been averaged"
            else:
                why = "there was no backward() or reduce() of all ranks since the last optimizer.step()"
            self._refuse(f"the gradient of {name!r} has not been averaged: {why}. {_INSTEAD}")

    def _name_of(self, param: torch.Tensor) -> str:
        """Return the name of ``param`` in the module, or a description of it."""
        named = [] if self._table.module is None else self._table.module.named_parameters()
        return next((name for name, each in named if each is param), f"a parameter of shape {list(param.shape)}")

    def require_step_of_other(self, optimizer: torch.optim.Optimizer, *, has_paused: bool) -> None:
        """Raise RuntimeError if another ``optimizer`` is about to step attached parameters on local gradients.

        Also if those gradients are only parts of averages. A wrapper of the attached optimizer only calls it, and one
        that the attached optimizer calls is part of its step. Gradients of a paused pass are meant to be local.
        """
        reductions, attached = self._state.reductions, self._table.optimizer
        before, self._steps_of_others[optimizer] = self._steps_of_others.get(optimizer, 0), reductions
        if before == reductions and not has_paused:
            for slot in self._slots_in(optimizer):
                grad = slot.param.grad
                if grad is not None and not slot.holds_average() and bool(local_of(grad).any()):
                    self._refuse(
                        f"the gradient of {slot.name!r} has not been averaged, and another optimizer than the attached "
                        "one is about to use it: there was no backward() or reduce() of all ranks since its last step. "
                        f"{_INSTEAD}"
                    )
        if self._table.partial is None or self._state.is_stepping or is_around(optimizer, attached):
            return
        for slot in self._slots_in(optimizer):
            if slot.holds_average():
                self._refuse(
                    f"a {type(optimizer).__name__} is about to step {slot.name!r}, whose gradient is averaged only on "
                    f"the rank that steps it by the attached {type(attached).__name__}, because of shard=: step "
                    'the attached optimizer, or pass Sharding(grads="full")'
                )

    def _slots_in(self, optimizer: torch.optim.Optimizer) -> Iterator[Slot]:
        slots = {id(slot.param): slot for slot in self._table.slots()}
        return (slots[id(param)] for param in optimizer_parameters(optimizer) if id(param) in slots)

    def _refuse(self, problem: str) -> NoReturn:
        raise RuntimeError(f"rank {self._communicator.rank}: {problem}")
