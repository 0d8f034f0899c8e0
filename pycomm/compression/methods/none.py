"""No compression."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Method
from pycomm.compression.dense import DenseExchange


@dataclass(frozen=True)
class NoCompression(Method):
    """Gradients in their own dtype; means accumulate in float32 for the half types."""

    def make(self, bucket: Bucket, communicator: Communicator) -> DenseExchange:
        return DenseExchange(bucket, communicator)
