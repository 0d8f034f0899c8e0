"""Memory and descriptors of this process, as the kernel counts them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

_MEMORY_FILE = "/memfd:"
_FIELDS = {"Pss": "pss", "Private_Clean": "private", "Private_Dirty": "private"}


def usage() -> dict[str, int]:
    """Return the number of open "descriptors", and bytes: "private", and "pss", where shared pages count in part."""
    found = {"descriptors": len(os.listdir("/proc/self/fd")), "pss": 0, "private": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] += int(rest.split()[0]) << 10
    return found


def give_back() -> None:
    """Collect garbage, and give back to the kernel what only the allocator holds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def mapped_bytes() -> int:
    """Return the proportional set size without anonymous shared files."""
    kilobytes, counts = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # the first line of a mapping: addresses, rights, ..., its file
            counts = not any(word.startswith(_MEMORY_FILE) for word in words)
        elif words[0] == "Pss:" and counts:
            kilobytes += int(words[1])
    return 1024 * kilobytes


def memory_file_bytes() -> dict[int, int]:
    """Return the bytes that each anonymous shared file open here has allocated, touched or not, by its inode."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone by now
            if os.readlink(link).startswith(_MEMORY_FILE):
                status = os.fstat(int(link.name))
                found[status.st_ino] = 512 * status.st_blocks
    return found
