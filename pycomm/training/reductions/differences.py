"""Reports on replicas that differ: which parameters, on which ranks, why, and whether a majority agrees."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Named
from pycomm.descriptions import cpu_model, name_ranks, ranks_by_value
from pycomm.errors import DamageError
from pycomm.untrusted import COUNT, MapOf, parse

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
_SEEN = {"written": MapOf(str), "processor": str, "drawn": MapOf(COUNT), "rewritten": str}
"""Form of what another rank has seen."""


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


class DifferenceReport:
    """Report on parameters that differ. All ranks make it together, and do the same.

    Args:
        world: numbers of the ranks.
        parameters: all parameters by name; of DTensors, this rank's part.
    """

    def __init__(self, communicator: Communicator, world: Sequence[int], parameters: Named) -> None:
        self._communicator, self._world, self._parameters = communicator, world, parameters

    def explained(
        self, names: Sequence[str], by_rank: np.ndarray, num_reductions: int, seen_here: Mapping[str, Any]
    ) -> str:
        """Return a warning if the ranks' processors explain the difference. Collective.

        Args:
            names: those that differ.
            by_rank: their hashes, a row for each rank; without columns if some ranks have more parameters than others.
            num_reductions: number of reductions before.
            seen_here: what this rank has seen of its training.

        Raises:
            DamageError: a majority agrees, or it looks like a flipped bit.
            RuntimeError: neither.
        """
        mine = json.dumps({**seen_here, "processor": _processor()})
        texts = self._communicator.channel.all_gather_bytes(mine.encode())
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
            odd = [self._world[rank] for rank in outvoted(by_rank)]
            causes, spared = self._causes(seen, odd)
            is_flip = not causes and count <= _FEW and count * _FEW_OF <= total
            self._raise_difference(message, [] if spared else odd, count, is_flip, causes)
        kinds = ", ".join(sorted(set(processors)))
        return f"{message}. The ranks' processors ({kinds}) round differently in optimizer.step(), which explains it"

    def _causes(self, seen: Sequence[Mapping[str, Any]], odd: Sequence[int]) -> tuple[str, bool]:
        """Return what explains a difference, "" if nothing does, and whether the ``odd`` ranks are not to blame."""
        world = self._world
        drawn = {name for each in seen for name in each["drawn"]}
        differing = sorted(name for name in drawn if len({each["drawn"].get(name) for each in seen}) > 1)
        writers = [rank for rank, each in zip(world, seen, strict=True) if each["written"]]
        causes = []
        if differing:
            causes.append(
                f"The optimizer's step() draws random numbers from the generator of {' and of '.join(differing)}, "
                "whose state differs between the ranks: use the same seed on all ranks, or give the optimizer its own"
            )
        if writers:
            written = {name: how for each in seen for name, how in each["written"].items()}
            name = next(iter(written))
            by = "a forward writes to it (clamping, initialization by data), or code outside of optimizer.step()"
            if written[name]:
                by = f"{written[name]} rescales the rows that a forward looks up"
            causes.append(
                f"Parameter {name!r} was written to after the last optimizer.step() on {name_ranks(writers)}: {by}. "
                "Write the same values to parameters on all ranks"
            )
        rewriters = [rank for rank, each in zip(world, seen, strict=True) if each["rewritten"]]
        if rewriters:
            name = next(filter(None, (each["rewritten"] for each in seen)))
            causes.append(
                f"A step used another gradient of {name!r} than the average on {name_ranks(rewriters)}: if a wrapper "
                "rewrites .grad (per-sample clipping), run it and backward() inside `with reducer.paused():`, then "
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
        me = self._world[self._communicator.rank]
        if odd:
            raise DamageError.of(odd, f"{message}. {why}", rank=me)
        if is_flip:
            ranks = name_ranks(self._world)
            raise DamageError.of([], f"{message}. One of {ranks} is wrong, no majority says which. {why}", rank=me)
        raise RuntimeError(f"{message}. {why}")

    def _distance(self) -> tuple[float, float, int, int]:
        """Return largest difference, largest magnitude, number of differing elements, and size of their parameters."""
        found, count, total = torch.zeros(2, dtype=torch.float64), 0, 0
        for _, parameter in self._parameters:
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

    def _who(self, by_rank: np.ndarray) -> str:
        """Describe which ranks differ in the first differing tensor."""
        if by_rank.shape[1] == 0:
            return "differs"
        first = by_rank[:, :1]
        odd = [self._world[rank] for rank in outvoted(first)]
        if odd:
            return f"on {name_ranks(odd)} differs from the other ranks"
        groups = list(ranks_by_value(dict(zip(self._world, first[:, 0].tolist(), strict=True))).values())
        return f"differs between {' and '.join(map(name_ranks, groups)) if len(groups) < 4 else 'the ranks'}"


def _processor() -> str:
    """Return the names of this rank's CPU and GPU, which determine floating-point rounding."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}{gpu}"
