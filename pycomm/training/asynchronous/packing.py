"""Packing: gradients compressed by any method, from one worker to one server.

A method's exchange is a collective. A worker runs it in a group of one and records the inputs of its collectives: they
are the message. The server runs the same exchange without gradients, with the message as the collectives' results, and
so gets the worker's gradients. Residuals, velocities and other state stay with the worker; unpacking depends on the
message and its number alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from pycomm.compression.base import Compression, Scaling
from pycomm.training.reductions.exchanges import BucketExchanges
from pycomm.training.reductions.reduction import all_finite


class _GroupOfOne:
    """Substitute for the communicator of a group of one."""

    rank, size, hosts = 0, 1, ((0,),)

    def empty(
        self, shape: int, dtype: torch.dtype = torch.float32, device: Any = None, *, symmetric: bool = False
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._pass(x, out)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        self._pass(x, x)

    def own_share(self, x: torch.Tensor, algorithm: str) -> None:
        """Return ``None``: every element must be packed, as this rank keeps none."""

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError


class _Recorder(_GroupOfOne):
    """Records the inputs of collectives."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.parts.append(_bytes_of(x).clone())
        if out is not x:
            _bytes_of(out).copy_(_bytes_of(x))


class _Player(_GroupOfOne):
    """Returns a recorded message as the results of collectives."""

    def __init__(self) -> None:
        self.message, self.position = torch.empty(0, dtype=torch.uint8), 0

    def _pass(self, x: torch.Tensor, out: torch.Tensor) -> None:
        target = _bytes_of(out)
        part = self.message[self.position : self.position + len(target)]
        if len(part) != len(target):
            raise ValueError(f"a message ends after {len(self.message)} bytes, more are needed")
        target.copy_(part)
        self.position += len(target)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _exchanges(params: Sequence[torch.Tensor], method: Compression, group: _GroupOfOne) -> BucketExchanges:
    """Return exchanges of contiguous ``params`` in a group of one; only their shapes and dtypes count."""
    communicator: Any = group
    # Random numbers depend on these names, which must therefore be the same on both sides.
    return BucketExchanges([str(i) for i in range(len(params))], params, method, communicator, "auto")


def _exchange(exchanges: BucketExchanges, grads: Sequence[torch.Tensor | None], number: int) -> bool:
    """Exchange ``grads``; return whether all are finite. ``exchanges.finish()`` must follow."""
    exchanges.pack(grads, Scaling(1, step=number - 1))
    exchanges.send()
    return bool(all_finite(exchanges.parts))


class Packer:
    """Packs gradients on a worker, and keeps their residuals.

    Args:
        params: parameters of the shard, in the order of its pieces.
        method: compression method.
        worker: number of the worker, on which its random numbers depend.
    """

    def __init__(self, params: Sequence[torch.Tensor], method: Compression, worker: int) -> None:
        self._recorder = _Recorder()
        self._zeros = [torch.zeros((), dtype=p.dtype).expand(p.shape) for p in params]
        self._exchanges = _exchanges([p.detach() for p in params], seeded(method, worker), self._recorder)

    def pack(self, grads: Sequence[torch.Tensor | None], number: int) -> torch.Tensor | None:
        """Return the message of push ``number``; ``None`` if a gradient is not finite. :meth:`finish` must follow."""
        self._recorder.parts.clear()
        # Zeros for missing gradients: residuals are sent all the same, and must not be restored as for unused ones.
        filled = [zero.contiguous() if grad is None else grad for grad, zero in zip(grads, self._zeros, strict=True)]
        if not _exchange(self._exchanges, filled, number):
            return None
        parts = self._recorder.parts
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)  # the shard may be empty

    def finish(self, sent: bool) -> None:
        """Keep the residuals of the message if it is ``sent``, otherwise the residuals from before :meth:`pack`."""
        self._exchanges.finish(sent)


class Unpackers:
    """Unpacks the messages of all workers on a server.

    Args:
        params: parameters of the shard, in the order of its pieces.
        method: compression method.
        dtype: dtype of the unpacked gradients.
    """

    def __init__(self, params: Sequence[torch.Tensor], method: Compression, dtype: torch.dtype) -> None:
        self._params = [torch.empty_like(p, device="meta") for p in params]
        self._method, self._dtype = method, dtype
        self._ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
        self._by_worker: dict[int, tuple[_Player, BucketExchanges]] = {}

    def unpack(self, worker: int, number: int, message: torch.Tensor) -> torch.Tensor:
        """Return the flat gradients in push ``number`` of ``worker``. Raise ValueError if it is malformed."""
        if worker not in self._by_worker:
            player = _Player()
            params = [torch.zeros_like(p, device="cpu") for p in self._params]  # methods with a weight decay read them
            self._by_worker[worker] = player, _exchanges(params, seeded(self._method, worker), player)
        player, exchanges = self._by_worker[worker]
        player.message, player.position = message, 0
        finite = _exchange(exchanges, [None] * len(self._params), number)
        exchanges.finish(finite)
        if not finite or player.position != len(message):
            self.forget(worker)
            raise ValueError(f"a message has {len(message)} bytes, {player.position} of which make sense")
        gradient = torch.empty(self._ends[-1] if self._ends else 0, dtype=self._dtype)
        for part in exchanges.parts:
            for i, place in zip(part.indices, part.bucket.places, strict=True):
                gradient[self._ends[i] - place.numel() : self._ends[i]].copy_(place.reshape(-1))
        return gradient

    def forget(self, worker: int) -> None:
        """Release the memory that ``worker`` takes."""
        self._by_worker.pop(worker, None)


def seeded(method: Compression, worker: int) -> Compression:
    """Return ``method`` with a seed of this ``worker``, if it has a seed."""
    if getattr(method, "seed", None) is None:
        return method
    chosen: Any = method
    return dataclasses.replace(chosen, seed=zlib.crc32(f"{chosen.seed}/{worker}".encode()))  # type: ignore[no-any-return]
