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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Operation
from pycomm.compression.codec import Accumulated, BaseCodec, seed_of, sum_of_maxima
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

    def decode(self, messages: Sequence[Arrays], out: torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        """Write the sum of ``messages``, computed in float32, times ``factor``, to float32 ``out``."""

    def add_up(
        self, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
    ) -> None:
        """Encode the sum of ``messages`` to ``arrays``, and add the rounding error to ``remainder``."""


FormOf = Callable[[int, int], Form]
"""Makes the form of a bucket's elements from one number up to another, which may be the same."""


def add_up_decoded(
    form: Form, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
) -> None:
    """Do what :meth:`Form.add_up` says, where one kernel cannot."""
    sums = torch.empty_like(remainder)
    form.decode(messages, sums)
    form.encode(sums, arrays, seed)
    remainder.add_(sums)


class Division:
    """Division of ``num_elements`` among ``hosts`` with equally many ranks each, as ``rank`` sees it.

    Attributes:
        lanes: the k-th ranks of all hosts, by k; the lane of ``rank`` is number ``lane``.
        per_lane: number of parts of a lane: 1, or with two hops one for each host.
        parts: elements of each part, lane by lane.
        owners: for each part, the ranks that send it to all. It is the sum of what they send.
        own: number of the part that ``rank`` sends to all.
        num_bytes: size of the longest part's message.
    """

    def __init__(self, hosts: Hosts, rank: int, num_elements: int, form: FormOf) -> None:
        self.lanes = list(zip(*hosts, strict=True))
        self.per_lane = len(hosts) if len(hosts) > _MOST_GATHERED else 1
        self.owners = [(p,) for lane in self.lanes for p in lane] if self.per_lane > 1 else self.lanes
        count = len(self.owners)
        self.parts = [slice(num_elements * i // count, num_elements * (i + 1) // count) for i in range(count)]
        self.lane = next(k for k, lane in enumerate(self.lanes) if rank in lane)
        self.own = next(i for i, owners in enumerate(self.owners) if rank in owners)
        self.forms = [form(part.start, part.stop) for part in self.parts]
        self._layouts = [Layout(0, tuple(each.arrays)) for each in self.forms]
        self.num_bytes = max(layout.num_bytes() for layout in self._layouts)

    def arrays_in(self, part: int, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays of a part in ``message``."""
        return self._layouts[part].arrays_in(message)

    def of_lane(self, lane: int) -> range:
        """Return the numbers of a lane's parts."""
        return range(lane * self.per_lane, (lane + 1) * self.per_lane)

    def share(self, lane: int) -> slice:
        """Return the elements of a lane's parts."""
        numbers = self.of_lane(lane)
        return slice(self.parts[numbers[0]].start, self.parts[numbers[-1]].stop)


class TwoHopCodec(BaseCodec):
    """Codec of messages that are gathered, or added up in two hops; see the module's docstring.

    Args:
        form: makes the form of a part.
        seed: round stochastically, by numbers that follow from it, the rank, the part and the step; ``None``: to the
            nearest.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, form: FormOf, seed: int | None = None) -> None:
        super().__init__()
        self._communicator, self._form, self._num_elements = communicator, form, bucket.num_elements
        rank, size = communicator.rank, communicator.size
        self._division = division = Division(_hosts_of(communicator, bucket), rank, bucket.num_elements, form)
        self._has_two_hops = division.per_lane > 1
        self._messages = GatheredMessages(bucket, communicator, [(torch.uint8, division.num_bytes)])
        self._mine = division.arrays_in(division.own, self._messages.mine[0])
        everyones = [message for (message,) in self._messages.everyones]
        self._sums = [
            [division.arrays_in(part, everyones[p]) for p in owners] for part, owners in enumerate(division.owners)
        ]
        num_bytes = division.per_lane * division.num_bytes if self._has_two_hops else 0
        # Zeros: the gaps between arrays travel too.
        self._sent, self._received = (
            communicator.empty(num_bytes, torch.uint8, bucket.device).zero_().view(-1, division.num_bytes)
            for _ in range(2)
        )
        self._seeds: Sequence[torch.Tensor | None] = [None] * (division.per_lane + 1)
        if seed is not None:  # of this rank's messages, and of its sums
            numbers = [seed_of(seed, rank + size * i, bucket) for i in range(len(self._seeds))]
            self._step_seeds = torch.tensor([[number, 0] for number in numbers], device=bucket.device)
            self._seeds = self._step_seeds.unbind()

    def begin(self, step: int | torch.Tensor) -> None:
        if self._seeds[0] is not None:
            self._step_seeds[:, 1].fill_(step)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat = accumulated.flat
        x = flat if flat.dtype == torch.float32 else flat.float()
        if x is not flat:
            flat.sub_(x)  # what float32 cannot hold stays here
        if len(self._division.lanes) > 1:
            self._add_up_on_host(x)
        if self._has_two_hops:
            self._add_up_own(x)
        else:
            own = self._division.own
            self._division.forms[own].encode(x[self._division.parts[own]], self._mine, self._seeds[0])
        if x is not flat:
            flat.add_(x)
        self.bytes_sent += max(0, len(self._sent) - 1) * self._division.num_bytes + self._messages.num_bytes
        return self._messages.gather(told)

    def _add_up_on_host(self, x: torch.Tensor) -> None:
        """Make this rank's share of ``x`` the sum over its host, and the others zero."""
        division = self._division
        shares = [x[division.share(lane)] for lane in range(len(division.lanes))]
        self._communicator.channel.run("reduce_on_host", False, shares)
        for lane, share in enumerate(shares):
            if lane != division.lane:
                share.zero_()

    def _add_up_own(self, x: torch.Tensor) -> None:
        """Do the first hop, and write this rank's sums to its message; leave all rounding errors in ``x``."""
        division = self._division
        numbers, lane = division.of_lane(division.lane), division.lanes[division.lane]
        for i, seed, message in zip(numbers, self._seeds, self._sent, strict=False):
            division.forms[i].encode(x[division.parts[i]], division.arrays_in(i, message), seed)
        if len(division.lanes) == 1:
            self._communicator.all_to_all(self._received, self._sent)
        else:
            outs, xs = dict(zip(lane, self._received, strict=True)), dict(zip(lane, self._sent, strict=True))
            ranks = range(self._communicator.size)
            self._communicator.channel.run(
                "all_to_all_v", False, [outs.get(p) for p in ranks], [xs.get(p) for p in ranks]
            )
        received = [division.arrays_in(division.own, message) for message in self._received]
        form, own = division.forms[division.own], division.parts[division.own]
        form.add_up(received, self._mine, x[own], self._seeds[-1])

    def largest(self) -> torch.Tensor:
        terms = zip(*self._sums, strict=True)  # of the sums of all parts
        return (
            sum_of_maxima([torch.cat([arrays[0] for arrays in term]) for term in terms]) * self._division.forms[0].top
        )

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for form, part, messages in zip(self._division.forms, self._division.parts, self._sums, strict=True):
            form.decode(messages, into[part], factor)
        if into is not out:
            out.copy_(into)

    def operations_among(self, size: int) -> list[Operation]:
        division = Division([(p,) for p in range(size)], 0, self._num_elements, self._form)
        gather = Operation("all_gather", division.num_bytes)
        hop = Operation("all_to_all", size * division.num_bytes)
        return [hop, gather] if division.per_lane > 1 else [gather]


def _hosts_of(communicator: Communicator, bucket: Bucket) -> Hosts:
    """Return the ranks by host; each as a host of its own if they are on one, on GPUs, or not equally distributed."""
    hosts = communicator.hosts
    if bucket.on_gpu or len(hosts) == 1 or len({len(ranks) for ranks in hosts}) > 1:
        return [(p,) for p in range(communicator.size)]
    return hosts
