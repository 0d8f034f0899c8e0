"""Memory without a name that a worker and a server of one host both have."""

from __future__ import annotations

import mmap
import os

import torch

_ACCESS = os.O_RDWR | os.O_CLOEXEC


class SharedMemory:
    """Piece of memory, made here or opened by the path that another process told.

    Args:
        num_bytes: its size, positive.
        path: where it is; made anew if it is ``None``.

    Attributes:
        path: by which another process of this host opens it, as long as this one has it.

    Raises:
        OSError: there is none, or it is smaller.
    """

    def __init__(self, num_bytes: int, path: str | None = None) -> None:
        made = path is None
        descriptor = os.memfd_create("pycomm-server", os.MFD_CLOEXEC) if path is None else os.open(path, _ACCESS)
        try:
            if made:
                os.ftruncate(descriptor, num_bytes)
            elif os.fstat(descriptor).st_size < num_bytes:  # an access beyond its end would be a SIGBUS
                raise OSError(f"{path} has {os.fstat(descriptor).st_size} bytes, wanted {num_bytes}")
            self._memory = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it as a flat tensor, which keeps the memory, but not its path."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def close(self) -> None:
        """Let go of its path. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
