"""Comparisons of what the ranks are about to do, where the transport's own do not see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pycomm import agreement
from pycomm.agreement import Words, agreed, rows_of_all
from pycomm.channel import Channel
from pycomm.transport.base import Transport

T = TypeVar("T")

_NAMES = (
    *("nothing", "another dtype", "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

_WORDS = Words(differ="the ranks disagree: {here} on rank {rank}, {there} on rank 0")


def prepared(transport: Transport, prepare: Callable[[], T], timeout: float) -> T:
    """Return the result of ``prepare``; if it raises, tell the other ranks, which are about to compare."""
    return agreement.prepared(prepare, lambda reason: transport.refuse(reason, timeout))


def require_same(channel: Channel, mine: str, timeout: float) -> None:
    """Raise ValueError, on every rank, unless all ranks pass the same text. Collective."""

    def gather(row: list[int]) -> list[list[int]]:
        everyones = torch.empty((channel.size, 1), dtype=torch.int64)
        channel.transport.all_gather(everyones, torch.tensor(row), timeout)
        return everyones.tolist()

    def disagree() -> None:
        agreed(channel.all_gather_bytes, mine, "call", lambda text: {"": [text]}, _WORDS)

    rows_of_all(gather, (), 0, mine, disagree)


def require_same_dtypes(
    channel: Channel, outs: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor | None], timeout: float
) -> None:
    """Raise ValueError, on every rank, unless what each rank sends is of the dtype that its receiver expects.

    The transports compare numbers of bytes only. ``outs`` and ``xs`` hold what this rank gets from, and has for, each
    rank. Collective.
    """
    numbers, size = [_number_of(x) for x in (*xs, *outs)], channel.size
    everyones = torch.empty(size * len(numbers), dtype=torch.uint8)
    channel.transport.all_gather(everyones, torch.tensor(numbers, dtype=torch.uint8), timeout)
    table = everyones.view(size, 2, size)
    wrong = (table[:, 0] != table[:, 1].T).nonzero().tolist()
    if wrong:
        p, q = wrong[0]
        has, wants = (_NAMES[int(number)] for number in (table[p, 0, q], table[q, 1, p]))
        raise ValueError(f"the ranks disagree: rank {p} has {has} for rank {q}, which wants {wants}")


def _number_of(x: torch.Tensor | None) -> int:
    """Return the place of the dtype of ``x`` in ``_NAMES``."""
    name = _NAMES[0] if x is None else str(x.dtype).removeprefix("torch.")
    return _NAMES.index(name) if name in _NAMES else 1
