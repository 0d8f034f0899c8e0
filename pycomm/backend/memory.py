"""Memory for communication, which FSDP2 asks a process group for.

A model's owner asks for that with ``set_allocate_memory_from_process_group_for_comm(True)``.
"""

from __future__ import annotations

from typing import Any

import torch

from pycomm.backend.engine import Engine


class CommunicationMemory:
    """Allocator of tensors that collectives reach without a copy."""

    engine: Engine

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether :meth:`allocate_tensor` has memory for ``device``, given as such or as an index."""
        return isinstance(device, (torch.device, str)) and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a flat tensor of ``size`` elements, uninitialised.

        Raises:
            ValueError: ``device`` is not the CPU.
            MemoryError: there is too little memory.
        """
        if torch.device(device).type != "cpu":
            raise ValueError(f"device is {device}, wanted the CPU")
        return self.engine.empty(size, dtype)
