"""Hyperparameters of an optimizer's groups, which must be the same on all ranks in every step."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any

import torch

from pycomm.descriptions import values_text

_NOT_COMPARED = frozenset(("params", "param_names", "foreach", "fused", "capturable", "differentiable"))
"""Keys that are not numbers, or that select an implementation with the same result."""

NUM_PARAMETERS = "number of parameters"
"""Key of a group's number of parameters, beside its own keys."""

Numbers = dict[str, Any]
"""Numbers of one group by key: bools, ints, floats, and tuples of them (lists, once they were JSON)."""


class Hyperparameters:
    """Reader of the numbers in ``optimizer.param_groups`` (learning rate, momentum, betas, weight decay, ...).

    They are read in every reduction, so reading costs only one call of ``itemgetter`` per group while nothing changes.
    Text, functions, and tensors on a GPU (for which the host would wait) are not read. The number of parameters is.

    Args:
        ignores: returns whether a parameter is local to its rank; groups of only such parameters are not read, and
            parameters not counted.

    Attributes:
        digest: 64-bit hash of the numbers, the same in every process; 0 before they are read.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        per_rank: Collection[str] = (),
        ignores: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self._optimizer, self._ignores = optimizer, ignores
        self._skipped = _NOT_COMPARED.union(per_rank)
        self._getters: list[tuple[int, list[str], Callable[[Any], tuple[Any, ...]]]] = []
        self._last: list[Any] = []
        self._names = self.digest = 0

    def refresh(self) -> bool:
        """Read the numbers; return whether any of them has changed since the last call."""
        values = self._read()
        if values == self._last:
            return False
        self._last = values
        # Python's hash of numbers is the same in every process, and fast: schedules change numbers in every step.
        self.digest = hash((self._names, tuple(values))) & (2**64 - 1)
        return True

    def groups(self) -> list[Numbers]:
        """Return the numbers of each group that were read last, as JSON can hold them."""
        counts = self._last[len(self._getters) :] or itertools.repeat(None)
        return [
            dict(zip(keys, values, strict=True)) | ({} if count is None else {NUM_PARAMETERS: count})
            for (_, keys, _), values, count in zip(self._getters, self._last, counts, strict=False)
        ]

    def read(self) -> list[Numbers]:
        """Read the numbers; return the numbers of each group."""
        self.refresh()
        return self.groups()

    def _groups(self) -> list[dict[str, Any]]:
        groups, ignores = self._optimizer.param_groups, self._ignores
        if ignores is None:
            return groups
        return [group for group in groups if not group["params"] or not all(map(ignores, group["params"]))]

    def _counts(self) -> list[int]:
        return [len(group["params"]) for group in self._groups()] if self._ignores is None else []

    def _read(self) -> list[Any]:
        groups = self._groups()
        try:
            if [len(group) for group in groups] != [size for size, _, _ in self._getters]:
                raise KeyError  # a key was added or removed
            values = [get(group) for (_, _, get), group in zip(self._getters, groups, strict=True)]
            if values != self._last[: len(values)] and not all(map(_is_plain, values)):
                raise KeyError  # a number has become a tensor, a list or None
        except KeyError:
            self._getters = [self._getter(group) for group in groups]
            self._names = zlib.crc32(repr([keys for _, keys, _ in self._getters]).encode())
            values = [get(group) for (_, _, get), group in zip(self._getters, groups, strict=True)]
        return values + self._counts()

    def _getter(self, group: dict[str, Any]) -> tuple[int, list[str], Callable[[Any], tuple[Any, ...]]]:
        """Return the size of ``group``, the keys of its numbers, and a function that reads these."""
        keys = [key for key, value in group.items() if self._number(key, value) is not None]
        if not all(_is_plain(group[key]) for key in keys):  # tensors and lists may be written to in place
            return len(group), keys, lambda group: tuple(self._number(key, group[key]) for key in keys)
        if len(keys) < 2:  # itemgetter returns no tuple
            return len(group), keys, lambda group: tuple(group[key] for key in keys)
        return len(group), keys, itemgetter(*keys)

    def _number(self, key: str, value: Any) -> Any:
        """Return ``value`` as plain numbers; ``None`` if it is not compared."""
        if key in self._skipped:
            return None
        if isinstance(value, (tuple, list)):
            numbers = tuple(self._number("", item) for item in value)
            return None if None in numbers or not numbers else numbers
        if isinstance(value, torch.Tensor):
            return self._number("", value.item()) if value.numel() == 1 and value.is_cpu else None
        return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, or a tuple of numbers. NaN is not: its hash is its address's."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float)) and value == value


def first_difference(groups: Mapping[int, list[Numbers]]) -> tuple[int, str, dict[int, Any]] | None:
    """Return group, key and every rank's value of the first number that differs; ``None`` if none does.

    ``groups``: what :meth:`Hyperparameters.groups` returned, by rank.
    """
    for index in range(max(map(len, groups.values()), default=0)):
        of_ranks = {rank: each[index] if index < len(each) else {} for rank, each in groups.items()}
        for key in dict.fromkeys(key for numbers in of_ranks.values() for key in numbers):
            values = {rank: numbers.get(key) for rank, numbers in of_ranks.items()}
            if len(set(map(repr, values.values()))) > 1:
                return index, key, values
    return None


def require_equal_groups(
    groups: Mapping[int, list[Numbers] | None], permitting: str = 'per_rank=("{}",)', whose: str = ""
) -> None:
    """Raise ValueError if numbers differ between ranks.

    Args:
        groups: what :meth:`Hyperparameters.groups` returned on each rank; ``None`` for one that does not count.
        permitting: argument that permits a number to differ, with ``{}`` for its key.
        whose: what the groups belong to, if there are several optimizers.
    """
    found = first_difference({rank: each for rank, each in groups.items() if each is not None})
    if found is None:
        return
    index, key, values = found
    described = values_text({rank: "missing" if value is None else repr(value) for rank, value in values.items()})
    if key == NUM_PARAMETERS:
        raise ValueError(
            f"the ranks' optimizers differ: the {key} of parameter group {index}{whose} is {described}. Sort "
            "parameters into the same groups on all ranks"
        )
    raise ValueError(
        f"the ranks' optimizers differ: {key!r} of parameter group {index}{whose} is {described}. Change it in "
        "the same way on all ranks: by the same schedule, by a loss or progress that is averaged over the ranks, by a "
        f"checkpoint that all load. If it is meant to differ, write {permitting.format(key)}"
    )
