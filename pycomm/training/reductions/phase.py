"""State of a step on one page: the phase that this rank is in, and what has happened in it.

Only :class:`StepState` changes the phase. Its methods are named after events. An illegal event is a mistake of pycomm,
hence an assertion; calls of users at a wrong time get their errors before.

    IDLE ........ a pass begins ........ COLLECTING, or SENDING if it is the last of its window
    COLLECTING .. the pass ends ........ COLLECTING; the next pass as above; gradients thrown away: IDLE
    SENDING ..... the reduction is over  AVERAGED, also if no rank had a gradient; after an error: IDLE
    AVERAGED .... the step begins ...... STEPPING; gradients thrown away: IDLE
    STEPPING .... the step ends ........ STEPPED; a pass of its closure: as IDLE, and back
    STEPPED ..... a forward, zero_grad . IDLE
    all ......... an error of this rank alone: STOPPED; detach: CLOSED
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from pycomm.collectives.gradients import PassGate
from pycomm.compression.base import Flag
from pycomm.torch_internals import current_graph_task


class Phase(Enum):
    """Phase of a step."""

    IDLE, COLLECTING, SENDING, AVERAGED, STEPPING, STEPPED, STOPPED, CLOSED = range(8)


class Role(Enum):
    """Why this rank takes part in the present reduction.

    BATCH: with gradients of a pass. WRITTEN: with gradients that the user has written. SKIPS: it has no batch.
    ABSENT: it has no data, and takes no step. NEW: its buckets were sent empty, as it came in the middle of a step.
    """

    BATCH, WRITTEN, SKIPS, ABSENT, NEW = range(5)


class HostCopy:
    """Asynchronous copy of flags from a device to the host, which waits only when it reads them."""

    def __init__(self, num_flags: int, device: torch.device) -> None:
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(num_flags, dtype=torch.bool, pin_memory=pinned)
        self._array = self._host.numpy()  # read instead of the tensor, as torch would wait for the whole device
        self._event: torch.cuda.Event | None = None

    def put(self, flags: torch.Tensor) -> None:
        """Start to copy ``flags``, on the current stream."""
        self._host.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flags.device))

    def get(self) -> list[bool]:
        """Wait for the last flags, and return them."""
        if self._event is not None:
            self._event.synchronize()
        flags: list[bool] = self._array.tolist()
        return flags


_AROUND_STEP = (Phase.IDLE, Phase.AVERAGED, Phase.STEPPING, Phase.STEPPED)


class StepState:
    """State of one rank's step.

    Attributes:
        phase, role: see :class:`Phase` and :class:`Role`.
        reason: error after which this rank no longer takes part; "" without one.
        passes: number of passes that have ended in this window.
        holds: whether the last of them has left gradients.
        launched: number of buckets that were launched in this reduction.
        packed: numbers of those whose gradients have been packed since.
        contributed: whether this rank had a gradient in it.
        firing: parameter whose hooks are running.
        late: parameter whose ``.grad`` becomes the bucket's view, or joins the window's sum, after all its hooks.
        paused: number of open contexts in which passes are this rank's alone.
        depth: number of nested calls of ``step()``.
        reductions: number of reductions that have been handed out.
        used: number of reductions when a step of any optimizer last used averages, or was left out on purpose.
        steps: number of reductions that steps have used.
        gate: whether hooks may count gradients automatically.
    """

    def __init__(self, device: torch.device | None = None, gate: PassGate | None = None) -> None:
        """``device``: the one that computes whether compression has committed state; ``None`` if the host knows."""
        self.phase, self.role, self.reason = Phase.IDLE, Role.BATCH, ""
        self.passes, self.holds = 0, False
        self.launched, self.contributed = 0, False
        self.packed: list[int] = []
        self.firing: Any = None
        self.late: Any = None
        self.paused = self.depth = 0
        self.reductions = self.used = self.steps = 0
        self.gate = PassGate(current_graph_task, None) if gate is None else gate
        self._used_here = 0  # as `used`, of steps of the attached optimizer alone
        self._used_before = 0  # the same as its present step began
        self._owed: bool | None = False  # whether compression has committed the last reduction; None: the device knows
        self._on_device = None if device is None else HostCopy(1, device)

    # Questions.

    @property
    def is_open(self) -> bool:
        """Whether passes of this window have ended, and its reduction is not over."""
        return self.passes > 0

    @property
    def is_sending(self) -> bool:
        """Whether the present pass is the last of its window, or a reduction without a pass is under way."""
        return self.phase is Phase.SENDING

    @property
    def is_used(self) -> bool:
        """Whether no averages wait for a step."""
        return self.used == self.reductions

    @property
    def has_averages(self) -> bool:
        """Whether there was a reduction since the attached optimizer's step before this one."""
        return self.reductions > self._used_before

    @property
    def has_pass(self) -> bool:
        """Whether this rank's own gradients are in the present reduction."""
        return self.role in (Role.BATCH, Role.WRITTEN)

    def owes_step(self) -> bool:
        """Return whether compression has counted gradients as applied that no step has applied. Waits for a GPU."""
        if self.is_used or self.steps == 0:  # before the first step some loops update parameters without step()
            return False
        if self._owed is None:
            assert self._on_device is not None
            return self._on_device.get()[0]
        return self._owed

    # Events of passes.

    def pass_begins(self, is_last: bool, role: Role | None = None) -> None:
        """A pass begins: with other passes of its window to come, or as the last one."""
        assert self.phase in (*_AROUND_STEP, Phase.COLLECTING) or self.role is Role.NEW, self.phase
        self.phase = Phase.SENDING if is_last else Phase.COLLECTING
        if self.role is not Role.NEW:
            self.role = role or Role.BATCH

    def reduces(self, role: Role) -> None:
        """A reduction begins without a pass: ``flush``, ``reduce`` and the like, or a newcomer's first."""
        assert self.phase in (*_AROUND_STEP, Phase.COLLECTING), self.phase
        self.phase, self.role = Phase.SENDING, role

    def expects_gradients(self) -> None:
        """The buckets of a pass are ready for its gradients; none was sent."""
        self.launched, self.packed, self.late, self.contributed = 0, [], None, False

    def pass_ends(self, *, holds: bool) -> None:
        """A pass ends, with or without gradients."""
        assert self.phase in (Phase.COLLECTING, Phase.SENDING), self.phase
        self.passes, self.holds = self.passes + 1, holds

    def pass_fails(self) -> None:
        """A pass has ended with an exception, and nothing of it was sent, or only by a rank alone."""
        if self.phase is Phase.SENDING and self.role is not Role.NEW:
            self.phase = Phase.COLLECTING if self.is_open else Phase.IDLE
        self.launched, self.packed = 0, []

    def cleared(self) -> int:
        """All gradients of an open window were thrown away; return the number of its passes."""
        number, self.passes = self.passes, 0
        if self.phase is Phase.COLLECTING:
            self.phase = Phase.IDLE
        return number

    # Events of reductions.

    def handed_out(self, committed: Flag, *, has_averages: bool, is_seen: bool = True) -> None:
        """Results are handed out: averages, or nothing if no rank had a gradient, or one had a veto.

        Args:
            committed: whether compression has committed state.
            has_averages: whether a step is to use this reduction; of a vetoed one, even if it has no gradients.
            is_seen: false if a CUDA graph captures this: the host does not see what its launches commit.
        """
        assert self.phase in (Phase.SENDING, Phase.STOPPED), self.phase  # stopped on another thread
        if not has_averages:  # nothing new to use, then
            self.used += self.is_used
            self._used_here += self._used_here == self.reductions
            self._used_before += self._used_before == self.reductions
        self.reductions += 1
        if not has_averages:
            return
        self.depth = 0  # a step that raised has left it
        if not isinstance(committed, torch.Tensor):
            self._owed = committed
        elif not is_seen:
            self._owed = False
        else:
            assert self._on_device is not None
            self._on_device.put(committed)
            self._owed = None

    def reduced(self, *, succeeded: bool) -> None:
        """The reduction is over; averages, if there are any, have been handed out."""
        if self.phase is Phase.SENDING:
            self.phase = Phase.AVERAGED if succeeded else Phase.IDLE
        self.role, self.passes = Role.BATCH, 0

    def resumes(self, reductions: int, steps: int) -> None:
        """A newcomer, or a rank that was absent, continues with the counts of the other ranks."""
        self.used += reductions - self.reductions
        self._used_here += reductions - self.reductions
        self.reductions, self.steps = reductions, steps

    # Events of steps.

    def step_begins(self) -> bool:
        """``step()`` is called; return whether it is the outermost call."""
        self.depth += 1
        if self.depth > 1:
            return False
        self._used_before = self._used_here
        if self.phase in _AROUND_STEP:
            self.phase = Phase.STEPPING
        return True

    def uses_averages(self, *, is_attached: bool = True) -> None:
        """A step uses the last averages: of the attached optimizer, or of another one that has its parameters."""
        if is_attached:
            self._used_here = self.reductions
        if not self.is_used:
            self.used = self.reductions
            self.steps += 1

    def leaves_out_step(self) -> None:
        """The step of the last averages is left out on purpose."""
        self.used = self._used_here = self.reductions

    def closure_ends(self, depth: int) -> None:
        """A closure of ``step()``, called at this ``depth``, has returned; its reductions do not end the step."""
        self.depth = depth
        if self.phase in _AROUND_STEP:
            self.phase = Phase.STEPPING

    def step_ends(self) -> bool:
        """``step()`` has returned; return whether it was the outermost call."""
        self.depth = max(self.depth - 1, 0)
        return self.depth == 0

    def stepped(self) -> None:
        """The parameters were stepped: the outermost step of an optimizer that has them has ended."""
        if self.phase in _AROUND_STEP:
            self.phase = Phase.STEPPED

    @property
    def is_stepping(self) -> bool:
        """Whether ``step()`` is running."""
        return self.depth > 0

    # Events of the training loop.

    def forward_begins(self) -> None:
        """A forward of the module: what followed the last step is over."""
        if self.phase is Phase.STEPPED:
            self.phase = Phase.IDLE

    def loop_begins(self) -> None:
        """``zero_grad()``, or the weight of the next pass: a step begins."""
        if self.phase in (Phase.AVERAGED, Phase.STEPPED):
            self.phase = Phase.IDLE

    def stops(self, reason: str) -> None:
        """This rank no longer takes part, after an error of its own."""
        self.reason = reason
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.STOPPED

    def closes(self) -> None:
        """The training ends: ``detach()``."""
        self.phase = Phase.CLOSED
