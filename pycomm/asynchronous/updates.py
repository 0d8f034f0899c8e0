"""Updates: a server's shard of the parameters, and the optimizer that steps it."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm.asynchronous.shards import Piece
from pycomm.optim import fuse
from pycomm.optim.fused import RULES

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` is known to update each element by itself: then parameters may be cut anywhere."""
    kind = type(optimizer)
    return any(kind is getattr(torch.optim, name, None) for name in _ELEMENTWISE)


def group_sizes(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return how many parameters a :class:`ShardOptimizer` of ``pieces`` has in each of its groups."""
    ends = list(itertools.accumulate(len(group["params"]) for group in optimizer.param_groups))
    indices = sorted(piece.index for piece in pieces)
    return tuple(
        bisect.bisect_left(indices, end) - bisect.bisect_left(indices, begin)
        for begin, end in itertools.pairwise([0, *ends])
    )


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Name what does not take its state: a foreign object may raise anything."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} does not take what was saved: {type(error).__name__}: {error}") from error


@dataclass
class _Schedule:
    """Schedule of the learning rate, and how often it was stepped."""

    scheduler: Any
    samples: float | None
    num_steps: int = 0

    def follow(self, due: float) -> None:
        """Step until it has been stepped ``due`` times."""
        while self.num_steps + 1 <= due:
            self.scheduler.step()
            self.num_steps += 1


class ShardOptimizer:
    """Optimizer of the pieces of one shard, which lie one after the other in ``memory``.

    The given optimizer is the one that steps: its groups keep their options, but have only what lies in the shard from
    now on. A whole parameter stays the object that it was, with its values in ``memory``; a part of one becomes a flat
    parameter of its own, and one of a half type, for which ``memory`` is float32, one of its shape.

    Args:
        optimizer: the user's.
        pieces: of the optimizer's parameters, counted in the order of its groups.
        memory: flat, for all elements; gets the parameters' values.

    Attributes:
        memory: the parameters.
        num_updates: number of steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], memory: torch.Tensor) -> None:
        self._optimizer, self.memory, self.num_updates = optimizer, memory, 0
        self._params: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._weight = self._samples = 0.0
        self._count, self._all_samples = 0, 0.0
        self._schedules: list[_Schedule] = []
        self._take_over(pieces)
        if type(optimizer) in RULES:
            fuse(optimizer)

    @torch.no_grad()
    def _take_over(self, pieces: Sequence[Piece]) -> None:
        by_index = {piece.index: piece for piece in pieces}
        index, found = 0, dict[int, tuple[int, list[torch.Tensor]]]()
        for group in self._optimizer.param_groups:
            kept: list[torch.Tensor] = []
            for p in group["params"]:
                if index in by_index:
                    found[index] = len(kept), kept
                    kept.append(p)
                else:
                    self._optimizer.state.pop(p, None)
                index += 1
            group["params"] = kept
        begin = 0
        for piece in pieces:
            position, kept = found[piece.index]
            view = self.memory[begin : begin + piece.size]
            begin += piece.size
            kept[position] = self._in_memory(kept[position], piece, view)
            self._params.append(kept[position])

    def _in_memory(self, p: torch.Tensor, piece: Piece, view: torch.Tensor) -> torch.Tensor:
        view.copy_(p.detach().reshape(-1)[piece.begin : piece.end])
        is_whole = piece.size == p.numel()
        if is_whole and p.dtype == view.dtype:
            p.data = view.view(p.shape)
            return p
        part = nn.Parameter(view.view(p.shape) if is_whole else view)
        state = self._optimizer.state
        if p in state:
            state[part] = {
                key: value.reshape(-1)[piece.begin : piece.end].to(view.dtype, copy=True).view(part.shape)
                if isinstance(value, torch.Tensor) and value.shape == p.shape
                else value
                for key, value in state.pop(p).items()
            }
        return part

    def collect(self, gradient: torch.Tensor, samples: float, rate: float) -> None:
        """Add ``gradient`` to the next update, whose learning rate it wants to be multiplied by ``rate``.

        It must stay as it is until :meth:`update` if it is the only one.
        """
        weight = samples * rate
        self._all_samples += samples
        if self._count == 0:
            self._sum = gradient
        else:
            assert self._sum is not None
            if self._count == 1:
                self._sum = self._sum * self._weight
            self._sum.add_(gradient, alpha=weight)
        self._count += 1
        self._weight += weight
        self._samples += samples

    def own(self) -> None:
        """Copy what was collected, if it is the memory of somebody else."""
        if self._count == 1 and self._sum is not None:
            self._sum = self._sum.clone()

    def update(self) -> None:
        """Step by the weighted mean of what was collected."""
        gradient, weight = self._sum, self._weight
        assert gradient is not None
        if self._count > 1:
            gradient = gradient / weight if weight else gradient
        rate = weight / self._samples if self._samples else 1.0
        self._count, self._sum, self._weight, self._samples = 0, None, 0.0, 0.0
        begin = 0
        for p in self._params:
            p.grad = gradient[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rate != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * rate
        try:
            self._optimizer.step()
        finally:
            for group, before in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = before
            for p in self._params:
                p.grad = None
        self.num_updates += 1
        for schedule in self._schedules:
            schedule.follow(self.num_updates if schedule.samples is None else self._all_samples / schedule.samples)

    def schedule(self, scheduler: Any, samples: float | None) -> None:
        """Step ``scheduler`` after each update, or each time that so many ``samples`` more were counted."""
        self._schedules.append(_Schedule(scheduler, samples))

    def group_sizes(self) -> tuple[int, ...]:
        """Return the number of parameters in each of the optimizer's groups."""
        return tuple(len(group["params"]) for group in self._optimizer.param_groups)

    def state(self) -> dict[str, Any]:
        """Return what a server that begins again has to know."""
        return {
            "memory": self.memory,
            "updates": self.num_updates,
            "optimizer": self._optimizer.state_dict(),
            "sum": self._sum,
            "collected": [self._count, self._weight, self._samples, self._all_samples],
            "schedules": [[each.scheduler.state_dict(), each.num_steps] for each in self._schedules],
        }

    def take_back(self, memory: torch.Tensor, optimizer: dict[str, Any]) -> None:
        """Take back parameters and the optimizer's state."""
        self._optimizer.load_state_dict(optimizer)
        self.memory.copy_(memory)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave.

        Raises:
            ValueError: it is of another model or optimizer.
        """
        if len(state["schedules"]) != len(self._schedules):
            raise ValueError(
                f"the checkpoint has {len(state['schedules'])} schedules, this server {len(self._schedules)}"
            )
        with _named("the optimizer"):
            self.take_back(state["memory"], state["optimizer"])
        self.num_updates, self._sum = state["updates"], state["sum"]
        self._count, self._weight, self._samples, self._all_samples = state["collected"]
        for each, (own, num_steps) in zip(self._schedules, state["schedules"], strict=True):
            with _named(f"a {type(each.scheduler).__name__}"):
                each.scheduler.load_state_dict(own)
            each.num_steps = num_steps
