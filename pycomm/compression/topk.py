"""Top-k sparsification with error feedback.

Per parameter: what was not sent so far is added to the new gradient, the k largest magnitudes of the
sum are sent as (value, index), the rest is kept for the next step (Stich et al., "Sparsified SGD with
Memory", 2018; Lin et al., "Deep Gradient Compression", 2017, section 3.1, without momentum
correction). Selection is exact: ties go to the lowest index.

Transactional: the sum goes into the gradient's own memory, so the old residual is untouched until
every rank's step is known to be finite. Then the two memories change places: the sum, without what
was sent, becomes the residual, and the old residual's memory holds the averaged gradient. Beyond the
gradients that takes one residual, and no copy. On a GPU, where the host does not know whether the
step is finite, the memories change places in any case, and a kernel that does nothing after finite
steps copies the old residual back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import kernels
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling, as_flag
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
        device = bucket.device
        self._residual = communicator.empty(*memory_like_bucket, device).zero_() if error_feedback else None
        self._wide = bucket.memory if self._shares_memory else communicator.empty(*memory_like_bucket, device)
        num_bytes = Payload.num_bytes(len(bucket.names), total, self._dtype)
        self._mine = communicator.empty(num_bytes, torch.uint8, device)
        self._everyone = torch.empty(size * num_bytes, dtype=torch.uint8, device=device)
        self._payloads = [
            Payload(memory, len(bucket.names), total, self._dtype) for memory in torch.split(self._everyone, num_bytes)
        ]
        self._scaling = Scaling(weight=1.0 / size)
        self._thresholds = torch.zeros(len(bucket.names), device=device)  # of the last step: where to look next time
        self._guilty = torch.zeros(size, len(bucket.names), dtype=torch.uint8, device=device)
        self._all_used_here = True
        self._send_scratch, self._finish_scratch = kernels.Scratch(), kernels.Scratch()

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        bucket = self._bucket
        self._scaling = scaling
        self._all_used_here = all(grad is not None for grad in grads)
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
            if grad is None:
                mine.codes[i].fill_(_UNUSED)  # assigning a number would copy it from the host, and wait
            else:
                mine.codes[i] = torch.where(finite, _USED, _NOT_FINITE)
            out = mine.values[pieces[i]], mine.indices[pieces[i]]
            kernels.topk(sums[i], k, out, threshold=self._thresholds[i], scratch=self._send_scratch)
        self._communicator.all_gather(self._everyone, self._mine)
        self.bytes_sent += self._mine.nbytes

    def _codes(self) -> torch.Tensor:
        """Of all ranks, one row each."""
        return torch.stack([payload.codes for payload in self._payloads])

    def finite(self) -> Flag:
        all_finite = (self._codes() != _NOT_FINITE).all()
        # Finite terms can still overflow in the sum, or once the loss scale is back: no rank may commit then.
        factor = self._scaling.result * self._scaling.loss_scale
        largest = torch.stack([kernels.absmax([payload.values]) for payload in self._payloads]).double().sum()
        fits = largest * factor <= torch.finfo(self._bucket.dtype).max
        return as_flag(all_finite & fits, self._bucket)

    def used(self) -> list[bool]:
        if self._all_used_here:
            return [True] * len(self._bucket.names)
        used: list[bool] = (self._codes() != _UNUSED).any(dim=0).tolist()
        return used

    def blame(self) -> str | None:
        for rank, codes in enumerate(self._guilty.tolist()):
            for name, code in zip(self._bucket.names, codes, strict=True):
                if code == _NOT_FINITE:
                    return f"parameter {name!r} on rank {rank}"
        return None

    def finish(self, finite: Flag) -> None:
        factor = self._scaling.result * self._scaling.loss_scale
        if isinstance(finite, torch.Tensor):
            self._guilty = torch.where(finite, self._guilty, self._codes())
            self._commit(finite, torch.where(finite, factor, math.nan).float())
        elif finite:
            self._commit(finite, factor)
        else:
            self._guilty = self._codes()
            self._bucket.flat.fill_(math.nan)

    def _commit(self, finite: Flag, factor: float | torch.Tensor) -> None:
        """The sum becomes the residual, unless ``finite`` is a tensor that says no; averages times ``factor``.

        ``factor`` is NaN where the step is not finite: every entry that was sent becomes NaN.
        """
        bucket = self._bucket
        if self._residual is not None:
            self._take_out_what_was_sent()
            self._wide, self._residual = self._residual, self._wide
            if isinstance(finite, torch.Tensor):
                kernels.pack([self._wide], self._residual, unless=finite, scratch=self._finish_scratch)
        self._wide.zero_()
        averages = bucket.parts(self._wide)
        for payload in self._payloads:
            for average, piece in zip(averages, self._pieces(), strict=True):
                indices, values = payload.indices[piece], payload.values[piece]
                kernels.scatter_add(average, indices, values, factor, scratch=self._finish_scratch)
        if self._shares_memory:
            bucket.use(self._wide)
        else:
            kernels.unpack(self._wide[: bucket.num_elements], [bucket.flat])

    def _take_out_what_was_sent(self) -> None:
        """From the sum; but not where no rank had a gradient: then nothing of it is applied anywhere."""
        mine = self._payloads[self._communicator.rank]
        nobody = torch.zeros(len(self._counts), dtype=torch.bool, device=self._bucket.device)
        if not self._all_used_here:
            nobody = (self._codes() == _UNUSED).all(dim=0)
        parts = zip(self._bucket.parts(self._wide), nobody, self._pieces(), strict=True)
        for part, kept, piece in parts:
            part[mine.indices[piece].long()] = torch.where(kept, mine.values[piece], 0.0)

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
