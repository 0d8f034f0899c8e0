"""Sums over the ranks of messages with few bits per element: gathered, or in two hops.

Among one or two hosts every rank gathers the messages of all and adds them up. Values are rounded once. From three
hosts on the elements are cut into parts, each with an owner, and the sum has two hops:

1. Each rank encodes its elements part by part, and sends each part to its owner (an all-to-all).
2. The owner adds up what it received in float32 and encodes the sum, and all ranks gather the sums.

A rank sends 2 (P - 1) / P of the size of one message for any number P of ranks. Values are rounded twice: by the
sender, and by the owner of their sum. (ZeRO++, Wang et al. 2023, section 3.3; 1-bit Adam, Tang et al. 2021, section
4.3. The schedule is "direct".)

With error feedback the sender's rounding error stays in its residual. The owner adds the error of the sum to its own
residual, at its own part. So there is no second state: what was sent and the residuals of all ranks still add up to all
gradients, a step that is not finite commits neither error, and another number of ranks loads both as one residual.

Between several hosts of L > 1 ranks each, the ranks of a host first add up in float32 through shared memory. The k-th
of each host gets the k-th of L parts, with all residuals of its host there, and goes on with the k-th ranks of the
other hosts. So a link between hosts carries each part once. If hosts have different numbers of ranks, and on GPUs,
each rank counts as a host.

Where a step is divided among the ranks (ZeRO), each requires the sum of its own part alone: then there is the first hop
only, whatever the number of hosts, and values are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Operation
from pycomm.compression.codec import Accumulated, BaseCodec, Summands, seed_of, sum_of_maxima
from pycomm.compression.messages import GatheredMessages, Layout
from pycomm.compression.report import Report, Told

_MOST_GATHERED = 2
"""Number of hosts up to which gathering all messages takes no more bytes than two hops."""

Hosts = Sequence[Sequence[int]]
Arrays = Sequence[torch.Tensor]


class Form(Protocol):
    """Form of some elements in a message.

    Attributes:
        arrays: dtype and length of each array. ``top`` times the largest element of the first one, which is float32,
            bounds all magnitudes.
    """

    arrays: Sequence[tuple[torch.dtype, int]]
    top: float

    def encode(self, x: torch.Tensor, arrays: Arrays, seed: torch.Tensor | None) -> None:
        """Write float32 ``x`` to ``arrays``, and leave the rounding error in ``x``.

        ``seed``: two int64 numbers that stochastic rounding follows from; ``None``: round to the nearest.
        """

    def accumulate(self, parts: Sequence[EncodedPart], summands: Summands) -> torch.Tensor:
        """Accumulate, encode ``parts`` of the sums, and leave the rounding errors there if there is a residual.

        All parts have forms like this one.
        """

    def decode(self, messages: Sequence[Arrays], out: torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        """Write the sum of ``messages``, computed in float32, times ``factor``, to float32 ``out``."""

    def add_up(
        self, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
    ) -> None:
        """Encode the sum of ``messages`` to ``arrays``, and add the rounding error to ``remainder``."""


@dataclass(frozen=True)
class EncodedPart:
    """Elements ``where`` of a bucket, and the arrays of their message; ``seed`` as for :meth:`Form.encode`."""

    where: slice
    form: Form
    arrays: Arrays
    seed: torch.Tensor | None


FormOf = Callable[[int, int], Form]
"""Makes the form of a bucket's elements from one number up to another, which may be the same."""


def add_up_decoded(
    form: Form, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
) -> None:
    """Do the work of :meth:`Form.add_up` in two kernels, where one kernel cannot."""
    sums = torch.empty_like(remainder)
    form.decode(messages, sums)
    form.encode(sums, arrays, seed)
    remainder.add_(sums)


class Division:
    """Division of ``num_elements`` among ``hosts`` with equally many ranks each, as ``rank`` sees it.

    Args:
        shares: the elements that each rank is to own; ``None``: equal parts, or none where messages are gathered.

    Attributes:
        lanes: the k-th ranks of all hosts, by k; the lane of ``rank`` is number ``lane``.
        per_lane: number of parts of a lane: 1, or if parts have owners one for each host.
        parts: elements of each part, lane by lane.
        owners: for each part, the ranks that send it to all. It is the sum of what they send.
        own: number of the part that ``rank`` sends to all, or keeps.
        sizes: size of each part's message in bytes.
    """

    def __init__(
        self, hosts: Hosts, rank: int, num_elements: int, form: FormOf, shares: Sequence[slice] | None = None
    ) -> None:
        self.lanes = list(zip(*hosts, strict=True))
        has_owners = shares is not None or len(hosts) > _MOST_GATHERED
        self.per_lane = len(hosts) if has_owners else 1
        self.owners = [(p,) for lane in self.lanes for p in lane] if has_owners else self.lanes
        count = len(self.owners)
        self.parts = [slice(num_elements * i // count, num_elements * (i + 1) // count) for i in range(count)]
        if shares is not None:
            self.parts = [shares[p] for (p,) in self.owners]
        self.lane = next(k for k, lane in enumerate(self.lanes) if rank in lane)
        self.own = next(i for i, owners in enumerate(self.owners) if rank in owners)
        self.forms = [form(part.start, part.stop) for part in self.parts]
        self._layouts = [Layout(0, tuple(each.arrays)) for each in self.forms]
        self.sizes = [layout.num_bytes() for layout in self._layouts]

    def arrays_in(self, part: int, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays of a part in ``message``."""
        return self._layouts[part].arrays_in(message)

    def of_lane(self, lane: int) -> range:
        """Return the numbers of a lane's parts."""
        return range(lane * self.per_lane, (lane + 1) * self.per_lane)

    def share(self, lane: int) -> slice:
        """Return the elements of a lane's parts, which are adjacent if there are several lanes."""
        numbers = self.of_lane(lane)
        return slice(self.parts[numbers[0]].start, self.parts[numbers[-1]].stop)


class _Seeds:
    """Pairs of numbers that the stochastic rounding of ``count`` messages follows from; ``None`` without ``seed``."""

    def __init__(self, bucket: Bucket, communicator: Communicator, seed: int | None, count: int) -> None:
        self._pairs: torch.Tensor | None = None
        self.of: Sequence[torch.Tensor | None] = [None] * count
        if seed is not None:
            numbers = [seed_of(seed, communicator.rank + communicator.size * i, bucket) for i in range(count)]
            self._pairs = torch.tensor([[number, 0] for number in numbers], device=bucket.device)
            self.of = self._pairs.unbind()

    def begin(self, step: int | torch.Tensor) -> None:
        """Use the random numbers of ``step``."""
        if self._pairs is not None:
            self._pairs[:, 1].fill_(step)


class FirstHop:
    """Messages of a lane's ranks to the owners of its parts.

    Args:
        sizes: room for the message of each part of the lane, in bytes.

    Attributes:
        parts: those that this rank encodes.
        received: the arrays of this rank's own part, from every rank of the lane, after :meth:`run`.
        num_bytes: what this rank sends to others.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, division: Division, sizes: Sequence[int], seeds: _Seeds
    ) -> None:
        self._communicator = communicator
        numbers, self._lane = division.of_lane(division.lane), division.lanes[division.lane]
        self._are_equal = len(division.lanes) == 1 and len(set(sizes)) == 1
        own = sizes[division.own - numbers[0]]
        # Zeros: the gaps between arrays travel too.
        self._sent, self._room = (
            communicator.empty(num_bytes, torch.uint8, bucket.device).zero_()
            for num_bytes in (sum(sizes), len(sizes) * own)
        )
        self._messages = torch.split(self._sent, list(sizes))
        self._incoming = torch.split(self._room, [own] * len(sizes))
        self.received = [division.arrays_in(division.own, message) for message in self._incoming]
        self.num_bytes = sum(sizes) - own
        self.parts = [
            EncodedPart(division.parts[i], division.forms[i], division.arrays_in(i, message), seed)
            for i, seed, message in zip(numbers, seeds.of, self._messages, strict=False)
        ]

    def run(self) -> None:
        """Send the encoded ``parts``, and receive."""
        if self._are_equal:
            self._communicator.all_to_all(self._room, self._sent)
            return
        outs, xs = (dict(zip(self._lane, each, strict=True)) for each in (self._incoming, self._messages))
        ranks = range(self._communicator.size)
        self._communicator.channel.run("all_to_all_v", False, [outs.get(p) for p in ranks], [xs.get(p) for p in ranks])


@contextmanager
def _sent_of(flat: torch.Tensor, communicator: Communicator, division: Division) -> Iterator[torch.Tensor]:
    """Yield what is to be sent of ``flat``, float32; what is left of it goes back to ``flat``.

    Of several lanes, this rank's share is the sum over its host, and the others are zero.
    """
    x = flat if flat.dtype == torch.float32 else flat.float()
    if x is not flat:
        flat.sub_(x)  # what float32 cannot hold stays here
    if len(division.lanes) > 1:
        shares = [x[division.share(lane)] for lane in range(len(division.lanes))]
        communicator.channel.run("reduce_on_host", False, shares)
        for lane, share in enumerate(shares):
            if lane != division.lane:
                share.zero_()
    yield x
    if x is not flat:
        flat.add_(x)


@contextmanager
def _float32_of(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield float32 memory that is written to ``out``: itself, if it has that dtype."""
    into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    yield into
    if into is not out:
        out.copy_(into)


class _DividedCodec(BaseCodec):
    """Base of codecs of a division. ``_parts``: those that this rank encodes of its sums.

    Args:
        seed: round stochastically, by numbers that follow from it, the rank, the part and the step; ``None``: to the
            nearest.
        num_sums: number of sums that are rounded as well.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, form: FormOf, seed: int | None, num_sums: int
    ) -> None:
        super().__init__()
        self._bucket, self._communicator, self._form = bucket, communicator, form
        hosts = _hosts_of(communicator, bucket)
        self._division = Division(hosts, communicator.rank, bucket.num_elements, form, bucket.shares)
        self._seeds = _Seeds(bucket, communicator, seed, self._division.per_lane + num_sums)
        self._parts: list[EncodedPart] = []
        self._is_encoded = False

    def begin(self, step: int | torch.Tensor) -> None:
        self._seeds.begin(step)

    def accumulate(self, summands: Summands) -> torch.Tensor:
        # What float32 cannot hold, and sums over a host, come between.
        is_float32, is_alone = summands.acc.dtype == torch.float32, len(self._division.lanes) == 1
        self._is_encoded = is_float32 and is_alone and not summands.whole
        if not self._is_encoded:
            return super().accumulate(summands)
        return self._parts[0].form.accumulate(self._parts, summands)

    def _encode(self, x: torch.Tensor) -> None:
        """Encode the parts of ``x``, unless that has been done; leave the rounding errors in ``x``."""
        if not self._is_encoded:
            for part in self._parts:
                part.form.encode(x[part.where], part.arrays, part.seed)


class TwoHopCodec(_DividedCodec):
    """Codec of messages that are gathered, or added up in two hops; see the module's docstring."""

    def __init__(self, bucket: Bucket, communicator: Communicator, form: FormOf, seed: int | None = None) -> None:
        super().__init__(bucket, communicator, form, seed, num_sums=1)
        division = self._division
        longest = max(division.sizes)
        self._messages = GatheredMessages(bucket, communicator, [(torch.uint8, longest)])
        self._mine = division.arrays_in(division.own, self._messages.mine[0])
        everyones = [message for (message,) in self._messages.everyones]
        self._sums = [
            [division.arrays_in(part, everyones[p]) for p in owners] for part, owners in enumerate(division.owners)
        ]
        self.top = division.forms[0].top
        self._hop: FirstHop | None = None
        if division.per_lane > 1:
            self._hop = FirstHop(bucket, communicator, division, [longest] * division.per_lane, self._seeds)
            self._parts = self._hop.parts
        else:
            own = division.own
            self._parts = [EncodedPart(division.parts[own], division.forms[own], self._mine, self._seeds.of[0])]

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        division, hop = self._division, self._hop
        form, own = division.forms[division.own], division.parts[division.own]
        with _sent_of(accumulated.flat, self._communicator, division) as x:
            self._encode(x)
            if hop is not None:
                hop.run()
                form.add_up(hop.received, self._mine, x[own], self._seeds.of[-1])
                self.bytes_sent += hop.num_bytes
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(told)

    def largest(self) -> torch.Tensor:
        if self._hop is None and len(self._division.lanes) == 1:  # one part, of which every rank sends as much
            rows = self._messages.rows(self._mine[0].nbytes).view(torch.float32)
            return rows.amax(dim=1).sum(dtype=torch.float64)
        terms = zip(*self._sums, strict=True)  # of the sums of all parts
        return sum_of_maxima([torch.cat([arrays[0] for arrays in term]) for term in terms])

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        with _float32_of(out) as into:
            for form, part, messages in zip(self._division.forms, self._division.parts, self._sums, strict=True):
                form.decode(messages, into[part], factor)

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation]:
        num_elements, per_host = self._bucket.num_elements, per_host if per_host < size else 1
        hosts = [range(first, first + per_host) for first in range(0, size, per_host)]
        division = Division(hosts, 0, num_elements, self._form)
        longest, found = max(division.sizes), []
        if per_host > 1:
            found.append(Operation("reduce_on_host", 4 * num_elements))
        if division.per_lane > 1:
            found.append(Operation("all_to_all", division.per_lane * longest, per_host))
        return [*found, Operation("all_gather", longest)]


class OwnPartCodec(_DividedCodec):
    """Codec of messages that are added up by the owners of the bucket's shares, who keep the sums: the first hop alone.

    Of the other ranks' parts, zeros are written.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, form: FormOf, seed: int | None = None) -> None:
        super().__init__(bucket, communicator, form, seed, num_sums=0)
        division = self._division
        numbers = division.of_lane(division.lane)
        self._hop = FirstHop(bucket, communicator, division, [division.sizes[i] for i in numbers], self._seeds)
        self._parts = self._hop.parts
        self._bounds = GatheredMessages(bucket, communicator, [(torch.float64, 1)])  # of all parts, with the reports

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        with _sent_of(accumulated.flat, self._communicator, self._division) as x:
            self._encode(x)
        self._hop.run()
        form, first = self._division.forms[self._division.own], [arrays[0] for arrays in self._hop.received]
        (bound,) = self._bounds.mine
        bound.copy_(sum_of_maxima(first) * form.top if first[0].numel() > 0 else torch.zeros(()))
        self.bytes_sent += self._hop.num_bytes + self._bounds.num_bytes
        return self._bounds.gather(told)

    def largest(self) -> torch.Tensor:
        return torch.cat([bound for (bound,) in self._bounds.everyones]).max()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        own = self._division.parts[self._division.own]
        out[: own.start].zero_()
        out[own.stop :].zero_()
        with _float32_of(out[own]) as into:
            self._division.forms[self._division.own].decode(self._hop.received, into, factor)


def summing_codec(
    bucket: Bucket, communicator: Communicator, form: FormOf, seed: int | None = None
) -> TwoHopCodec | OwnPartCodec:
    """Return the codec that gives every rank the sums of ``bucket``, or each rank the sums of its own share."""
    kind = TwoHopCodec if bucket.shares is None else OwnPartCodec
    return kind(bucket, communicator, form, seed)


def _hosts_of(communicator: Communicator, bucket: Bucket) -> Hosts:
    """Return the ranks by host; each as a host of its own if they are on one, on GPUs, or not equally distributed."""
    hosts = communicator.hosts
    if bucket.on_gpu or len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1:
        return [(p,) for p in range(communicator.size)]
    return hosts
