"""Progress: whether all ranks of a pipeline finish, and an order of their actions.

Each rank does its operations one by one: it receives an action's inputs, does the action, and sends the outputs,
waiting until each is sent. A message can be sent when its receiver waits for that message, or when fewer than
``buffers`` messages between the two ranks are unreceived. A possible operation stays possible until it is done,
and each rank has exactly one next operation, so the order does not matter: either all orders finish, or none does
(Kahn, "The semantics of a simple language for parallel programming", 1974, with bounded, tagged channels).
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np

from pycomm.schedule.pipeline.messages import Messages
from pycomm.schedule.pipeline.table import Columns
from pycomm.schedule.table import Ints
from pycomm.schedule.verify import ScheduleError

UNLIMITED = sys.maxsize


def run(c: Columns, messages: Messages, buffers: int = UNLIMITED) -> list[int]:
    """Return the actions, as indices into the columns, in an order in which they can be done.

    Raises:
        ScheduleError: ranks wait for each other; the message says for what.
    """
    machine = _Machine(c, messages, buffers)
    waiting = list(range(c.num_ranks))[::-1]
    while waiting:
        waiting += machine.advance(waiting.pop())
    if len(machine.done) < len(c):
        raise ScheduleError(machine.deadlock())
    return machine.done


class _Machine:
    """Ranks, each at one of its operations, and the messages between them.

    An operation is a number: ``message`` for its receive, ``num_messages + message`` for its send,
    ``-1 - action`` for an action.
    """

    def __init__(self, c: Columns, messages: Messages, buffers: int) -> None:
        self._c = c
        self._messages = messages
        self._buffers = buffers
        count = self._count = len(messages.src)
        self._operations, first = _operations(c, messages)
        self._next = first[:-1]  # of each rank
        self._end = first[1:]
        src, dst = c.rank[messages.src], c.rank[messages.dst]
        self._src, self._dst = src.tolist(), dst.tolist()
        self._pair = (src * c.num_ranks + dst).tolist()
        self._sent = bytearray(count)
        self._awaited = bytearray(count)
        self._unreceived: defaultdict[int, int] = defaultdict(int)
        self.done: list[int] = []

    def advance(self, rank: int) -> list[int]:
        """Do what ``rank`` can do now; return the ranks that may be able to continue because of that."""
        operations, sent, awaited, count = self._operations, self._sent, self._awaited, self._count
        pair, unreceived, limit = self._pair, self._unreceived, self._buffers
        woken: list[int] = []
        at, end = self._next[rank], self._end[rank]
        while at < end:
            operation = operations[at]
            if operation < 0:
                self.done.append(-1 - operation)
            elif operation < count:
                if sent[operation]:
                    unreceived[pair[operation]] -= 1  # now there is room
                elif awaited[operation]:
                    break
                if limit != UNLIMITED:
                    woken.append(self._src[operation])
                if not sent[operation]:
                    awaited[operation] = 1
                    break
            else:
                message = operation - count
                if awaited[message]:
                    woken.append(self._dst[message])
                elif unreceived[pair[message]] >= limit:
                    break
                sent[message] = 1
                unreceived[pair[message]] += 1
            at += 1
        self._next[rank] = at
        return woken

    def deadlock(self) -> str:
        """Describe the cycle of ranks that wait for each other."""
        rank = next(r for r in range(self._c.num_ranks) if self._next[r] < self._end[r])
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = self._peer(rank)
        circle = seen[seen.index(rank) :]
        start = circle.index(min(circle))
        return "deadlock: " + "; ".join(self._told(r) for r in circle[start:] + circle[:start])

    def _peer(self, rank: int) -> int:
        operation = self._operations[self._next[rank]]
        peer: int = self._src[operation] if operation < self._count else self._dst[operation - self._count]
        return peer

    def _told(self, rank: int) -> str:
        operation = self._operations[self._next[rank]]
        if operation < self._count:
            awaited, needed = (int(end[operation]) for end in self._messages)
            return (
                f"rank {rank} waits for rank {self._c.rank[awaited]} to send {self._c.action(awaited)}, which its "
                f"action {needed - int(self._c.first[rank])}, {self._c.action(needed)}, needs"
            )
        message = operation - self._count
        sent = int(self._messages.src[message])
        what, peer = self._c.action(sent), self._dst[message]
        place = f"its action {sent - int(self._c.first[rank])}"
        if self._buffers == 0:
            return f"rank {rank} waits for rank {peer} to receive {what}, {place}"
        room = f"{self._buffers} earlier message{'s' * (self._buffers > 1)} unreceived"
        return f"rank {rank} waits for rank {peer} to make room for {what}, {place}: it has left {room}"


def _operations(c: Columns, messages: Messages) -> tuple[list[int], list[int]]:
    """Return the operations of all ranks, one rank after the other, and where each rank's begin."""
    count = len(messages.src)
    owner = np.concatenate([messages.dst, np.arange(len(c)), messages.src])
    operation = np.concatenate([np.arange(count), -1 - np.arange(len(c)), count + np.arange(count)])
    # Stable: an action's receives, the action, its sends; messages in their own order.
    order: Ints = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], c.first)
    return operation[order].tolist(), first.tolist()
