"""Sums over the ranks of the entries that each has selected: gathered, or as dense arrays.

Every rank gathers k entries of each of P ranks, or sums dense arrays if that takes fewer bytes: codec.py chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.bucket import FINGERPRINT_BITS, Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import to_device
from pycomm.compression.codec import Accumulated, Outcome, RankSum, wide_dtype
from pycomm.compression.messages import GatheredMemory, SummedMessage
from pycomm.compression.report import UNUSED, Report, Told


@dataclass(frozen=True)
class Selected:
    """Entries that a rank has selected of its sums.

    Attributes:
        accumulated: the sums and the velocities that they are entries of.
        values, indices: the entries; int32 indices, ascending.
        largest: the largest magnitude among the values, one float32; ``None`` if they are float64.
        ends: where each parameter ends in the sums, int64.
        whole: for each parameter, whether all of it is selected; then its velocity stays. ``None``: none is.
        keeps: the same for each entry.
    """

    accumulated: Accumulated
    values: torch.Tensor
    indices: torch.Tensor
    largest: torch.Tensor | None
    ends: torch.Tensor
    whole: torch.Tensor | None
    keeps: torch.Tensor | None

    @property
    def flat(self) -> torch.Tensor:
        return self.accumulated.flat

    def mask_velocity(self, sent: torch.Tensor) -> None:
        """Zero the velocity at the indices ``sent``, int64, unless the whole parameter is sent."""
        velocity = self.accumulated.velocity
        if velocity is None:
            return
        if self.whole is None:
            velocity.index_fill_(0, sent, 0.0)
            return
        kept = self.whole[torch.bucketize(sent, self.ends, right=True)]
        velocity[sent] = torch.where(kept, velocity[sent], 0.0)


def entry_bytes(dtype: torch.dtype, limit: int, count: int, half: bool) -> int:
    """Return the bytes of ``count`` values and their ascending indices, all below ``limit``, in a message.

    ``half``: float32 values are sent as float16, with one scale for all.
    """
    index_bytes = torch.int32.itemsize * int(kernels.packed_words(limit, count))
    if half and dtype == torch.float32:
        return torch.float32.itemsize + torch.float16.itemsize * count + index_bytes
    return dtype.itemsize * count + index_bytes


class Verdict:
    """Report that the kernel made from all ranks' messages; valid until the next step's."""

    def __init__(self, memory: torch.Tensor, places: tuple[int, ...]) -> None:
        finite, sources, used, differing, *_ = places
        self._finite = memory[finite : finite + 1].view(torch.bool)[0]
        self._sources = memory[sources:used].view(torch.int64)
        self._used = memory[used:differing].view(torch.bool)
        self._differing = memory[differing : differing + FINGERPRINT_BITS].view(torch.bool)

    def used(self) -> torch.Tensor:
        return self._used

    def finite(self) -> torch.Tensor:
        """Return whether all gradients were finite, and the sum over the ranks fits: a 0-d bool."""
        return self._finite

    def evidence(self) -> torch.Tensor:
        return self._sources

    def sources_in(self, evidence: torch.Tensor) -> list[int]:
        sources: list[int] = evidence.tolist()
        return sources

    def differing(self) -> torch.Tensor:
        return self._differing


class GatheredSum(RankSum):
    """Sum of gathered entries, computed by every rank. On a GPU it takes three kernels and a collective."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        super().__init__()
        self._communicator = communicator
        dtype, size, device = wide_dtype(bucket), communicator.size, bucket.device
        half = half and dtype == torch.float32
        name = str(dtype).removeprefix("torch.")
        layout = kernels.EntryLayout(len(bucket.names), FINGERPRINT_BITS, count, bucket.num_elements, name, half)
        places = layout.verdict_places(size)
        memory = GatheredMemory(bucket, communicator, layout.num_bytes)
        self._message, messages = memory.messages(layout.num_bytes)
        verdict = torch.zeros(places[-1], dtype=torch.uint8, device=device)
        self._gathered = kernels.Gathered(
            layout,
            size,
            messages=messages,
            indices=torch.empty(size * count, dtype=torch.int32, device=device),
            verdict=verdict,
        )
        self._verdict = Verdict(verdict, places)
        self._ends = to_device(torch.tensor(bucket.numels).cumsum(0), device)
        self._unused = UnusedCodes(device)
        self._scratch = kernels.Scratch()

    def send(self, selected: Selected, told: Told) -> Report:
        """Send and receive; leave in the sums what was not sent, and zero the velocity of what was."""
        taken = kernels.Taken(
            values=selected.values,
            indices=selected.indices,
            flat=selected.flat,
            finite=told.finite,
            largest=selected.largest,
            velocity=selected.accumulated.velocity,
            keeps=selected.keeps,
            fingerprint=told.fingerprint,
        )
        kernels.pack_entries(self._message, taken, self._gathered)
        self._unused.write(self._message, told.unused)
        self.bytes_sent += self._gathered.layout.num_bytes
        self._communicator.all_gather(self._gathered.messages, self._message)
        factor, most = selected.accumulated.factor, selected.accumulated.most
        kernels.unpack_entries(self._gathered, factor, most, scratch=self._scratch)
        return self._verdict

    def finite(self, report: Report, accumulated: Accumulated) -> torch.Tensor:
        return report.finite()

    def settle(self, outcome: Outcome) -> None:
        kernels.add_entries(
            self._gathered,
            outcome.factor,
            outcome.bucket.flat,
            outcome.states,
            finite=outcome.finite if isinstance(outcome.finite, torch.Tensor) else None,
            used=outcome.used,
            ends=self._ends,
            last_sources=outcome.last,
        )


class UnusedCodes:
    """Codes of unused parameters, written with one operation; the set of unused parameters rarely changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: tuple[int, ...] = ()
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    def write(self, message: torch.Tensor, unused: tuple[int, ...]) -> None:
        """Write the codes of the parameters ``unused`` to the beginning of ``message``."""
        if not unused:
            return
        if unused != self._unused:
            self._unused, self._places = unused, to_device(torch.tensor(unused), self._device)
        message.index_fill_(0, self._places, UNUSED)


class DenseSum(RankSum):
    """Sum of dense arrays that hold the entries among zeros."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int, half: bool) -> None:
        super().__init__()
        self._message = SummedMessage(bucket, communicator, bucket.num_elements)

    def send(self, selected: Selected, told: Told) -> Report:
        sent = selected.indices.long()
        self._message.values.zero_()
        self._message.values[sent] = selected.values
        selected.flat.index_fill_(0, sent, 0.0)
        selected.mask_velocity(sent)
        self.bytes_sent += self._message.num_bytes
        return self._message.all_reduce(told)

    def largest(self) -> torch.Tensor:
        return self._message.largest()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._message.values, factor, out=out)
