"""Stamps: which tensors were replaced or written to since a moment."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from pycomm.torch_internals import versions_of


class Stamp:
    """Identities and version counters of tensors as they are now, read in bulk. It keeps the tensors.

    Reading version counters costs little. Writes through ``.data`` and NumPy's views do not change them, and are not
    found.

    Args:
        tensors: ``None`` stands for a missing one.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        self._tensors = list(tensors)
        self._versions = versions_of(self._tensors)

    def changed(self, now: Sequence[torch.Tensor | None] | None = None) -> list[int]:
        """Return the indices of tensors that were written to, or replaced by others in ``now``."""
        there = self._tensors if now is None else now
        versions = versions_of(there)
        if versions == self._versions and all(map(operator.is_, there, self._tensors)):
            return []
        each = zip(there, self._tensors, versions, self._versions, strict=True)
        return [i for i, (a, b, version, before) in enumerate(each) if a is not b or version != before]

    def has(self, index: int, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was the tensor at ``index``."""
        return self._tensors[index] is tensor
