"""One bit per element."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import BaseCodec, Summands
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.two_hop import Arrays, EncodedPart, add_up_decoded, summing_codec


class SignForm:
    """Form of the elements of a bucket from ``begin`` to ``end``: their signs, and a magnitude for each parameter."""

    top = 1.0

    def __init__(self, bucket: Bucket, begin: int, end: int) -> None:
        ends = itertools.accumulate(bucket.numels, initial=0)
        lengths = [min(end, after) - max(begin, before) for before, after in itertools.pairwise(ends)]
        self._lengths = [length for length in lengths if length > 0]
        self._words = [kernels.sign_words(length) for length in self._lengths]
        words = torch.int32, sum(self._words)
        self.arrays: Sequence[tuple[torch.dtype, int]] = [(torch.float32, len(self._words)), words]
        self._scratches = [kernels.Scratch() for _ in self._words]

    def encode(self, x: torch.Tensor, arrays: Arrays, seed: torch.Tensor | None) -> None:
        parts = zip(torch.split(x, self._lengths), *self._split(arrays), strict=True)
        for part, magnitude, words in parts:
            magnitude.copy_(torch.linalg.vector_norm(part, 1) / part.numel())
            kernels.pack_signs(part, magnitude, words, remainder=part)

    def accumulate(self, parts: Sequence[EncodedPart], summands: Summands) -> torch.Tensor:
        finite: torch.Tensor = kernels.accumulate(*summands.arrays, **summands.options)
        for part in parts:
            part.form.encode(summands.acc[part.where], part.arrays, part.seed)
        return finite

    def decode(self, messages: Sequence[Arrays], out: torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        everyones = [self._split(arrays) for arrays in messages]
        for i, part in enumerate(torch.split(out, self._lengths)):
            words, magnitudes = [words[i] for _, words in everyones], [magnitudes[i] for magnitudes, _ in everyones]
            kernels.unpack_signs(words, magnitudes, part, factor, scratch=self._scratches[i])

    def add_up(
        self, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
    ) -> None:
        add_up_decoded(self, messages, arrays, remainder, seed)

    def _split(self, arrays: Arrays) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the magnitude and the words of each parameter."""
        return arrays[0].unsqueeze(1).unbind(), torch.split(arrays[1], self._words)  # of no elements none


@dataclass(frozen=True)
class OneBit(CodecMethod):
    """The sign of every element, and the mean magnitude of each parameter; the rest is fed back.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
    algorithm 2: with p the sum of gradient and residual, ``mean(|p|) * sign(p)`` is sent. A bit per
    element and a float32 per parameter. Messages are summed as :mod:`pycomm.compression.two_hop` says: with two
    hops each rank's part of a parameter has a magnitude of its own, and so has the sum, as in 1-bit Adam (Tang et al.
    2021, section 4.3). It does not converge without error feedback, so there is no switch.
    """

    reduces_parts = True

    def codec(self, bucket: Bucket, communicator: Communicator) -> BaseCodec:
        return summing_codec(bucket, communicator, lambda begin, end: SignForm(bucket, begin, end))
