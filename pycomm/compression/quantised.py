"""Quantised sums, gathered by every rank and added up there. Shared by the methods that differ in the code only."""

from __future__ import annotations

import zlib

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import PlainWire, Sums, each
from pycomm.compression.gathered import Messages
from pycomm.compression.report import Report


def seed_of(seed: int, rank: int, bucket: Bucket) -> int:
    """A number of this rank and bucket, by names: it does not depend on how parameters are put into buckets before."""
    text = f"{seed}/{rank}/{bucket.names[0]}".encode()
    return zlib.crc32(text) << 31 ^ zlib.adler32(text)


class QuantisedWire(PlainWire):
    """``how``: blocks of the bucket's sums. ``seed``: rounding is stochastic, by it and the number of the step."""

    def __init__(
        self, bucket: Bucket, communicator: Communicator, how: kernels.Quantization, seed: int | None = None
    ) -> None:
        super().__init__()
        count = bucket.num_elements
        self._how = how
        self._messages = Messages(
            bucket, communicator, [(torch.float32, how.num_blocks(count)), (torch.uint8, how.code_bytes(count))]
        )
        self._seed = None
        if seed is not None:
            mixed = seed_of(seed, communicator.rank, bucket)
            self._seed = torch.tensor([mixed, 0], dtype=torch.int64, device=bucket.device)
        self._scratch = kernels.Scratch()

    def begin(self, number: int | torch.Tensor) -> None:
        if self._seed is not None:
            self._seed[1:].fill_(number)

    def send(self, sums: Sums, codes: torch.Tensor) -> Report:
        units, small = self._messages.mine
        if sums.flat.dtype == torch.float32:
            kernels.quantize(sums.flat, self._how, (units, small), seed=self._seed, remainder=sums.flat)
        else:
            sent = sums.flat.float()
            kernels.quantize(sent, self._how, (units, small), seed=self._seed)
            kernels.dequantize([units], [small], self._how, sent)
            sums.flat.sub_(sent)
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(codes)

    def largest(self) -> torch.Tensor:
        return each([units for units, _ in self._messages.everyones], torch.max).sum() * self._how.levels

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        units, small = zip(*self._messages.everyones, strict=True)
        into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        kernels.dequantize(list(units), list(small), self._how, into, factor, scratch=self._scratch)
        if into is not out:
            out.copy_(into)
