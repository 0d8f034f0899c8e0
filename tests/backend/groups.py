"""Groups over the backend "pycomm" for tests, beside the pools' own over Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def pycomm_group(timeout: float = 20.0) -> Iterator[Any]:
    """A group of all ranks of the pool over "pycomm"."""
    group: Any = dist.new_group(backend="pycomm", timeout=timedelta(seconds=timeout))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
