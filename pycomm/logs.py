"""Prefix of the logger ``pycomm``: the rank that writes the line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys


def prefix() -> str:
    """Return ``[pycomm rank 0]``, or ``[pycomm]`` in a process without a rank."""
    dist = sys.modules.get("torch.distributed")  # without it there is no group
    if dist is not None and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(ValueError, RuntimeError):  # another thread destroyed the group
            return f"[pycomm rank {dist.get_rank()}]"
    rank = os.environ.get("RANK", "")
    return f"[pycomm rank {rank}]" if rank.isdecimal() else "[pycomm]"


def _begin_with_rank(record: logging.LogRecord) -> bool:
    record.msg = f"{prefix()} {record.msg}"
    return True


# On the logger, not on a handler: handlers belong to the user or to Python.
logging.getLogger("pycomm").addFilter(_begin_with_rank)
