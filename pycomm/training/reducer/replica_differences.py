"""Reports on replicas that differ: which parameters, on which ranks, and whether a majority agrees."""

from __future__ import annotations

import json
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import torch

from pycomm import kernels
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import hashable, is_plain
from pycomm.descriptions import cpu_model, name_ranks, ranks_by_value
from pycomm.errors import CommError
from pycomm.training.reducer.buckets import Slot
from pycomm.untrusted import ListOf, parse


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
    "parameters, gradients that were never averaged. detach() and attach() again make them equal; "
    "check_replicas=0, in tuning=pycomm.Tuning(...) or of pycomm.ddp.register, turns this check off"
)

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


class ReplicaDifferences:
    """Reports of differences between the ranks' tensors. All methods are collective, and do the same on all ranks.

    Args:
        parameters: returns the tensors that must be equal on all ranks, by name.

    Attributes:
        warned: whether a difference has been explained by the ranks' processors, which will not be the last.
    """

    def __init__(
        self, communicator: Communicator, parameters: Callable[[], Named], world: Callable[[], Sequence[int]]
    ) -> None:
        self._communicator, self._parameters, self._world = communicator, parameters, world
        self.warned = False

    def report(self, hashes: Hashes, num_reductions: int, absent: Sequence[bool]) -> None:
        """Raise an error, or warn, about parameters whose ``hashes`` differ after ``num_reductions``."""
        names, by_rank = self.find(hashes, absent)
        if any(absent) and not names:
            return
        processors = self.all_gather_text(_processor())
        apart, largest, count, total = self._distance()
        message = (
            f"the replicas differ after {num_reductions} reductions: parameter {names[0] if names else '?'!r} "
            f"{self._who(by_rank)}{f' ({len(names)} parameters differ)' if len(names) > 1 else ''}; "
            f"the largest difference is {apart:.3g}, the largest magnitude {largest:.3g}"
        )
        if len(set(processors)) == 1 or not apart <= _LAST_BITS * largest:
            is_flip = count <= _FEW and count * _FEW_OF <= total
            self._raise_difference(message, [self._world()[rank] for rank in outvoted(by_rank)], count, is_flip)
        if not self.warned:
            self.warned = True
            kinds = ", ".join(sorted(set(processors)))
            warnings.warn(
                f"{message}. The ranks' processors ({kinds}) round differently in optimizer.step(), which explains it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _raise_difference(self, message: str, odd: list[int], count: int, is_flip: bool) -> NoReturn:
        """Raise DamageError if a majority agrees or it looks like a flipped bit; else RuntimeError."""
        why = f"Something {_DRIFT}"
        if is_flip:
            why = (
                f"Only {count} of their elements {'differs' if count == 1 else 'differ'}, as after a flipped bit in "
                f"memory or in a processor. If it was not that, something {_DRIFT}"
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
            lowest = highest.clone()
            self._communicator.all_reduce(highest, "max")
            self._communicator.all_reduce(lowest, "min")
            here = torch.stack([(highest - lowest).max(), torch.maximum(highest.abs(), lowest.abs()).max()]).cpu()
            found = torch.where(found >= here, found, here)  # NaN wins
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
