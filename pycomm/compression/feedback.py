"""Error feedback, and momentum correction, around any way to send something of a sum.

The gradient, as this rank's contribution to the average, is added to what earlier steps left (the
residual); a ``Wire`` sends something of the sum and leaves the rest, which is the next residual
(Seide et al. 2014; Stich et al., "Sparsified SGD with Memory", 2018; Karimireddy et al., "Error
Feedback Fixes SignSGD", 2019). With momentum correction (Lin et al., "Deep Gradient Compression",
2018, section 3.1) what is added is the velocity, a second state.

Transactional: the sum goes into the gradient's own memory, so the old residual is untouched until
every rank's step is known to be finite. Then the two memories change places: what is left of the sum
becomes the residual, and the old residual's memory holds the averaged gradient. A new velocity is
written beside the old one. Beyond the gradients that takes 4 bytes per element, with momentum 12,
and no copy. On a GPU, where the host does not know whether the step is finite, the memories change
places in any case, and a kernel that does nothing after finite steps copies the old state back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Method, Scaling, State, as_flag
from pycomm.compression.report import Report, codes_of
from pycomm.layout import laid_out_like


@dataclass(frozen=True)
class Correction:
    """What happens to a gradient before it is added to the residual; see :class:`pycomm.DGC`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True)
class Sums:
    """Where a wire finds what it may send of, one flat tensor for the bucket: float32 or float64.

    Attributes:
        flat: the sums of residual and gradient. The wire leaves what it has not sent.
        velocity: where entries are sent, it may be zeroed (momentum factor masking); or ``None``.
    """

    flat: torch.Tensor
    velocity: torch.Tensor | None


class Wire(Protocol):
    """A way to send something of a bucket's sums. On a GPU nothing here waits, but where it says so."""

    @property
    def bytes_sent(self) -> int: ...

    def begin(self, number: int | torch.Tensor) -> None:
        """A step begins, the one of that number (see :class:`Scaling`)."""

    def accumulate(self, acc: torch.Tensor, residual: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
        """:func:`pycomm.kernels.accumulate`, and what can be done in the same pass."""

    def send(self, sums: Sums, codes: torch.Tensor) -> Report:
        """Send, receive from all, take out of ``sums`` what was sent; ``codes`` and those of all come back."""

    def largest(self) -> torch.Tensor:
        """A bound on the magnitudes that :meth:`write` would give with factor 1; 0-d float64."""

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Write the sum over the ranks of what they sent, times ``factor``, to flat ``out``."""

    def commit(self, finite: Flag) -> None:
        """Make what state there is the next step's, if ``finite``."""

    def stats(self) -> dict[str, int]: ...

    def state(self) -> State: ...


class PlainWire:
    """What wires have in common that accumulate and nothing else, and carry no state."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def begin(self, number: int | torch.Tensor) -> None:
        pass

    def accumulate(self, acc: torch.Tensor, residual: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
        finite: torch.Tensor = kernels.accumulate(acc, residual, *args, **options)
        return finite

    def commit(self, finite: Flag) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}

    def state(self) -> State:
        return {}


def wide_dtype(bucket: Bucket) -> torch.dtype:
    """Of sums and state: float32, float64 for gradients of that."""
    return torch.float64 if bucket.dtype == torch.float64 else torch.float32


class FeedbackExchange:
    """One bucket: its residuals, its velocities, and the wire.

    Args:
        wire: may be another from one step to the next.
        feedback: whether what was not sent is kept.
        correction: what happens to the gradients first.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        wire: Wire,
        feedback: bool = True,
        correction: Correction | None = None,
    ) -> None:
        self._bucket = bucket
        self._size = communicator.size
        self.wire = wire
        self._correction = Correction() if correction is None else correction
        # State of half-precision gradients is float32, and so are the sums: they need memory of their own.
        dtype = wide_dtype(bucket)
        shares_memory = dtype == bucket.dtype

        def memory() -> torch.Tensor:
            return communicator.empty(bucket.memory.numel(), dtype, bucket.device)

        self._residual = memory().zero_() if feedback else None
        self._own_sums = None if shares_memory else memory()
        self._velocity = memory().zero_() if self._correction.momentum else None
        self._new_velocity = memory() if self._correction.momentum else None
        self._scaling = Scaling(communicator.size)
        self._report: Report | None = None
        self._kept: torch.Tensor | None = None  # the old residual, where memories cannot change places
        self._guilty = torch.zeros(communicator.size, dtype=torch.int64, device=bucket.device)
        self._all_used_here = True
        self._accumulate_scratch, self._finish_scratch = kernels.Scratch(), kernels.Scratch()

    transactional = True

    @property
    def _sums(self) -> torch.Tensor:
        return self._bucket.memory if self._own_sums is None else self._own_sums

    @property
    def bytes_sent(self) -> int:
        return self.wire.bytes_sent

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket = self._bucket
        self._scaling = scaling
        self._all_used_here = all(grad is not None for grad in grads)
        # A gradient that is not there counts as zeros: what is left from earlier steps still goes out.
        raws = [
            laid_out_like(view.zero_() if grad is None else grad, view)
            for grad, view in zip(grads, bucket.views, strict=True)
        ]
        self.wire.begin(scaling.number)
        flat, velocity = self._flat(self._sums), self._optional_flat(self._new_velocity)
        finite = self.wire.accumulate(
            flat,
            self._optional_flat(self._residual),
            raws,
            scaling.to_state(),
            **self._corrections(raws, scaling, velocity),
            scratch=self._accumulate_scratch,
        )
        self._report = self.wire.send(Sums(flat, velocity), codes_of(grads, finite, scaling.fingerprint))

    def _corrections(self, raws: list[torch.Tensor], scaling: Scaling, velocity: torch.Tensor | None) -> dict[str, Any]:
        how, bucket = self._correction, self._bucket
        options: dict[str, Any] = {}
        if velocity is not None:
            assert self._velocity is not None
            old = self._flat(self._velocity)
            options["momentum"] = kernels.Momentum(velocity, old, how.momentum, how.nesterov)
        if how.weight_decay:
            weights = [laid_out_like(p, view) for p, view in zip(bucket.params(), bucket.views, strict=True)]
            options["decay"] = kernels.Decay(weights, how.weight_decay * scaling.weight)
        if how.clip_norm is not None:
            norms = torch.stack([torch.linalg.vector_norm(raw, dtype=wide_dtype(bucket)) for raw in raws])
            most = how.clip_norm / math.sqrt(self._size)
            # Of a zero the quotient is inf, of what is not finite NaN or 0: min and the sums keep all of that right.
            options["factors"] = (most / (norms * scaling.to_state())).clamp(max=1.0).float()
        return options

    def finite(self) -> Flag:
        assert self._report is not None
        # Finite terms can still overflow in the sum, or once the loss scale is back: no rank may commit then.
        fits = self.wire.largest() * self._scaling.from_state() <= torch.finfo(self._bucket.dtype).max
        return as_flag(self._report.finite() & fits, self._bucket)

    def differing(self) -> torch.Tensor:
        assert self._report is not None
        return self._report.differing()

    def used(self) -> list[bool]:
        if self._all_used_here:
            return [True] * len(self._bucket.names)
        assert self._report is not None
        used: list[bool] = self._report.used().tolist()
        return used

    def blame(self) -> str | None:
        for rank, number in enumerate(self._guilty.tolist()):
            if number:
                return f"parameter {self._bucket.names[number - 1]!r} on rank {rank}"
        return None

    def finish(self, finite: Flag) -> None:
        assert self._report is not None
        factor = self._scaling.from_state()
        if isinstance(finite, torch.Tensor):
            self._guilty = torch.where(finite, self._guilty, self._report.guilty())
            one = torch.ones((), dtype=torch.float64, device=finite.device)  # two numbers would get the default dtype
            self._commit(finite, torch.where(finite, one * factor, math.nan).float())
        elif finite:
            self._commit(finite, factor)
        else:
            self._guilty = self._report.guilty()
            self._bucket.flat.fill_(math.nan)

    def _commit(self, finite: Flag, factor: float | torch.Tensor) -> None:
        """What is new becomes the state, unless ``finite`` is a tensor that says no; averages times ``factor``.

        ``factor`` is NaN where the step is not finite: then what was sent comes out as NaN.
        """
        self._keep_what_nobody_used()
        if self._velocity is not None and self._new_velocity is not None:
            self._velocity, self._new_velocity = self._new_velocity, self._velocity
            self._go_back(self._velocity, self._new_velocity, finite)
        if self._residual is not None:
            self._swap_residual()
            self._go_back(self._residual, self._sums, finite)
        self.wire.commit(finite)
        self.wire.write(self._flat(self._sums), factor)
        if self._own_sums is not None:
            kernels.unpack(self._flat(self._own_sums), [self._bucket.flat])

    def _swap_residual(self) -> None:
        """What is left of the sums is the next residual; the old one's memory takes the averages.

        Where somebody keeps the gradients that are written in place, they stay where they are, which takes a copy.
        """
        old, sums = self._residual, self._sums
        assert old is not None
        if self._own_sums is None and self._bucket.is_kept():
            self._kept = old.clone() if self._kept is None else self._kept.copy_(old)
            old.copy_(sums)
            sums.copy_(self._kept)
            return
        if self._own_sums is None:
            self._bucket.use(old)
        else:
            self._own_sums = old
        self._residual = sums

    def _go_back(self, new: torch.Tensor, old: torch.Tensor, finite: Flag) -> None:
        if isinstance(finite, torch.Tensor):
            kernels.pack([old], new, unless=finite, scratch=self._finish_scratch)

    def _keep_what_nobody_used(self) -> None:
        """Where no rank had a gradient, nothing is applied anywhere, and state stays."""
        if self._all_used_here:
            return
        assert self._report is not None
        used = self._report.used()
        for new, old in ((self._sums, self._residual), (self._new_velocity, self._velocity)):
            if new is None or old is None:
                continue
            parts = zip(self._bucket.parts(new), self._bucket.parts(old), used, strict=True)
            for part, before, any_rank in parts:
                torch.where(any_rank, part, before, out=part)

    def stats(self) -> dict[str, int]:
        return self.wire.stats()

    def state(self) -> State:
        state = {name: dict(entry) for name, entry in self.wire.state().items()}
        for key, memory in (("residual", self._residual), ("velocity", self._velocity)):
            if memory is None:
                continue
            parts = zip(self._bucket.names, self._bucket.parts(memory), self._bucket.views, strict=True)
            for name, part, view in parts:
                state.setdefault(name, {})[key] = part.as_strided(view.shape, view.stride())
        return state

    def load_state(self, state: State) -> None:
        for name, entry in self.state().items():
            for key, tensor in entry.items():
                if key in state.get(name, {}):
                    tensor.copy_(state[name][key])

    def _flat(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[: self._bucket.num_elements]

    def _optional_flat(self, memory: torch.Tensor | None) -> torch.Tensor | None:
        return None if memory is None else self._flat(memory)


class FeedbackMethod(Method):
    """What methods around a :class:`FeedbackExchange` have in common: parameters of one dimension travel dense."""

    @property
    def transactional(self) -> bool:
        return True

    def applies_to(self, param: torch.Tensor) -> bool:
        return param.dim() > 1 and param.numel() > 0


def each(tensors: Sequence[torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A float64 tensor of what ``function`` makes of each."""
    return torch.stack([function(tensor) for tensor in tensors]).double()
