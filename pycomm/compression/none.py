"""No compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import DenseExchange
from pycomm.compression.bucket import Bucket


@dataclass(frozen=True)
class NoCompression:
    """Gradients travel in their own dtype; means accumulate in float32 for the half types."""

    transactional = False

    def applies_to(self, param: torch.Tensor) -> bool:
        return True

    def make(self, bucket: Bucket, communicator: Communicator) -> DenseExchange:
        return DenseExchange(bucket, communicator)
