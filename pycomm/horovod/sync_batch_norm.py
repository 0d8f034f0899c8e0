"""Batch normalization over the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.horovod.collectives import Submission, check_tensor
from pycomm.horovod.coordinator import ALLGATHER
from pycomm.horovod.names import Sum
from pycomm.horovod.operations import allgather, allreduce
from pycomm.horovod.process_sets import global_process_set, world


class SyncBatchNorm(torch.nn.BatchNorm1d):
    """Batch normalization that uses the mean and variance over all ranks' batches during training.

    Inputs have at least two dimensions, (samples, features, ...), and may differ in the number of samples; they are on
    the CPU or on a GPU. Arguments: as of ``torch.nn.BatchNorm1d``.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input has {input.dim()} dimensions, wanted at least 2: samples and features")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input``, normalized."""
        alone = world().size == 1 or not (self.training or self.running_mean is None)
        if alone:
            normalized: torch.Tensor = super().forward(input)
            return normalized
        made, mean, variance, count = _normalize(input, self.weight, self.bias, self.eps)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        self._track(mean, variance, count)
        return made  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        part = self.momentum
        if part is None:
            part = 1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


def _of_features(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, -1, *[1] * (like.dim() - 2))


def _statistics(x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``x`` in the precision of the computation, its mean, and a row for other ranks: mean, squares, count."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"input is a {type(x).__name__}, wanted a tensor")
    if x.dim() < 2:
        raise ValueError(f"input has {x.dim()} dimensions, wanted at least 2: samples and features")
    if weight is not None and x.shape[1] != len(weight):
        raise ValueError(f"input has {x.shape[1]} features, wanted {len(weight)}")
    check_tensor(x)
    dims = [d for d in range(x.dim()) if d != 1]
    wide = x if x.dtype == torch.float64 else x.float()
    count = x.numel() // max(x.shape[1], 1)
    mean = wide.mean(dims) if count else wide.new_zeros(x.shape[1])
    deviations = ((wide - _of_features(mean, x)) ** 2).sum(dims)
    return wide, mean, torch.cat([mean, deviations, mean.new_tensor([count])])


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        try:
            wide, mean, mine = _statistics(x, weight)
        except Exception:
            with Submission(ALLGATHER, None, global_process_set):  # the other ranks are about to call it
                raise
        rows = allgather(mine.unsqueeze(0))
        means, sums, counts = rows[:, : len(mean)], rows[:, len(mean) : -1], rows[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (sums + counts * (means - mean) ** 2).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normal = (wide - _of_features(mean, x)) * _of_features(inverse, x)
        ctx.save_for_backward(normal, weight, inverse, total)
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        made = normal if weight is None else normal * _of_features(weight, x)
        made = made if bias is None else made + _of_features(bias, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return made.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, weight, inverse, total = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        dims = [d for d in range(grad.dim()) if d != 1]
        of_bias, of_weight = wide.sum(dims), (wide * normal).sum(dims)
        sums = allreduce(torch.cat([of_bias, of_weight]), op=Sum) / total
        mean_grad, mean_product = sums[: len(of_bias)], sums[len(of_bias) :]
        scale = inverse if weight is None else inverse * weight
        of_input = wide - _of_features(mean_grad, grad) - normal * _of_features(mean_product, grad)
        of_input = (of_input * _of_features(scale, grad)).to(ctx.dtype)
        return of_input, None if weight is None else of_weight, of_bias if ctx.has_bias else None, None


_normalize: Any = _Normalize.apply
