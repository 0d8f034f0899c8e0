"""Helpers that scripts import from ``horovod.common.util``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.horovod.basics import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built
from pycomm.horovod.execution import pieces

_HERE = ("torch", "horovod.torch")


def check_extension(ext_name: str, *_: Any) -> None:
    """Raise ImportError unless ``ext_name`` is Horovod's interface to PyTorch, the only one that there is here."""
    if ext_name not in _HERE:
        raise ImportError(f"Extension {ext_name} is not there: pycomm stands for horovod.torch only")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether ``ext_base_name`` is "torch"."""
    return ext_base_name in _HERE


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch sees a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Return ``values`` in ``parts`` pieces that differ in length by at most one."""
    return pieces(values, parts)


def is_iterable(x: Any) -> bool:
    """Return whether ``x`` can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
