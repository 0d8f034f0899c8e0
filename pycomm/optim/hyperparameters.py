"""Hyperparameters of an optimizer's groups, which must be the same on all ranks in every step."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any

import torch

from pycomm.descriptions import name_ranks, ranks_by_value

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
        digest: 64-bit hash of the numbers, and of those in the last step, whose low bits can be compared alone.
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
        self._in_step: list[Any] = []
        self._keys_in_step: list[list[str]] = []
        self._names = self.digest = 0
        self.refresh()

    def refresh(self) -> bool:
        """Read the numbers; return whether any of them has changed since the last call."""
        values = self._read(self._last)
        if values == self._last:
            return False
        self._last = values
        self._mix()
        return True

    def note_step(self) -> bool:
        """Read the numbers of a step, also of the digest; return whether they are others than those read last."""
        values = self._read(self._in_step)
        if values != self._in_step:
            self._in_step, self._keys_in_step = values, [keys for _, keys, _ in self._getters]
            self._mix()
        return values != self._last

    def _mix(self) -> None:
        try:
            # Python's hash of numbers is the same in every process, and fast: schedules change numbers in every step.
            mixed = hash((self._names, tuple(self._last), tuple(self._in_step)))
        except TypeError:  # lists are not hashable
            text = repr([sorted(numbers.items()) for numbers in (*self.groups(), *self.groups_in_step())])
            mixed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        self.digest = mixed ^ (mixed >> 29)

    def groups_in_step(self) -> list[Numbers]:
        """Return the numbers of each group in the last step; an empty list before the first one."""
        return [
            dict(zip(keys, values, strict=True))
            for keys, values in zip(self._keys_in_step, self._in_step, strict=False)
        ]

    def groups(self) -> list[Numbers]:
        """Return the numbers of each group, as JSON can hold them."""
        found = [
            {key: number for key, value in group.items() if (number := self._number(key, value)) is not None}
            for group in self._groups()
        ]
        for numbers, count in zip(found, self._counts(), strict=False):
            numbers[NUM_PARAMETERS] = count
        return found

    def _groups(self) -> list[dict[str, Any]]:
        groups, ignores = self._optimizer.param_groups, self._ignores
        if ignores is None:
            return groups
        return [group for group in groups if not group["params"] or not all(map(ignores, group["params"]))]

    def _counts(self) -> list[int]:
        return [len(group["params"]) for group in self._groups()] if self._ignores is None else []

    def _read(self, before: list[Any]) -> list[Any]:
        groups = self._groups()
        try:
            if [len(group) for group in groups] != [size for size, _, _ in self._getters]:
                raise KeyError  # a key was added or removed
            values = [get(group) for (_, _, get), group in zip(self._getters, groups, strict=True)]
            if values != before[: len(values)] and not all(map(_is_plain, values)):
                raise KeyError  # a number has become a tensor or None
        except KeyError:
            self._getters = [self._getter(group) for group in groups]
            self._names = zlib.crc32(repr([list(numbers) for numbers in self.groups()]).encode())
            values = [get(group) for (_, _, get), group in zip(self._getters, groups, strict=True)]
        return values + self._counts()

    def _getter(self, group: dict[str, Any]) -> tuple[int, list[str], Callable[[Any], tuple[Any, ...]]]:
        """Return the size of ``group``, the keys of its numbers, and a function that reads these."""
        keys = [key for key, value in group.items() if self._number(key, value) is not None]
        if not all(_is_plain(group[key]) for key in keys):  # tensors may be written to in place
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
    """Return whether ``value`` is a number, or consists of numbers. NaN is none: its hash is that of its address."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float)) and value == value


def first_difference(groups_of_ranks: list[list[Numbers] | None]) -> tuple[int, str, list[Any]] | None:
    """Return group, key and all ranks' values of the first number that differs; ``None`` if none does.

    Args:
        groups_of_ranks: what :meth:`Hyperparameters.groups` returned on each rank; ``None`` for one that does not
            count.
    """
    for index in range(max((len(groups) for groups in groups_of_ranks if groups is not None), default=0)):
        of_ranks = [groups[index] if groups is not None and index < len(groups) else {} for groups in groups_of_ranks]
        for key in dict.fromkeys(key for numbers in of_ranks for key in numbers):
            values = [numbers.get(key) for numbers in of_ranks]
            counting = [value for value, groups in zip(values, groups_of_ranks, strict=True) if groups is not None]
            if any(repr(value) != repr(counting[0]) for value in counting):
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
    found = first_difference(list(groups.values()))
    if found is None:
        return
    index, key, values = found
    counting = {rank: value for (rank, group), value in zip(groups.items(), values, strict=True) if group is not None}
    by_value = ranks_by_value({rank: "missing" if value is None else repr(value) for rank, value in counting.items()})
    described = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
    if key == NUM_PARAMETERS:
        raise ValueError(
            f"the ranks' optimizers differ: the {key} of parameter group {index}{whose} is {described}. Sort "
            "parameters into the same groups on all ranks"
        )
    raise ValueError(
        f"the ranks' optimizers differ: {key!r} of parameter group {index}{whose} is {described}. Change it on all "
        "ranks alike: by the same schedule, by a loss or progress that is averaged over the ranks, by a checkpoint "
        f"that all load. If it is meant to differ, write {permitting.format(key)}"
    )
