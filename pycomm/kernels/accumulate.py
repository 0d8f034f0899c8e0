"""Adding gradients to the residual of earlier ones. Contract: csrc/kernels/accumulate.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm.checks import instance, length
from pycomm.kernels.arrays import Scratch, empty, num_threads


@dataclass(frozen=True)
class Momentum:
    """Momentum correction (Lin et al., "Deep Gradient Compression", 2018, section 3.2).

    Attributes:
        velocity, old_velocity: the new and the old velocity, flat arrays like ``acc``; may be the same array.
        factor: m, 0 <= m < 1. nesterov: use Nesterov's momentum.
    """

    velocity: Any
    old_velocity: Any
    factor: float
    nesterov: bool = False


@dataclass(frozen=True)
class Decay:
    """Weight decay: adds ``factor`` times ``weights``, one array for each gradient, to the gradients."""

    weights: Sequence[Any]
    factor: float


def accumulate(
    acc: Any,
    residual: Any | None,
    grads: Any,
    scale: Any = 1.0,
    *,
    clip: float | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    scratch: Scratch | None = None,
) -> Any:
    """Compute ``acc = residual + grads * scale`` in one pass; ``residual=None`` stands for zeros.

    Args:
        acc: contiguous float32 array (float64 if the gradients are) with as many elements as they.
        residual: like ``acc``; may be ``acc``.
        grads: a floating array, or several of one dtype, which lie one after the other in ``acc``.
        scale: a number, or an array of one float32, also on the GPU, that is read when the kernel runs.
        clip: largest norm of a gradient times ``scale``; larger gradients are scaled down to it.
        momentum: accumulate the velocity instead of the gradient.
        decay: see :class:`Decay`; not multiplied by ``scale``.

    Returns:
        A bool array on ``acc``'s device, an element for each gradient (0-d for a single one): whether
        everything written is finite.

    Raises:
        TypeError, ValueError: dtypes or sizes do not match.
    """
    several = isinstance(grads, list | tuple)
    finite = empty(acc, (len(grads),) if several else (), "bool")
    arrays = grads if several else [grads]
    common = arguments_of(clip, acc, residual, momentum, decay, finite, scale)
    _native.accumulate(arrays, common, scratch=scratch, num_threads=num_threads())
    return finite


def arguments_of(
    clip: float | None, acc: Any, residual: Any, momentum: Momentum | None, decay: Decay | None, finite: Any, scale: Any
) -> dict[str, Any]:
    """Return the arguments that the extension's ``accumulate`` and ``sparsify`` share, except the gradients."""
    if momentum is not None:
        instance("momentum", momentum, Momentum)
    if decay is not None:
        instance("decay", decay, Decay)
        length("decay.weights", decay.weights)
    return {
        "weights": None if decay is None else decay.weights,
        "clip": clip,
        "acc": acc,
        "residual": residual,
        "velocity": None if momentum is None else momentum.velocity,
        "old_velocity": None if momentum is None else momentum.old_velocity,
        "finite": finite,
        "scale": scale,
        "decay": 0.0 if decay is None else decay.factor,
        "momentum": 0.0 if momentum is None else momentum.factor,
        "nesterov": momentum is not None and momentum.nesterov,
    }
