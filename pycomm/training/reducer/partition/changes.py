"""Changes of parameters, which their owners send to all ranks in few bits.

ZeRO++ (Wang et al. 2023, section 3.1, "qwZ") gathers weights in 8 bits. Here the owner of a part sends how far its
parameters are from what all ranks have: that is far less than the weights, so the same bits resolve it far better. What
rounding leaves is kept and sent with the next change (error feedback). So an owner steps exact parameters, and those of
all ranks follow them within half a step of the format, with the same bits on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.compression.messages import Layout
from pycomm.compression.two_hop import Form

UNSENT = "unsent"
"""Key of what rounding has left of a parameter's changes, among its optimizer state."""


class ChangedParts:
    """Parts of parameters, one for each rank, whose changes are sent.

    Args:
        communicator: the ranks.
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
