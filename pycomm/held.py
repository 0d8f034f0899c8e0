"""References to a tensor, or to its memory, besides its owner's.

Gradients are handed out as views of memory that the next reduction writes to. Plain autograd makes a
new gradient after ``zero_grad()``, so a kept one stays as it is; promising the same without copying
every gradient takes knowing which ones were kept.
"""

from __future__ import annotations

import sys

import torch

from pycomm.torch_internals import uses_outside_python


def _references(tensors: list[torch.Tensor], index: int) -> int:
    tensor = tensors[index]
    return sys.getrefcount(tensor)


def _usual_references() -> tuple[int, int]:
    """Return the reference counts of a tensor that only a list holds, and of one that is also a ``.grad``."""
    tensors, param = [torch.empty(1)], torch.nn.Parameter(torch.empty(1))
    alone = _references(tensors, 0)
    param.grad = tensors[0]
    return alone, _references(tensors, 0)


_ALONE, _AS_GRAD = _usual_references()  # releases of Python and torch count differently


def is_held(tensors: list[torch.Tensor], index: int, is_grad: bool = False) -> bool:
    """Return whether Python refers to ``tensors[index]`` besides in this list, and as ``.grad`` if it is one."""
    return _references(tensors, index) > (_AS_GRAD if is_grad else _ALONE)


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether DLPack's consumers or a graph, outside Python, refer to ``tensor``, which is no ``.grad``."""
    return uses_outside_python(tensor) > 1
