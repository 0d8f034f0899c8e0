"""Core of a server: what pulls and pushes do to its shard, whoever asks for them and however."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pycomm.asynchronous.modes import Compensator, Rules
from pycomm.asynchronous.packing import Unpackers
from pycomm.asynchronous.states import Wanted
from pycomm.asynchronous.updates import ShardOptimizer


class Core:
    """State machine of a server. Everything follows from the order in which its methods are called.

    Args:
        shard: parameters and their optimizer.
        mode: which gradients count, and who waits.
        compensator: what is done to stale ones.
        wire: dtype of parameters and gradients on the workers.
        unpackers: of gradients that do not travel as they are.
        settings: what a server that begins again must have in common with this one.

    Attributes:
        staleness: number of gradients by their staleness: the updates since their parameters were pulled.
        counts: "pushes", those that were "dropped" because they came too late, and "duplicates".
    """

    def __init__(
        self,
        shard: ShardOptimizer,
        mode: Rules,
        compensator: Compensator,
        wire: torch.dtype,
        unpackers: Unpackers | None = None,
        settings: str = "",
    ) -> None:
        self.shard, self.mode, self._compensator, self.wire = shard, mode, compensator, wire
        self.unpackers, self._settings = unpackers, settings
        self.staleness: Counter[int] = Counter()
        self.counts: Counter[str] = Counter(pushes=0, dropped=0, duplicates=0)
        self._lives: dict[int, str] = {}  # of workers: each process has one of its own
        self._last: dict[int, int] = {}  # number of each worker's last push
        self._pulled: dict[int, int] = {}  # number of updates when it pulled

    def join(self, worker: int, life: str) -> int:
        """Let ``worker`` take part; return the number of its last push that has arrived, 0 for none.

        Args:
            life: tells its process from another one that had its number.
        """
        if self._lives.get(worker) != life:
            if worker in self._lives:  # the first process with that number counts from the server's beginning
                self.mode.leave(worker)
            self._forget(worker)
            self._pulled.pop(worker, None)
            self._lives[worker], self._last[worker] = life, 0
        self.mode.join(worker)
        return self._last[worker]

    def leave(self, worker: int) -> None:
        """Note that ``worker`` is gone, which others may have waited for; it may come again."""
        self.mode.leave(worker)
        self._forget(worker)
        self.update_if_due()

    def _forget(self, worker: int) -> None:
        self._compensator.leave(worker)
        if self.unpackers is not None:
            self.unpackers.forget(worker)

    def pull(self, worker: int) -> int:
        """Note that ``worker`` gets the parameters as they are; return how many updates they have had."""
        self._pulled[worker] = self.shard.num_updates
        self._compensator.pulled(worker, self.shard.memory)
        self.mode.pulled(worker)
        return self.shard.num_updates

    def gradient_of(self, worker: int, number: int, sent: torch.Tensor) -> torch.Tensor:
        """Return the gradients in what ``worker`` has sent with that push, flat; it may be the same memory.

        Raises:
            ValueError: it is a malformed message.
        """
        if self.unpackers is not None:
            return self.unpackers.unpack(worker, number, sent)
        return sent.view(self.wire).to(self.shard.memory.dtype)

    @torch.no_grad()
    def push(self, worker: int, number: int, samples: float, gradient: torch.Tensor) -> None:
        """Take the push of ``worker`` with that ``number``: once, however often it comes.

        The worker must take part.
        """
        if number <= self._last[worker]:
            self.counts["duplicates"] += 1
            return
        self._last[worker] = number
        staleness = self.shard.num_updates - self._pulled.get(worker, self.shard.num_updates)
        self.counts["pushes"] += 1
        self.staleness[staleness] += 1
        if not self.mode.push(worker, staleness, samples):
            self.counts["dropped"] += 1
            return
        gradient = self._compensator.compensate(worker, gradient, self.shard.memory)
        self.shard.collect(gradient, samples, self._compensator.weight(staleness))
        if not self.update_if_due():
            self.shard.own()

    def update_if_due(self) -> bool:
        """Update with what was collected, if that is due; return whether it was."""
        is_due = self.mode.num_collected > 0 and self.mode.is_due()
        if is_due:
            self.shard.update()
            self.mode.updated()
        return is_due

    def state(self) -> dict[str, Any]:
        """Return everything, for a server that begins again."""
        return {
            "settings": self._settings,
            "shard": self.shard.state(),
            "mode": self.mode.state(),
            "compensator": self._compensator.state(),
            "staleness": dict(self.staleness),
            "counts": dict(self.counts),
            "lives": dict(self._lives),
            "last": dict(self._last),
            "pulled": dict(self._pulled),
        }

    def wanted(self) -> Wanted:
        """Return what :meth:`load_state` takes."""
        memory = self.shard.memory
        size = None if self.unpackers is not None else len(memory) * self.wire.itemsize
        groups, mode = self.shard.group_sizes(), self.mode.state().keys()
        return Wanted(self._settings, len(memory), memory.dtype, groups, mode, size)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave. Raises ValueError if it is of another model, optimizer, or settings."""
        self.wanted().check(state, "the state")
        self.shard.load_state(state["shard"])
        self.mode.load_state(state["mode"])
        self._compensator.load_state(state["compensator"])
        self.staleness, self.counts = Counter(state["staleness"]), Counter(state["counts"])
        self._lives, self._last = dict(state["lives"]), dict(state["last"])
        self._pulled = dict(state["pulled"])
