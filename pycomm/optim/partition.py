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


class Partition(Protocol):
    """Partition of an optimizer's parameters over ranks. Each rank steps its own elements of each parameter.

    Attributes:
        is_shared: whether a :meth:`home` shows what the other ranks have written there.
    """

    is_shared: bool

    def has(self, param: torch.Tensor) -> bool:
        """Return whether ranks step ``param`` together; not if it is frozen, or so new that no pass has used it."""

    def span_of(self, param: torch.Tensor) -> Span:
        """Return this rank's own elements of ``param``; they may be none."""

    def mirrors_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the other ranks' memory of this rank's own elements of ``param``, flat, a tensor for each rank.

        Empty if they have none that this rank reaches.
        """

    def home(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the state ``key`` of ``param``, of its shape, which all ranks share: only owners write.

        Collective, the first time for a key and the parameters that travel together.
        """

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' float64 ``values``; the same bits on all ranks. Collective."""

    def step(
        self, optimizer: torch.optim.Optimizer, factor: Factor, *, is_skipped: bool
    ) -> AbstractContextManager[bool]:
        """Return a context for a step, which yields whether it is taken; if any rank skips it, it is not. Collective.

        ``factor``: the gradients' factor, which ranks compare. Inside, all ranks write to each other's parameters;
        no rank leaves before all are done.
        """

    def writing(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Return a context in which each rank writes to its own parameters; then all get the new values. Collective."""
