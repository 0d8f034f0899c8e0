"""Reduction: exchanges that are begun together, run one by one, and judged and ended together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Flag, Scaling
from pycomm.compression.nonfinite import NonfiniteSource, Sent
from pycomm.optim.shards import Shards
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork

Grads = Sequence[torch.Tensor | None]


class Exchanging(Protocol):
    """Exchange of one bucket, or of several."""

    def pack(self, grads: Grads, scaling: Scaling) -> None: ...
    def send(self) -> None: ...


def all_finite(parts: Iterable[Sent], shards: Shards | None = None) -> torch.Tensor:
    """Return whether all that was received is finite, on all ranks of ``shards``: 0-d bool.

    Does not wait for a GPU. Collective over the ranks of ``shards``, if there are any.
    """
    flags = [torch.as_tensor(part.exchange.finite()) for part in parts]
    finite = torch.stack(flags).all() if flags else torch.tensor(True)
    return shards.all_agree(finite) if shards else finite


class Reduction:
    """Reductions of one engine, one after the other. It knows no hook, and no phase of a step.

    Args:
        communicator: the ranks.
        device: device of what is reduced.
        on_gpu: whether exchanges run on a stream of that device, and the host does not wait for them.

    Attributes:
        scaling: scales of the present reduction.
        source: rank and parameter of the last non-finite gradient.
        committed, nonfinite: numbers of reductions that have changed state, and of those that were not finite: 0-d
            int64 tensors on ``device``.
    """

    def __init__(self, communicator: Communicator, device: torch.device, *, on_gpu: bool) -> None:
        self._communicator, self._device, self._on_gpu = communicator, device, on_gpu
        self.scaling = Scaling(communicator.size)
        self._weigh: Callable[[], float] | None = None
        self.source = NonfiniteSource()
        self.committed = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    # On the thread of the engine.

    def begin(self, scaling: Scaling, weigh: Callable[[], float] | None = None) -> None:
        """Begin a reduction.

        Args:
            scaling: its scales.
            weigh: returns this rank's weight in place of ``scaling.relative``. Called as the first gradients are
                packed; it may be collective, and raise the same error on all ranks.
        """
        self.scaling, self._weigh = scaling, weigh
        if self._on_gpu:
            scaling.compute()

    def number(self) -> int | torch.Tensor:
        """Return how many reductions have changed state."""
        # A copy on a GPU: the count may be incremented before the GPU has read it for this reduction.
        return self.committed.clone() if self._on_gpu else int(self.committed)

    def submit(self, job: Callable[[], None], channel: Channel) -> Work | GpuWork:
        """Run ``job`` where gradients are sent: on the communication thread of ``channel``, or on its stream."""
        return channel.submit_on_gpu(self._device, job) if self._on_gpu else channel.submit(job)

    def pack(
        self,
        exchanging: Exchanging,
        grads: Grads,
        fingerprint: Callable[[], torch.Tensor] | None = None,
        *,
        frees: bool = False,
    ) -> None:
        """Take what is to be sent out of ``grads``. On a GPU on the stream that made them, otherwise where it is sent.

        Args:
            fingerprint: makes this rank's bits, to be sent with them.
            frees: see :class:`Scaling`.
        """
        if self._weigh is not None:
            self.begin(replace(self.scaling, relative=self._weigh()))
        scaling = self.scaling if fingerprint is None else replace(self.scaling, fingerprint=fingerprint())
        exchanging.pack(grads, replace(scaling, frees=True) if frees else scaling)

    # Where gradients are sent: on the communication thread of a channel, or on a stream.

    def exchange(
        self,
        exchanging: Exchanging,
        grads: Grads,
        channel: Channel | None = None,
        fingerprint: Callable[[], torch.Tensor] | None = None,
        *,
        is_compared: bool = False,
    ) -> None:
        """Pack and send ``grads``.

        Args:
            channel: channel whose communication thread this is; ``None`` on a thread of the engine.
            fingerprint: makes this rank's bits, to be sent with them.
            is_compared: whether ranks compare the first operation. It implies the others, as they agree on the order.
        """
        self.run(exchanging, lambda: self.pack(exchanging, grads, fingerprint), channel, is_compared=is_compared)

    def run(
        self, exchanging: Exchanging, pack: Callable[[], None], channel: Channel | None, *, is_compared: bool
    ) -> None:
        """Do what :meth:`exchange` does, where ``pack`` packs the gradients."""
        if self._weigh is not None:
            self.begin(replace(self.scaling, relative=self._weigh()))
        if self._on_gpu or channel is None:
            pack()
            exchanging.send()
            return
        with channel.skip_checks(but_first=is_compared):
            pack()
            exchanging.send()

    def share_source(self, parts: Iterable[Sent]) -> None:
        """Share which rank has a non-finite gradient. Collective, if any has one."""
        self.source.share(parts, self._communicator)

    # The end.

    def verdict(self, parts: Iterable[Sent], shards: Shards | None = None) -> Flag:
        """Return whether all that was received is finite, the same on all ranks. Does not wait for a GPU.

        Collective over the ranks of ``shards``, if there are any.
        """
        found = all_finite(parts, shards)
        finite: Flag = found if self._on_gpu else bool(found)
        self.source.count(finite)
        return finite

    def count(self, finite: Flag) -> None:
        """Count a reduction of methods with state."""
        found = torch.as_tensor(finite, device=self._device)
        self.committed += found
        self.nonfinite += ~found

    def stats(self, parts: Iterable[Sent], otherwise: str) -> dict[str, Any]:
        """Return ``nonfinite_steps``, and ``last_nonfinite``: ``otherwise`` if the source is not known. Waits."""
        number = int(self.nonfinite)
        return {"nonfinite_steps": number, "last_nonfinite": self.source.of(parts) or (otherwise if number else None)}
