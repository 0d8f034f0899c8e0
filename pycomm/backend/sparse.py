"""Sums of sparse tensors."""

from __future__ import annotations

import torch

from pycomm.backend.agreement import prepared, require_same
from pycomm.backend.dense import contiguous
from pycomm.channel import Channel


def all_reduce_sparse(channel: Channel, tensor: torch.Tensor, op: str, timeout: float) -> None:
    """Sum COO tensors over all ranks, in place: every rank gathers the indices and values of all.

    Raises:
        TypeError, ValueError: on every rank: ``op`` is another one than "sum", or the ranks' tensors do not fit.
    """

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        if op != "sum":
            raise ValueError(f"op is {op!r}, wanted 'sum' for a sparse tensor")
        mine = tensor.detach().coalesce()
        return contiguous(mine.indices()), contiguous(mine.values())

    transport, size = channel.transport, channel.size
    indices, values = prepared(transport, prepare, timeout)
    form = f"{list(tensor.shape)} {str(tensor.dtype)[6:]}, {indices.shape[0]} sparse dimensions"
    require_same(channel, f"all_reduce of a sparse tensor ({form})", timeout)
    counts = torch.empty(size, dtype=torch.int64)
    transport.all_gather(counts, torch.tensor([indices.shape[1]]), timeout)
    lengths = counts.tolist()
    all_indices = [torch.empty(indices.shape[0], n, dtype=torch.int64) for n in lengths]
    all_values = [torch.empty(n, *values.shape[1:], dtype=values.dtype) for n in lengths]
    transport.all_to_all_v(all_indices, [indices] * size, timeout)
    transport.all_to_all_v(all_values, [values] * size, timeout)
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # a detached one has indices of its own
