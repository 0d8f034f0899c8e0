"""Top-k sparsification with error feedback.

Per parameter: what was not sent so far is added to the new gradient, the k largest magnitudes of the
sum are sent as (value, index), the rest is kept for the next step (Stich et al., "Sparsified SGD with
Memory", 2018; Lin et al., "Deep Gradient Compression", 2017, section 3.1, without momentum
correction). Selection is exact: ties go to the lowest index.

Transactional: the sum goes into the gradient's own memory, so the old residual is untouched until
every rank's step is known to be finite. Then the two memories change places: the sum, without what
was sent, becomes the residual, and the old residual's memory holds the averaged gradient. Beyond the
gradients that takes one residual, and no copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import kernels
from pycomm.communicator import Communicator
from pycomm.compression.base import Scaling
from pycomm.compression.bucket import Bucket, laid_out_like

_UNUSED, _USED, _NOT_FINITE = 0, 1, 2


class Payload:
    """Views into one message: a code per parameter, then all values, then all indices."""

    def __init__(self, memory: torch.Tensor, num_params: int, total: int, dtype: torch.dtype) -> None:
        codes_bytes = -(-num_params // 8) * 8
        values_end = codes_bytes + total * dtype.itemsize
        self.codes = memory[:num_params]
        self.values = memory[codes_bytes:values_end].view(dtype)
        self.indices = memory[values_end : values_end + 4 * total].view(torch.int32)

    @staticmethod
    def num_bytes(num_params: int, total: int, dtype: torch.dtype) -> int:
        return -(-(-(-num_params // 8) * 8 + total * (dtype.itemsize + 4)) // 8) * 8


class TopKExchange:
    """One bucket: the residuals of its parameters and the message they make."""

    def __init__(self, bucket: Bucket, communicator: Communicator, ratio: float, error_feedback: bool) -> None:
        self.bytes_sent = 0
        self._bucket = bucket
        self._communicator = communicator
        self._counts = [max(1, round(ratio * n)) for n in bucket.numels]
        # Residuals of half-precision gradients are float32, and so is the sum: they need memory of their own.
        self._dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        self._shares_memory = self._dtype == bucket.dtype
        size, total = communicator.size, sum(self._counts)
        memory_like_bucket = (bucket.memory.numel(), self._dtype)
        self._residual = communicator.empty(*memory_like_bucket).zero_() if error_feedback else None
        self._wide = bucket.memory if self._shares_memory else communicator.empty(*memory_like_bucket)
        num_bytes = Payload.num_bytes(len(bucket.names), total, self._dtype)
        self._mine = communicator.empty(num_bytes, torch.uint8)
        self._everyone = torch.empty(size * num_bytes, dtype=torch.uint8)
        self._payloads = [
            Payload(memory, len(bucket.names), total, self._dtype) for memory in torch.split(self._everyone, num_bytes)
        ]
        self._scaling = Scaling(weight=1.0 / size)

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket = self._bucket
        self._scaling = scaling
        mine = Payload(self._mine, len(bucket.names), sum(self._counts), self._dtype)
        pieces = self._pieces()
        sums = self._bucket.parts(self._wide)
        residuals: list[torch.Tensor | None] = [None] * len(sums)
        if self._residual is not None:
            residuals[:] = bucket.parts(self._residual)
        for i, (k, grad) in enumerate(zip(self._counts, grads, strict=True)):
            # A gradient that is not there counts as zeros: what is left from earlier steps still goes out.
            raw = laid_out_like(bucket.views[i].zero_() if grad is None else grad, bucket.views[i])
            finite = kernels.accumulate(sums[i], residuals[i], raw, scaling.weight / scaling.loss_scale)
            mine.codes[i] = _UNUSED if grad is None else _USED if finite else _NOT_FINITE
            kernels.topk(sums[i], k, out=(mine.values[pieces[i]], mine.indices[pieces[i]]))
        self._communicator.all_gather(self._everyone, self._mine)
        self.bytes_sent += self._mine.nbytes

    def finite(self) -> bool:
        if any((payload.codes == _NOT_FINITE).any() for payload in self._payloads):
            return False
        # Finite terms can still overflow in the sum, or once the loss scale is back: no rank may commit then.
        factor = self._scaling.result * self._scaling.loss_scale
        largest = sum(kernels.absmax([payload.values]).item() for payload in self._payloads)
        return bool(largest * factor <= torch.finfo(self._bucket.dtype).max)

    def used(self) -> list[bool]:
        used = torch.stack([payload.codes for payload in self._payloads]).any(dim=0)
        return [bool(flag) for flag in used.tolist()]

    def blame(self) -> str | None:
        for rank, payload in enumerate(self._payloads):
            for name, code in zip(self._bucket.names, payload.codes.tolist(), strict=True):
                if code == _NOT_FINITE:
                    return f"parameter {name!r} on rank {rank}"
        return None

    def finish(self, finite: bool) -> None:
        bucket = self._bucket
        if not finite:
            bucket.flat.fill_(math.nan)
            return
        if self._residual is not None:
            mine = self._payloads[self._communicator.rank]
            for part, used, piece in zip(bucket.parts(self._wide), self.used(), self._pieces(), strict=True):
                if used:  # else nothing of it is applied anywhere, and the sum is the residual as it was
                    part[mine.indices[piece].long()] = 0.0
            self._wide, self._residual = self._residual, self._wide
        self._wide.zero_()
        factor = self._scaling.result * self._scaling.loss_scale
        averages = self._bucket.parts(self._wide)
        for payload in self._payloads:
            for average, piece in zip(averages, self._pieces(), strict=True):
                kernels.scatter_add(average, payload.indices[piece], payload.values[piece], factor)
        if self._shares_memory:
            bucket.use(self._wide)
        else:
            kernels.unpack(self._wide[: bucket.num_elements], [bucket.flat])

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        if self._residual is None:
            return {}
        return {
            name: {"residual": _shaped(part, view)}
            for name, part, view in zip(
                self._bucket.names, self._bucket.parts(self._residual), self._bucket.views, strict=True
            )
        }

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        for name, entry in self.state().items():
            if name in state:
                entry["residual"].copy_(state[name]["residual"])

    def _pieces(self) -> list[slice]:
        """Where each parameter's values and indices lie in a payload."""
        pieces, offset = [], 0
        for k in self._counts:
            pieces.append(slice(offset, offset + k))
            offset += k
        return pieces


def _shaped(part: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """``part`` with the shape and memory order of ``view``."""
    return part.as_strided(view.shape, view.stride())


@dataclass(frozen=True)
class TopK:
    """The k entries of largest magnitude per parameter, k = max(1, round(ratio * n)), as index + value.

    One-dimensional parameters (biases, norms) travel dense. Costs 8 bytes per entry sent (12 for
    float64), gathered by every rank.

    Args:
        ratio: fraction of the entries to send, in (0, 1].
        error_feedback: keep what was not sent and add it to the next gradient. Without it most
            models do not train; the switch is there for comparisons.

    Raises:
        ValueError: ``ratio`` outside (0, 1]. TypeError: it is no number.
    """

    ratio: float
    _: KW_ONLY
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float):
            raise TypeError(f"ratio is {self.ratio!r}, wanted a number in (0, 1]")
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ratio is {self.ratio}, wanted 0 < ratio <= 1")

    transactional = True

    def applies_to(self, param: torch.Tensor) -> bool:
        return param.dim() > 1 and param.numel() > 0

    def make(self, bucket: Bucket, communicator: Communicator) -> TopKExchange:
        return TopKExchange(bucket, communicator, self.ratio, self.error_feedback)
