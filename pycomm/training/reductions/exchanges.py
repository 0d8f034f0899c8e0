"""Exchanges of gradients that torch has sorted into buckets, with state that outlives the sorting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression, Exchange, Flag, Scaling, State
from pycomm.compression.dense import by_method

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class MethodPart:
    """Parameters of a bucket that use the same method."""

    indices: list[int]
    bucket: Bucket
    exchange: Exchange


class BucketExchanges:
    """Exchanges of a bucket that torch has built: for the parameters that a method applies to, and for the others.

    Args:
        params: the bucket's parameters, in the order in which its buffer holds their gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        method: Compression,
        communicator: Communicator,
        algorithm: str,
    ) -> None:
        self.params, self.names = list(params), list(names)
        self.parts = []
        for chosen, indices in by_method(method, params):
            bucket = Bucket([names[i] for i in indices], [params[i] for i in indices], communicator, algorithm)
            self.parts.append(MethodPart(indices, bucket, chosen.make(bucket, communicator)))

    def is_of(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the exchanges of ``params``, in that order."""
        return len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))

    def lie_in(self, buffer: torch.Tensor) -> None:
        """Keep the averages in ``buffer``, which holds the gradients, so that neither is copied.

        Done if one method has all parameters, in the order in which they lie there.
        """
        if len(self.parts) == 1 and self._is_usual():
            self.parts[0].exchange.lie_in(buffer)

    def _is_usual(self) -> bool:
        # Torch reads another tensor than its own by the present strides of the parameters.
        return all(t.is_contiguous() for t in [*self.parts[0].bucket.places, *self.params])

    def pack(self, grads: Gradients, scaling: Scaling) -> None:
        """Take what is to be sent out of ``grads`` (``None``: not used on this rank)."""
        for part in self.parts:
            part.exchange.pack([grads[i] for i in part.indices], scaling)

    def send(self) -> None:
        """Send it, and receive from all ranks."""
        for part in self.parts:
            part.exchange.send()

    def finish(self, finite: Flag) -> None:
        """Commit state if ``finite``; write the averages, and zeros for what no rank used."""
        for part in self.parts:
            part.exchange.finish(finite)
            # Its residual has not been sent either, as no rank had a gradient.
            for place, used in zip(part.bucket.places, part.exchange.used(), strict=True):
                if not used:
                    place.zero_()

    def averages(self, buffer: torch.Tensor, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the averages, flat, in the order of ``params``, perhaps in ``buffer``; ``grads`` are views of it."""
        if len(self.parts) == 1 and self._is_usual():
            return self.parts[0].bucket.flat
        self.write(grads)
        return buffer

    def write(self, grads: Sequence[torch.Tensor]) -> None:
        """Copy the averages to ``grads``, one tensor for each parameter."""
        for part in self.parts:
            torch._foreach_copy_([grads[i] for i in part.indices], part.bucket.places)

    def state(self) -> State:
        """Return the state of the exchanges (not copied)."""
        return {name: entry for part in self.parts for name, entry in part.exchange.state().items()}

    def load_state(self, state: State) -> None:
        """Load a result of :meth:`state`; missing parameters keep their state."""
        for part in self.parts:
            part.exchange.load_state(state)


class ExchangesByIndex:
    """Exchanges by the number of torch's bucket, recreated when torch rebuilds its buckets.

    DistributedDataParallel does so after its first backward pass, in the order in which gradients arrived. State
    then moves with its parameter to the new bucket.

    Args:
        names: the parameters' names, by ``id``.
    """

    def __init__(
        self, names: Mapping[int, str], method: Compression, communicator: Communicator, algorithm: str
    ) -> None:
        self._names, self._method = names, method
        self._communicator, self._algorithm = communicator, algorithm
        self._by_index: dict[int, BucketExchanges] = {}
        self._homeless: State = {}  # state of parameters whose new bucket does not exist yet
        self._bytes_sent = 0  # by exchanges that have been replaced

    def __len__(self) -> int:
        return len(self._by_index)

    def __getitem__(self, index: int) -> BucketExchanges:
        return self._by_index[index]

    def of(self, index: int, params: Sequence[torch.Tensor]) -> BucketExchanges:
        """Return the exchanges of bucket ``index`` with ``params``; recreate them if its parameters have changed."""
        found = self._by_index.get(index)
        if found is not None and found.is_of(params):
            return found
        for number in [number for number in self._by_index if number >= index]:
            old = self._by_index.pop(number)
            self._homeless.update(old.state())
            self._bytes_sent += sum(part.exchange.bytes_sent for part in old.parts)
        return self.make(index, [self._name_of(param) for param in params], params)

    def make(self, index: int, names: Sequence[str], params: Sequence[torch.Tensor]) -> BucketExchanges:
        """Return new exchanges of bucket ``index`` with ``params``, which have these ``names``."""
        made = BucketExchanges(names, params, self._method, self._communicator, self._algorithm)
        made.load_state({name: self._homeless.pop(name) for name in names if name in self._homeless})
        self._by_index[index] = made
        return made

    def _name_of(self, param: torch.Tensor) -> str:
        try:
            return self._names[id(param)]
        except KeyError:
            raise ValueError(
                f"a parameter of shape {list(param.shape)} was added to the model after register(), so its name is "
                "unknown: remove() the handle and register again"
            ) from None

    def parts(self) -> Iterator[MethodPart]:
        for exchanges in self._by_index.values():
            yield from exchanges.parts

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to the transport."""
        return self._bytes_sent + sum(part.exchange.bytes_sent for part in self.parts())

    def state(self) -> State:
        """Return the state of all parameters, by name (not copied)."""
        state = dict(self._homeless)
        for exchanges in self._by_index.values():
            state.update(exchanges.state())
        return state

    def load_state(self, state: State) -> None:
        """Load a result of :meth:`state`; missing parameters keep their state."""
        for name, entry in self._homeless.items():
            for key, tensor in entry.items():
                if key in state.get(name, {}):
                    tensor.copy_(state[name][key])
        for exchanges in self._by_index.values():
            exchanges.load_state(state)

    def clear(self) -> None:
        self._by_index.clear()
        self._homeless.clear()
