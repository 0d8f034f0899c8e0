"""Exchange with error feedback and momentum correction, around any codec.

The gradient, as this rank's contribution to the average, is added to the residual of earlier steps. A
codec sends a part of the sum; the rest is the next residual (Seide et al. 2014; Stich et al.,
"Sparsified SGD with Memory", 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019). With
momentum correction (Lin et al., "Deep Gradient Compression", 2018, section 3.1) a second state, the
velocity, is added instead of the gradient.

Transactional: the sum is written to the gradient's own memory, so the old residual is untouched until
every rank's step is known to be finite. Then the two buffers are swapped: the rest of the sum becomes
the residual, and the old residual's memory receives the averaged gradient. A new velocity is written
beside the old one. Beyond the gradients this takes 4 bytes per element, with momentum 12, and no copy.
On a GPU the host does not know whether the step is finite. So the buffers are always swapped, and after
a non-finite step a kernel copies the old state back. A CUDA graph keeps addresses: while one is captured, and
from then on, the new state is copied to where the old one was.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing, laid_out_like
from pycomm.compression.base import Flag, Method, Operation, Scaling, State, as_flag
from pycomm.compression.codec import Accumulated, BaseCodec, Outcome, Summands, wide_dtype
from pycomm.compression.report import Report, Told
from pycomm.logs import prefix


def check_ratio(value: object) -> None:
    """Check ``ratio``, a fraction. The integer 1 may be meant as a percentage: rank 0 says once what it does."""
    checks.fraction("ratio", value)
    if isinstance(value, int) and prefix() in ("[pycomm]", "[pycomm rank 0]"):
        _log_once("ratio=1 sends all; 0.01 is 1 %")


@functools.cache
def _log_once(line: str) -> None:
    logging.getLogger("pycomm").warning("%s", line)


@dataclass(frozen=True)
class Correction:
    """Changes to a gradient before it is added to the residual; see :class:`pycomm.DGC`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None


class CodecExchange:
    """Exchange of a bucket through a codec, with the bucket's residuals and velocities.

    Args:
        codec: may be replaced by another between steps.
        keep_residual: keep what was not sent, and add it to the next gradients.
        correction: changes to gradients before they are added.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: BaseCodec,
        keep_residual: bool = True,
        correction: Correction | None = None,
    ) -> None:
        self._bucket = bucket
        self._size = communicator.size
        self.codec = codec
        self._correction = Correction() if correction is None else correction
        # State of half-precision gradients is float32, and so are the sums: they require memory of their own. The same
        # holds if the bucket's memory is another's, because sums become the residual.
        dtype = wide_dtype(bucket)
        shares_memory = dtype == bucket.dtype and not bucket.has_flags_apart

        def memory() -> torch.Tensor:
            return communicator.empty(bucket.memory.numel(), dtype, bucket.device)

        self._residual = memory().zero_() if keep_residual else None
        self._own_sums = None if shares_memory else memory()
        self._velocity = memory().zero_() if self._correction.momentum else None
        self._new_velocity = memory() if self._correction.momentum else None
        self._report: Report | None = None
        self._accumulated: Accumulated | None = None
        self._told: Told | None = None
        self._kept: torch.Tensor | None = None  # the old residual, where buffers cannot be swapped
        self._has_graph = False  # whether a CUDA graph knows the addresses of state
        self._finite = torch.tensor(True)
        self._last: tuple[Report, torch.Tensor] | None = None  # and its evidence, of the last step that was not finite
        self._all_used_here, self._measures = True, False
        self._measured: tuple[torch.Tensor, torch.Tensor] | None = None  # squared norms, before and after sending
        self._accumulate_scratch, self._finish_scratch = kernels.Scratch(), kernels.Scratch()

    transactional = True

    @property
    def _sums(self) -> torch.Tensor:
        return self._bucket.memory if self._own_sums is None else self._own_sums

    @property
    def bytes_sent(self) -> int:
        return self.codec.bytes_sent

    def lie_in(self, buffer: torch.Tensor) -> None:
        if self._own_sums is None:
            self._own_sums = self._bucket.memory
        self._bucket.lie_in(buffer)

    def pack(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket, is_used = self._bucket, None
        if scaling.zeros_are_unused and bucket.on_gpu:
            norms = torch._foreach_norm([grad for grad in grads if grad is not None], math.inf)
            is_used = torch.stack(norms) != 0.0
        elif scaling.zeros_are_unused:
            grads = [grad if grad is not None and bool(grad.any()) else None for grad in grads]
        unused = tuple(i for i, grad in enumerate(grads) if grad is None)
        assert is_used is None or not unused
        self._all_used_here = not unused
        if unused:  # counts as zeros: what is left from earlier steps still goes out
            torch._foreach_zero_([bucket.places[i] for i in unused])
        raws = [
            laid_out_like(place if grad is None else grad, place)
            for grad, place in zip(grads, bucket.places, strict=True)
        ]
        self.codec.begin(scaling.step)
        flat, velocity = self._flat(self._sums), self._optional_flat(self._new_velocity)
        options = {**self._corrections(scaling, velocity), "scratch": self._accumulate_scratch}
        residual = self._optional_flat(self._residual)
        finite = self.codec.accumulate(Summands(flat, residual, raws, scaling.to_state, options, self._measures))
        self._accumulated = Accumulated(flat, velocity, scaling.from_state, torch.finfo(bucket.dtype).max)
        self._told = Told(unused, finite, scaling.fingerprint, is_used)

    def send(self) -> None:
        assert self._accumulated is not None
        assert self._told is not None
        flat, measures, self._measures = self._accumulated.flat, self._measures, False
        before = kernels.squared_norms([flat]) if measures else None
        self._report = self.codec.send(self._accumulated, self._told)
        self._finite = self.codec.finite(self._report, self._accumulated)
        if before is not None:
            self._measured = before, kernels.squared_norms([flat])

    def _corrections(self, scaling: Scaling, velocity: torch.Tensor | None) -> dict[str, Any]:
        config, bucket = self._correction, self._bucket
        options: dict[str, Any] = {}
        if velocity is not None:
            assert self._velocity is not None
            old = self._flat(self._velocity)
            options["momentum"] = kernels.Momentum(velocity, old, config.momentum, config.nesterov)
        if config.weight_decay:
            weights = [laid_out_like(p, place) for p, place in zip(bucket.params(), bucket.places, strict=True)]
            options["decay"] = kernels.Decay(weights, config.weight_decay * scaling.weight)
        if config.clip_norm is not None:
            options["clip"] = config.clip_norm / math.sqrt(self._size)
        return options

    def finite(self) -> Flag:
        return as_flag(self._finite, self._bucket)

    def differing(self) -> torch.Tensor:
        assert self._report is not None
        return self._report.differing()

    def used(self) -> list[bool]:
        if self._all_used_here:
            return [True] * len(self._bucket.names)
        assert self._report is not None
        used: list[bool] = self._report.used().tolist()
        return used

    def nonfinite_source(self) -> str | None:
        numbers = [] if self._last is None else self._last[0].sources_in(self._last[1])
        found = ((rank, number) for rank, number in enumerate(numbers) if number)
        return next((f"parameter {self._bucket.names[number - 1]!r} on rank {rank}" for rank, number in found), None)

    def _last_evidence(self) -> torch.Tensor:
        """Return the evidence of the last step that was not finite, to be written to; zeros if there was none."""
        assert self._report is not None
        now = self._report.evidence()
        last = torch.zeros_like(now) if self._last is None else self._last[1]
        if last.shape != now.shape or last.dtype != now.dtype:  # the codec was replaced
            last = torch.zeros_like(now)
        self._last = self._report, last
        return last

    def finish(self, finite: Flag) -> None:
        assert self._report is not None
        # What is accumulated is a view of the bucket's memory, which otherwise looks as if a user kept it.
        accumulated, self._accumulated = self._accumulated, None
        if isinstance(finite, torch.Tensor) or finite:
            assert accumulated is not None
            factor = accumulated.factor
            del accumulated
            self._commit(finite, factor)
        else:
            self._last_evidence().copy_(self._report.evidence())
            self._bucket.flat.fill_(math.nan)

    def _commit(self, finite: Flag, factor: float | torch.Tensor) -> None:
        """Make the new state current and write the averages; if ``finite`` is a false tensor, the codec undoes it."""
        assert self._report is not None
        assert self._told is not None
        self._has_graph = self._has_graph or (self._bucket.on_gpu and is_capturing())
        states = []
        if self._velocity is not None and self._new_velocity is not None:
            self._velocity, self._new_velocity = self._new_velocity, self._velocity
            states.append((self._flat(self._velocity), self._flat(self._new_velocity)))
        if self._residual is not None:
            self._swap_residual()
            states.append((self._flat(self._residual), self._flat(self._sums)))
        self.codec.commit(finite)
        outcome = Outcome(
            bucket=self._bucket,
            sums=self._flat(self._sums),
            factor=factor,
            states=states,
            finite=finite,
            used=None if self._all_used_here and self._told.is_used is None else self._report.used(),
            report=self._report,
            last=self._last_evidence(),
            scratch=self._finish_scratch,
        )
        self.codec.settle(outcome)
        if self._told.is_used is not None and outcome.used is not None:  # what earlier steps left was sent for nothing
            for place, used in zip(self._bucket.places, outcome.used, strict=True):
                place.masked_fill_(~used, 0.0)
        if self._has_graph:
            self._move_back()

    def _swap_residual(self) -> None:
        """Make the rest of the sums the next residual; the old residual's memory will receive the averages.

        If somebody holds a reference to the gradients, or a graph knows their addresses, both must stay where they are,
        which takes a copy.
        """
        old, sums = self._residual, self._sums
        assert old is not None
        if self._own_sums is None and (self._has_graph or self._bucket.is_kept()):
            self._kept = old.clone() if self._kept is None else self._kept.copy_(old)
            old.copy_(sums)
            sums.copy_(self._kept)
            return
        if self._own_sums is None:
            self._bucket.use(old)
        else:
            self._own_sums = old
        self._residual = sums

    def _move_back(self) -> None:
        """Copy the state that was swapped to where the next launch of a graph reads it."""
        if self._velocity is not None and self._new_velocity is not None:
            self._velocity, self._new_velocity = self._new_velocity.copy_(self._velocity), self._velocity
        if self._residual is not None and self._own_sums is not None:
            self._residual, self._own_sums = self._own_sums.copy_(self._residual), self._residual

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation] | None:
        return self.codec.operations_among(size, per_host)

    def stats(self) -> dict[str, int]:
        return self.codec.stats()

    def measure_next(self) -> None:
        self._measures = True

    def measured(self) -> tuple[float, float] | None:
        if self._measured is None:
            return None
        there_was, left = self._measured
        return float(there_was), float(left)

    def squared_residual(self) -> float | None:
        return None if self._residual is None else float(kernels.squared_norms([self._flat(self._residual)]))

    def state(self) -> State:
        state = {name: dict(entry) for name, entry in self.codec.state().items()}
        for key, memory in (("residual", self._residual), ("velocity", self._velocity)):
            if memory is None:
                continue
            for name, place in zip(self._bucket.names, self._bucket.places_in(memory), strict=True):
                state.setdefault(name, {})[key] = place
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


class StatefulMethod(Method):
    """Base of methods that carry state: parameters of one dimension are sent dense."""

    @property
    def transactional(self) -> bool:
        return True

    def applies_to(self, param: torch.Tensor) -> bool:
        return param.dim() > 1 and param.numel() > 0


class CodecMethod(StatefulMethod):
    """Base of methods that consist of a codec, with error feedback or without."""

    @property
    def error_feedback(self) -> bool:
        """Whether what was not sent is kept, and added to the next gradient."""
        return True

    def codec(self, bucket: Bucket, communicator: Communicator) -> BaseCodec:
        """Make the codec of ``bucket``."""
        raise NotImplementedError

    def correction(self) -> Correction:
        """Return how gradients are changed before anything is sent of them."""
        return Correction()

    def make(self, bucket: Bucket, communicator: Communicator) -> CodecExchange:
        codec = self.codec(bucket, communicator)
        return CodecExchange(bucket, communicator, codec, self.error_feedback, self.correction())
