"""Whether somebody besides its owner refers to a tensor, or to its memory.

Gradients are handed out as views of memory that the next reduction writes to. Plain autograd makes a
new gradient after ``zero_grad()``, so one that was kept stays as it is; to promise the same without a
copy of every gradient, one has to know which were kept.
"""

from __future__ import annotations

import sys

import torch


def _references(tensors: list[torch.Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


_UNHELD = _references([torch.empty(0)], 0)
"""What is counted of a tensor that a list holds and nobody else. Releases of Python and torch differ."""


def is_held(tensors: list[torch.Tensor], index: int) -> bool:
    """Whether there are references in Python to ``tensors[index]``, which is no ``.grad``, besides this list's."""
    return _references(tensors, index) > _UNHELD


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, and other owners, share the storage of ``tensor``."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses
