"""Changes of parameters, which their owners send to all ranks in few bits.

ZeRO++ (Wang et al. 2023, section 3.1, "qwZ") gathers weights in 8 bits. Here the owner of a part sends how far its
parameters are from what all ranks have: that is far less than the weights, so the same bits resolve it far better. What
rounding leaves is kept and sent with the next change (error feedback). So an owner steps exact parameters, and those of
all ranks follow them within half a step of the format, with the same bits on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import laid_out_like
from pycomm.compression.messages import Layout
from pycomm.compression.methods.quantized import QuantizedForm
from pycomm.compression.two_hop import Form
from pycomm.torch_internals import version_of
from pycomm.training.reducer.buckets import BucketInFlight
from pycomm.training.reducer.partition.partition import Segment
from pycomm.training.reducer.settings import Sharding

_UNSENT = "unsent"
"""Key of what rounding has left of a parameter's changes, among its optimizer state."""


class ChangedParts:
    """Parts of parameters, one for each rank, whose changes are sent.

    Args:
        parts: the parts, flat float32.
        unsent: what rounding has left of the changes of this rank's own part; is updated.
        form: makes the form of that many elements in a message.
        order: ranks in the order in which their messages are to lie.
    """

    def __init__(
        self,
        communicator: Communicator,
        parts: Sequence[torch.Tensor],
        unsent: torch.Tensor,
        form: Callable[[int], Form],
        order: Sequence[int],
    ) -> None:
        self._communicator, self._parts, self._unsent = communicator, parts, unsent
        self._forms = [form(part.numel()) for part in parts]
        layouts = [Layout(0, tuple(each.arrays)) for each in self._forms]
        sizes = [layouts[p].num_bytes() for p in order]
        room = communicator.empty(sum(sizes), torch.uint8).zero_()  # the gaps between arrays travel too
        messages = dict(zip(order, torch.split(room, sizes), strict=True))
        self._messages = [messages[p] for p in range(len(parts))]
        self._arrays = [each.arrays_in(message) for each, message in zip(layouts, self._messages, strict=True)]
        self._own, self._known = parts[communicator.rank], torch.empty_like(unsent)

    def make_exact(self) -> None:
        """Add what has not been sent to this rank's own part, before it is stepped."""
        self._known.copy_(self._own)
        self._own.add_(self._unsent)

    def encode(self) -> None:
        """Write the message of this rank's own part, and make the part again what all ranks have."""
        torch.sub(self._own, self._known, out=self._unsent)
        self._own.copy_(self._known)
        rank = self._communicator.rank
        self._forms[rank].encode(self._unsent, self._arrays[rank], None)

    def gather(self) -> None:
        """Exchange the messages, and change all parts. Collective."""
        self._communicator.channel.all_gather_v(self._messages, self._messages[self._communicator.rank])
        for part, form, arrays in zip(self._parts, self._forms, self._arrays, strict=True):
            change = torch.empty_like(part)
            form.decode([arrays], change)
            part.add_(change)


class SentChanges:
    """Changes of the parameters that ``optimizer`` steps, sent in the form that ``shard.gather`` says, if it does.

    ``order``: see :class:`ChangedParts`.
    """

    def __init__(self, shard: Sharding | None, optimizer: torch.optim.Optimizer, order: Sequence[int]) -> None:
        self._gather = None if shard is None else shard.gather
        self._optimizer, self._order = optimizer, order
        self._segments: dict[BucketInFlight, Segment] = {}
        self._parts: dict[BucketInFlight, ChangedParts] = {}
        self._versions: dict[torch.Tensor, int] = {}  # since their changes were sent

    def adopt(self, flight: BucketInFlight, segment: Segment) -> None:
        """Send the changes of the parameters of ``flight``, which are in ``segment``, from now on."""
        if self._gather is not None and flight.bucket.dtype == torch.float32:
            self._segments[flight] = segment

    def make_exact(self) -> None:
        """Add what has not been sent to this rank's own parameters, before they are stepped."""
        for flight, segment in self._segments.items():
            self._renew(flight, segment)
            if flight not in self._parts:
                assert self._gather is not None
                form = functools.partial(QuantizedForm, self._gather.config)
                arguments = segment.parts_in(segment.own, segment.dtype), segment.own_state(_UNSENT), form
                self._parts[flight] = ChangedParts(flight.communicator, *arguments, self._order)
            self._parts[flight].make_exact()

    def _renew(self, flight: BucketInFlight, segment: Segment) -> None:
        """Drop what is unsent of parameters that were written to since, and take what the optimizer has loaded."""
        for slot in flight.slots:
            param, span = slot.param, segment.spans[slot.index]
            unsent = span.of(segment.home(slot.index, param, _UNSENT, torch.float32))
            if self._versions.get(param) != version_of(param):
                unsent.zero_()
            loaded = self._optimizer.state[param].pop(_UNSENT, None) if param in self._optimizer.state else None
            if loaded is not None:
                unsent.copy_(laid_out_like(loaded, param).view(-1)[slice(*span)])

    def encoded(self, flight: BucketInFlight) -> Callable[[], None] | None:
        """Write the message of this rank's own part; return a function that exchanges it, if changes are sent."""
        if flight not in self._parts:
            return None
        self._parts[flight].encode()
        self._versions.update((slot.param, version_of(slot.param)) for slot in flight.slots)
        return self._parts[flight].gather

    def finish(self, states: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
        """Add what is unsent to all parameters, of which ``states`` is the whole state."""
        with torch.no_grad():
            for param, state in states.items():
                if _UNSENT in state:
                    param.add_(state[_UNSENT])
        self._segments.clear()
        self._parts.clear()


def add_unsent(states: dict[int, dict[str, Any]], index: int, whole: Mapping[str, torch.Tensor]) -> None:
    """Add what is unsent of the ``index``-th parameter, of which ``whole`` is all state, to ``states``."""
    if _UNSENT in whole and bool(whole[_UNSENT].any()):
        states.setdefault(index, {})[_UNSENT] = whole[_UNSENT]
