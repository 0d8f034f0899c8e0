"""Reports on replicas that differ: which parameters, on which ranks, and whether a majority agrees."""

from __future__ import annotations

import json
import math
import random
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from pycomm import kernels
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing
from pycomm.collectives.tensor_memory import hashable, is_plain
from pycomm.descriptions import cpu_model, name_ranks, ranks_by_value
from pycomm.errors import CommError
from pycomm.torch_internals import own_parameters, parts_of, uncompiled, version_of
from pycomm.training.reducer.buckets import Slot
from pycomm.untrusted import COUNT, ListOf, MapOf, parse


class DamageError(CommError):
    """CommError about ranks whose data differ from the majority's, or were damaged in memory.

    All ranks raise it together after a complete exchange, so the communicator remains usable.

    Attributes:
        ranks: the damaged ranks, by their numbers in ``Reducer.world``; empty without a majority.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], what: str, *, rank: int) -> DamageError:
        """Create the error on ``rank`` that accuses ``ranks``."""
        error = cls(f"rank {rank}: {what}", rank=rank, peer=next(iter(ranks), None), operation="backward", elapsed=0.0)
        error.ranks = tuple(ranks)
        return error

    def spares(self, rank: int) -> bool:
        """Return whether ``rank`` can continue without the accused ranks."""
        return bool(self.ranks) and rank not in self.ranks


def outvoted(by_rank: np.ndarray) -> list[int]:
    """Return the rows that differ from what more than half of the rows have, in any column; none if undecided.

    Args:
        by_rank: hashes, a row for each rank and a column for each tensor.
    """
    size, odd = len(by_rank), set[int]()
    for column in np.flatnonzero((by_rank != by_rank[0]).any(axis=0)):
        values = by_rank[:, column].tolist()
        usual, votes = Counter(values).most_common(1)[0]
        if 2 * votes <= size:
            return []
        odd |= {rank for rank, value in enumerate(values) if value != usual}
    return sorted(odd) if len(odd) < size else []


_LAST_BITS = 1e-3
"""Largest difference, relative to the largest magnitude, that processors which round differently may explain."""

_FEW = 64
"""Largest number of differing elements that suggests damaged memory: code usually writes to more."""
_FEW_OF = 8
"""Smallest ratio of a parameter's size to that number: in a small parameter, code may write to few, too."""

_DRIFT = (
    "updates them differently: a learning rate, data that decides whether a step is taken, code that writes to "
    "parameters, gradients that were never averaged"
)
_REMEDY = (
    "detach() and attach() again make them equal; check_replicas=0, in tuning=pycomm.Tuning(...) or of "
    "pycomm.ddp.register, turns this check off"
)
_MOST_UNANSWERED = 4
"""Number of reductions in a row with differing parameters, and no step ever, that is an error."""

_SEEN = {"written": MapOf(str), "processor": str, "drawn": MapOf(COUNT), "rewritten": str}
"""Form of what another rank has seen."""

Named = Sequence[tuple[str, torch.Tensor]]
"""Tensors with their names."""


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

    def bits(self, named: Named) -> torch.Tensor:
        """Return bools that almost certainly differ if a tensor does. Does not wait for a GPU."""
        named = [(name, tensor) for name, tensor in named if tensor.device == self._device]
        names = [name for name, _ in named]
        if names != self._names:
            weights = [zlib.crc32(name.encode()) << 20 | 2 * i + 1 for i, name in enumerate(names)]
            on_host = torch.tensor(weights, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._weights = on_host.to(self._device, non_blocking=True)
            self._each = torch.empty_like(self._weights)
            self._names = names
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
        self._slots: list[Slot] = []
        self._parts: list[list[tuple[Slot, int, int | None]]] = []
        self._scratch = kernels.Scratch()
        self._out = np.empty(0, np.int64)

    def part_of(self, slots: list[Slot], number: int) -> list[torch.Tensor]:
        """Return the tensors to hash in reduction ``number``; on all ranks the same, if ``slots`` are."""
        if slots != self._slots:
            self._slots, self._parts = slots, _parts_of(slots)
        if not self._parts:
            return []
        part = self._parts[number % len(self._parts)]
        tensors = [(hashable(slot.local), begin, end) for slot, begin, end in part]
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
"""Bytes that are read in the time that a tensor takes besides."""


def _parts_of(slots: Sequence[Slot]) -> list[list[tuple[Slot, int, int | None]]]:
    """Cut the plain parameters of ``slots`` into parts of equal bytes: slot, first element, and end or ``None``."""
    sizes = [(slot, slot.local.numel(), slot.local.element_size()) for slot in slots if is_plain(slot.local)]
    length = max(_LEAST_PART, sum(count * width + _PER_TENSOR for _, count, width in sizes) // _PARTS + 1)
    parts: list[list[tuple[Slot, int, int | None]]] = [[]]
    left = length
    for slot, count, width in sizes:
        begin = 0
        while begin < count:
            if left <= 0:
                parts.append([])
                left = length
            taken = min(count - begin, -(-left // width)) if slot.local.is_contiguous() else count
            parts[-1].append((slot, begin, None if taken == count else begin + taken))
            begin, left = begin + taken, left - taken * width - _PER_TENSOR
    return parts


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
        self._versions: tuple[Named, list[int]] = ((), [])  # as the last step has ended
        self._before: dict[str, int] | None = None  # generators, as the step began that is looked at
        self._drawn: set[str] = set()
        self._rewritten = ""

    def before_step(self, *, looks: bool, rewritten: Callable[[], str] = lambda: "") -> None:
        """Note that a step begins, and whether it is one that ``looks`` closer.

        ``rewritten``: returns the name of a parameter whose gradient is not the averaged tensor; "" without one.
        """
        looks = looks and not is_capturing()  # of a GPU's generator nothing may be asked meanwhile
        self._before = self._generators() if looks else None
        if looks and not self._rewritten:
            self._rewritten = rewritten()

    def after_step(self) -> None:
        """Note that a step has ended, or that training begins: parameters may have been written to until now."""
        params = self._params()
        self._versions = params, [version_of(param) for _, param in params]
        before, self._before = self._before, None
        if before is not None:
            after = self._generators()
            self._drawn |= {name for name in after if after[name] != before.get(name)}

    def forget(self) -> None:
        """Release the parameters."""
        self._versions = (), []

    def written(self) -> dict[str, str]:
        """Return the parameters that were written to since the last step, with what their modules say of it, or ""."""
        before = {name: version for (name, _), version in zip(*self._versions, strict=True)}
        now = {name: version_of(param) for name, param in self._params()}
        return {name: self._writer_of(name) for name in now if now[name] != before.get(name, now[name])}

    def of_steps(self) -> dict[str, Any]:
        """Return hashes of the generators from which a step has drawn, and a parameter with a rewritten gradient."""
        drawn = {name: value for name, value in self._generators().items() if name in self._drawn}
        return {"drawn": drawn, "rewritten": self._rewritten}

    def _writer_of(self, name: str) -> str:
        module = self._module()
        parts = () if module is None else parts_of(uncompiled(module))
        wanted = dict(self._params())[name]
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
    """Parameters that must be equal on all ranks, and when they are compared.

    Attributes:
        parameters, hashed: return them by name, as they are and in the form that is hashed.
        hashes: their hashes, combined into the bits that are sent.
        interval: see :func:`is_comparison_due`.
        on_gpu: whether the host learns of a difference two reductions later, so that no step can answer.
    """

    parameters: Callable[[], Named]
    hashed: Callable[[], Named]
    hashes: Hashes
    interval: int
    on_gpu: bool


class ReplicaDifferences:
    """When replicas are compared, and reports of their differences. What is collective does the same on all ranks.

    Attributes:
        hashes: hashes of the parameters.
        question: difference that the last reduction has found, if no step has come since; alike on all ranks.
        warned: whether a difference has been explained by the ranks' processors, which will not be the last.
    """

    def __init__(
        self,
        communicator: Communicator,
        world: Callable[[], Sequence[int]],
        compared: Compared,
        evidence: StepEvidence,
    ) -> None:
        self._communicator, self._world, self._compared, self._evidence = communicator, world, compared, evidence
        self.hashes, self._parameters = compared.hashes, compared.parameters
        self._at_step: torch.Tensor | None = None  # bits of the parameters as the last step left them
        self.question: Question | None = None
        self.warned = False

    def is_due(self, num_reductions: int) -> bool:
        """Return whether all parameters are compared in the reduction that follows ``num_reductions`` others."""
        return self.question is not None or is_comparison_due(num_reductions, self._compared.interval)

    def before_step(self, num_reductions: int, rewritten: Callable[[], str] = lambda: "") -> None:
        """Note that a step begins; ``rewritten``: see :meth:`StepEvidence.before_step`."""
        looks = num_reductions == 1 or self.is_due(num_reductions)
        self._evidence.before_step(looks=looks, rewritten=rewritten)

    def after_step(self, num_reductions: int) -> None:
        """Note that a step has ended, or that training begins.

        On a GPU the parameters are hashed here if the next reduction compares them: there the host cannot ask again
        before a step, by which weights that differ on purpose are equal again.
        """
        self._evidence.after_step()
        if self._compared.on_gpu and self.is_due(num_reductions) and not is_capturing():
            self._at_step = self.hashes.bits(self._compared.hashed())

    def bits(self) -> Callable[[], torch.Tensor]:
        """Return the function that makes the bits to be sent; the list of parameters is read now."""
        at_step, self._at_step, hashed = self._at_step, None, self._compared.hashed()
        return lambda: self.hashes.bits(hashed) if at_step is None else at_step

    def forget(self) -> None:
        """Release the parameters."""
        self._evidence.forget()

    def ask(self, num_reductions: int, *, has_stepped: bool) -> None:
        """Note that parameters differ in the reduction after ``num_reductions``, which the next step is to answer.

        If no step was ever seen, as the script updates the parameters by itself, the answer is given here in the end.

        ``has_stepped``: whether an optimizer has stepped the parameters before.
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
        self.hashes.bits(self._compared.hashed())
        names, by_rank = self.find(self.hashes, [False] * self._communicator.size)
        if names:
            self._report(names, by_rank, question.num_reductions, question.written)

    def report(self, num_reductions: int, absent: Sequence[bool]) -> None:
        """Raise an error, or warn, about parameters whose last hashes differ after ``num_reductions``."""
        names, by_rank = self.find(self.hashes, absent)
        if names or not any(absent):
            self._report(names, by_rank, num_reductions, self._evidence.written())

    def _report(
        self, names: Sequence[str], by_rank: np.ndarray, num_reductions: int, written: Mapping[str, str]
    ) -> None:
        mine = {"written": {name: how for name, how in written.items() if name in names}, "processor": _processor()}
        texts = self.all_gather_text(json.dumps({**mine, **self._evidence.of_steps()}))
        seen = [parse(text, _SEEN, f"what rank {rank} has seen") for rank, text in enumerate(texts)]
        apart, largest, count, total = self._distance()
        far = f"the largest difference is {apart:.3g}, the largest magnitude {largest:.3g}"
        message = (
            f"the replicas differ after {num_reductions} reductions: parameter {names[0] if names else '?'!r} "
            f"{self._who(by_rank)}{f' ({len(names)} parameters differ)' if len(names) > 1 else ''}; "
            f"{far if apart else 'the bits differ (-0.0, NaN), the values do not'}"
        )
        processors = [each["processor"] for each in seen]
        if len(set(processors)) == 1 or not apart <= _LAST_BITS * largest:
            odd = [self._world()[rank] for rank in outvoted(by_rank)]
            causes, spared = self._causes(seen, odd)
            is_flip = not causes and count <= _FEW and count * _FEW_OF <= total
            self._raise_difference(message, [] if spared else odd, count, is_flip, causes)
        if not self.warned:
            self.warned = True
            kinds = ", ".join(sorted(set(processors)))
            warnings.warn(
                f"{message}. The ranks' processors ({kinds}) round differently in optimizer.step(), which explains it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _causes(self, seen: Sequence[Mapping[str, Any]], odd: Sequence[int]) -> tuple[str, bool]:
        """Return what explains a difference, "" if nothing does, and whether the ``odd`` ranks are not to blame."""
        world = self._world()
        drawn = {name for each in seen for name in each["drawn"]}
        differing = sorted(name for name in drawn if len({each["drawn"].get(name) for each in seen}) > 1)
        writers = [rank for rank, each in zip(world, seen, strict=True) if each["written"]]
        causes = []
        if differing:
            causes.append(
                f"The optimizer's step() draws random numbers from the generator of {' and of '.join(differing)}, "
                "whose state differs between the ranks: seed it alike on all ranks, or give the optimizer its own"
            )
        if writers:
            written = {name: how for each in seen for name, how in each["written"].items()}
            name = next(iter(written))
            by = "a forward writes to it (clamping, initialisation by data), or code outside of optimizer.step()"
            if written[name]:
                by = f"{written[name]} rescales the rows that a forward looks up"
            causes.append(
                f"Parameter {name!r} was written to after the last optimizer.step() on {name_ranks(writers)}: {by}. "
                "Write to parameters alike on all ranks"
            )
        rewriters = [rank for rank, each in zip(world, seen, strict=True) if each["rewritten"]]
        if rewriters:
            name = next(filter(None, (each["rewritten"] for each in seen)))
            causes.append(
                f"A step used another gradient of {name!r} than the average on {name_ranks(rewriters)}: if a wrapper "
                "rewrites .grad (per-sample clipping), have backward() and that inside `with reducer.paused():`, then "
                "call reducer.reduce() before the step"
            )
        return ". ".join(causes), bool(differing) or not set(writers) <= set(odd)

    def _raise_difference(self, message: str, odd: list[int], count: int, is_flip: bool, causes: str) -> NoReturn:
        """Raise DamageError if a majority agrees or it looks like a flipped bit; else RuntimeError."""
        why = f"{causes or f'Something {_DRIFT}'}. {_REMEDY}"
        if is_flip:
            why = (
                f"Only {count} of their elements {'differs' if count == 1 else 'differ'}, as after a flipped bit in "
                f"memory or in a processor. If it was not that, something {_DRIFT}. {_REMEDY}"
            )
        if odd:
            raise DamageError.of(odd, f"{message}. {why}", rank=self.me)
        if is_flip:
            ranks = name_ranks(self._world())
            raise DamageError.of([], f"{message}. One of {ranks} is wrong, no majority says which. {why}", rank=self.me)
        raise RuntimeError(f"{message}. {why}")

    def _distance(self) -> tuple[float, float, int, int]:
        """Return largest difference, largest magnitude, number of differing elements, and size of their parameters."""
        found, count, total = torch.zeros(2, dtype=torch.float64), 0, 0
        for _, parameter in self._parameters():
            if parameter.numel() == 0:
                continue
            highest = parameter.detach().double().clone(memory_format=torch.contiguous_format)
            highest[highest.isnan()] = math.inf  # equal to itself, and far from numbers
            lowest = highest.clone()
            self._communicator.all_reduce(highest, "max")
            self._communicator.all_reduce(lowest, "min")
            apart = torch.where(highest == lowest, 0.0, highest - lowest)
            here = torch.stack([apart.max(), torch.maximum(highest.abs(), lowest.abs()).max()]).cpu()
            found = torch.maximum(found, here)
            num_different = int((highest != lowest).sum())
            count, total = count + num_different, total + bool(num_different) * parameter.numel()
        return float(found[0]), float(found[1]), max(count, 1), total  # 0 and -0 are equal

    def find(self, hashes: Hashes, absent: Sequence[bool]) -> tuple[list[str], np.ndarray]:
        """Return the names that differ, and all ranks' hashes of them: a row for each rank. Collective.

        Ranks that are ``absent`` count as equal to the first that is not. If some ranks have more tensors than others,
        the names are those that not all have, without hashes.
        """
        names, mine = hashes.by_name()
        data = self._communicator.channel.all_gather_bytes(mine.tobytes())
        if len(set(map(len, data))) > 1:
            texts = self.all_gather_text(json.dumps(names))
            every = [set(parse(text, ListOf(str), "the names of a rank's tensors")) for text in texts]
            return sorted(set.union(*every) - set.intersection(*every)), np.empty((len(data), 0), np.int64)
        by_rank = np.stack([np.frombuffer(each, np.int64) for each in data])
        by_rank[np.array(absent)] = by_rank[absent.index(False) if False in absent else 0]
        # On a GPU the hashes may have been computed again since, so that none differs.
        columns = np.flatnonzero((by_rank != by_rank[0]).any(axis=0))
        return [names[column] for column in columns], by_rank[:, columns]

    def _who(self, by_rank: np.ndarray) -> str:
        """Describe which ranks differ in the first differing tensor."""
        if by_rank.shape[1] == 0:
            return "differs"
        first = by_rank[:, :1]
        odd = [self._world()[rank] for rank in outvoted(first)]
        if odd:
            return f"on {name_ranks(odd)} differs from the other ranks"
        groups = list(ranks_by_value(dict(zip(self._world(), first[:, 0].tolist(), strict=True))).values())
        return f"differs between {' and '.join(map(name_ranks, groups)) if len(groups) < 4 else 'the ranks'}"

    @property
    def me(self) -> int:
        """Number of this rank."""
        return self._world()[self._communicator.rank]

    def all_gather_text(self, text: str) -> list[str]:
        return [data.decode() for data in self._communicator.channel.all_gather_bytes(text.encode())]


def _processor() -> str:
    """Return the names of this rank's CPU and GPU, which determine floating-point rounding."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}{gpu}"
