"""Top-k by chunks, with values of a few bits and decayed error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec, Summands, sum_of_maxima
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import GatheredMessages
from pycomm.compression.report import Report, Told

_MOST_CHUNK = 65536
_UPPER_HALF = -65536  # of an int32


class ChunkCodec(BaseCodec):
    """Codec of the largest entries of every chunk of a bucket, gathered and added up by every rank.

    Args:
        decay: factor of what is left, the next residual.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, config: kernels.Chunks, decay: float) -> None:
        super().__init__()
        self._config, self._decay = config, decay
        self._messages = GatheredMessages(bucket, communicator, [(torch.int32, config.num_words(bucket.num_elements))])
        self._words_of_chunk = config.num_words(config.chunk)
        self._scratch, self._scratch_of_sent = kernels.Scratch(), kernels.Scratch()
        self._is_packed = False

    def accumulate(self, summands: Summands) -> torch.Tensor:
        self._is_packed = summands.acc.dtype == torch.float32 and not summands.whole
        if not self._is_packed:
            return super().accumulate(summands)
        (words,) = self._messages.mine
        finite: torch.Tensor = kernels.accumulate_chunks(
            *summands.arrays, self._config, words, packing_decay=self._decay, **summands.options
        )
        return finite

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat, (words,) = accumulated.flat, self._messages.mine
        if self._is_packed:
            pass
        elif flat.dtype == torch.float32:
            kernels.pack_chunks(flat, self._config, words, remainder=flat, decay=self._decay)
        else:
            sent = flat.float()
            kernels.pack_chunks(sent, self._config, words)
            kernels.unpack_chunks([words], self._config, sent, scratch=self._scratch_of_sent)
            flat.sub_(sent).mul_(self._decay)
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(told)

    def largest(self) -> torch.Tensor:
        # The largest magnitude of a chunk is the upper half of its first word.
        first = [words[:: self._words_of_chunk] & _UPPER_HALF for (words,) in self._messages.everyones]
        return sum_of_maxima([word.view(torch.float32) for word in first])

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        words = [theirs for (theirs,) in self._messages.everyones]
        into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        kernels.unpack_chunks(words, self._config, into, factor, scratch=self._scratch)
        if into is not out:
            out.copy_(into)


@dataclass(frozen=True)
class ChunkTopK(CodecMethod):
    """The ``k`` largest entries of every ``chunk`` elements, each as a position, a sign and a level.

    The compression of SparseLoCo (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    arXiv:2508.15706) for :func:`pycomm.local_sgd`. With e the residual and d this rank's contribution::

        e = decay * e + d;  send the k largest |e| of every chunk;  e = e - what was sent

    With ``decay`` below 1 the residual forgets on purpose, and takes the place of momentum: the optimizer that the
    average goes to, or the outer optimizer, must then have none. With ``decay=1`` nothing is lost.

    Chunks run through all parameters of a bucket, also one-dimensional ones. At ``k=64, chunk=4096, bits=2``
    an entry takes 8 bits of position (Elias-Fano code; 12 without one) and 2 of value, and a chunk 4 bytes more: 84
    bytes instead of 16,384. Those are two magnitudes, which its levels divide evenly. With 2 bits they are the means
    of the entries below and above the mean of all, with more bits the smallest and the largest entry. Every rank
    gathers all ranks' messages, so bytes received grow with their number.

    Args:
        k: entries sent of every chunk, from 1 to ``chunk``. The paper has 0.8 to 3 % of it: 32 to 128.
        chunk: elements of a chunk, a power of two up to 65536; the last chunk of a bucket may be shorter.
        bits: size of a value, its sign included: 2, 4 or 8.
        decay: factor of the residual from step to step, above 0 and at most 1; the paper has 0.95.

    Raises:
        TypeError, ValueError: a setting is out of range.
    """

    k: int
    chunk: int = 4096
    bits: int = 2
    decay: float = 0.95

    def __post_init__(self) -> None:
        checks.integer("chunk", self.chunk, 1, _MOST_CHUNK)
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk is {self.chunk}, wanted a power of two")
        checks.integer("k", self.k, 1, self.chunk)
        checks.integer("bits", self.bits, 2, 8)
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits is {self.bits}, wanted 2, 4 or 8")
        checks.fraction("decay", self.decay)

    @property
    def sent_fraction(self) -> float:
        return min(1.0, self._config.num_words(self.chunk) / self.chunk)

    @property
    def _config(self) -> kernels.Chunks:
        return kernels.Chunks(self.k, self.chunk, self.bits)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        momentum = max((group.get("momentum", 0.0) for group in optimizer.param_groups), default=0.0)
        if self.decay < 1.0 and momentum:
            raise ValueError(
                f"ChunkTopK(decay={self.decay:g}) with momentum={momentum:g}: the decayed residual takes the place of "
                "momentum; set momentum=0, or decay=1"
            )

    def applies_to(self, param: torch.Tensor) -> bool:
        return param.numel() > 0

    def codec(self, bucket: Bucket, communicator: Communicator) -> ChunkCodec:
        return ChunkCodec(bucket, communicator, self._config, self.decay)
