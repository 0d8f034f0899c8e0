"""Which parameters travel by which method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.compression.base import Compression
from pycomm.compression.methods.none import NoCompression


def by_method(method: Compression, params: Sequence[torch.Tensor]) -> list[tuple[Compression, list[int]]]:
    """Return methods, and the indices of those of ``params`` that travel by each: ``method``, where it applies."""
    groups: dict[bool, list[int]] = {}
    for i, param in enumerate(params):
        groups.setdefault(method.applies_to(param), []).append(i)
    otherwise = method.otherwise or NoCompression()
    return [(method if applies else otherwise, indices) for applies, indices in groups.items()]
