"""Steps of optimizers that touch every array once. Contract: csrc/kernels/step.h.

Arguments of all steps:

Args:
    weights: float32, or all float64, arrays of any shapes; updated in place, contiguous, on one device.
    grads: floating arrays with as many elements each.
    scale: factor of the gradients: a number, or an array of one float32, also on the GPU, that is
        read when the kernel runs. Negative to maximize.
    copies: float16 or bfloat16 arrays to write the new weights to, rounded; for float32 weights only.
    scratch: see :class:`Scratch`.

Raises:
    TypeError, ValueError: dtypes, sizes or devices do not match; the array is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm import checks
from pycomm.kernels.arrays import Scratch, empty, num_threads

Arrays = Sequence[Any]


@dataclass(frozen=True)
class Moments:
    """Moments of Adam and LAMB: the settings of a parameter group.

    Attributes:
        step: number of steps, including this one.
        bias_correction: whether the moments are divided by 1 - beta^step.
    """

    betas: tuple[float, float]
    eps: float
    step: int
    bias_correction: bool = True

    def fill(self, c: _native.Coefficients) -> None:
        """Write the coefficients of the moments to ``c``."""
        beta1, beta2 = (checks.number("betas", beta) for beta in checks.pair("betas", self.betas, "two numbers"))
        c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2 = beta1, 1.0 - beta1, beta2, 1.0 - beta2
        c.eps, c.corrects_bias = self.eps, bool(self.bias_correction)
        if not self.bias_correction:
            return
        step = checks.number("step", self.step)
        if not 1 <= step < math.inf or step != int(step) or not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(
                f"step is {self.step!r} and betas {self.betas!r}, wanted a step of at least 1, 0 <= betas < 1"
            )
        c.inverse_bias_correction1 = 1.0 / (1.0 - beta1**step)
        c.inverse_sqrt_bias_correction2 = 1.0 / math.sqrt(1.0 - beta2**step)


def momentum_coefficients(
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
) -> _native.Coefficients:
    """Return the coefficients of :func:`momentum_step`."""
    c = _native.Coefficients()
    c.lr, c.momentum, c.nesterov = lr, momentum, nesterov
    c.decay = checks.number("weight_decay", weight_decay)
    c.one_minus_dampening = 1.0 - checks.number("dampening", dampening)
    return c


def adam_coefficients(lr: float, moments: Moments, weight_decay: float, decoupled: bool) -> _native.Coefficients:
    """Return the coefficients of :func:`adam_step`."""
    c = _coefficients_of(moments)
    c.lr = lr
    if decoupled:
        c.decoupled_decay = checks.number("lr", lr) * checks.number("weight_decay", weight_decay)
    else:
        c.decay = checks.number("weight_decay", weight_decay)
    return c


def rmsprop_coefficients(
    lr: float, alpha: float, eps: float, momentum: float, weight_decay: float
) -> _native.Coefficients:
    """Return the coefficients of :func:`rmsprop_step`."""
    c = _native.Coefficients()
    c.lr, c.eps, c.momentum = lr, eps, momentum
    c.decay = checks.number("weight_decay", weight_decay)
    c.beta2 = checks.number("alpha", alpha)
    c.one_minus_beta2 = 1.0 - checks.number("alpha", alpha)
    return c


def adagrad_coefficients(lr: float, eps: float, weight_decay: float) -> _native.Coefficients:
    """Return the coefficients of :func:`adagrad_step`."""
    c = _native.Coefficients()
    c.lr, c.eps = lr, eps
    c.decay = checks.number("weight_decay", weight_decay)
    return c


def lamb_coefficients(moments: Moments, weight_decay: float) -> _native.Coefficients:
    """Return the coefficients of :func:`lamb_moments` and :func:`lamb_apply`."""
    c = _coefficients_of(moments)
    c.decay = checks.number("weight_decay", weight_decay)
    return c


def _coefficients_of(moments: Moments) -> _native.Coefficients:
    checks.instance("moments", moments, Moments)
    coefficients = _native.Coefficients()
    moments.fill(coefficients)
    return coefficients


def momentum_step(
    weights: Arrays,
    grads: Arrays,
    buffers: Arrays | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    rates: Any = None,
    scale: Any = 1.0,
    copies: Arrays | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Do a step of SGD or LARS: ``v = momentum * v + rate * (1 - dampening) * g``, ``w -= lr * v``, g with decay.

    Args:
        buffers: v for each weight; ``None``: no momentum.
        rates: float64, one for each weight; ``None``: all 1.
    """
    c = momentum_coefficients(lr, momentum, dampening, weight_decay, nesterov)
    _run("momentum", c, weights, grads, [buffers], scale, copies, scratch, rates=rates)


def adam_step(
    weights: Arrays,
    grads: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    max_exp_avg_sqs: Arrays | None = None,
    *,
    lr: float,
    moments: Moments,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    scale: Any = 1.0,
    copies: Arrays | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Do a step of Adam (Kingma and Ba 2015), of AdamW if ``decoupled`` (Loshchilov and Hutter 2019).

    With a third state, ``max_exp_avg_sqs``, it is AMSGrad.
    """
    c = adam_coefficients(lr, moments, weight_decay, decoupled)
    _run("adam", c, weights, grads, [exp_avgs, exp_avg_sqs, max_exp_avg_sqs], scale, copies, scratch)


def rmsprop_step(  # noqa: PLR0913  # an argument for each array
    weights: Arrays,
    grads: Arrays,
    square_avgs: Arrays,
    momentum_buffers: Arrays | None = None,
    grad_avgs: Arrays | None = None,
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    copies: Arrays | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Do a step of RMSprop as torch has it: centered if there are ``grad_avgs``, with momentum if there are buffers."""
    c = rmsprop_coefficients(lr, alpha, eps, momentum, weight_decay)
    _run("rmsprop", c, weights, grads, [square_avgs, momentum_buffers, grad_avgs], scale, copies, scratch)


def adagrad_step(
    weights: Arrays,
    grads: Arrays,
    sums: Arrays,
    *,
    lr: float,
    eps: float,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    copies: Arrays | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Do a step of Adagrad (Duchi et al. 2011): ``s += g^2``, ``w -= lr * g / (sqrt(s) + eps)``, g with decay.

    Args:
        sums: s for each weight.
        lr: learning rate, after its decay if there is one.
    """
    c = adagrad_coefficients(lr, eps, weight_decay)
    _run("adagrad", c, weights, grads, [sums], scale, copies, scratch)


def lamb_moments(
    weights: Arrays,
    grads: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    *,
    moments: Moments,
    weight_decay: float = 0.0,
    scale: Any = 1.0,
    scratch: Scratch | None = None,
) -> Any:
    """Do the first pass of LAMB, which updates the moments; weights are only read.

    Returns:
        Squared norms, float64 of shape (len(weights), 2): of each weight and of its direction
        m / (sqrt(v) + eps) + weight_decay * w.
    """
    c = lamb_coefficients(moments, weight_decay)
    squares = empty(checks.first_of("weights", weights), (checks.length("weights", weights), 2), "float64")
    _run("lamb_moments", c, weights, grads, [exp_avgs, exp_avg_sqs], scale, None, scratch, squares=squares)
    return squares


def lamb_apply(
    weights: Arrays,
    exp_avgs: Arrays,
    exp_avg_sqs: Arrays,
    rates: Any,
    *,
    moments: Moments,
    weight_decay: float = 0.0,
    copies: Arrays | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Do the second pass of LAMB: move each weight by -rate times its direction. ``rates``: float64, one for each."""
    c = lamb_coefficients(moments, weight_decay)
    if rates is None:
        raise TypeError("rates is None, wanted one float64 for each of weights")
    _run("lamb_apply", c, weights, None, [exp_avgs, exp_avg_sqs], 1.0, copies, scratch, rates=rates)


def _run(
    rule: str,
    coefficients: _native.Coefficients,
    weights: Arrays,
    grads: Arrays | None,
    states: Sequence[Arrays | None],
    scale: Any,
    copies: Arrays | None,
    scratch: Scratch | None,
    *,
    rates: Any = None,
    squares: Any = None,
) -> None:
    _native.step(rule, coefficients, weights, grads, copies, states, rates, squares, scale, scratch, num_threads())
