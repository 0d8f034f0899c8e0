"""Sparse sum with an owner for every part of the index space.

After Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", 2022 (Ok-Topk):

1. The index space is cut into P parts with about equally many entries. The cuts are the mean over the
   ranks of each rank's quantiles: every k/P-th of its ascending entries. Quantiles are sent with the
   sums, so the cuts of a step come from the previous step; the first cuts are even.
2. Every rank sends each owner its entries in the owner's part: the largest, up to a fixed number. The
   others stay in this rank's residual.
3. The owner adds them up, and all ranks gather the sums: the largest of each part, at most twice k/P, or
   a quarter more than the fullest part had in the previous step. The others go into the owner's residual.
   A part is sent dense if its entries would take more bytes than its elements.

So all ranks know the size of every message. A rank receives about 1.5 k + 2 k entries for any P, where
gathering everything takes (P - 1) k. On the CPU only: sizes depend on what was received.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.compression.codec import RankSum, wide_dtype
from pycomm.compression.messages import GatheredMessages, Layout
from pycomm.compression.report import Report, Told
from pycomm.compression.sparse.sums import Entries, Selected

SPLIT_ROOM, SUM_ROOM, MARGIN = 1.5, 2.0, 1.25


def split_room(count: int, size: int) -> int:
    """Return how many of its ``count`` entries a rank has room for in one part."""
    return int(SPLIT_ROOM * count / size) + 8


def sum_room(count: int, size: int, fullest: int | None) -> int:
    """Return how many sums of a part are gathered; ``fullest``: the most that a part had in the previous step."""
    most = int(SUM_ROOM * count / size) + 8
    return most if fullest is None else min(most, int(MARGIN * fullest) + 8)


@dataclass(frozen=True)
class OwnedPart:
    """Part [begin, end) of the index space.

    Attributes:
        is_dense: whether its sums are sent as a dense array.
        split: form of a rank's entries on their way to the owner.
        sums: form of the sums, unless they are dense.
    """

    begin: int
    end: int
    is_dense: bool
    split: Entries
    sums: Entries

    @property
    def length(self) -> int:
        """Number of elements, but at least 1: messages have no empty range."""
        return max(1, self.end - self.begin)

    def split_layout(self) -> Layout:
        return Layout(0, tuple(self.split.arrays))

    def sum_layout(self, dtype: torch.dtype) -> Layout:
        return Layout(0, ((dtype, self.length),) if self.is_dense else tuple(self.sums.arrays))


class BalancedSum(RankSum):
    """Sum whose parts have owners; see the module's docstring."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        super().__init__()
        self._communicator = communicator
        self._count, self._half = count, half
        self._dtype = wide_dtype(bucket)
        self._size, self._rank = communicator.size, communicator.rank
        self._num_elements = bucket.num_elements
        even = [self._num_elements * p // self._size for p in range(self._size + 1)]
        self._plan: tuple[list[int], int | None] = even, None  # borders, and how full the fullest part was
        self._next: tuple[list[int], int | None] = self._plan
        self._sums: list[tuple[OwnedPart, torch.Tensor, torch.Tensor | None]] = []
        self._pieces = self._received = torch.empty(0, dtype=torch.uint8)
        self._messages = GatheredMessages(bucket, communicator, [])
        self._arrange()

    def _arrange(self) -> None:
        """Lay out the messages for the borders and sizes of this step."""
        borders, fullest = self._plan
        room, split = sum_room(self._count, self._size, fullest), split_room(self._count, self._size)
        self._parts = []
        for begin, end in itertools.pairwise(borders):
            length = max(1, end - begin)
            sums = Entries(self._dtype, length, min(room, length), self._half)
            is_dense = length * self._dtype.itemsize <= sums.num_bytes()
            self._parts.append(OwnedPart(begin, end, is_dense, Entries(self._dtype, length, split, self._half), sums))
        num_bytes = self._size * max(part.split_layout().num_bytes() for part in self._parts)
        if num_bytes > len(self._pieces):
            self._pieces = torch.zeros(num_bytes, dtype=torch.uint8)
            self._received = torch.zeros(num_bytes, dtype=torch.uint8)
        self._num_bytes = num_bytes
        longest = max(part.sum_layout(self._dtype).num_bytes() for part in self._parts)
        self._messages.arrange([(torch.int64, self._size), (torch.uint8, longest)])

    def send(self, selected: Selected, told: Told) -> Report:
        self._arrange()
        flat, values, indices = selected.flat, selected.values, selected.indices
        own = self._parts[self._rank]
        pieces, received = self._pieces[: self._num_bytes], self._received[: self._num_bytes]
        sent = self._split_up(flat, values, indices, torch.split(pieces, self._num_bytes // self._size))
        selected.mask_velocity(sent)
        self._communicator.all_to_all(received, pieces)
        summed = self._add_up(own, torch.split(received, self._num_bytes // self._size))
        header = self._messages.mine[0]
        header[0] = torch.count_nonzero(summed)
        header[1:] = indices[[self._count * p // self._size for p in range(1, self._size)]]
        flat[own.begin : own.end] += self._put(own, summed)
        report = self._messages.gather(told)
        self.bytes_sent += self._num_bytes // self._size * (self._size - 1) + self._messages.num_bytes
        self._take()
        return report

    def _split_up(
        self, flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Move the entries in each part out of ``flat`` into the piece for its owner; return their indices, int64."""
        cuts = torch.searchsorted(indices, torch.tensor(self._plan[0], dtype=torch.int32)).tolist()
        sent = []
        for p, (part, piece) in enumerate(zip(self._parts, pieces, strict=True)):
            mine, places = values[cuts[p] : cuts[p + 1]], indices[cuts[p] : cuts[p + 1]]
            room = part.split.count
            if len(mine) > room:
                mine, chosen = kernels.topk(mine, room)
                places = places[chosen.long()]
            # The rest of the room is filled with zeros for the part's last element.
            filled = torch.zeros(room, dtype=mine.dtype)
            filled[: len(mine)] = mine
            where = torch.full((room,), part.length - 1, dtype=torch.int32)
            where[: len(mine)] = places - part.begin
            left = part.split.put(filled, where, part.split_layout().arrays_in(piece))
            flat[places.long()] = left[: len(mine)]
            sent.append(places.long())
        return torch.cat(sent)

    def _add_up(self, own: OwnedPart, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        summed = torch.zeros(own.length, dtype=self._dtype)
        for piece in pieces:
            values, places = own.split.get(own.split_layout().arrays_in(piece))
            kernels.scatter_add(summed, places, values)
        return summed[: own.end - own.begin]

    def _put(self, own: OwnedPart, summed: torch.Tensor) -> torch.Tensor:
        """Write the sums to this rank's message; return those that do not fit."""
        arrays = own.sum_layout(self._dtype).arrays_in(self._messages.mine[1])
        if own.is_dense:
            arrays[0][: len(summed)] = summed
            return torch.zeros_like(summed)
        values, places = kernels.topk(summed, own.sums.count)
        summed[places.long()] = own.sums.put(values, places, arrays)
        return summed

    def _take(self) -> None:
        """Take every rank's sums, and the borders for the next step, out of the messages."""
        self._sums, headers = [], []
        for part, (header, message) in zip(self._parts, self._messages.everyones, strict=True):
            arrays = part.sum_layout(self._dtype).arrays_in(message)
            self._sums.append((part, arrays[0], None) if part.is_dense else (part, *part.sums.get(arrays)))
            headers.append(header)
        everyone = torch.stack(headers)
        quantiles = everyone[:, 1:].sum(dim=0) // self._size
        self._next = [0, *quantiles.tolist(), self._num_elements], int(everyone[:, 0].max())

    def commit(self, finite: Flag) -> None:
        if finite:
            self._plan = self._next

    def largest(self) -> torch.Tensor:
        return torch.stack([values.abs().max() for _, values, _ in self._sums]).double().max()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        out.zero_()
        for part, values, places in self._sums:
            into = out[part.begin : part.end]
            if places is None:
                torch.mul(values[: len(into)], factor, out=into)
            elif len(into) > 0:
                kernels.scatter_add(into, places, values, factor)
