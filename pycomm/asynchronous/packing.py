"""Packing: gradients as any compression method sends them, from one worker to one server.

A method's exchange is a collective. Here a worker runs it in a group of one, and what it hands to each collective is
recorded: that is the message. The server runs the same exchange of nothing, and plays the message back as what the
collectives come to: what comes out is what the worker has sent. Residuals, velocities and whatever else is kept from
step to step stay with the worker; unpacking depends on the message and its number alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from pycomm.bucket import Bucket
from pycomm.compression import Compression
from pycomm.compression.base import Exchange, Scaling
from pycomm.compression.dense import by_method


class _Alone:
    """Stands in for the communicator of a group of one."""

    rank, size = 0, 1

    def empty(self, shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(shape, dtype=dtype)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write what everyone has to ``out``."""
        self._pass(x, out)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        """Reduce ``x`` over everyone."""
        self._pass(x, x)

    def own_share(self, x: torch.Tensor, algorithm: str) -> None:
        """Return what need not be packed: nothing, as all of it goes to somebody else."""

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError


class _Recorder(_Alone):
    """Records what is handed to collectives."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.parts.append(_bytes_of(x).clone())
        if out is not x:
            _bytes_of(out).copy_(_bytes_of(x))


class _Player(_Alone):
    """Plays a message back as what collectives come to."""

    def __init__(self) -> None:
        self.message, self.position = torch.empty(0, dtype=torch.uint8), 0

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        target = _bytes_of(out)
        part = self.message[self.position : self.position + len(target)]
        if len(part) != len(target):
            raise ValueError(f"a message ends after {len(self.message)} bytes, more are wanted")
        target.copy_(part)
        self.position += len(target)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


class _Exchanges:
    """Exchanges of ``params`` in a group of one.

    Args:
        params: contiguous; only their shapes and dtypes count.
        method: of compression.
        alone: stands in for the communicator.
    """

    def __init__(self, params: Sequence[torch.Tensor], method: Compression, alone: _Alone) -> None:
        communicator: Any = alone
        self.parts: list[tuple[list[int], Bucket, Exchange]] = []
        for chosen, indices in by_method(method, params):
            # Random numbers depend on these names, so that they must be the same on both sides.
            bucket = Bucket([str(i) for i in indices], [params[i].detach() for i in indices], communicator)
            self.parts.append((indices, bucket, chosen.make(bucket, communicator)))

    def exchange(self, grads: Sequence[torch.Tensor | None], number: int) -> bool:
        """Exchange; return whether all is finite. ``finish`` must follow."""
        scaling = Scaling(1, step=number - 1)
        for indices, _, exchange in self.parts:
            exchange.exchange([grads[i] for i in indices], scaling)
        verdicts = [bool(exchange.finite()) for _, _, exchange in self.parts]
        return all(verdicts)

    def finish(self, finite: bool) -> None:
        """Keep what is kept from step to step, if ``finite``."""
        for _, _, exchange in self.parts:
            exchange.finish(finite)


class Packer:
    """Worker's side: packs gradients, and keeps what they leave over.

    Args:
        params: of the shard, in the order of its pieces.
        method: of compression.
        worker: number of the worker, of which its random numbers depend.
    """

    def __init__(self, params: Sequence[torch.Tensor], method: Compression, worker: int) -> None:
        self._recorder = _Recorder()
        self._zeros = [torch.zeros((), dtype=p.dtype).expand(p.shape) for p in params]
        self._exchanges = _Exchanges(params, seeded(method, worker), self._recorder)

    def pack(self, grads: Sequence[torch.Tensor | None], number: int) -> torch.Tensor | None:
        """Return the message of push ``number``, uint8; ``None`` if a gradient is not finite. See :meth:`finish`."""
        self._recorder.parts.clear()
        # Not as unused ones: what earlier gradients have left over goes out all the same, and must not come back.
        filled = [zero.contiguous() if grad is None else grad for grad, zero in zip(grads, self._zeros, strict=True)]
        if not self._exchanges.exchange(filled, number):
            return None
        parts = self._recorder.parts
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)  # of a server that holds nothing

    def finish(self, sent: bool) -> None:
        """Keep what the message has left over, if it is ``sent``; else stay as before :meth:`pack`."""
        self._exchanges.finish(sent)


class Unpackers:
    """Server's side: unpacks the messages of all workers.

    Args:
        params: of the shard, in the order of its pieces.
        method: of compression.
        dtype: of the gradients that come out.
    """

    def __init__(self, params: Sequence[torch.Tensor], method: Compression, dtype: torch.dtype) -> None:
        self._params = [torch.empty_like(p, device="meta") for p in params]
        self._method, self._dtype = method, dtype
        self._ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
        self._by_worker: dict[int, tuple[_Player, _Exchanges]] = {}

    def unpack(self, worker: int, number: int, message: torch.Tensor) -> torch.Tensor:
        """Return the gradients in push ``number`` of ``worker``; flat.

        Raises:
            ValueError: the message is malformed.
        """
        if worker not in self._by_worker:
            player = _Player()
            params = [torch.zeros_like(p, device="cpu") for p in self._params]  # which methods with a decay read
            self._by_worker[worker] = player, _Exchanges(params, seeded(self._method, worker), player)
        player, exchanges = self._by_worker[worker]
        player.message, player.position = message, 0
        finite = exchanges.exchange([None] * len(self._params), number)
        exchanges.finish(finite)
        if not finite or player.position != len(message):
            self.forget(worker)
            raise ValueError(f"a message has {len(message)} bytes, {player.position} of which make sense")
        gradient = torch.empty(self._ends[-1] if self._ends else 0, dtype=self._dtype)
        for indices, bucket, _ in exchanges.parts:
            for i, view in zip(indices, bucket.views, strict=True):
                gradient[self._ends[i] - view.numel() : self._ends[i]].copy_(view.reshape(-1))
        return gradient

    def forget(self, worker: int) -> None:
        """Release the memory that ``worker`` takes."""
        self._by_worker.pop(worker, None)


def seeded(method: Compression, worker: int) -> Compression:
    """Return ``method`` with random numbers of this ``worker``'s own, if it has any."""
    if not hasattr(method, "seed"):
        return method
    chosen: Any = method
    return dataclasses.replace(chosen, seed=zlib.crc32(f"{chosen.seed}/{worker}".encode()))  # type: ignore[no-any-return]
