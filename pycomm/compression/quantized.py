"""Codec of quantized blocks, shared by the methods that differ only in how they quantize."""

from __future__ import annotations

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec, seed_of, sum_of_maxima
from pycomm.compression.messages import GatheredMessages
from pycomm.compression.report import Report, Told


class QuantizedCodec(BaseCodec):
    """Codec of blocks as small integers with a scale each, gathered and added up by every rank.

    Args:
        config: how blocks are quantized.
        seed: round stochastically, by random numbers that follow from it, the rank and the step; ``None``:
            to the nearest.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, config: kernels.Quantization, seed: int | None = None
    ) -> None:
        super().__init__()
        count = bucket.num_elements
        self._config = config
        self._messages = GatheredMessages(
            bucket, communicator, [(torch.float32, config.num_blocks(count)), (torch.uint8, config.code_bytes(count))]
        )
        self._seed = None
        if seed is not None:
            mixed = seed_of(seed, communicator.rank, bucket)
            self._seed = torch.tensor([mixed, 0], dtype=torch.int64, device=bucket.device)
        self._scratch = kernels.Scratch()

    def begin(self, step: int | torch.Tensor) -> None:
        if self._seed is not None:
            self._seed[1:].fill_(step)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat = accumulated.flat
        scales, small = self._messages.mine
        if flat.dtype == torch.float32:
            kernels.quantize(flat, self._config, (scales, small), seed=self._seed, remainder=flat)
        else:
            sent = flat.float()
            kernels.quantize(sent, self._config, (scales, small), seed=self._seed)
            kernels.dequantize([scales], [small], self._config, sent)
            flat.sub_(sent)
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(told)

    def largest(self) -> torch.Tensor:
        return sum_of_maxima([scales for scales, _ in self._messages.everyones]) * self._config.levels

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        scales, small = zip(*self._messages.everyones, strict=True)
        into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        kernels.dequantize(list(scales), list(small), self._config, into, factor, scratch=self._scratch)
        if into is not out:
            out.copy_(into)
