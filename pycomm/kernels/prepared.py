"""Optimizer steps that are prepared once for the same arrays, so that these are fully checked only once."""

from __future__ import annotations

from typing import Any, NamedTuple

import pycomm._native as _native
from pycomm.kernels.resources import Scratch, num_threads


class PackScaling(NamedTuple):
    """Scaling of gradients before a step. Arrays of one float32 are on the gradients' device.

    Attributes:
        factor: what they are multiplied by, a number or one float32.
        divisor: one float32, which divides the factor first.
        found: one float32: no step is taken if it is not 0 when the kernel runs.
    """

    factor: Any = 1.0
    divisor: Any = None
    found: Any = None


class PreparedGroup(_native.PreparedGroup):
    """Kernel calls of one parameter group, found again by its tensors; see csrc/bindings/prepared_step.h."""


class PreparedStep(_native.PreparedStep):
    """One kernel call of a step, on flat torch tensors of one dtype on one device.

    Args:
        rule: name of the kernel's rule; the two rules of LAMB may run on the same arrays.
        weights, grads, copies: as in :mod:`pycomm.kernels.step`.
        states: for each state of the rule, the arrays of all weights, or ``None``.
        counts: ``None``, or for each weight one float32 on its device: the number of steps taken, which the
            kernel then counts itself.
        terms: lists of arrays, one for each weight. Their ``reduction``, "sum" or "mean", is the gradient, and
            ``grads`` are not read.
        mirrors: lists of arrays, one for each weight, which receive what is written to ``copies``, or to ``weights``
            if there are no copies. Mirrors and terms are in CPU memory, which may be shared with other processes;
            references to them are kept.

    Attributes:
        taken: number of steps, including this one.

    Raises:
        TypeError, ValueError: dtypes, sizes or devices do not match, or arrays overlap; the array is named.
    """

    def step(
        self,
        rule: str,
        coefficients: _native.Coefficients,
        scaling: PackScaling,
        *,
        rates: Any = None,
        squares: Any = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Run the kernel ``rule``; the other arguments are as in :mod:`pycomm.kernels.step`."""
        scale, divisor, found = scaling
        self.run(rule, coefficients, rates, squares, scale, divisor, found, scratch, num_threads())

    def squared_norms(self, squares: Any, scratch: Scratch | None = None) -> None:
        """Write the squared norms of all weights, then of all gradients, to ``squares``, which is float64."""
        self.norms(squares, scratch, num_threads())
