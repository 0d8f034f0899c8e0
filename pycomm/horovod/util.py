"""Helpers that scripts import from ``horovod.common.util``."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.horovod.basics import ccl_built as ccl_built
from pycomm.horovod.basics import ddl_built as ddl_built
from pycomm.horovod.basics import gloo_built as gloo_built
from pycomm.horovod.basics import mpi_built as mpi_built
from pycomm.horovod.basics import nccl_built as nccl_built
from pycomm.horovod.execution import split_list as split_list

_HERE = ("torch", "horovod.torch")


def check_extension(ext_name: str, *_: Any) -> None:
    """Raise ImportError unless ``ext_name`` is Horovod's interface to PyTorch, the only one here."""
    if ext_name not in _HERE:
        raise ImportError(f"Extension {ext_name} is not there: pycomm stands for horovod.torch only")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether ``ext_base_name`` is "torch" or "horovod.torch"."""
    return ext_base_name in _HERE


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch sees a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether ``num_rank`` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    """Return whether ``x`` can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
