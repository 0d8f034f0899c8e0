"""Freed memory of this process, kept for the next step.

By default glibc's ``malloc`` returns large blocks to the system as they are freed. Autograd allocates every gradient
again in every step, so each step faults on each page of them again: a quarter of a step's time on virtual machines. An
allocator that keeps what is freed, as torch's own does on GPUs, has no such cost; the process stays at its peak.
"""

from __future__ import annotations

import ctypes
import functools
import os

VARIABLE = "PYCOMM_KEEP_FREED_MEMORY"
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST, _MOST_OF_OLD_GLIBC = 2**31 - 1, 32 << 20  # bytes


def why_not_kept() -> str | None:
    """Return why :func:`keep_freed_memory` would leave ``malloc`` as it is; ``None`` if it would not."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    for name in _USERS_OWN:
        if name in os.environ:
            return f"{name} is set"
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return "GLIBC_TUNABLES is set"
    return None if hasattr(ctypes.CDLL(None), "mallopt") else "the C library is not glibc"


@functools.cache
def keep_freed_memory() -> None:
    """Have ``malloc`` keep what is freed, for the rest of the process, unless the environment says otherwise."""
    if why_not_kept() is not None:
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_M_MMAP_THRESHOLD, _MOST) != 1:
        mallopt(_M_MMAP_THRESHOLD, _MOST_OF_OLD_GLIBC)
    mallopt(_M_TRIM_THRESHOLD, _MOST)
