"""Codec that sends everything."""

from __future__ import annotations

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec
from pycomm.compression.messages import SummedMessage
from pycomm.compression.report import Report, Told


class WholeCodec(BaseCodec):
    """Codec of everything that was accumulated, as it is: compression at density 1."""

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        super().__init__()
        self._message = SummedMessage(bucket, communicator, bucket.num_elements)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        self._message.values.copy_(accumulated.flat)
        accumulated.flat.zero_()
        self.bytes_sent += self._message.num_bytes
        return self._message.all_reduce(told)

    def largest(self) -> torch.Tensor:
        return self._message.largest()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._message.values, factor, out=out)
