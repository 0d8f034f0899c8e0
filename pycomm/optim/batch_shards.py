"""Split of a global batch into one shard per rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from pycomm import checks


@dataclass(frozen=True, eq=False)
class Shard:
    """Part of a global batch that belongs to one rank.

    Attributes:
        data: views into the batch's tensors, in the same nesting; a ``slice`` if the batch was an int.
        num_samples: number of samples in ``data``, at least 1; for ``reducer.set_weight(shard.num_samples)``.
        weight: ``num_samples`` divided by the number of samples in the global batch; the weights of all
            ranks sum to 1.
    """

    data: Any
    num_samples: int
    weight: float


def shard_batch(
    batch: Any,
    *,
    per_rank: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Shard:
    """Return this rank's part of a global batch, which must be the same on every rank.

    The parts are contiguous and in rank order. Without ``per_rank`` the size of the global batch is fixed,
    however many ranks there are: the parts differ by at most one sample, larger ones first. With
    ``per_rank`` the size of a part is fixed, and the batch grows with the number of ranks: rank r gets the
    samples from ``r * per_rank`` up to ``(r + 1) * per_rank``. A smaller batch, such as the last one of an
    epoch, is split as without ``per_rank``. If the parts differ in size, the mean of the ranks' mean
    gradients is not the gradient of the batch; call ``reducer.set_weight(shard.num_samples)`` before
    backward to make it so.

    Args:
        batch: a tensor, or nested tuples, named tuples, lists and dicts of tensors, with the samples along
            the first dimension; or the number of samples.
        per_rank: samples per rank; the batch has at most ``per_rank * world_size``.
        rank: if ``None``, this process's rank in ``process_group``.
        world_size: if ``None``, the size of ``process_group``.
        process_group: the default group if ``None``.

    Returns:
        The :class:`Shard`; no data is copied.

    Raises:
        RuntimeError: ``rank`` or ``world_size`` is ``None`` and torch.distributed is not initialized.
        TypeError, ValueError: an argument is wrong; tensors differ in their number of samples (the first
            such tensor is named); or there are fewer samples than ranks, or more than ``per_rank`` allows
            (the same on every rank).
    """
    if per_rank is not None:
        checks.count("per_rank", per_rank, 1)
    rank, world_size = _rank_and_size(rank, world_size, process_group)
    samples = batch if _is_count(batch) else _samples(batch)
    if samples < world_size:
        raise ValueError(f"batch has {samples} samples, wanted at least one for each of {world_size} ranks")
    if per_rank is not None and samples > per_rank * world_size:
        raise ValueError(
            f"batch has {samples} samples, wanted at most per_rank * world_size = "
            f"{per_rank} * {world_size} = {per_rank * world_size}"
        )
    # One rule for both: the even split of a full batch of per_rank samples each gives per_rank to every rank.
    least, longer = divmod(samples, world_size)
    start = rank * least + min(rank, longer)
    part = slice(start, start + least + (rank < longer))
    data = part if _is_count(batch) else _map(batch, lambda tensor: tensor[part])
    num_samples = part.stop - part.start
    return Shard(data, num_samples, num_samples / samples)


def _rank_and_size(rank: int | None, world_size: int | None, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group first, "
                "or give both rank and world_size"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of process_group")
        rank = dist.get_rank(group) if rank is None else rank
        world_size = dist.get_world_size(group) if world_size is None else world_size
    checks.count("world_size", world_size, 1)
    checks.count("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank is {rank}, wanted 0 <= rank < {world_size}")
    return rank, world_size


def _is_count(batch: Any) -> bool:
    return isinstance(batch, int) and not isinstance(batch, bool)


def _samples(batch: Any) -> int:
    first = ""
    samples = 0
    for path, tensor in _leaves(batch, "batch"):
        if tensor.dim() == 0:
            raise ValueError(f"{path} has no dimensions, wanted the samples along the first")
        if first and len(tensor) != samples:
            raise ValueError(f"{path} has {len(tensor)} samples, {first} has {samples}; wanted the same in all tensors")
        first, samples = first or path, len(tensor)
    if not first:
        raise ValueError("batch holds no tensor, wanted at least one")
    return samples


def _leaves(batch: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its path, written as a Python expression."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    # A PackedSequence is also a named tuple, but its tensors do not have samples along the first dimension.
    elif isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        names = getattr(batch, "_fields", None)
        for i, item in enumerate(batch):
            yield from _leaves(item, f"{path}.{names[i]}" if names else f"{path}[{i}]")
    elif isinstance(batch, MutableMapping):
        for key, item in batch.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    else:
        wanted = "a tensor, or a tuple, list or dict of tensors" + (", or an int" if path == "batch" else "")
        raise TypeError(f"{path} is a {type(batch).__name__}, wanted {wanted}")


def _map(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, (tuple, list)):
        items = [_map(item, function) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    # Copied, then overwritten, to keep a subclass's own attributes, such as the factory of a defaultdict.
    mapping = copy.copy(batch)
    for key, item in batch.items():
        mapping[key] = _map(item, function)
    return mapping
