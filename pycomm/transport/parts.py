"""Arrays of which there is one for each rank: checks, and the comparison of their lengths between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import pycomm._native as _native
from pycomm.transport.base import Message
from pycomm.transport.host_tensors import reducible, require, tensor_of
from pycomm.transport.torch_group import TorchGroup


def _one_each(name: str, arrays: object, size: int, writes: bool) -> list[_native.HostArray | None]:
    """Return the argument ``name``, a sequence of an array, or ``None``, for each of ``size`` ranks, in memory."""
    ordered = isinstance(arrays, Sequence) and not isinstance(arrays, str)
    require(ordered, f"{name} is a {type(arrays).__name__}, wanted a sequence of arrays", TypeError)
    assert isinstance(arrays, Sequence)
    require(len(arrays) == size, f"{name} has {len(arrays)} arrays, wanted {size}, one for each rank")
    return [
        None if array is None else _native.HostArray(array, f"{name}[{p}]", writes, True)
        for p, array in enumerate(arrays)
    ]


def _bytes_of(array: _native.HostArray | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8) if array is None else tensor_of(array).view(torch.uint8)


def parts_apart(outs: object, xs: object, rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the arrays to write and those to read as flat tensors of bytes, empty where there is ``None``.

    No array to write may overlap another one, or one to read, but that ``outs[rank]`` may be ``xs[rank]``.

    Raises:
        TypeError, ValueError: ``outs`` or ``xs`` is no sequence of an array for each rank, or they overlap.
    """
    targets = [_bytes_of(array) for array in _one_each("outs", outs, size, True)]
    sources = [_bytes_of(array) for array in _one_each("xs", xs, size, False)]
    in_place = _is_same(targets[rank], sources[rank])
    for p, target in enumerate(targets):
        for q in range(size):
            problem = f"outs[{p}] overlaps outs[{q}], wanted arrays apart"
            require(q >= p or not _overlap(target, targets[q]), problem)
            problem = f"outs[{p}] overlaps xs[{q}], wanted arrays apart, or outs[rank] and xs[rank] the same"
            require((p == rank and in_place) or not _overlap(target, sources[q]), problem)
    return targets, sources


def contributions(out: Any, xs: object, op: object, rank: int, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ``out`` as a flat tensor, and what each rank gets of this one, which has ``out``'s dtype.

    Raises:
        TypeError, ValueError: ``op`` cannot reduce them, ``out`` has another length than ``xs[rank]``, or they overlap.
    """
    target = reducible("out", out, op, writes=True)
    sources = []
    for p, array in enumerate(_one_each("xs", xs, size, False)):
        if array is None:
            sources.append(torch.empty(0, dtype=target.dtype))
            continue
        source = tensor_of(array)
        found = "another dtype" if array.tag else array.dtype
        require(
            array.tag == 0 and source.dtype == target.dtype,
            f"xs[{p}] has {found}, wanted dtype {str(target.dtype).removeprefix('torch.')} as out",
            TypeError,
        )
        problem = f"out overlaps xs[{p}], wanted arrays apart, or out and xs[rank] the same"
        require((p == rank and _is_same(target, source)) or not _overlap(target, source), problem)
        sources.append(source)
    counts = target.numel(), sources[rank].numel()
    require(counts[0] == counts[1], f"out has {counts[0]} elements, wanted {counts[1]}, as xs[{rank}] has")
    return target, sources


def agree_on_lengths(
    group: TorchGroup, kind: str, sends: Sequence[torch.Tensor], receives: Sequence[int], timeout: float
) -> None:
    """Compare, between all ranks, what each sends with what the other expects. Collective.

    Args:
        group: the ranks to compare.
        kind: name of the operation.
        sends: tensor for each rank.
        receives: number of bytes expected from each rank.
        timeout: of every wait, in seconds.

    Raises:
        ValueError: on every rank: they differ, for the pair of ranks that the message names.
    """
    mine = torch.tensor([[x.nbytes for x in sends], receives], dtype=torch.int64)
    gathered = torch.empty(group.size * mine.numel(), dtype=torch.int64)
    group.gather(kind, gathered, mine.view(-1), timeout)
    lengths = gathered.view(group.size, 2, group.size)
    wrong = (lengths[:, 0] != lengths[:, 1].T).nonzero().tolist()
    if wrong:
        p, q = wrong[0]
        has, wants = int(lengths[p, 0, q]), int(lengths[q, 1, p])
        raise ValueError(f"{kind}: rank {p} has {has} bytes for rank {q}, which wants {wants}")


def messages(tensors: Sequence[torch.Tensor], rank: int) -> list[Message]:
    """Return the messages to, or from, the other ranks that these tensors are; empty ones are none."""
    return [(p, tensor) for p, tensor in enumerate(tensors) if p != rank and tensor.numel() > 0]


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.nbytes == b.nbytes


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.nbytes == 0 or b.nbytes == 0:
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
