"""Partition of a step over ranks that share memory: each steps a part of the parameters, in all ranks' memory.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.1,
which gathers the parts by messages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from pycomm.optim.step_override import Factor


class Span(NamedTuple):
    """Elements ``begin`` to ``end`` of a tensor, in memory order."""

    begin: int
    end: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of ``tensor``, which is dense, flat, not copied."""
        return tensor.detach().as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)


class GradientTerms(Protocol):
    """Gradients of all ranks, of which the step may compute the sums."""

    @property
    def version(self) -> int:
        """Number that changes with what :meth:`of` returns; 0 if gradients have been reduced before the step."""

    def of(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' gradients of this rank's own elements of ``param``, flat, in rank order."""

    @property
    def has_moved(self) -> bool:
        """Whether gradients that the step reduces are in other memory than in the last one."""

    @property
    def defers(self) -> bool:
        """Whether sums of later gradients are left to the step."""

    def open(self) -> None:
        """Find the gradients of all ranks again, some of which have moved. Collective."""

    def require_reduced(self) -> None:
        """Reduce the gradients now, if that was left to the step. Collective."""

    def reduce_early(self) -> None:
        """Reduce gradients now, and from now on during backward, as they are needed before the step. Collective."""


class Partition(Protocol):
    """Partition of an optimizer's parameters over ranks. Each rank steps its own elements of each parameter."""

    @property
    def terms(self) -> GradientTerms | None:
        """Gradients of all ranks, if the step may compute their sums."""

    @property
    def reduction(self) -> str:
        """Reduction that makes a gradient of its terms: "sum" or "mean"."""

    def span_of(self, param: torch.Tensor) -> Span:
        """Return this rank's own elements of ``param``; they may be none."""

    def mirrors_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the other ranks' memory of this rank's own elements of ``param``, flat, a tensor for each rank.

        Empty if the ranks share the parameters.
        """

    def home(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the state ``key`` of ``param``, of its shape, which all ranks share: only owners write.

        Collective, the first time for a key and the parameters that travel together.
        """

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' float64 ``values``; the same bits on all ranks. Collective."""

    def step(
        self, optimizer: torch.optim.Optimizer, factor: Factor, *, is_skipped: bool, needs_gradients: bool
    ) -> AbstractContextManager[bool]:
        """Return a context for a step, which yields whether it is taken; if any rank skips it, it is not. Collective.

        ``factor`` is that of the gradients, which ranks compare.
        With ``needs_gradients`` they are reduced before, as a kernel reads them by themselves. Inside, all ranks write
        to each other's parameters; none leaves before all are done.
        """

    def writing(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context in which each rank writes to its own parameters; then all get the new values. Collective."""
