"""What a reducer was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycomm.compression import Compression


@dataclass(frozen=True)
class Settings:
    """What ``attach`` was told; equal on all ranks."""

    compression: Compression
    bucket_bytes: int
    accumulate: int
    average: bool
    loss_scaler: Any
    clip_local_norm: float | None = None
    algorithm: str = "auto"
    all_parameters: bool = False
    check_replicas: int = 0
    buffers: str = "local"

    def lines(self) -> list[str]:
        return [
            f"compression={self.compression!r}",
            f"bucket_mb={self.bucket_bytes / 2**20}",
            f"accumulate={self.accumulate}",
            f"average={self.average}",
            f"loss_scaler={type(self.loss_scaler).__name__}",
            f"clip_local_norm={self.clip_local_norm}",
            f"algorithm={self.algorithm}",
            f"all_parameters={self.all_parameters}",
            f"check_replicas={self.check_replicas}",
            f"buffers={self.buffers}",
        ]
