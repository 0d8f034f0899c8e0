"""ElasticGroup: a group that ranks may leave and join (``on_failure="shrink"``)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycomm.collectives.communicator import Communicator, communicator_at
from pycomm.errors import CommError
from pycomm.training.elastic.join_requests import JoinClient, JoinListener
from pycomm.training.elastic.liveness import this_process
from pycomm.training.elastic.membership import Membership, reconvene

_LOG = logging.getLogger("pycomm")
_MIN_RANKS = 1
_numbers = itertools.count()
"""Numbers of this process's elastic groups: the n-th of a new rank joins the n-th of the others."""

Lines = Sequence[tuple[str, str]]
"""Settings that must be the same on all ranks: pairs of a kind and a text."""


class ElasticGroup:
    """Group of ranks that changes, with the ``communicator`` that follows it. Created by :meth:`found` or :meth:`join`.

    Attributes:
        events: changes of the group, a dict each: see ``LocalAverager.stats``.
    """

    def __init__(self, communicator: Communicator, membership: Membership, listener: JoinListener) -> None:
        self.communicator, self._membership, self._listener = communicator, membership, listener
        self.events: list[dict[str, Any]] = []

    @classmethod
    def found(cls, communicator: Communicator, lines: Lines) -> ElasticGroup:
        """Make the group of the ranks of ``communicator``. Collective."""
        membership = Membership.found(communicator, _MIN_RANKS)
        name = f"averager/{next(_numbers)}"
        return cls(communicator, membership, JoinListener(membership.store, name, lines, _host_of(membership)))

    @classmethod
    def join(cls, address: str, lines: Lines, timeout: float) -> ElasticGroup:
        """Join the group whose store listens at ``address``; ask again if a rank is lost meanwhile."""
        client = JoinClient(address, f"averager/{next(_numbers)}", timeout)
        while True:
            answer = client.ask(this_process(), lines)
            membership, place = Membership.accept(answer, client.store, _MIN_RANKS, timeout)
            try:
                communicator = communicator_at(place, timeout)
                membership.confirm(communicator)
            except CommError:
                membership.close()
                if client.is_late():
                    raise
                continue
            listener = JoinListener(client.store, client.index, lines, _host_of(membership))
            listener.skip_to(answer["request"])
            return cls(communicator, membership, listener)

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks of the group, by the numbers that they got when they joined."""
        return self._membership.world

    def commit(self) -> int:
        """Wait until all ranks have a meeting's result; return the number of a waiting join request, 0 for none."""
        word = np.zeros(1, np.int64)
        if self._membership.is_first and (waiting := self._listener.waiting()) is not None:
            word[0] = waiting.number
        with self.communicator.channel.skip_checks():
            self.communicator.all_reduce(word, "max")
        return int(word[0])

    def recover(self, error: CommError, committed: int, catch_up: Callable[[int], None]) -> int:
        """Continue among the remaining ranks; return how many meetings count. Collective among them.

        Arguments as of :func:`reconvene`. Raises CommError if the others have excluded this rank.
        """
        start, old = time.monotonic(), self.world
        found = reconvene(
            self._membership, self.communicator, error, committed, catch_up=catch_up, open_again=lambda: None
        )
        left = {rank: found.decision.gone.get(rank, "was lost while the others met") for rank in old}
        for rank in self.world:
            del left[rank]
        self.events.append({"seconds": time.monotonic() - start, "left": left, "world": self.world})
        if self._membership.is_first:
            fates = ", ".join(f"rank {rank} {fate}" for rank, fate in left.items())
            _LOG.warning("%s: %d ranks go on", fates, len(self.world))
        return found.committed

    def admit(self, number: int) -> None:
        """Admit the new rank of join request ``number``. Collective, with the new rank.

        Raises:
            CommError: it did not come, or a rank was lost meanwhile. The group is as before.
            RuntimeError, ValueError: it was not invited.
        """
        self._listener.skip_to(number)
        place = self._membership.admit(self.communicator, number, self._listener.process_of(number))
        try:
            if self._membership.is_first:
                self._listener.answer(number, self._membership.invitation())
            self.communicator.move(place)
            self._membership.confirm(self.communicator)
        except BaseException:
            self._membership.dismiss()
            raise
        self.events.append({"joined": self.world[-1], "world": self.world})
        if self._membership.is_first:
            _LOG.warning("rank %d has joined: %d ranks go on", self.world[-1], len(self.world))

    def close(self, reason: str) -> None:
        self._listener.close()
        self._membership.leave(reason)
        self._membership.close()


def _host_of(membership: Membership) -> str:
    """Return the host that all ranks must be on; "" if they may be on any."""
    return str(this_process()["host"]) if membership.is_on_one_host else ""
