"""Parameters whose gradients are sparse: known before the first of them has come."""

from __future__ import annotations

import gc
from typing import Any

import torch

from pycomm.horovod.arguments import Named


def sparse_parameters(optimizer: torch.optim.Optimizer, named: Named) -> set[torch.Tensor]:
    """Return those of the ``named`` parameters whose gradients are sparse.

    All of a ``SparseAdam``'s, and weights of embeddings that were made with ``sparse=True``; these are looked for among
    all objects of the process.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {param for _, param in named}
    ids = {id(param) for _, param in named}
    kinds = _with_subclasses(torch.nn.Embedding) | _with_subclasses(torch.nn.EmbeddingBag)
    found: set[Any] = set()
    for embedding in [candidate for candidate in gc.get_objects() if type(candidate) in kinds]:
        weight = getattr(embedding, "weight", None)  # one that is half constructed has none
        if id(weight) in ids and getattr(embedding, "sparse", False):
            found.add(weight)
    return found


def _with_subclasses(kind: type) -> set[Any]:
    """Return ``kind`` and all classes that derive from it."""
    found: set[Any] = {kind}
    derived: Any
    for derived in kind.__subclasses__():
        found |= _with_subclasses(derived)
    return found
