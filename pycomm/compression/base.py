"""What a compression method is to the reducer.

One reduction runs in two halves. ``exchange`` runs on the communication thread while backward still
computes; it may change nothing that a non-finite gradient elsewhere would forbid. ``finish`` runs
once every bucket has been exchanged and it is known whether the step is finite on all ranks; only
there does state change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.fingerprint import differing_places


@dataclass(frozen=True)
class Scaling:
    """The units of one reduction, and what its ranks must have in common.

    Attributes:
        size: how many ranks there are.
        relative: how much this rank counts, where 1 is as much as the average rank.
        clip: what this rank's gradient is multiplied with beforehand, so that its norm is in bounds. On
            a GPU a 0-d float32 tensor there, so that nobody waits for it.
        loss_scale: what the loss was multiplied by; state is kept without it. As ``clip``.
        average: whether ``.grad`` gets the average over the ranks, or ``size`` times that, the sum.
        number: of the step: how many were finite, and so committed, before it. On a GPU a 0-d int64
            tensor there. What changes in the course of training, and random numbers, follow from it:
            a step that is not finite leaves no trace in them.
        fingerprint: bits that are to be equal on all ranks: ``FINGERPRINT_BITS`` bools, where the bucket
            lies. ``None``, on all ranks alike: nothing is compared.
    """

    size: int
    relative: float = 1.0
    clip: float | torch.Tensor = 1.0
    loss_scale: float | torch.Tensor = 1.0
    average: bool = True
    number: int | torch.Tensor = 0
    fingerprint: torch.Tensor | None = None

    @property
    def weight(self) -> float:
        """A gradient in bounds times this is this rank's contribution to the average."""
        return self.relative / self.size

    @property
    def local(self) -> float | torch.Tensor:
        """A gradient times this is what the ranks' plain mean is of."""
        return self.relative * self.clip

    @property
    def result(self) -> float:
        """The average times this is what ``.grad`` gets."""
        return 1.0 if self.average else float(self.size)

    def to_state(self) -> float | torch.Tensor:
        """A gradient times this is what state is made of."""
        return self.weight * self.clip / self.loss_scale

    def from_state(self) -> float | torch.Tensor:
        """A sum over the ranks of what state is made of, times this, is what ``.grad`` gets."""
        return self.result * self.loss_scale


Flag = bool | torch.Tensor
"""A 0-d bool tensor on the GPU for buckets there: the host must not wait to know it. A bool for others."""

State = dict[str, dict[str, torch.Tensor]]
"""Parameter name -> name of the state -> tensor."""


class Exchange(Protocol):
    """One bucket's way over the wire, with its state. On a GPU nothing here waits, but where it says so."""

    @property
    def transactional(self) -> bool:
        """Whether it must know, in this step, if the step is finite before it finishes. Equal on all ranks."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to the transport."""

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        """Send ``grads`` (``None``: unused here) and receive; on the communication thread, or stream."""

    def finite(self) -> Flag:
        """Whether all that this bucket brought, from every rank, is finite. Equal on all ranks."""

    def differing(self) -> torch.Tensor:
        """For each bit of the fingerprint, whether ranks differ in it: bool. Equal on all ranks."""

    def finish(self, finite: Flag) -> None:
        """Leave the gradients in the bucket's views and commit state, if ``finite``: every bucket is, everywhere."""

    def used(self) -> list[bool]:
        """For each parameter, whether any rank had a gradient. Waits where this rank lacks one."""

    def blame(self) -> str | None:
        """Where the non-finite values of the last step that had any came from, if known. Waits."""

    def stats(self) -> dict[str, int]:
        """Counters of this method's own, which add up over buckets. Waits."""

    def state(self) -> State:
        """What is carried from step to step (not copied)."""

    def load_state(self, state: State) -> None:
        """Take back what :meth:`state` gave; entries that are missing stay as they are."""


@runtime_checkable
class Compression(Protocol):
    """A method and its settings."""

    @property
    def transactional(self) -> bool:
        """Whether its exchanges carry state, which a step that is not finite must not touch."""

    @property
    def otherwise(self) -> Compression | None:
        """How parameters travel that this one does not apply to; ``None``: as they are."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError where the method does not go with ``optimizer``; says what to do."""

    def applies_to(self, param: torch.Tensor) -> bool:
        """Whether ``param`` travels this way."""

    def make(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """The way of one bucket, whose parameters it applies to."""


class Method:
    """What most methods have in common: they suit every optimizer and parameter, and carry no state."""

    @property
    def transactional(self) -> bool:
        return False

    @property
    def otherwise(self) -> Compression | None:
        return None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def applies_to(self, param: torch.Tensor) -> bool:
        return True


def as_flag(finite: torch.Tensor, bucket: Bucket) -> Flag:
    return finite if bucket.on_gpu else bool(finite)


class DenseExchange:
    """The gradients as they are: one in-place all-reduce of the bucket."""

    transactional = False

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self.bytes_sent = 0
        self._bucket = bucket
        self._communicator = communicator
        self._all_used_here = True

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        self._all_used_here = all(grad is not None for grad in grads)
        self._bucket.gather(grads, scaling.local, scaling.fingerprint)
        op = "mean" if scaling.average else "sum"
        self._communicator.all_reduce(self._bucket.memory, op, self._bucket.algorithm)
        self.bytes_sent += self._bucket.memory.nbytes

    def finite(self) -> Flag:
        return as_flag(self._bucket.finite(), self._bucket)

    def differing(self) -> torch.Tensor:
        return differing_places(self._bucket.fingerprint_places)

    def finish(self, finite: Flag) -> None:
        pass

    def used(self) -> list[bool]:
        if self._all_used_here:
            return [True] * len(self._bucket.names)
        return [flag != 0.0 for flag in self._bucket.used_flags.tolist()]

    def blame(self) -> str | None:
        return None

    def stats(self) -> dict[str, int]:
        return {}

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass
