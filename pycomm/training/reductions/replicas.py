"""Replicas: comparison of parameters, buffers and compression's state by hashes, and reports of their differences.

Bits 0 to 31 of the record travel with the first bucket of a reduction:

- 0-3: number of steps that the optimizer has taken, modulo 16. If ranks differ, that is an error.
- 4: compression's state was changed by something else. An error names rank and parameter.
- 5-26: hash of the parameters, or of a part of them. An error names parameter and ranks.
- 27-31: hash of the buffers, in some reductions. A log line names a buffer.

All parameters and buffers are hashed in the 2nd, 3rd, 5th, 9th, ... reduction, and then in one of every
``check_replicas``, in CPU memory a part of the parameters in the others, each part in turn. If fewer than half of the
ranks differ, the error accuses them, and the others may continue without them.

This covers averaged gradients, too, which are equal on all ranks: a flipped bit in one leads to a different parameter,
or has no effect.

Residuals and velocities differ between ranks by nature, so other ranks cannot check them. But nothing may write to them
between the commits of two steps. So a hash is taken right after a commit, and compared before the next exchange reads
them; a rank whose state has changed sets a bit. The two hashes read the state twice, and find only changes between
them: to find every flipped bit, they would have to be taken in every step.
"""

from __future__ import annotations

import json
import logging
import random
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycomm import kernels
from pycomm.collectives.bucket import FingerprintBits
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing, on_gpu
from pycomm.collectives.tensor_memory import Named, comparable, hashable, is_plain
from pycomm.compression.base import Flag, State
from pycomm.descriptions import counts_text, name_ranks
from pycomm.errors import DamageError
from pycomm.optim.stamps import Stamp
from pycomm.torch_internals import local_of, own_parameters, parts_of, uncompiled
from pycomm.untrusted import ListOf, parse

STEP = slice(0, 4)
STATE = 4
PARAMETERS = slice(5, 27)
BUFFERS = slice(27, 32)
"""Bits of a reduction's record."""

_logger = logging.getLogger("pycomm")
_REMEMBERED = 4
"""Number of comparisons that may still be reported: on a GPU the host reports two reductions later."""


_MOST_UNANSWERED = 4
"""Number of reductions in a row with differing parameters that raises an error if no step was ever seen."""


def is_comparison_due(num_reductions: int, interval: int) -> bool:
    """Return whether all parameters are compared in the reduction that follows ``num_reductions`` others.

    Args:
        interval: they are compared after the first one, in the 3rd, 5th, 9th, ... one, as most differences show soon,
            and once in so many; 0: never.
    """
    if interval == 0 or num_reductions == 0:
        return False
    is_power_of_two = num_reductions.bit_count() == 1
    soon = is_power_of_two and num_reductions < interval
    return soon or num_reductions == 1 or num_reductions % interval == 0


class Hashes:
    """Hashes of a changing list of tensors, combined into a few bits."""

    def __init__(self, device: torch.device, num_bits: int) -> None:
        self._device = device
        self._shifts = torch.arange(64 - num_bits, 64, device=device, dtype=torch.int64)
        self._scratch = kernels.Scratch()
        self._weights = self._each = torch.empty(0, dtype=torch.int64, device=device)
        self._names: list[str] = []
        self._is_of_graph = False  # whether the weights have values only while a CUDA graph runs

    def bits(self, named: Named) -> torch.Tensor:
        """Return bools that almost certainly differ if a tensor does. Does not wait for a GPU."""
        named = [(name, tensor) for name, tensor in named if tensor.device == self._device]
        names = [name for name, _ in named]
        if names != self._names or self._is_of_graph:
            weights = [zlib.crc32(name.encode()) << 20 | 2 * i + 1 for i, name in enumerate(names)]
            on_host = torch.tensor(weights, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._weights = on_host.to(self._device, non_blocking=True)
            self._each = torch.empty_like(self._weights)
            self._names, self._is_of_graph = names, is_capturing()
        if named:
            kernels.hashes([hashable(tensor) for _, tensor in named], out=self._each, scratch=self._scratch)
        total = (self._each * self._weights).sum()
        return ((total >> self._shifts) & 1).bool()

    def by_name(self) -> tuple[list[str], np.ndarray]:
        """Return the names and hashes of the tensors in the last call of :meth:`bits`."""
        return self._names, self._each.cpu().numpy()


class RollingHash:
    """Hash of another part of the trained parameters in each reduction, so that all are read once in 64 reductions.

    What moves all parameters of a rank is seen at once. Models of 32 small tensors are read as a whole.
    """

    def __init__(self) -> None:
        self._named: Named = ()
        self._parts: list[list[tuple[torch.Tensor, int, int | None]]] = []
        self._scratch = kernels.Scratch()
        self._out = np.empty(0, np.int64)

    def part_of(self, named: Named, number: int) -> list[torch.Tensor]:
        """Return the tensors to hash in reduction ``number``; on all ranks the same, if those ``named`` are."""
        if named is not self._named:
            self._named, self._parts = named, _parts_of([tensor for _, tensor in named])
        if not self._parts:
            return []
        part = self._parts[number % len(self._parts)]
        tensors = [(hashable(local_of(tensor)), begin, end) for tensor, begin, end in part]
        return [x if end is None else x.view(-1)[begin:end] for x, begin, end in tensors]

    def number(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return a number of 32 bits that almost certainly differs if a tensor does."""
        if len(self._out) != len(tensors):
            self._out = np.empty(len(tensors), np.int64)
        kernels.hashes(tensors, out=self._out, scratch=self._scratch)
        return zlib.crc32(self._out.tobytes())


_PARTS = 64
_LEAST_PART = 1 << 16
"""Number of parts, and least bytes of one."""
_PER_TENSOR = 1 << 11
"""Overhead of a tensor, as the number of bytes that are read in the same time."""


def _parts_of(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, int, int | None]]]:
    """Cut ``tensors`` whose local parts are plain into parts of equal bytes: tensor, first element, end or ``None``."""
    sizes = [
        (each, local.numel(), local.element_size())
        for each, local in ((each, local_of(each)) for each in tensors)
        if is_plain(local)
    ]
    length = max(_LEAST_PART, sum(count * width + _PER_TENSOR for _, count, width in sizes) // _PARTS + 1)
    parts: list[list[tuple[torch.Tensor, int, int | None]]] = [[]]
    left = length
    for tensor, count, width in sizes:
        begin = 0
        while begin < count:
            if left <= 0:
                parts.append([])
                left = length
            taken = min(count - begin, -(-left // width)) if local_of(tensor).is_contiguous() else count
            parts[-1].append((tensor, begin, None if taken == count else begin + taken))
            begin, left = begin + taken, left - taken * width - _PER_TENSOR
    return parts


class TakenHashes:
    """Hashes of committed state. Created by the thread that commits; computed and compared where buckets are sent."""

    def __init__(self, state: State, scratch: kernels.Scratch) -> None:
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
    """Hashes of this rank's state, kept from a commit to the reduction after it.

    Args:
        carried: returns the state of the exchanges that have some in this step.
    """

    def __init__(self, carried: Callable[[], State]) -> None:
        self._carried, self._scratch = carried, kernels.Scratch()
        self._taken: TakenHashes | None = None
        self._compared: deque[TakenHashes] = deque(maxlen=_REMEMBERED)
        self._has_graph = False

    def taking(self) -> TakenHashes | None:
        """Return hashes, still to be taken, of the state; ``None`` if there is none."""
        state: State = {} if self._has_graph else self._carried()
        self._taken = TakenHashes(state, self._scratch) if any(state.values()) else None
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


class StepEvidence:
    """What this rank has seen of its training that may explain why replicas differ. It reads only local objects.

    A write is seen by a parameter's version counter, which a fault of the memory does not change. Random numbers are
    looked for in few steps.

    Args:
        params: returns the parameters by name.
        module: returns the module that has them, if it is known.
        device: device of the parameters.
    """

    def __init__(
        self, params: Callable[[], Named], module: Callable[[], torch.nn.Module | None], device: torch.device
    ) -> None:
        self._params, self._module, self._device = params, module, device
        self._stepped: tuple[Named, Stamp] = (), Stamp()  # as the last step has ended
        self._before: dict[str, int] | None = None  # generators, as the step began that is looked at
        self._drawn: set[str] = set()
        self._rewritten = ""

    def before_step(self, *, looks: bool, rewritten: Callable[[], str] = lambda: "") -> None:
        """Note that a step begins, and whether it is one that ``looks`` closer.

        ``rewritten``: returns the name of a parameter whose gradient is not the averaged tensor; "" without one.
        """
        looks = looks and not is_capturing()  # a GPU's generator must not be queried meanwhile
        self._before = self._generators() if looks else None
        if looks and not self._rewritten:
            self._rewritten = rewritten()

    def after_step(self) -> None:
        """Note that a step has ended, or that training begins: parameters may have been written to until now."""
        params = self._params()
        self._stepped = params, Stamp(param for _, param in params)
        before, self._before = self._before, None
        if before is not None:
            after = self._generators()
            self._drawn |= {name for name in after if after[name] != before.get(name)}

    def forget(self) -> None:
        """Release the parameters."""
        self._stepped = (), Stamp()

    def written(self) -> dict[str, str]:
        """Return the parameters that were written to since the last step, with what their modules say of it, or ""."""
        params, stamp = self._stepped
        names = [params[index][0] for index in stamp.changed()]
        return {name: self._writer_of(name) for name in names}

    def of_steps(self) -> dict[str, Any]:
        """Return hashes of the generators from which a step has drawn, and a parameter with a rewritten gradient."""
        drawn = {name: value for name, value in self._generators().items() if name in self._drawn}
        return {"drawn": drawn, "rewritten": self._rewritten}

    def _writer_of(self, name: str) -> str:
        module = self._module()
        parts = () if module is None else parts_of(uncompiled(module))
        wanted = dict(self._stepped[0])[name]
        owner = next((part for part in parts if any(p is wanted for p in own_parameters(part).values())), None)
        max_norm = getattr(owner, "max_norm", None)
        return "" if max_norm is None else f"{type(owner).__name__}(max_norm={max_norm:g})"

    def _generators(self) -> dict[str, int]:
        """Return a hash of the state of each generator that a step may draw from."""
        found = {
            "torch": zlib.crc32(torch.random.get_rng_state().numpy().tobytes()),
            "numpy": zlib.crc32(repr(np.random.get_state()).encode()),
            "random": zlib.crc32(repr(random.getstate()).encode()),
        }
        if self._device.type == "cuda" and torch.cuda.is_available():
            found["torch.cuda"] = zlib.crc32(torch.cuda.get_rng_state(self._device).numpy().tobytes())
        return found


@dataclass(frozen=True)
class Question:
    """Difference between the ranks' parameters that a reduction has found. The step that uses it answers.

    Weights may differ on purpose while a gradient is computed (SAM, weight noise), and be equal at the step.

    Attributes:
        num_reductions: number of reductions before that one.
        written: see :meth:`StepEvidence.written`, at that reduction.
        num_asked: number of reductions in a row that have found a difference.
    """

    num_reductions: int
    written: Mapping[str, str]
    num_asked: int


@dataclass(frozen=True)
class Compared:
    """What must be equal on all ranks, and when it is compared.

    Attributes:
        parameters, buffers: return them by name; of DTensors, this rank's part.
        trained: returns the trained parameters by name, the same list until there are others.
        carried: returns compression's state of the exchanges that have some in this step, if it is compared.
        module: returns the module that has the parameters, if it is known.
        interval: see :func:`is_comparison_due`.
        by_parts: whether a part of the parameters is compared in the other reductions.
        reads_late: whether the host learns of a difference two reductions later, so that no step can answer.
    """

    parameters: Callable[[], Named]
    trained: Callable[[], Named]
    interval: int
    reads_late: bool
    by_parts: bool = False
    buffers: Callable[[], Named] = lambda: ()
    carried: Callable[[], State] | None = None
    module: Callable[[], torch.nn.Module | None] = lambda: None


class Replicas:
    """Bits of this rank's replica, and reports of differences. What is collective does the same on all ranks.

    Args:
        world: returns the numbers of the ranks.
        device: device of the bits.
        of_parameters: device of the parameters.

    Attributes:
        question: difference that the last reduction has found, if no step has come since; equal on all ranks.
        warned: whether a difference has been explained by the ranks' processors, which will not be the last.
    """

    def __init__(
        self,
        communicator: Communicator,
        world: Callable[[], Sequence[int]],
        compared: Compared,
        device: torch.device,
        of_parameters: torch.device,
    ) -> None:
        self._communicator, self._world, self._compared = communicator, world, compared
        self._hashes = Hashes(of_parameters, PARAMETERS.stop - PARAMETERS.start)
        self._buffer_hashes = Hashes(of_parameters, BUFFERS.stop - BUFFERS.start)
        self._rolling, self._bits = RollingHash(), FingerprintBits(device)
        self._by_step = [self._bits.of(number) for number in range(1 << STEP.stop)]
        self._evidence = StepEvidence(compared.trained, compared.module, of_parameters)
        self._state_hashes = None if compared.carried is None else StateHashes(compared.carried)
        self._state_changed: Flag = False
        self._at_step: torch.Tensor | None = None  # bits of the parameters as the last step left them
        self.question: Question | None = None
        self.warned = self._has_logged = False

    def is_due(self, num_reductions: int) -> bool:
        """Return whether all parameters are compared in the reduction that follows ``num_reductions`` others."""
        return self.question is not None or is_comparison_due(num_reductions, self._compared.interval)

    def _hashed(self) -> Named:
        return comparable(self._compared.parameters())

    # Steps.

    def before_step(self, num_reductions: int, rewritten: Callable[[], str] = lambda: "") -> None:
        """Note that a step begins; ``rewritten``: see :meth:`StepEvidence.before_step`."""
        self._evidence.before_step(looks=self.is_due(num_reductions), rewritten=rewritten)

    def after_step(self, num_reductions: int) -> None:
        """Note that a step has ended, or that training begins.

        On a GPU the parameters are hashed here if the next reduction compares them: there the host cannot ask again
        before a step, by which weights that differ on purpose are equal again.
        """
        if self._communicator.size == 1:
            return
        self._evidence.after_step()
        if self._compared.reads_late and self.is_due(num_reductions) and not is_capturing():
            self._at_step = self._hashes.bits(self._hashed())

    # Bits.

    def bits(self, num_reductions: int, num_steps: int) -> Callable[[], torch.Tensor]:
        """Return the function that makes this rank's bits, to be called on the first bucket's thread or stream.

        The parameters must not be written to until then. The lists of tensors are read now, as they may grow before.
        """
        by_step = self._by_step[num_steps % (1 << STEP.stop)]
        taken = None if self._state_hashes is None else self._state_hashes.comparing()
        if not self.is_due(num_reductions):
            return self._with_part(by_step, num_reductions) if self._compared.by_parts else lambda: by_step
        at_step, self._at_step, hashed = self._at_step, None, self._hashed()
        buffers = comparable(self._compared.buffers())

        def make() -> torch.Tensor:
            bits = by_step.clone()
            if self._state_hashes is not None:
                bits[STATE] = self._state_changed = self._state_hashes.changed(taken)
            bits[PARAMETERS] = self._hashes.bits(hashed) if at_step is None else at_step
            bits[BUFFERS] = self._buffer_hashes.bits(buffers)
            return bits

        return make

    def _with_part(self, by_step: torch.Tensor, num_reductions: int) -> Callable[[], torch.Tensor]:
        """Return the function that adds a hash of a part of the parameters to the bits ``by_step``."""
        is_compared = self._compared.interval > 0 and not self.warned
        tensors = self._rolling.part_of(self._compared.trained(), num_reductions) if is_compared else []
        if not tensors:
            return lambda: by_step

        mask = (1 << PARAMETERS.stop - PARAMETERS.start) - 1
        return lambda: by_step | self._bits.of((self._rolling.number(tensors) & mask) << PARAMETERS.start)

    def taking(self, num_reductions: int) -> TakenHashes | None:
        """Return hashes of compression's state, to be taken before the next bucket, if they are compared then.

        Called by the thread that has just committed the state.
        """
        return self._state_hashes.taking() if self._state_hashes is not None and self.is_due(num_reductions) else None

    def with_state(self, differing: torch.Tensor, num_reductions: int) -> torch.Tensor:
        """Return the bits ``differing`` between ranks, with the bit of changed state, which may be set on all ranks."""
        if self._state_changed is False or not self.is_due(num_reductions):
            return differing
        differing = differing.clone()
        differing[STATE] |= self._state_changed
        return differing

    def release(self) -> None:
        """Release the state and the parameters that hashes refer to."""
        if self._state_hashes is not None:
            self._state_hashes.forget()
        self._rolling = RollingHash()
        self._evidence.forget()

    # Reports.

    def judge(self, differing: Sequence[bool], of: int, absent: Sequence[bool], *, has_stepped: bool) -> None:
        """Report what differs in reduction ``of``. Collective.

        Args:
            differing: bits that differ, at least one of them.
            absent: whether each rank takes no steps.
            has_stepped: whether an optimizer has stepped the parameters; the same on all ranks.
        """
        if differing[STATE] and self._state_hashes is not None:
            self._report_state(self._state_hashes)
        if any(differing[PARAMETERS]):
            if self._compared.reads_late:
                self._report_now(of, absent)
            elif not any(absent):  # who is absent takes no step that could answer
                self._ask(of, has_stepped=has_stepped)
        if any(differing[BUFFERS]) and not self._has_logged:
            self._log_buffers(absent)

    def _ask(self, num_reductions: int, *, has_stepped: bool) -> None:
        """Note that parameters differ in the reduction after ``num_reductions``, which the next step is to answer.

        If no step was ever seen, as the script updates the parameters itself, this function finally answers.
        """
        num_asked = 1 if self.question is None else self.question.num_asked + 1
        self.question = Question(num_reductions, self._evidence.written(), num_asked)
        if not has_stepped and num_asked >= _MOST_UNANSWERED:
            self.look_again()

    def look_again(self) -> None:
        """Compare the parameters again if a reduction has found a difference, and report what is still different.

        Raises:
            RuntimeError, DamageError: they still differ.
        """
        question, self.question = self.question, None
        if question is None:
            return
        self._hashes.bits(self._hashed())
        names, by_rank = self._find(self._hashes, [False] * self._communicator.size)
        if names:
            self._report(names, by_rank, question.num_reductions, question.written)

    def compare_now(self, num_reductions: int) -> None:
        """Report parameters that differ between the ranks now. Collective, and waits for a GPU."""
        if self._compared.interval == 0 or num_reductions == 0:
            return
        self._hashes.bits(self._hashed())
        self._report_now(num_reductions, [False] * self._communicator.size)

    def _report_now(self, num_reductions: int, absent: Sequence[bool]) -> None:
        """Raise an error, or warn, about parameters whose last hashes differ after ``num_reductions``."""
        names, by_rank = self._find(self._hashes, absent)
        if names:
            self._report(names, by_rank, num_reductions, self._evidence.written())

    def _log_buffers(self, absent: Sequence[bool]) -> None:
        names, _ = self._find(self._buffer_hashes, absent)
        if names or not any(absent):
            self._has_logged = True
            if self._communicator.rank > 0:  # all ranks would log the same
                return
            _logger.warning(
                "buffer %r%s differs between the ranks: each rank keeps its own. "
                'attach(..., buffers="broadcast") or "average" makes them equal after each reduction',
                names[0] if names else "?",
                f", and {len(names) - 1} more," if len(names) > 1 else "",
            )

    def _report_state(self, hashes: StateHashes) -> None:
        found = self._all_gather_text(hashes.damaged())
        hashes.reported()
        damaged = {rank: label for rank, label in zip(self._world(), found, strict=True) if label}
        if damaged:
            where = ", ".join(f"the {label} on rank {rank}" for rank, label in damaged.items())
            raise DamageError.of(
                list(damaged),
                f"{where} is not what the last step left there, and nothing but pycomm writes to it: the memory is "
                "damaged, or something wrote beyond its own",
                rank=self._me,
            )

    def _report(
        self, names: Sequence[str], by_rank: np.ndarray, num_reductions: int, written: Mapping[str, str]
    ) -> None:
        from pycomm.training.reductions.differences import DifferenceReport

        seen = {"written": {name: how for name, how in written.items() if name in names}, **self._evidence.of_steps()}
        report = DifferenceReport(self._communicator, self._world(), self._compared.parameters())
        told = report.explained(names, by_rank, num_reductions, seen)
        if not self.warned:
            self.warned = True
            warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _find(self, hashes: Hashes, absent: Sequence[bool]) -> tuple[list[str], np.ndarray]:
        """Return the names that differ, and all ranks' hashes of them: a row for each rank. Collective.

        Ranks that are ``absent`` count as equal to the first that is not. If some ranks have more tensors than others,
        the names are those that not all have, without hashes.
        """
        names, mine = hashes.by_name()
        data = self._communicator.channel.all_gather_bytes(mine.tobytes())
        if len(set(map(len, data))) > 1:
            texts = self._all_gather_text(json.dumps(names))
            every = [set(parse(text, ListOf(str), "the names of a rank's tensors")) for text in texts]
            return sorted(set.union(*every) - set.intersection(*every)), np.empty((len(data), 0), np.int64)
        by_rank = np.stack([np.frombuffer(each, np.int64) for each in data])
        by_rank[np.array(absent)] = by_rank[absent.index(False) if False in absent else 0]
        # On a GPU the hashes may have been computed again since, so that none differs.
        columns = np.flatnonzero((by_rank != by_rank[0]).any(axis=0))
        return [names[column] for column in columns], by_rank[:, columns]

    @property
    def _me(self) -> int:
        """Number of this rank."""
        return self._world()[self._communicator.rank]

    def _all_gather_text(self, text: str) -> list[str]:
        return [data.decode() for data in self._communicator.channel.all_gather_bytes(text.encode())]


def out_of_step(steps: Mapping[int, int]) -> str:
    """Return the message about ranks with different numbers of steps."""
    behind = [rank for rank, count in steps.items() if count < max(steps.values())]
    return (
        "the ranks are out of step: averages that optimizer.step() has used before this reduction: "
        f"{counts_text(steps)}. {name_ranks(behind).capitalize()} ran a backward() that the others did not, or left "
        "out a step. The last averages were of different passes. A pass that is not a training step of all ranks (a "
        "saliency map, a penalty, validation) belongs in `with reducer.paused():`"
    )
