"""Whether somebody besides its owner refers to a tensor, or to its memory.

Gradients are handed out as views of memory that the next reduction writes to. Plain autograd makes a
new gradient after ``zero_grad()``, so one that was kept stays as it is; to promise the same without a
copy of every gradient, one has to know which were kept.
"""

from __future__ import annotations

import sys

import torch

from pycomm.torch_internals import uses_outside_python


def _references(tensors: list[torch.Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


def _usual_references() -> tuple[int, int]:
    """Of a tensor that a list holds and nobody else; and of one that is a ``.grad`` besides."""
    tensors, param = [torch.empty(1)], torch.nn.Parameter(torch.empty(1))
    alone = _references(tensors, 0)
    param.grad = tensors[0]
    return alone, _references(tensors, 0)


_ALONE, _AS_GRAD = _usual_references()
"""Releases of Python and torch differ in what they count."""


def is_held(tensors: list[torch.Tensor], index: int, is_grad: bool = False) -> bool:
    """Whether there are references in Python to ``tensors[index]`` besides this list's, and ``.grad`` if it is one."""
    return _references(tensors, index) > (_AS_GRAD if is_grad else _ALONE)


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether DLPack's consumers or a graph, outside Python, refer to ``tensor``, which is no ``.grad``."""
    return uses_outside_python(tensor) > 1
