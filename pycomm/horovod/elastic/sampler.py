"""Sampler that deals out what is left of an epoch among the ranks that are left."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from pycomm.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of a part of ``dataset``'s indices for each rank, which can begin anew in the middle of an epoch.

    Call :meth:`record_batch` after each batch and :meth:`set_epoch` at the end of each epoch, and give it to
    :class:`TorchState`: after ranks have been lost, the indices that nobody has processed are dealt out anew. The parts
    are equally long; a few indices are dealt twice for it.

    Args:
        dataset: anything with a length.
        shuffle: whether the order is random: the same on all ranks, another one in every epoch.
        seed: of the order; equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch``: nothing of it has been processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch, number ``batch_idx``, of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` has returned."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is left among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        times = -(-self.total_size // len(left)) if left else 0
        return iter((left * times)[: self.total_size][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
