"""The loop of a server: it lets workers in, and answers their requests in order."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.journal import Journal
from pycomm.asynchronous.settings import Replay, Trace
from pycomm.asynchronous.wire import (
    Connection,
    Message,
    SharedMemory,
    WorkerListener,
    as_array,
    readable,
    receive,
    receive_array,
    send,
    send_array,
)
from pycomm.errors import CommError
from pycomm.transport import processes
from pycomm.untrusted import COUNT, Number, OneOf, require

_LOG = logging.getLogger("pycomm")
_TICK = 0.25  # seconds
_TO_READ = 10.0
"""Seconds in which a worker copies the parameters that it was given; the others' pushes wait for it."""

_TO_RETURN = 5.0
"""Seconds in which a worker that has lost its connection, and may be alive, comes again."""

_LONGEST, _TIMES_SHARD = 1 << 16, 4
"""Bytes of the longest message into which gradients are packed: so many, and so many times those of the shard."""

_TO_GREET = 10.0
"""Seconds within which a new connection must say which worker it is."""

_LOST = (EOFError, OSError, ValueError)
"""What a broken connection raises: it has ended, or what it carries is malformed."""

_TINY = sys.float_info.min
_MEMORY = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_ASKS = {"ask": OneOf("hello", "pull", "push", "read", "stats", "close")}
_SHAPES: dict[str, Any] = {
    "hello": {"worker": COUNT, "life": str, "host": str, "process": COUNT, "memory": OneOf(None, str)},
    "pull": {"number": COUNT},
    "push": {"number": COUNT, "samples": Number(_TINY), "rate?": Number(0)},
    "read": {},
    "stats": {},
    "close": {},
}
"""Shapes of what workers ask."""


@dataclass(eq=False)
class _Worker:
    """Worker that is connected.

    Attributes:
        number: its own; -1 until it has said it.
        process: its id, where it is on this host; else 0.
        slot: its gradients: in memory that it shares, in this server's memory, or in its message.
        since: when it began to read the parameters; 0 if it does not read them now.
        rate: how many steps a second it makes, as far as it says so.
        last_message: when its last message came.
    """

    connection: Connection
    number: int = -1
    process: int = 0
    slot: torch.Tensor | None = None
    is_local: bool = False
    since: float = 0.0
    rate: float = 0.0
    last_message: float = field(default_factory=time.monotonic)

    def open(self, core: Core, path: str | None) -> None:
        """Open the memory that it shares, at ``path``, or make one for what it sends."""
        wire, size = core.wire, 0 if core.unpackers is not None else len(core.shard.memory)
        if path is not None:
            with contextlib.suppress(OSError):  # /proc may hide other processes
                shared = SharedMemory(max(1, size) * wire.itemsize, path)
                shared.close()
                self.slot, self.is_local = shared.tensor(wire)[:size], True
        if self.slot is None:
            self.slot = torch.empty(size, dtype=wire)

    def receive(self, core: Core) -> None:
        """Receive what it pushes, unless it is in memory that it shares."""
        if core.unpackers is not None:
            limit = _LONGEST + _TIMES_SHARD * core.shard.memory.nbytes
            self.slot = as_array(self.connection.recv_bytes(limit))
        elif not self.is_local:
            assert self.slot is not None
            receive_array(self.connection, self.slot)


class Serving:
    """Service of one server until all its workers have ended.

    Args:
        core: what happens.
        memory: in which the parameters are, for workers of this host.
        listener: where workers come in.
        host: identity of this host.
        expected: numbers of the workers that are to come, or to come back.
        timeout: for how long they may take, in seconds.
        rank: of this process, for errors.

    Attributes:
        lock: held while anything happens to ``core``.
        stopped: set by another thread, so that :meth:`run` returns soon, whoever is left.
    """

    def __init__(
        self,
        core: Core,
        memory: SharedMemory,
        listener: WorkerListener,
        host: str,
        expected: Iterable[int],
        timeout: float,
        rank: int,
        journal: Journal | None = None,
        trace: Trace | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._core, self._memory, self._listener, self._host = core, memory, listener, host
        self._expected, self._timeout, self._rank = set(expected), timeout, rank
        self._journal, self._trace, self._replay = journal, trace, replay
        self._workers: dict[Connection, _Worker] = {}
        self._queue: list[tuple[_Worker, Message]] = []  # what was asked, in order
        self._begun = time.monotonic()
        self.lock, self.stopped = threading.RLock(), threading.Event()
        self._served = 0 if self._expected else 1  # nobody is to come to a server that goes on when all have ended
        self._away: dict[int, float] = {}  # workers that may come again, and until when
        for number in core.mode.workers - self._expected:  # of an earlier run
            core.leave(number)
        for number in self._expected:  # they count from the beginning
            core.mode.join(number)
        if journal is not None:  # after that, as no event in it tells of them
            journal.checkpoint()

    def run(self) -> None:
        """Serve until no worker is left.

        Raises:
            CommError: no worker came within the timeout.
        """
        try:
            self._serve()
        finally:  # after an error, whose traceback keeps them, workers learn at once that nobody serves them
            for connection in self._workers:
                connection.close()

    def _serve(self) -> None:
        while not self.stopped.is_set() and (self._expected or self._workers or self._away):
            seconds = min(_TICK, self._core.mode.seconds_left())
            ready, has_come = readable(self._workers, self._listener.bell, seconds)
            for connection in ready:
                if connection in self._workers:  # which another one may have ended meanwhile
                    self._listen(self._workers[connection])
            for connection in self._listener.admitted() if has_come else []:
                self._workers[connection] = _Worker(connection)
            with self.lock:
                self._lose_patience()
                self._work()
        if self._served == 0 and not self.stopped.is_set():
            what = f"no worker came in {self._timeout:g} s"
            raise CommError.during("serve", what, rank=self._rank, elapsed=self._timeout)

    def _listen(self, worker: _Worker) -> None:
        try:
            message = _checked(receive(worker.connection, _ASKS), worker)
            worker.last_message = time.monotonic()
            match message["ask"]:
                case "read":
                    worker.since = 0.0
                case "stats":
                    send(worker.connection, **self.stats())
                case ask:
                    if ask == "push":
                        worker.receive(self._core)
                    self._queue.append((worker, message))
        except _LOST as error:
            self._lose(worker, error)

    def _greet(self, worker: _Worker, message: Message) -> None:
        number, is_here = message["worker"], message["host"] == self._host
        worker.number = number
        worker.open(self._core, message["memory"] if is_here else None)
        worker.process = message["process"] if is_here else 0
        self._expected.discard(number)
        self._away.pop(number, None)
        self._served += 1
        life = message["life"]
        self._note({"event": "join", "worker": number, "life": life})
        last = self._core.join(number, life)
        path = self._memory.path if worker.is_local else None
        self._answer(worker, memory=path, last=last)

    def _answer(self, worker: _Worker, array: torch.Tensor | None = None, **content: Any) -> None:
        if worker.connection not in self._workers:
            return
        try:
            send(worker.connection, **content)
            if array is not None:
                send_array(worker.connection, array)
        except OSError as error:
            self._lose(worker, error)

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """Go on without ``worker``; what it has asked before is still done, as far as it can be."""
        if self._workers.pop(worker.connection, None) is None:
            return
        worker.connection.close()
        self._queue = [(w, m) for w, m in self._queue if w is not worker or m["ask"] == "push"]
        if worker.number >= 0:
            _LOG.warning("worker %d is gone, the others go on: %s", worker.number, error or type(error).__name__)
            self._queue.append((worker, {"ask": "leave"}))
            if not worker.process or not processes.fate_of(worker.process):
                self._away[worker.number] = time.monotonic() + _TO_RETURN

    def _lose_patience(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.since and now - w.since > _TO_READ]:
            self._lose(worker, TimeoutError(f"it has read parameters for {_TO_READ:g} s"))
        queue, everyone = self._queue, self._workers.values()
        for worker in [w for w in everyone if _is_silent(w, now, self._timeout, queue, everyone)]:
            self._lose(worker, TimeoutError(f"it has said nothing for {now - worker.last_message:.3g} s"))
        for number in [number for number, until in self._away.items() if now > until]:
            del self._away[number]
        if self._expected and now - self._begun > self._timeout:
            for number in self._expected:
                _LOG.warning("worker %d has not come", number)
                self._leave({"event": "leave", "worker": number})
            self._expected.clear()

    # What was asked.

    def _work(self) -> None:
        """Do what was asked, as far as it can be done now."""
        while True:
            if not any(w.since for w in self._workers.values()):  # they read the parameters
                self._core.update_if_due()
            self._displace()
            may = (i for i, (worker, message) in enumerate(self._queue) if self._may(worker, message))
            index = next(may, None)
            if index is None:
                return
            self._do(*self._queue.pop(index))
            if self._journal is not None and self._journal.is_long():
                self._journal.checkpoint()

    def _may(self, worker: _Worker, message: Message) -> bool:
        """Return whether it is the turn of ``message``."""
        ask = message["ask"]
        if ask == "hello":
            number = message["worker"]  # once nothing is left to do of an earlier connection
            return not any(w.number == number for w, m in self._queue if m is not message)
        if ask != "pull" and any(w.since for w in self._workers.values()):
            return False  # they read the parameters
        if ask == "pull":
            # Behind pushes that wait for readers, or these would wait for ever.
            first_push = next((m for _, m in self._queue if m["ask"] == "push"), None)
            is_behind = first_push is not None and self._is_before(first_push, message)
            if is_behind or not self._core.mode.may_pull(worker.number):
                return False
        return self._replay is None or self._replay.is_next(_event(worker, message))

    def _displace(self) -> None:
        """Lose the earlier connections of workers that have come again."""
        again = {message["worker"] for _, message in self._queue if message["ask"] == "hello"}
        for worker in [w for w in self._workers.values() if w.number in again]:
            self._lose(worker, ConnectionError("it has come again"))

    def _is_before(self, first: Message, second: Message) -> bool:
        order = [id(message) for _, message in self._queue]
        return self._replay is None and order.index(id(first)) < order.index(id(second))

    def _do(self, worker: _Worker, message: Message) -> None:
        if message["ask"] == "hello":
            try:
                if worker.connection in self._workers:
                    self._greet(worker, message)
            except _LOST as error:
                self._lose(worker, error)
            return
        event = _event(worker, message)
        if message["ask"] == "pull":
            self._note(event)
            version = self._core.pull(worker.number)
            worker.since = time.monotonic() if worker.is_local else 0.0
            fastest = max(w.rate for w in self._workers.values())
            array = None if worker.is_local else self._core.shard.memory.to(self._core.wire)
            self._answer(worker, array, version=version, fastest=fastest)
        elif message["ask"] == "push":
            assert worker.slot is not None
            self._push(worker, event, message.get("rate", 0.0))
        else:
            self._leave(event)
            if message["ask"] == "close":
                self._answer(worker, closed=True)
                self._workers.pop(worker.connection, None)
                worker.connection.close()

    def _push(self, worker: _Worker, event: dict[str, Any], rate: float) -> None:
        assert worker.slot is not None
        try:
            gradient = self._core.gradient_of(worker.number, event["number"], worker.slot)
        except ValueError as error:
            self._lose(worker, error)
            return
        self._note(event, worker.slot)
        worker.rate = rate
        self._core.push(worker.number, event["number"], event["samples"], gradient)
        self._answer(worker, pushed=event["number"])

    def _leave(self, event: dict[str, Any]) -> None:
        self._note(event)
        self._core.leave(event["worker"])

    def _note(self, event: dict[str, Any], sent: torch.Tensor | None = None) -> None:
        """Write ``event`` down before it happens, with what a push has brought."""
        if event["event"] != "join" and self._trace is not None:
            self._trace.write(event)
        if event["event"] != "join" and self._replay is not None:
            self._replay.advance()
        if self._journal is not None:
            self._journal.write(event, sent)

    def stats(self) -> dict[str, Any]:
        """Return what has happened so far."""
        return {
            **self._core.counts,
            "updates": self._core.shard.num_updates,
            "staleness": {str(value): count for value, count in sorted(self._core.staleness.items())},
            "workers": sorted(self._core.mode.workers),
        }


def _is_silent(
    worker: _Worker, now: float, timeout: float, queue: list[tuple[_Worker, Message]], everyone: Collection[_Worker]
) -> bool:
    """Return whether ``worker`` is waited for in vain: it is stopped, or on another host, and has said nothing.

    One that takes long for a step is no hindrance, unless others wait for it, or it is the last.
    """
    if worker.number < 0:
        return now - worker.last_message > _TO_GREET
    if now - worker.last_message <= timeout or any(w is worker for w, _ in queue):
        return False
    if worker.process:
        return bool(processes.fate_of(worker.process))
    return bool(queue) or all(now - w.last_message > timeout for w in everyone)


def _checked(message: Message, worker: _Worker) -> Message:
    """Return ``message``. Raises ValueError if it is malformed, or not what comes at this time."""
    ask = message["ask"]
    require(message, _SHAPES[ask], f"{ask!r}")
    if (ask == "hello") != (worker.number < 0) and ask != "stats":
        raise ValueError(f"{ask!r} came {'again' if ask == 'hello' else 'before who it is from'}")
    if ask == "hello" and message["memory"] is not None and not _MEMORY.fullmatch(message["memory"]):
        raise ValueError(f"'hello' names no memory, but {message['memory'][:80]!r}")
    return message


def _event(worker: _Worker, message: Message) -> dict[str, Any]:
    if message["ask"] == "push":
        number, samples = message["number"], message["samples"]
        return {"event": "push", "worker": worker.number, "number": number, "samples": samples}
    if message["ask"] == "pull":
        return {"event": "pull", "worker": worker.number, "number": message["number"]}
    return {"event": "leave", "worker": worker.number}
