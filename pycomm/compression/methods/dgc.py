"""Deep Gradient Compression."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression
from pycomm.compression.feedback import CodecMethod, Correction, check_ratio
from pycomm.compression.sparse.codec import ENTRY_BYTES, SparseCodec, WholeCodec

_STAGES = 5
_STAGE_FACTOR = 0.25  # densities of 25 %, 6.25 %, 1.5625 %, 0.39 %, 0.1 %
_NOT_LINEAR = ("betas", "alpha", "rho", "etas", "lambd", "lr_decay", "beta2_decay", "line_search_fn")
"""Settings of optimizers that are not linear in the gradient: RMSprop has alpha, LBFGS a line search."""


@dataclass(frozen=True)
class DGC(CodecMethod):
    """Momentum-corrected top-k, after Lin et al., "Deep Gradient Compression", ICLR 2018.

    Per rank and parameter of more than one dimension, with g the gradient as this rank's contribution
    to the average (unscaled, times 1/N)::

        g = g * min(1, clip_norm / sqrt(N) / norm(g)) + weight_decay * w / N
        u = momentum * u + g;  v = v + u              (nesterov: u = momentum * (u + g);  v = v + u + g)
        send the k largest |v|, k = max(1, round(ratio * n));  zero u and v there

    The average of what was sent is ``.grad``. It already contains momentum, so the optimizer must have
    none: ``torch.optim.SGD(..., momentum=0)``. Parameters of one dimension, and all if ``ratio == 1``,
    are sent whole, as u (with Nesterov's u + g), and nothing is zeroed: with plain SGD this is SGD with
    momentum.

    For optimizers that are linear in the gradient. Adam and similar ones are not: use TopK with them.

    Args:
        ratio: fraction of the entries to send, in (0, 1].
        momentum, nesterov: as in SGD, 0 <= momentum < 1.
        clip_norm: the norm to clip a parameter's averaged gradient to. Each rank clips its own gradient
            to 1/sqrt(N) of that (section 3.3), per parameter as the authors' code does, so that no bucket
            waits for another. For a DTensor the norm of the whole parameter's gradient counts, and nothing
            is sent while backward runs.
        clip_local_norm: the norm to clip a rank's own gradient to, of all parameters together and without the
            loss scale, as section 3.3 writes it. The whole gradient must be known first, so nothing is sent while
            backward runs. With ``pycomm.attach`` only.
        warmup_steps: number of optimizer steps over which the density falls from 25 % in five stages
            by factors of four, never below ``ratio``. On a GPU the host waits once in each of these
            steps, to know whether the previous step was finite.
        weight_decay: as in SGD, whose own must then be 0.
        half_values: send values as float16; the rounding error stays in the residual.

    Raises:
        ValueError, TypeError: a setting is out of range.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = None
    warmup_steps: int = 0
    _: KW_ONLY
    clip_local_norm: float | None = None
    weight_decay: float = 0.0
    half_values: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        checks.real("momentum", self.momentum, 0.0, 1.0)
        checks.flag("nesterov", self.nesterov)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True with momentum=0: Nesterov's momentum needs one above 0")
        if self.clip_norm is not None:
            checks.real("clip_norm", self.clip_norm, 0.0, or_equal=False)
        if self.clip_local_norm is not None:
            object.__setattr__(self, "clip_local_norm", checks.positive("clip_local_norm", self.clip_local_norm))
        checks.integer("warmup_steps", self.warmup_steps, 0)
        checks.real("weight_decay", self.weight_decay, 0.0)
        checks.flag("half_values", self.half_values)

    @property
    def otherwise(self) -> Compression:
        return _Whole(self)

    @property
    def sent_fraction(self) -> float:
        return min(1.0, ENTRY_BYTES * self.ratio)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        told = sorted({key for group in optimizer.param_groups for key in _NOT_LINEAR if key in group})
        if told:
            raise ValueError(
                f"DGC with {name}: momentum correction is for optimizers that are linear in the gradient, such as SGD "
                f"(this one has {', '.join(told)}); use pycomm.TopK({self.ratio:g}) with it"
            )
        for group in optimizer.param_groups:
            if self.momentum and group.get("momentum", 0.0):
                raise ValueError(
                    f"DGC(momentum={self.momentum:g}) with {name}(momentum={group['momentum']:g}) would apply momentum "
                    f"twice: give the optimizer momentum=0, nesterov=False and leave it to "
                    f"DGC(momentum={group['momentum']:g}, nesterov={bool(group.get('nesterov', False))})"
                )
            if self.weight_decay and group.get("weight_decay", 0.0):
                raise ValueError(
                    f"DGC(weight_decay={self.weight_decay:g}) with {name}(weight_decay={group['weight_decay']:g}) "
                    "would decay twice: give the optimizer weight_decay=0"
                )

    def applies_to(self, param: torch.Tensor) -> bool:
        return self.ratio < 1.0 and super().applies_to(param)

    def codec(self, bucket: Bucket, communicator: Communicator) -> SparseCodec:
        return SparseCodec(bucket, communicator, self.density, self.half_values)

    def density(self, step: int | torch.Tensor) -> float:
        """Return the fraction of the entries to send in ``step``; see ``warmup_steps``."""
        if self.warmup_steps == 0 or (number := int(step)) >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, _STAGE_FACTOR ** (number * _STAGES // self.warmup_steps + 1))

    def correction(self) -> Correction:
        return Correction(self.momentum, self.nesterov, self.weight_decay, self.clip_norm)


@dataclass(frozen=True)
class _Whole(CodecMethod):
    """DGC for parameters that are sent whole, with the same correction."""

    dgc: DGC

    @property
    def error_feedback(self) -> bool:
        return False  # everything is sent

    def codec(self, bucket: Bucket, communicator: Communicator) -> WholeCodec:
        return WholeCodec(bucket, communicator)

    def correction(self) -> Correction:
        return self.dgc.correction()
