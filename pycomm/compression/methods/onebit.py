"""One bit per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec, sum_of_maxima
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import GatheredMessages
from pycomm.compression.report import Report, Told


class SignCodec(BaseCodec):
    """Codec of the signs of every parameter and one magnitude, gathered by every rank."""

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        super().__init__()
        self._bucket = bucket
        words = [kernels.sign_words(n) for n in bucket.numels]
        self._words = words
        self._messages = GatheredMessages(
            bucket, communicator, [(torch.float32, len(words)), (torch.int32, sum(words))]
        )
        self._scratches = [kernels.Scratch() for _ in words]

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        magnitudes, words = self._messages.mine
        parts = zip(self._bucket.parts(accumulated.flat), torch.split(words, self._words), strict=True)
        for i, (part, bits) in enumerate(parts):
            magnitude = magnitudes[i : i + 1]
            magnitude.copy_(torch.linalg.vector_norm(part, 1) / part.numel())
            if part.dtype == torch.float32:
                kernels.pack_signs(part, magnitude, bits, remainder=part)
            else:
                kernels.pack_signs(part.float(), magnitude, bits)
                part.sub_(torch.where(torch.signbit(part), -magnitude, magnitude))
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(told)

    def largest(self) -> torch.Tensor:
        return sum_of_maxima([magnitudes for magnitudes, _ in self._messages.everyones])

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        everyones = [(m, torch.split(words, self._words)) for m, words in self._messages.everyones]
        for i, part in enumerate(self._bucket.parts(out)):
            into = part if out.dtype == torch.float32 else torch.empty_like(part, dtype=torch.float32)
            kernels.unpack_signs(
                [words[i] for _, words in everyones],
                [magnitudes[i : i + 1] for magnitudes, _ in everyones],
                into,
                factor,
                scratch=self._scratches[i],
            )
            if into is not part:
                part.copy_(into)


@dataclass(frozen=True)
class OneBit(CodecMethod):
    """The sign of every element, and the mean magnitude of each parameter; the rest is fed back.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
    algorithm 2: with p the sum of gradient and residual, ``mean(|p|) * sign(p)`` is sent. A bit per
    element and a float32 per parameter; every rank gathers every other's. It does not converge
    without error feedback, so there is no switch.
    """

    def codec(self, bucket: Bucket, communicator: Communicator) -> SignCodec:
        return SignCodec(bucket, communicator)
