"""Which samples of a batch are this rank's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's piece of a global batch.

    Attributes:
        data: nested as the batch was, of views into its tensors; a ``slice`` if the batch was an int.
        num_samples: samples in ``data``, at least 1; for ``reducer.set_weight(shard.num_samples)``.
        weight: ``num_samples`` over the samples of the global batch; the weights of all ranks sum to 1.
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
    """This rank's piece of a global batch, which every rank has alike.

    Pieces are contiguous and in the order of the ranks. Without ``per_rank`` the global batch is what is
    fixed, however many ranks there are: pieces differ by at most one sample, longer ones first. With
    ``per_rank`` the piece is fixed, and the batch grows with the ranks: rank r has the samples from
    ``r * per_rank`` up to ``(r + 1) * per_rank``. A shorter batch, such as the last one of an epoch, is
    split as without ``per_rank``. Where pieces differ, the mean of the ranks' mean gradients is not the
    gradient of the batch: ``reducer.set_weight(shard.num_samples)`` before backward makes it so.

    Args:
        batch: a tensor, or a nesting of tuples, named tuples, lists and dicts of tensors, with the samples
            along the first dimension; or their number.
        per_rank: samples per rank; the batch has at most ``per_rank * world_size``.
        rank: torch.distributed's in ``process_group`` if ``None``.
        world_size: torch.distributed's in ``process_group`` if ``None``.
        process_group: the default group if ``None``.

    Returns:
        The :class:`Shard`, without a copy of any data.

    Raises:
        RuntimeError: ``rank`` or ``world_size`` is ``None`` and torch.distributed is not initialised.
        TypeError, ValueError: an argument is wrong; tensors differ in their number of samples (naming the
            place); or there are fewer samples than ranks, or more than ``per_rank`` allows (the same on
            every rank).
    """
    if per_rank is not None:
        _check_int("per_rank", per_rank, 1)
    rank, world_size = _place(rank, world_size, process_group)
    samples = batch if _is_count(batch) else _samples(batch)
    if samples < world_size:
        raise ValueError(f"batch has {samples} samples, wanted at least one for each of {world_size} ranks")
    if per_rank is not None and samples > per_rank * world_size:
        raise ValueError(
            f"batch has {samples} samples, wanted at most per_rank * world_size = "
            f"{per_rank} * {world_size} = {per_rank * world_size}"
        )
    # An even split of a full batch of per_rank samples each is that of per_rank: one rule for both.
    least, longer = divmod(samples, world_size)
    start = rank * least + min(rank, longer)
    piece = slice(start, start + least + (rank < longer))
    data = piece if _is_count(batch) else _map(batch, lambda tensor: tensor[piece])
    num_samples = piece.stop - piece.start
    return Shard(data, num_samples, num_samples / samples)


def _place(rank: int | None, world_size: int | None, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, "
                "or give both rank and world_size"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of process_group")
        rank = dist.get_rank(group) if rank is None else rank
        world_size = dist.get_world_size(group) if world_size is None else world_size
    _check_int("world_size", world_size, 1)
    _check_int("rank", rank, 0)
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
    """Every tensor with where it is, as it would be written."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    # A PackedSequence is a named tuple too, but its tensors do not have samples along the first dimension.
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
    # Copied, then overwritten: keeps what a subclass has beside its items, such as the factory of a defaultdict.
    mapping = copy.copy(batch)
    for key, item in batch.items():
        mapping[key] = _map(item, function)
    return mapping


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, wanted an int")
    if value < least:
        raise ValueError(f"{name} is {value}, wanted at least {least}")
