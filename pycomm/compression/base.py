"""Interface between compression methods and the reducer.

One reduction has three parts. ``pack`` takes what is to be sent out of the gradients, and ``send`` sends it and
receives. Both run on the communication thread while backward still computes; on a GPU ``pack`` runs on the stream that
made the gradients, which may be freed at once, and ``send`` on the communication stream. Neither changes state, since a
gradient elsewhere may be non-finite. ``finish`` runs once every bucket has been sent and it is known whether the step
is finite on all ranks; only ``finish`` changes state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator


@dataclass(frozen=True)
class Scaling:
    """Scaling of one reduction, and the bits that its ranks must agree on.

    Attributes:
        size: number of ranks.
        relative: weight of this rank, where 1 is the weight of an average rank.
        clip: factor that bounds the norm of this rank's gradient, applied first. On a GPU a 0-d float32
            tensor there, so that the host need not wait for it.
        loss_scale: factor that the loss was multiplied by; state is kept without it. On a GPU a tensor too.
        average: whether ``.grad`` receives the average over the ranks; if not, the sum.
        step: number of finite, and so committed, steps before this one. On a GPU a 0-d int64 tensor
            there. Schedules and random numbers depend on it alone, so a non-finite step does not
            affect them.
        fingerprint: bits that must be equal on all ranks: ``FINGERPRINT_BITS`` bools, on the bucket's
            device. ``None``, on all ranks or none: nothing is compared.
        zeros_are_unused: whether a gradient of zeros may belong to a parameter that this rank has not used, which
            makes a difference to methods with state.
        frees: whether gradients are freed once they have been packed: an exchange then refers to none of them.
    """

    size: int
    relative: float = 1.0
    clip: float | torch.Tensor = 1.0
    loss_scale: float | torch.Tensor = 1.0
    average: bool = True
    step: int | torch.Tensor = 0
    fingerprint: torch.Tensor | None = None
    zeros_are_unused: bool = False
    frees: bool = False

    @property
    def weight(self) -> float:
        """Factor that turns this rank's clipped gradient into its contribution to the average."""
        return self.relative / self.size

    @cached_property
    def local(self) -> float | torch.Tensor:
        """Factor to apply to this rank's gradient before the plain mean over the ranks."""
        return self.relative * self.clip

    @property
    def result(self) -> float:
        """Factor that turns the average into ``.grad``."""
        return 1.0 if self.average else float(self.size)

    @cached_property
    def contribution(self) -> float | torch.Tensor:
        """Factor that turns this rank's gradient into its contribution to the average. Computed once, too."""
        return self.weight * self.clip

    @cached_property
    def to_state(self) -> float | torch.Tensor:
        """Factor that brings a gradient into the units of state. Computed once for all buckets of a step."""
        return self.contribution / self.loss_scale

    @cached_property
    def from_state(self) -> float | torch.Tensor:
        """Factor that turns a sum over the ranks, in units of state, into ``.grad``. Computed once, too."""
        return self.result * self.loss_scale

    def compute(self) -> None:
        """Compute the factors that are tensors now, on the current stream: later streams only read them."""
        _ = self.local, self.contribution, self.to_state, self.from_state


Flag = bool | torch.Tensor
"""Truth value; for buckets on a GPU a 0-d bool tensor there, so that the host need not wait to know it."""

State = dict[str, dict[str, torch.Tensor]]
"""Tensors by parameter name, then by the name of the state."""


@dataclass(frozen=True)
class Operation:
    """Collective that a rank takes part in, and how many bytes it hands over.

    Attributes:
        kind: "all_reduce", "all_gather" or "all_to_all"; or "reduce_on_host", in which the ranks of a host sum arrays
            through shared memory, each a part.
        lanes: number of sets of ranks, one rank of each host, among which an all-to-all takes place side by side.
    """

    kind: str
    num_bytes: int
    lanes: int = 1


class Exchange(Protocol):
    """Reduction of one bucket, with its state. On a GPU a method waits only where its docstring says so."""

    @property
    def transactional(self) -> bool:
        """Whether ``finish`` depends, in this step, on whether the step is finite. Equal on all ranks."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to the transport."""

    def lie_in(self, buffer: torch.Tensor) -> None:
        """Leave the averages of later steps in ``buffer``, which holds all gradients in the order of the bucket.

        No gradient may then be ``None``: ranks need not share which ones were used.
        """

    def pack(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        """Take what is to be sent out of ``grads`` (``None``: unused on this rank).

        On a GPU, memory that is allocated here and used by :meth:`send` must live until the next call.
        """

    def send(self) -> None:
        """Send what was packed, and receive from all ranks; on the communication thread, or stream."""

    def finite(self) -> Flag:
        """Return whether everything this bucket received, from every rank, is finite. Equal on all ranks."""

    def differing(self) -> torch.Tensor:
        """Return, for each bit of the fingerprint, whether ranks differ in it: bool. Equal on all ranks."""

    def finish(self, finite: Flag) -> None:
        """Leave the gradients in the bucket's views; commit state if all buckets are ``finite``."""

    def used(self) -> list[bool]:
        """Return, for each parameter, whether any rank had a gradient. Waits if this rank lacks one.

        On a GPU a gradient of zeros counts as one, even if ``Scaling.zeros_are_unused``.
        """

    def nonfinite_source(self) -> str | None:
        """Name the parameter and rank that made the last non-finite step non-finite, if known. Waits."""

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation] | None:
        """Return the collectives that the last step would need among ``size`` ranks on hosts of ``per_host`` each.

        ``None`` if the collectives that it used are right for any number of ranks.
        """

    def stats(self) -> dict[str, int]:
        """Return the method's own counters, which add up over buckets. Waits."""

    def measure_next(self) -> None:
        """Measure in the next exchange how much it leaves unsent, which reads the gradients twice more."""

    def measured(self) -> tuple[float, float] | None:
        """Return two squared norms of the last measured exchange: of what it had to send, and of what it left unsent.

        They add up over buckets; ``None`` if nothing was measured. Waits.
        """

    def squared_residual(self) -> float | None:
        """Return the squared norm of the residual, which is read for it; ``None`` if none is kept. Waits."""

    def state(self) -> State:
        """Return what is carried from step to step (not copied)."""

    def load_state(self, state: State) -> None:
        """Load what :meth:`state` returned; missing entries stay as they are."""


@runtime_checkable
class Compression(Protocol):
    """Compression method with its settings."""

    @property
    def transactional(self) -> bool:
        """Whether its exchanges carry state, which a step that is not finite must not touch."""

    @property
    def otherwise(self) -> Compression | None:
        """Method for the parameters that this one does not apply to; ``None``: they travel as they are."""

    @property
    def sent_fraction(self) -> float:
        """Approximate number of bytes sent for each byte of a gradient; at most 1."""

    @property
    def clip_norm(self) -> float | None:
        """Norm to which each rank clips its own gradient of each parameter, times the root of the number of ranks."""

    @property
    def clip_local_norm(self) -> float | None:
        """Norm to which each rank clips its own whole gradient before anything is sent; ``None``: it does not."""

    @property
    def measures(self) -> bool:
        """Whether its exchanges measure the link, which nothing else may use meanwhile."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if the method does not suit ``optimizer``, and say what to do."""

    def applies_to(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` travels by this method."""

    def make(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """Make the exchange of a bucket of parameters that the method applies to."""


class Defaults:
    """Base of exchanges and codecs: no state, no counters, the same operations among any number of ranks."""

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation] | None:
        return None

    def stats(self) -> dict[str, int]:
        return {}

    def measure_next(self) -> None:
        pass

    def measured(self) -> tuple[float, float] | None:
        return None

    def squared_residual(self) -> float | None:
        return None

    def state(self) -> State:
        return {}


class Method:
    """Base of methods: suits every optimizer and parameter, and carries no state."""

    clip_norm: float | None = None
    clip_local_norm: float | None = None
    measures = False
    reduces_parts = False
    """Whether its exchanges give each rank the sum of its own share alone, if the bucket has shares."""

    @property
    def transactional(self) -> bool:
        return False

    @property
    def otherwise(self) -> Compression | None:
        return None

    @property
    def sent_fraction(self) -> float:
        return 1.0

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def applies_to(self, param: torch.Tensor) -> bool:
        return True


def as_flag(finite: torch.Tensor, bucket: Bucket) -> Flag:
    """Return ``finite`` as a bool, or as it is if ``bucket`` is on a GPU."""
    return finite if bucket.on_gpu else bool(finite)


def method_stats(exchanges: Iterable[Exchange], earlier: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the sums of the exchanges' counters, and of ``earlier`` ones, and the miss rate of selection."""
    total = dict(earlier or {})
    for exchange in exchanges:
        for key, value in exchange.stats().items():
            total[key] = total[key] + value if key in total else value
    if total.get("selections"):
        total["miss_rate"] = total["selections_missed"] / total["selections"]
    return total
