"""ElasticGroup: the ranks that meet, where some may be lost and others come (``on_failure="shrink"``)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycomm.communicator import Communicator, communicator_at
from pycomm.elastic.join_requests import JoinClient, JoinListener
from pycomm.elastic.liveness import this_process
from pycomm.elastic.membership import Membership, reconvene
from pycomm.errors import CommError

_LOG = logging.getLogger("pycomm")
_MIN_RANKS = 1
_numbers = itertools.count()
"""Numbers of this process's elastic groups: a newcomer's n-th joins the n-th of the others."""

Lines = Sequence[tuple[str, str]]
"""What the ranks of a group must have in common: kinds and texts."""


class ElasticGroup:
    """Ranks that meet, over ``communicator``, which moves with them. Make it by :meth:`found` or :meth:`join`.

    Attributes:
        events: what happened to the world, a dict each: see ``LocalAverager.stats``.
    """

    def __init__(self, communicator: Communicator, membership: Membership, listener: JoinListener) -> None:
        self.communicator, self._membership, self._listener = communicator, membership, listener
        self.events: list[dict[str, Any]] = []

    @classmethod
    def found(cls, communicator: Communicator, lines: Lines) -> ElasticGroup:
        """Make the group of the ranks of ``communicator``. Collective."""
        membership = Membership.found(communicator, _MIN_RANKS, counts_ready=False)
        return cls(communicator, membership, _listener_of(membership, lines))

    @classmethod
    def join(cls, address: str, lines: Lines, timeout: float) -> ElasticGroup:
        """Join those whose store listens at ``address``; asks again where a rank is lost meanwhile.

        Raises:
            ValueError: they refuse, or ``address`` is malformed.
            CommError: they do not answer, or failed.
        """
        client = JoinClient(address, f"averager/{next(_numbers)}", timeout)
        while True:
            answer = client.ask(this_process(), lines)
            membership, place = Membership.accept(answer, client.store, _MIN_RANKS, timeout, False)
            try:
                communicator = communicator_at(place, timeout)
                membership.settle(communicator)
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
        """Its ranks, by the numbers they were given when they joined."""
        return self._membership.world

    def commit(self) -> int:
        """Return, once all ranks have the results of a meeting, the number of a waiting newcomer; 0 for none."""
        word = np.zeros(1, np.int64)
        if self._membership.is_first and (waiting := self._listener.waiting()) is not None:
            word[0] = waiting.number
        with self.communicator.channel.skip_checks():
            self.communicator.all_reduce(word, "max")
        return int(word[0])

    def recover(self, error: CommError, committed: int, catch_up: Callable[[int], None]) -> int:
        """Go on among those that are left; return how many meetings count. Collective among them.

        Args:
            error, committed, catch_up: see :func:`reconvene`.

        Raises:
            CommError: this rank is left behind.
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

    def let_in(self, number: int) -> None:
        """Let in the newcomer whose request has that ``number``. Collective, with it.

        Raises:
            CommError: it did not come, or a rank was lost meanwhile; the world is as before.
        """
        self._listener.skip_to(number)
        place = self._membership.admit(self._listener.read(number))
        try:
            if self._membership.is_first:
                self._listener.answer(number, self._membership.invitation())
            self.communicator.move(place)
            self._membership.settle(self.communicator)
        except BaseException:
            self._membership.dismiss()
            raise
        self.events.append({"joined": self.world[-1], "world": self.world})
        if self._membership.is_first:
            _LOG.warning("rank %d has come: %d ranks go on", self.world[-1], len(self.world))

    def close(self, reason: str) -> None:
        """Leave."""
        self._listener.close()
        self._membership.leave(reason)
        self._membership.close()


def _listener_of(membership: Membership, lines: Lines) -> JoinListener:
    return JoinListener(membership.store, f"averager/{next(_numbers)}", lines, _host_of(membership))


def _host_of(membership: Membership) -> str:
    """Return the host that all ranks must be on, or nothing."""
    return str(this_process()["host"]) if membership.is_on_one_host else ""
