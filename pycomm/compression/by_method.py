"""Which parameters travel by which method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.compression.base import Compression
from pycomm.compression.methods.none import NoCompression
from pycomm.descriptions import settings_text


def by_method(method: Compression, params: Sequence[torch.Tensor]) -> list[tuple[Compression, list[int]]]:
    """Return methods, and the indices of those of ``params`` that travel by each: ``method``, where it applies."""
    groups: dict[bool, list[int]] = {}
    for i, param in enumerate(params):
        groups.setdefault(method.applies_to(param), []).append(i)
    otherwise = method.otherwise or NoCompression()
    return [(method if applies else otherwise, indices) for applies, indices in groups.items()]


def method_text(compression: Compression | None) -> str:
    """Return a compression method in a word or two; "dense" if there is none."""
    return "dense" if compression is None or isinstance(compression, NoCompression) else settings_text(compression)
