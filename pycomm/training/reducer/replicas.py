"""Check that the ranks are at the same step with the same parameters, by fingerprints sent with the gradients.

Every reduction carries the bits of :mod:`rank_flags`: the 2nd, 3rd, 5th, 9th, ... one, and then one in every
``check_replicas``, hashes of all parameters and of the module's buffers, in CPU memory the others a hash of a part of
the parameters, each part in turn. If fewer than half of the ranks differ, the error accuses them, and the others may
continue without them.

This covers averaged gradients, too, which are equal on all ranks: a flipped bit in one leads to a different parameter,
or has no effect.

Residuals and velocities differ between ranks by nature, so other ranks cannot check them. But nothing may write to them
between the commits of two steps. So a hash is taken right after a commit, and compared before the next exchange reads
them; a rank whose state has changed sets a bit. The two hashes read the state twice, and find only changes between
them: to find every flipped bit, they would have to be taken in every step.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pycomm import kernels
from pycomm.collectives.bucket import FingerprintBits
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing, on_gpu
from pycomm.collectives.tensor_memory import comparable, hashable
from pycomm.compression.base import Flag
from pycomm.descriptions import counts_text, name_ranks
from pycomm.optim.hyperparameters import Hyperparameters
from pycomm.torch_internals import parts_of, uncompiled
from pycomm.training.reducer import rank_flags
from pycomm.training.reducer.buckets import BucketInFlight, Slot, state_of
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.rank_flags import RankFlags, Record
from pycomm.training.reducer.replica_differences import (
    Compared,
    DamageError,
    Hashes,
    Named,
    ReplicaDifferences,
    RollingHash,
    StepEvidence,
)
from pycomm.training.reducer.settings import Options
from pycomm.training.reducer.window import AccumulationWindow
from pycomm.training.reductions.phase import Role, StepState

_REMEMBERED = 4
"""Number of comparisons that may still be reported: on a GPU the host reports two reductions later."""


class TakenHashes:
    """Hashes of committed state. Created by the thread that commits; computed and compared where buckets are sent."""

    def __init__(self, flights: Iterable[BucketInFlight], scratch: kernels.Scratch) -> None:
        # An exchange without state in this step may have no memory for it yet, and must not allocate any.
        state = state_of(flight for flight in flights if flight.exchange.transactional)
        found = [(f"{key} of parameter {name!r}", t) for name, entry in state.items() for key, t in entry.items()]
        device = found[0][1].device if found else None
        found = [(label, tensor) for label, tensor in found if tensor.device == device]
        self.labels = [label for label, _ in found]
        self._tensors = [hashable(tensor) for _, tensor in found]
        self._scratch = scratch
        self._then: torch.Tensor | None = None
        self.changed: torch.Tensor | None = None
        """Whether each has changed; bools, once compared."""

    def take(self) -> None:
        if self._tensors:
            self._then = self._hashes()

    def compare(self) -> None:
        """Take the hashes again, and compare them. Releases the state."""
        if self._then is not None:
            self.changed = self._hashes() != self._then
        self._tensors = []

    def _hashes(self) -> torch.Tensor:
        room = torch.empty(len(self._tensors), dtype=torch.int64, device=self._tensors[0].device)
        kernels.hashes(self._tensors, scratch=self._scratch, out=room)
        return room


class StateHashes:
    """Hashes of this rank's state, kept from a commit to the reduction after it."""

    def __init__(self) -> None:
        self._scratch = kernels.Scratch()
        self._taken: TakenHashes | None = None
        self._compared: deque[TakenHashes] = deque(maxlen=_REMEMBERED)
        self._has_graph = False

    def taking(self, flights: list[BucketInFlight]) -> TakenHashes | None:
        """Return hashes, still to be taken, of the state of ``flights``; ``None`` if there is no state."""
        self._taken = None
        if not self._has_graph and any(flight.exchange.transactional for flight in flights):
            taken = TakenHashes(flights, self._scratch)
            self._taken = taken if taken.labels else None
        return self._taken

    def comparing(self) -> TakenHashes | None:
        """Return the hashes of the last commit, if they were taken; they are compared only once."""
        # The launches of a CUDA graph change state without the host, so that hashes would be out of date.
        self._has_graph = self._has_graph or is_capturing()
        taken, self._taken = self._taken, None
        return None if self._has_graph else taken

    def forget(self) -> None:
        """Discard the hashes, and release the state."""
        self._taken = None

    def changed(self, taken: TakenHashes | None) -> Flag:
        """Compare ``taken``; return whether this or a recent comparison found a change. Does not wait for a GPU."""
        if taken is not None:
            taken.compare()
            self._compared.append(taken)
        flags = [each.changed.any() for each in self._compared if each.changed is not None]
        if not flags:
            return False
        return torch.stack(flags).any() if on_gpu(flags[0]) else any(map(bool, flags))

    def reported(self) -> None:
        """Note that the changes have been reported on all ranks."""
        self._compared.clear()

    def damaged(self) -> str:
        """Return the label of the first changed state; "" without one. Waits for a GPU."""
        for taken in self._compared:
            if taken.changed is not None and bool(taken.changed.any()):
                return taken.labels[int(taken.changed.cpu().nonzero()[0])]
        return ""


_STEP_BITS = 4
_BUFFER_BITS = 5
_STEP = slice(0, _STEP_BITS)
_STATE = _STEP_BITS
_PARAMETERS = slice(_STATE + 1, rank_flags.ALIKE.start - _BUFFER_BITS)
_BUFFERS = slice(rank_flags.ALIKE.start - _BUFFER_BITS, rank_flags.ALIKE.start)

_logger = logging.getLogger("pycomm")


class RankComparison:
    """Comparison between ranks of their replicas, and of what else they must do alike, by bits sent with gradients.

    Attributes:
        flags: further bits of this rank, and what the other ranks have announced.
        moved: see ``ParameterPlaces``.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: ParameterTable,
        settings: Options,
        state: StepState,
        window: AccumulationWindow,
        buffers: Callable[[], Named],
        world: Callable[[], Sequence[int]],
    ) -> None:
        self._communicator, self._table, self._world = communicator, table, world
        self._state, self._window = state, window
        self._interval, device = settings.tuning.check_replicas, table.device
        self.moved: Mapping[str, str] = {}
        self._compares_modes = "training" not in settings.tuning.per_rank
        self._compression, ignores = settings.compression, table.ignored.covers if table.ignored else None
        per_rank = tuple(settings.tuning.per_rank)
        self.flags = RankFlags(device, table.on_gpu, state)
        self.flags.readers = {
            when: Hyperparameters(table.optimizer, per_rank, ignores) for when in ("", rank_flags.IN_STEP)
        }
        self.flags.takes_new = not table.on_gpu  # there the host learns too late
        self._buffers: Callable[[], Named] = lambda: comparable(buffers())
        self._buffer_hashes = Hashes(device, _BUFFER_BITS)
        self._rolling, self._bits = RollingHash(), FingerprintBits(device)
        self._by_step = [self._bits.of(number) for number in range(1 << _STEP_BITS)]
        self.state_hashes = StateHashes()
        self._state_changed: Flag = False
        self._logged, self._uneven = False, -2
        self._slots, self._trained = list[Slot](), list[tuple[str, torch.Tensor]]()
        evidence = StepEvidence(self._of_slots, lambda: table.module, device)
        hashes = Hashes(device, _PARAMETERS.stop - _PARAMETERS.start)
        compared = Compared(table.locals, self._hashed, hashes, self._interval, table.on_gpu)
        self._differences = ReplicaDifferences(communicator, world, compared, evidence)
        self.is_due = self._differences.is_due
        self.look_again = self._differences.look_again

    def require_suitable(self, *, in_step: bool = False) -> None:
        """Read the numbers of the optimizer's groups, as those of a step if ``in_step``.

        Raises ValueError if they have changed, and compression does not support them.
        """
        if self.flags.readers[rank_flags.IN_STEP if in_step else ""].refresh():
            self._compression.check(self._table.optimizer)

    def _hashed(self) -> Named:
        return comparable(self._table.locals())

    def _of_slots(self) -> Named:
        """Return the trained parameters with their names."""
        slots = self._table.slots()
        if slots != self._slots:
            self._slots, self._trained = slots, [(slot.name, slot.param) for slot in slots]
        return self._trained

    def before_step(self) -> None:
        """Note that a step of the parameters begins."""
        self._differences.before_step(self._state.reductions, self._rewritten)

    def _rewritten(self) -> str:
        """Return the name of the first parameter whose gradient is not the averaged tensor; "" without one."""
        slots = self._table.slots()
        return next((s.name for s in slots if s.owner.grad is not None and not s.holds_average()), "")

    def after_step(self) -> None:
        """Note that a step of the parameters has ended, or that training begins."""
        if self._communicator.size > 1:
            self._differences.after_step(self._state.reductions)

    def forget_question(self) -> None:
        """Forget a difference, as the ranks have changed."""
        self._differences.question = None

    def fingerprint_of(self, number: int) -> Callable[[], torch.Tensor] | None:
        """Return the function that makes the bits sent with the ``number``-th launched bucket, if it carries any."""
        first = self._fingerprint() if number == 1 else None
        if number != len(self._table.flights):
            return first
        reductions = self._state.reductions
        modes, skips = self._modes(self.is_due(reductions)), self._window.skips
        frozen, new = self._table.frozen_of_trained(), self._table.new_names()
        flags = self.flags.fix(reductions, frozen, new, modes, skips=skips)
        return (lambda: flags) if first is None else (lambda: first() | flags)

    def _modes(self, of_all: bool) -> int:
        """Return training or evaluation mode of the module, or a hash of those ``of_all`` modules in it.

        It is mixed with a hash of :attr:`moved`.
        """
        module = self._table.module
        moved = zlib.crc32(repr(sorted(self.moved.items())).encode()) if self.moved else 0
        if module is None or not self._compares_modes:
            return moved
        if not of_all:
            return moved ^ module.training
        return moved ^ zlib.crc32(bytes(part.training for part in parts_of(uncompiled(module))))

    def _fingerprint(self) -> Callable[[], torch.Tensor]:
        """Return the function that computes the first bucket's bits, to be called on its thread or stream.

        The parameters must not be written to until then. The lists of tensors are read now, as they may grow before.
        """
        by_step = self._by_step[self._state.steps % (1 << _STEP_BITS)]
        taken = self.state_hashes.comparing()
        reductions = self._state.reductions
        if not self.is_due(reductions):
            return self._with_part(by_step, reductions)
        parameters, buffers = self._differences.bits(), self._buffers()

        def make() -> torch.Tensor:
            bits = by_step.clone()
            self._state_changed = self.state_hashes.changed(taken)
            bits[_STATE] = self._state_changed
            bits[_PARAMETERS] = parameters()
            bits[_BUFFERS] = self._buffer_hashes.bits(buffers)
            return bits

        return make

    def _with_part(self, by_step: torch.Tensor, reductions: int) -> Callable[[], torch.Tensor]:
        """Return the function that adds a hash of a part of the parameters to the bits ``by_step``."""
        is_compared = self._interval > 0 and not (self._table.on_gpu or self._differences.warned)
        tensors = self._rolling.part_of(self._table.slots(), reductions) if is_compared else []
        if not tensors:
            return lambda: by_step

        mask = (1 << _PARAMETERS.stop - _PARAMETERS.start) - 1
        return lambda: by_step | self._bits.of((self._rolling.number(tensors) & mask) << _PARAMETERS.start)

    def taking(self) -> TakenHashes | None:
        """Return hashes of compression's state, to be taken before the next bucket, if they are compared then.

        Called by the thread that has just committed the state.
        """
        is_due = self.is_due(self._state.reductions)
        return self.state_hashes.taking(self._table.flights) if is_due else None

    def compare(self) -> None:
        """Report what differs, and note what ranks ask for. Collective if there is anything.

        On a GPU, :meth:`compare_previous` does it two reductions later. In a CUDA graph nothing is reported, as the
        host takes no part in its launches.
        """
        self.flags.announced = {}
        if not self._table.flights:
            return
        first, last = self._table.flights[0].exchange, self._table.flights[-1].exchange
        differing = first.differing() if last is first else first.differing() | last.differing()
        if self._table.on_gpu and is_capturing():
            return
        reductions = self._state.reductions
        if self.is_due(reductions):  # the bit differs between ranks, unless the state of all of them is damaged
            differing = differing.clone()
            differing[_STATE] |= self._state_changed
        found = self.flags.received(differing)
        self._report(found, reductions)
        if not any(found[_PARAMETERS]):
            self.forget_question()

    def compare_previous(self) -> None:
        """Report differences that the reduction before the last found on a GPU. Called as each reduction begins."""
        if self._table.on_gpu and not is_capturing():
            self._report(self.flags.received_late(), self._state.reductions - 2)

    def compare_replicas(self) -> None:
        """Report parameters that differ between the ranks now. Collective, and waits for a GPU."""
        num_reductions = self._state.reductions
        if self._interval == 0 or num_reductions == 0:
            return
        self._differences.hashes.bits(self._hashed())
        absent = [False] * self._communicator.size
        if self._differences.find(self._differences.hashes, absent)[0]:
            self._differences.report(num_reductions, absent)

    def release(self) -> None:
        """Release the state and the parameters that hashes refer to."""
        self.state_hashes.forget()
        self._rolling, self._slots, self._trained = RollingHash(), [], []
        self._differences.forget()

    def _report(self, differing: Sequence[bool], of: int) -> None:
        """Raise, warn or log the differences between the ranks. Collective; all ranks do the same.

        An absent rank, which cannot know whether the others have left out a step, adopts their number of steps.

        Args:
            differing: bits that differ, or that a rank has set; [] if none is.
            of: number of the reduction that carried them.

        Raises:
            RuntimeError: the ranks are at different steps, or did not do the same, or their parameters differ.
            ValueError: their hyperparameters differ.
            DamageError: some ranks' parameters differ from those of most, or their state has changed by itself.
        """
        if not differing:
            return
        is_alike = not any(differing[rank_flags.ALIKE])
        more = {} if is_alike else self._alike()
        gather, mine = self._communicator.channel.all_gather_bytes, {"": self._state.steps}
        by_rank = self.flags.exchange(of, gather, self._world(), steps=mine, **more)
        absent = [each.absent for each in by_rank.values()]
        there = {rank: each for rank, each in by_rank.items() if not each.absent}
        steps = {rank: each.steps[""] for rank, each in (there or by_rank).items()}
        if any(differing[_STEP]) and there and (len(set(steps.values())) > 1 or not any(absent)):
            raise RuntimeError(_out_of_step(steps))
        if differing[rank_flags.NEW]:  # before the groups, which then differ too
            rank_flags.raise_different_new({rank: each.new for rank, each in there.items()})
        if not is_alike:
            self._raise_not_alike(there, of)
        self.flags.apply(by_rank)
        if differing[_STATE]:
            self._report_state()
        if any(differing[_PARAMETERS]):
            if self._table.on_gpu:
                self._differences.report(self._state.reductions, absent)
            elif not any(absent):  # who is absent takes no step that could answer
                self._differences.ask(of, has_stepped=self._state.steps > 0)
        if any(differing[_BUFFERS]) and not self._logged:
            self._log_buffers(absent)
        if self._state.role is Role.ABSENT:
            self._state.resumes(self._state.reductions, max(steps.values()))

    def _alike(self) -> dict[str, Any]:
        """Return the fields of this rank's record that are exchanged only if ranks do not do the same."""
        module = self._table.module
        parts = {} if module is None or not self._compares_modes else dict(uncompiled(module).named_modules())
        training = {name: part.training for name, part in parts.items()}
        return {"training": training, "moved": dict(self.moved), "names": self._table.names_in_optimizer()}

    def _raise_not_alike(self, records: Mapping[int, Record], of: int) -> None:
        """Raise the error of what ranks do not do alike in reduction ``of``."""
        rank_flags.raise_removed(records)
        rank_flags.raise_different_groups(records)
        rank_flags.raise_different_scales(records)
        rank_flags.raise_out_of_loop(rank_flags.loops_of(records))
        rank_flags.raise_different_freezing(records)
        rank_flags.raise_different_places(records)
        rank_flags.raise_different_modes(records)
        if found := rank_flags.different_windows(records):
            before, self._uneven = self._uneven, of
            if before == of - 1:  # else perhaps the end of an epoch
                raise RuntimeError(found)
            if self._communicator.rank == 0:  # all ranks would warn of the same
                warnings.warn(found, RuntimeWarning, stacklevel=2)

    def _log_buffers(self, absent: Sequence[bool]) -> None:
        names, _ = self._differences.find(self._buffer_hashes, absent)
        if names or not any(absent):
            self._logged = True
            if self._communicator.rank > 0:  # all ranks would log the same
                return
            _logger.warning(
                "buffer %r%s differs between the ranks: each rank keeps its own. "
                'attach(..., buffers="broadcast") or "average" makes them equal after each reduction',
                names[0] if names else "?",
                f", and {len(names) - 1} more," if len(names) > 1 else "",
            )

    def _report_state(self) -> None:
        found = self._differences.all_gather_text(self.state_hashes.damaged())
        self.state_hashes.reported()
        damaged = {rank: label for rank, label in zip(self._world(), found, strict=True) if label}
        if damaged:
            where = ", ".join(f"the {label} on rank {rank}" for rank, label in damaged.items())
            raise DamageError.of(
                list(damaged),
                f"{where} is not what the last step left there, and nothing but pycomm writes to it: the memory is "
                "damaged, or something wrote beyond its own",
                rank=self._differences.me,
            )


def _out_of_step(steps: Mapping[int, int]) -> str:
    """Return the message about ranks with different numbers of steps."""
    behind = [rank for rank, count in steps.items() if count < max(steps.values())]
    return (
        "the ranks are out of step: averages that optimizer.step() has used before this reduction: "
        f"{counts_text(steps)}. {name_ranks(behind).capitalize()} ran a backward() that the others did not, or left "
        "out a step. The last averages were of different passes. A pass that is not a training step of all ranks (a "
        "saliency map, a penalty, validation) belongs in `with reducer.paused():`"
    )
