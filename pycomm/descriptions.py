"""Texts for the ``repr`` of public objects and for messages: counts, sizes, settings, and the CPU."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pycomm.checks import shown

T = TypeVar("T")

if TYPE_CHECKING:  # `pycomm plan` does without
    import torch


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``number`` with ``noun`` or its ``plural``, by default ``noun`` + "s"."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return the ranks that have each of the ``values``, which are by rank."""
    found: dict[T, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def values_text(values: Mapping[int, str]) -> str:
    """Return the values with their ranks: "0.1 on rank 0, 0.2 on ranks 1, 2"."""
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value(values).items())


def counts_text(counts: Mapping[int, int]) -> str:
    """Return the count of each rank: "rank 0: 3, rank 1: 4"."""
    return ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())


def first_names(names: Sequence[str]) -> str:
    """Return the first five names, and how many more there are."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def size_text(num_bytes: float) -> str:
    """Write a size in powers of ten, with three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def tensors_text(tensors: Iterable[torch.Tensor]) -> str:
    """Return number and total size of parameters: "8 parameters of 11.2 MB"."""
    sizes = [tensor.nbytes for tensor in tensors]
    return f"{counted(len(sizes), 'parameter')} of {size_text(sum(sizes))}"


def settings_text(value: Any) -> str:
    """Return ``repr(value)``; of a dataclass, without fields at their defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return shown(value)
    shown_fields = (field for field in dataclasses.fields(value) if field.repr)
    fields = [field.name for field in shown_fields if getattr(value, field.name) != field.default]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in fields)})"


def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
