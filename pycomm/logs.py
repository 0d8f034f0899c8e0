"""Lines of the logger ``pycomm``, which begin with the rank that writes them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys


def prefix() -> str:
    """Return how a line begins: ``[pycomm rank 0]``, or ``[pycomm]`` in a process that is no rank."""
    dist = sys.modules.get("torch.distributed")  # without which there is no group
    if dist is not None and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(ValueError, RuntimeError):  # another thread has destroyed the group meanwhile
            return f"[pycomm rank {dist.get_rank()}]"
    rank = os.environ.get("RANK", "")
    return f"[pycomm rank {rank}]" if rank.isdecimal() else "[pycomm]"


def _begin_with_rank(record: logging.LogRecord) -> bool:
    record.msg = f"{prefix()} {record.msg}"
    return True


# On the logger, not on a handler: these are the user's, or the one that Python has where there is none.
logging.getLogger("pycomm").addFilter(_begin_with_rank)
