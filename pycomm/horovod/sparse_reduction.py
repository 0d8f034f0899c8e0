"""Sums and averages of sparse tensors: every rank gathers the entries of all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pycomm.horovod.errors import InvalidRequestError
from pycomm.horovod.handles import Submission, single, synchronize_all
from pycomm.horovod.operations import submit_allgather
from pycomm.horovod.process_sets import ProcessSet, global_process_set
from pycomm.horovod.reduce_ops import NAMES, Average, ReduceOp, checked_op
from pycomm.horovod.requests import ALLGATHER

_PARTS = ("indices", "values")


class SparseHandle:
    """Handle of a sparse allreduce: call it, or pass it to ``synchronize``, for the sum or average, a COO tensor."""

    def __init__(self, tensor: torch.Tensor, handles: tuple[int, int], divisor: int) -> None:
        self.handles, self._shape, self._divisor = handles, tensor.shape, divisor

    def __call__(self) -> torch.Tensor:
        indices, values = synchronize_all(self.handles)
        return torch.sparse_coo_tensor(
            indices.t(), values / self._divisor if self._divisor > 1 else values, self._shape
        )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Begin to sum or average the COO ``tensor`` of all ranks, each of which gets the entries of all.

    Args:
        tensor: sparse, in COO form; its shape is the same on all ranks, its entries need not be.
        name: of the operation.
        op: ``Sum`` or ``Average``.
        process_set: the ranks.

    Raises:
        TypeError, ValueError: ``tensor`` is not sparse, or ``op`` is another one.
    """
    labels = [f"{name}.{part}" if isinstance(name, str) else _sparse_label(name, part) for part in _PARTS]
    try:
        chosen, mine = _checked_sparse(tensor, op)
    except Exception as error:
        _refuse_sparse(labels, process_set, error)
    form = f"of a sparse tensor {list(tensor.shape)}"
    indices = submit_allgather([mine.indices().t().contiguous()], labels[0], process_set, detail=form).handle(single)
    values = submit_allgather([mine.values()], labels[1], process_set, detail=form).handle(single)
    size = process_set.size() or 1
    return SparseHandle(tensor, (indices, values), size if chosen == Average else 1)


def _sparse_label(name: Any, part: str) -> Any:
    return name if name is not None else f"sparse.noname.{part}"


def _checked_sparse(tensor: Any, op: Any) -> tuple[ReduceOp, torch.Tensor]:
    """Return the reduction and the tensor, each index once. Raises TypeError or ValueError if they are wrong."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise TypeError("tensor: wanted a sparse tensor in COO form; pass dense ones to allreduce_async()")
    if tensor.is_meta:
        raise TypeError("tensor is on the device meta, where it has no values")
    chosen = checked_op(op)
    if NAMES[chosen] not in ("sum", "mean"):
        raise ValueError(f"op is {chosen.name}, wanted Sum or Average of sparse tensors")
    return chosen, tensor.detach().coalesce()


def _refuse_sparse(labels: Sequence[Any], process_set: ProcessSet, error: Exception) -> NoReturn:
    """Tell the others, of both operations that this is made of; raise ``error``."""
    for label in labels:
        with contextlib.suppress(type(error), InvalidRequestError), Submission(ALLGATHER, label, process_set):
            raise error
    raise error
