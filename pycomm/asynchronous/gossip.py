"""Gossip: ranks that mix with a few neighbours in each step, and so, over the steps, with all (D-PSGD, push-sum)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycomm.asynchronous.averaging import checked_parameters
from pycomm.communicator import DEFAULT_TIMEOUT, Communicator
from pycomm.optim.parameters import unwrapped
from pycomm.reducer.agreement import agreed
from pycomm.reducer.broadcast import broadcast_tensors, check_same_lines, signature

TOPOLOGIES = ("ring", "exponential", "random")
_TOLERANCE = 1e-9

Mixing = Callable[[int], np.ndarray]
"""Returns the weights of a round: ``w[i, j]`` is what rank i takes of rank j's parameters."""


def gossip(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    topology: str | Sequence[Any] = "exponential",
    every: int = 1,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
) -> Gossip:
    """Let each rank step by itself, and mix its parameters with a few others' after each ``every`` steps.

    Decentralised parallel SGD (Lian et al., 2017): what a rank sends does not grow with the number of ranks, and nobody
    waits for more than its neighbours. The loop stays ``zero_grad``, ``backward``, ``step``. The ranks' parameters
    differ, but are drawn towards their mean, which mixing does not change. Collective: rank 0's are first copied.

    Args:
        optimizer: any torch optimizer, whose state stays each rank's own.
        model: its parameters must all belong to the optimizer, and be all float32 or all float64, in CPU memory.
        topology: "ring": both neighbours and oneself, a third each. "exponential": half from a rank that is 1, 2, 4,
            ... ranks away, in turns (Assran et al., 2019). "random": in pairs, drawn anew each time. Or a matrix of
            weights, or several that take turns: ``w[i][j]`` is what rank i takes of rank j's. Columns must sum to 1. If
            rows do not, what is mixed is weighed by push-sum, so that the ranks still come to their mean.
        every: number of steps from one mixing to the next; equal on all ranks, which must make equally many.
        seed: of "random".
        process_group: the ranks; the default group if ``None``.
        timeout: limit of every wait for a peer; seconds or ``timedelta``.

    Raises:
        TypeError, ValueError: an argument is wrong: weights that are negative, or whose columns do not sum to 1, or by
            which some ranks never hear of others; or the ranks differ. On every rank.
        CommError: a rank did not come. ``optimizer.step()`` raises it, too, if a neighbour is lost.
    """
    communicator = Communicator(process_group, timeout)
    try:
        request: Any
        try:
            optimizer = unwrapped(optimizer)
            named = checked_parameters(optimizer, model, every)
            kind = next(iter(named.values())).device.type
            if kind != "cpu":
                raise ValueError(f"parameters are on {kind}, wanted CPU memory")
            request = mixing_of(topology, communicator.size, seed), named
        except (TypeError, ValueError) as error:
            request = error
        mixing, named = agreed(communicator, request)
        check_same_lines(communicator, [f"topology={topology}", f"every={every}", f"seed={seed}"], "setting")
        check_same_lines(communicator, [f"{name}: {signature(p)}" for name, p in named.items()], "parameter")
        broadcast_tensors(communicator, [*model.parameters(), *model.buffers()], src=0)
        return Gossip(communicator, optimizer, list(named.values()), mixing, every)
    except BaseException:
        communicator.close()
        raise


def mixing_of(topology: str | Sequence[Any], size: int, seed: int = 0) -> Mixing:
    """Return the weights of each round among ``size`` ranks. Raises TypeError or ValueError as :func:`gossip` does."""
    if isinstance(topology, str):
        if topology not in TOPOLOGIES:
            raise ValueError(f"topology is {topology!r}, wanted one of {', '.join(TOPOLOGIES)}, or weights")
        return {"ring": _ring, "exponential": _exponential}.get(topology, lambda n: _random(n, seed))(size)
    try:
        given = np.asarray(topology, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"topology is neither a name nor weights: {error}") from error
    matrices = given[None] if given.ndim == 2 else given
    if matrices.ndim != 3 or matrices.shape[1:] != (size, size) or len(matrices) == 0:
        raise ValueError(f"topology has shape {list(given.shape)}, wanted weights of {size} by {size} ranks")
    require_mixing(matrices)
    return lambda number: matrices[number % len(matrices)]


def require_mixing(matrices: np.ndarray) -> None:
    """Prove that mixing by ``matrices``, in turns, brings all ranks to their mean; else raise ValueError.

    The mean stays as it is if every column sums to 1. Whoever hears of whom is a graph: after as many turns as there
    are ranks, everybody must have heard of everybody.
    """
    if not np.isfinite(matrices).all() or (matrices < 0).any():
        raise ValueError("topology has weights that are negative or not finite")
    sums = matrices.sum(axis=1)
    worst = np.unravel_index(np.abs(sums - 1).argmax(), sums.shape)
    if abs(sums[worst] - 1) > _TOLERANCE:
        raise ValueError(
            f"the weights that others take of rank {worst[1]} sum to {sums[worst]:g} in matrix {worst[0]}, wanted 1"
        )
    if (np.diagonal(matrices, axis1=1, axis2=2) <= 0).any():
        raise ValueError("topology has a rank that keeps nothing of its own: its weight w[i][i] must be positive")
    heard = np.eye(matrices.shape[1], dtype=bool)
    for _ in range(matrices.shape[1]):
        for matrix in matrices:
            heard = (matrix > 0) @ heard
    if not heard.all():
        i, j = np.argwhere(~heard)[0]
        raise ValueError(f"by these weights rank {i} never hears of rank {j}")


def _ring(size: int) -> Mixing:
    matrix = np.zeros((size, size))
    neighbours = (-1, 0, 1) if size > 2 else range(size)
    for i in range(size):
        for offset in neighbours:
            matrix[i, (i + offset) % size] += 1 / len(neighbours)
    return lambda _: matrix


def _exponential(size: int) -> Mixing:
    turns = max(1, math.ceil(math.log2(size)))
    half = [np.eye(size) / 2 + np.roll(np.eye(size), 1 << k, axis=0) / 2 for k in range(turns)]
    return lambda number: half[number % turns]


def _random(size: int, seed: int) -> Mixing:
    def matrix(number: int) -> np.ndarray:
        order = list(range(size))
        random.Random(f"{seed}/{number}").shuffle(order)
        mixed = np.eye(size)
        for i, j in zip(order[::2], order[1::2], strict=False):
            mixed[[i, i, j, j], [i, j, i, j]] = 0.5
        return mixed

    return matrix


class Gossip:
    """Handle of :func:`gossip`, kept alive by the optimizer's hook."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.Tensor],
        mixing: Mixing,
        every: int,
    ) -> None:
        self._communicator, self._params, self._mixing, self._every = communicator, list(params), mixing, every
        self._sizes = [p.numel() for p in params]
        # Push-sum: the parameters are what is mixed, divided by a mass that is mixed alike: 1 where rows sum to 1.
        self._mixed = torch.cat([p.detach().reshape(-1) for p in params])
        self._mass = 1.0
        self._outgoing, self._incoming = (torch.empty(len(self._mixed) + 1, dtype=self._mixed.dtype) for _ in range(2))
        self._num_steps = self._num_mixings = self._bytes = 0
        self._seconds = 0.0
        self._hook: Any = optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            start = time.perf_counter()
            self.mix()
            self._seconds += time.perf_counter() - start

    @torch.no_grad()
    def mix(self) -> None:
        """Mix with this round's neighbours. All ranks must."""
        rank, weights = self._communicator.rank, self._mixing(self._num_mixings)
        mixed, tag = self._catch_up(), self._num_mixings % (1 << 29)
        for peer in np.flatnonzero(weights[:, rank]).tolist():
            if peer != rank:
                torch.mul(mixed, weights[peer, rank], out=self._outgoing[:-1])
                self._outgoing[-1] = self._mass * weights[peer, rank]
                self._communicator.send(self._outgoing, peer, tag)
                self._bytes += self._outgoing.nbytes
        mixed.mul_(weights[rank, rank])
        mass = self._mass * float(weights[rank, rank])
        for peer in np.flatnonzero(weights[rank]).tolist():
            if peer != rank:
                self._communicator.recv(self._incoming, peer, tag)
                mixed += self._incoming[:-1]
                mass += float(self._incoming[-1])
        self._mass = mass
        self._num_mixings += 1
        self._show()

    def _catch_up(self) -> torch.Tensor:
        """Return what is mixed, with the steps that were made since: on the parameters, not on it."""
        stepped = torch.cat([p.detach().reshape(-1) for p in self._params])
        return self._mixed.add_(stepped - self._mixed / self._mass)

    def _show(self) -> None:
        for part, p in zip(torch.split(self._mixed / self._mass, self._sizes), self._params, strict=True):
            p.copy_(part.view(p.shape))

    @torch.no_grad()
    def average(self) -> None:
        """Make the mean of all ranks' parameters everybody's: in the end, or before an evaluation. Collective."""
        self._require_attached()
        self._communicator.all_reduce(self._catch_up(), "mean")
        self._mass = 1.0
        self._show()

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``mixings``, ``bytes_sent`` and ``wait_seconds``, those of mixing."""
        return {
            "steps": self._num_steps,
            "mixings": self._num_mixings,
            "bytes_sent": self._bytes,
            "wait_seconds": self._seconds,
        }

    def detach(self) -> None:
        """Mix no more; release the communicator. Idempotent, not collective."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._communicator.close()

    def _require_attached(self) -> None:
        if self._hook is None:
            raise RuntimeError("this Gossip is detached")
