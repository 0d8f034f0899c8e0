"""Loop of a server, which admits workers and answers their requests in order."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm.collectives.transport import processes
from pycomm.collectives.transport.authentication import Step
from pycomm.errors import CommError
from pycomm.training.asynchronous.core import Core, packed_limit
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint
from pycomm.training.asynchronous.settings import Trace
from pycomm.training.asynchronous.wire import (
    STALLED,
    Connection,
    Message,
    SharedMemory,
    WorkerListener,
    as_array,
    bytes_of,
    ready,
    receiving,
)
from pycomm.untrusted import COUNT, PROCESS_ID, Number, OneOf, require

_LOG = logging.getLogger("pycomm")
_TICK = 0.25  # seconds
_READ_LIMIT = 10.0
"""Seconds in which a worker must copy the shared parameters; the others' pushes wait for it."""

_RETURN_LIMIT = 5.0
"""Seconds in which a worker that has lost its connection, and may be alive, may connect again."""

_MOST_QUEUED = 2
"""Most requests of a worker that wait: a push from before it connected again, and the next one."""

_HANDSHAKE = 10.0
"""Seconds within which a new connection must name its worker."""

_LOST = (EOFError, OSError, ValueError)
"""Errors of a broken connection: it has ended, or a message is malformed."""

_TINY = sys.float_info.min
_MEMORY = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_ASKS = {"ask": OneOf("hello", "pull", "push", "read", "stats", "close")}
_SHAPES: dict[str, Any] = {
    "hello": {
        "worker": COUNT,
        "life": str,
        "host": str,
        "process": PROCESS_ID,
        "memory": OneOf(None, str),
        "acknowledged": COUNT,
    },
    "pull": {"number": COUNT},
    "push": {"number": COUNT, "samples": Number(_TINY)},
    "read": {},
    "stats": {},
    "close": {},
}
"""Shapes of workers' requests."""


@dataclass(eq=False)
class _Worker:
    """Connected worker.

    Attributes:
        number: its number; -1 before its "hello".
        process: id of its process if that is on this host, else 0.
        life: token of its process.
        slot: its gradients: in memory that it shares, in this server's memory, or in its message.
        buffers: those in its last push, if workers push them.
        since: time at which it began to read the shared parameters; 0 if it is not reading.
        last_active: time of its last message, or of the last answer to it. It is not late while it waits for an answer.
        sending: answers that it has not read yet. Until it has, no more of its messages are received.
        receiving: its message, if a part has come.
        waits_for: event to poll its connection for.
        moved: time at which a part of a message has last moved.
    """

    connection: Connection
    number: int = -1
    process: int = 0
    life: str = ""
    slot: torch.Tensor | None = None
    buffers: torch.Tensor | None = None
    is_local: bool = False
    since: float = 0.0
    last_active: float = field(default_factory=time.monotonic)
    sending: deque[Step] = field(default_factory=deque)
    receiving: Step | None = None
    waits_for: int = select.POLLIN
    moved: float = 0.0

    def open(self, core: Core, path: str | None) -> None:
        """Open the memory that the worker shares at ``path``, or allocate memory for its pushes."""
        wire, size = core.wire, 0 if core.unpackers is not None else len(core.shard.memory)
        if path is not None:
            with contextlib.suppress(OSError):  # /proc may hide other processes
                shared = SharedMemory(max(1, size) * wire.itemsize, path)
                shared.close()
                self.slot, self.is_local = shared.tensor(wire)[:size], True
        if self.slot is None:
            self.slot = torch.empty(size, dtype=wire)

    def receive_push(self, core: Core) -> Step:
        """Receive the data of a push, unless it is in shared memory."""
        if core.unpackers is not None:
            content = yield from self.connection.receiving(packed_limit(core.shard.memory.nbytes))
            self.slot = as_array(content)
        elif not self.is_local:
            assert self.slot is not None
            yield from self.connection.receiving_into(bytes_of(self.slot))
        if core.buffers is not None:
            self.buffers = torch.empty(core.buffers.num_bytes, dtype=torch.uint8)
            yield from self.connection.receiving_into(bytes_of(self.buffers))

    def send(self) -> None:
        """Send what the connection takes now. Raises OSError if it is lost."""
        self.waits_for, self.moved = select.POLLIN, time.monotonic()
        while self.sending:
            if event := next(self.sending[0], 0):
                self.waits_for = event
                return
            self.sending.popleft()

    def stalled(self, now: float) -> str:
        """Return what has not moved for too long; "" if nothing."""
        if now - self.moved <= STALLED:
            return ""
        what = "it has read no answer" if self.sending else "nothing of its message has come" if self.receiving else ""
        return what and f"{what} for {STALLED:g} s"


class Serving:
    """Service of one server until all its workers have ended.

    Args:
        core: state machine of the server.
        memory: memory of the parameters, which workers of this host read.
        listener: accepts the workers' connections.
        host: identity of this host.
        expected: numbers of the workers that must connect, or connect again.
        timeout: seconds that they may take.
        rank: rank of this process, for errors.
        checkpoint: where to write the state, from which the server may restart.
        trace: where to write the order of events.
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
        checkpoint: ServerCheckpoint | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._core, self._memory, self._listener, self._host = core, memory, listener, host
        self._expected, self._timeout, self._rank = set(expected), timeout, rank
        self._checkpoint, self._trace = checkpoint, trace
        self._workers: dict[Connection, _Worker] = {}
        self._queue: list[tuple[_Worker, Message]] = []  # requests, in order
        self._begun = time.monotonic()
        self._served = 0 if self._expected else 1  # a server restarted after all workers ended expects none
        self._sent: Callable[[], memoryview | None] = lambda: None
        self._sent_version = -1
        self._away: dict[int, float] = {}  # until when workers may connect again
        for number in core.mode.workers - self._expected:  # of an earlier run
            core.leave(number)
        for number in self._expected:  # the mode waits for them from the start
            core.mode.join(number)
        if checkpoint is not None:
            checkpoint.write(core)

    def run(self) -> None:
        """Serve until no worker is left."""
        while self._expected or self._workers or self._away:
            waits = {connection: worker.waits_for for connection, worker in self._workers.items()}
            found, has_come = ready(waits, self._listener.wakeup, _TICK)
            for connection in found:
                if connection in self._workers:  # an earlier one in the loop may have replaced it
                    self._continue(self._workers[connection])
            for connection in self._listener.admitted() if has_come else []:
                self._workers[connection] = _Worker(connection)
            self._apply_timeouts()
            self._process_queue()
            if self._checkpoint is not None and self._checkpoint.is_due(self._core):  # also after the last worker
                self._checkpoint.write(self._core)
        if self._served == 0:
            what = f"no worker came in {self._timeout:g} s"
            raise CommError.during("serve", what, rank=self._rank, elapsed=self._timeout)

    def close(self) -> None:
        """Close all connections, also those that a traceback keeps alive. Idempotent."""
        for connection in self._workers:
            connection.close()

    def _continue(self, worker: _Worker) -> None:
        """Continue to send to ``worker``, or else to receive its message, as far as possible without waiting."""
        try:
            if not worker.sending:
                worker.moved, worker.receiving = time.monotonic(), worker.receiving or self._receive(worker)
                if not next(worker.receiving, 0):
                    worker.receiving = None
            worker.send()
        except _LOST as error:
            self._disconnect(worker, error)

    def _receive(self, worker: _Worker) -> Step:
        message = _checked((yield from receiving(worker.connection, _ASKS)), worker)
        match message["ask"]:
            case "read":
                worker.since = 0.0
            case "stats":
                worker.sending.append(_message(worker, self.stats()))
            case ask:
                waiting = [other["ask"] for each, other in self._queue if each is worker]
                if "close" in waiting:
                    raise ValueError(f"{ask!r} came after close")
                if len(waiting) >= _MOST_QUEUED:
                    raise ValueError(f"{ask!r} came before it had the answers to earlier requests")
                if ask == "hello":
                    self._refuse_other_process(message)
                if ask == "push":
                    yield from worker.receive_push(self._core)
                self._queue.append((worker, message))
        worker.last_active = time.monotonic()

    def _refuse_other_process(self, hello: Message) -> None:
        """Raise ValueError if the worker of this number is another process of this host, and alive."""
        same = [worker for worker in self._workers.values() if worker.number == hello["worker"]]
        for worker in same:
            is_other = worker.process not in (0, hello["process"]) and worker.life != hello["life"]
            if is_other and not processes.fate_of(worker.process):
                what = f"worker {worker.number} is process {worker.process}, which is alive"
                _LOG.warning("process %d is refused: %s", hello["process"], what)
                raise ValueError(what)

    def _admit(self, worker: _Worker, message: Message) -> None:
        number, is_here = message["worker"], message["host"] == self._host
        worker.number = number
        worker.open(self._core, message["memory"] if is_here else None)
        worker.process = message["process"] if is_here else 0
        self._expected.discard(number)
        self._away.pop(number, None)
        self._served += 1
        worker.life = life = message["life"]
        if lost := self._core.join(number, life, message["acknowledged"]):
            what = "came after the checkpoint from which this server has restarted, and are lost"
            _LOG.warning("worker %d: %d of its pushes %s", number, lost, what)
        self._answer(worker, memory=self._memory.path if worker.is_local else None)

    def _answer(self, worker: _Worker, *arrays: memoryview, **content: Any) -> None:
        if worker.connection not in self._workers:
            return
        worker.last_active = time.monotonic()
        worker.sending.append(_message(worker, content))
        worker.sending += [worker.connection.sending(array) for array in arrays]
        try:
            worker.send()
        except OSError as error:
            self._disconnect(worker, error)

    def _disconnect(self, worker: _Worker, error: Exception) -> None:
        """Disconnect ``worker``; pushes that it has sent still count."""
        if self._workers.pop(worker.connection, None) is None:
            return
        worker.connection.close()
        self._queue = [(w, m) for w, m in self._queue if w is not worker or m["ask"] == "push"]
        if worker.number >= 0:
            _LOG.warning("worker %d is lost, the others go on: %s", worker.number, error or type(error).__name__)
            self._queue.append((worker, {"ask": "leave"}))
            if not worker.process or not processes.fate_of(worker.process):
                self._away[worker.number] = time.monotonic() + _RETURN_LIMIT

    def _apply_timeouts(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if w.since and now - w.since > _READ_LIMIT]:
            self._disconnect(worker, TimeoutError(f"it has read parameters for {_READ_LIMIT:g} s"))
        for worker, what in [(w, what) for w in self._workers.values() if (what := w.stalled(now))]:
            self._disconnect(worker, TimeoutError(what))
        queue, everyone = self._queue, self._workers.values()
        for worker in [w for w in everyone if _has_timed_out(w, now, self._timeout, queue, everyone)]:
            self._disconnect(worker, TimeoutError(f"it has sent nothing for {now - worker.last_active:.3g} s"))
        for number in [number for number, until in self._away.items() if now > until]:
            del self._away[number]
        if self._expected and now - self._begun > self._timeout:
            for number in self._expected:
                _LOG.warning("worker %d has not come", number)
                self._leave({"event": "leave", "worker": number})
            self._expected.clear()

    # Requests.

    def _process_queue(self) -> None:
        """Handle the requests that are ready."""
        while True:
            if not self._has_readers():
                self._core.update_if_due()
            self._replace_old_connections()
            ready = (i for i, (worker, message) in enumerate(self._queue) if self._is_ready(worker, message))
            index = next(ready, None)
            if index is None:
                return
            self._handle(*self._queue.pop(index))

    def _has_readers(self) -> bool:
        """Return whether a worker is reading the shared parameters."""
        return any(worker.since for worker in self._workers.values())

    def _is_ready(self, worker: _Worker, message: Message) -> bool:
        """Return whether ``message`` can be handled now."""
        ask = message["ask"]
        if ask == "hello":
            number = message["worker"]  # after the requests of an earlier connection
            return not any(w.number == number for w, m in self._queue if m is not message)
        if ask != "pull" and self._has_readers():
            return False
        if ask == "pull":
            # After earlier pushes, which wait for readers: else further pulls could delay them for ever.
            earlier = itertools.takewhile(lambda each: each[1] is not message, self._queue)
            return not any(m["ask"] == "push" for _, m in earlier) and self._core.mode.may_pull(worker.number)
        return True

    def _replace_old_connections(self) -> None:
        """Disconnect the earlier connections of workers that have connected again."""
        again = {message["worker"] for _, message in self._queue if message["ask"] == "hello"}
        for worker in [w for w in self._workers.values() if w.number in again]:
            self._disconnect(worker, ConnectionError("it has connected again"))

    def _handle(self, worker: _Worker, message: Message) -> None:
        if message["ask"] == "hello":
            try:
                if worker.connection in self._workers:
                    self._admit(worker, message)
            except _LOST as error:
                self._disconnect(worker, error)
            return
        event = _event(worker, message)
        if message["ask"] == "pull":
            self._record(event)
            version = self._core.pull(worker.number)
            worker.since = time.monotonic() if worker.is_local else 0.0
            arrays = [] if worker.is_local else [self._snapshot(version)]
            arrays += [] if self._core.buffers is None else [bytes_of(self._core.buffers.at(version))]
            self._answer(worker, *arrays, version=version)
        elif message["ask"] == "push":
            self._push(worker, event)
        else:
            self._leave(event)
            if message["ask"] == "close":
                self._answer(worker, closed=True)
                self._workers.pop(worker.connection, None)
                worker.connection.close()

    def _snapshot(self, version: int) -> memoryview:
        """Return a copy of the parameters, as updates go on while slow workers receive it, all the same one."""
        sent = self._sent()
        if sent is None or self._sent_version != version:
            sent = bytes_of(self._core.shard.memory.to(self._core.wire, copy=True))
            self._sent, self._sent_version = weakref.ref(sent), version
        return sent

    def _push(self, worker: _Worker, event: dict[str, Any]) -> None:
        assert worker.slot is not None
        try:
            gradient = self._core.gradient_of(worker.number, event["number"], worker.slot)
        except ValueError as error:
            self._disconnect(worker, error)
            return
        self._record(event)
        if self._core.buffers is not None and worker.buffers is not None:  # first, as they belong to the update
            version = self._core.shard.num_updates
            self._core.buffers.push(worker.number, worker.buffers, self._core.mode.workers, version)
        self._core.push(worker.number, event["number"], event["samples"], gradient)
        self._answer(worker, pushed=event["number"])

    def _leave(self, event: dict[str, Any]) -> None:
        self._record(event)
        self._core.leave(event["worker"])

    def _record(self, event: dict[str, Any]) -> None:
        """Write ``event`` to the trace, before it is applied."""
        if self._trace is not None:
            self._trace.write(event)

    def stats(self) -> dict[str, Any]:
        """Return the counters."""
        return {
            **self._core.counts,
            "updates": self._core.shard.num_updates,
            "staleness": {str(value): count for value, count in sorted(self._core.staleness.items())},
            "workers": sorted(self._core.mode.workers),
        }


def _has_timed_out(
    worker: _Worker, now: float, timeout: float, queue: list[tuple[_Worker, Message]], everyone: Collection[_Worker]
) -> bool:
    """Return whether ``worker`` has been silent for too long: its process is stopped, or on another host.

    A worker of this host may take any time for a step. One of another host may while no request waits, unless all are
    silent.
    """
    if worker.number < 0:
        return now - worker.last_active > _HANDSHAKE
    if now - worker.last_active <= timeout or worker.sending or any(w is worker for w, _ in queue):
        return False
    if worker.process:
        return bool(processes.fate_of(worker.process))
    return bool(queue) or all(now - w.last_active > timeout for w in everyone)


def _message(worker: _Worker, content: Message) -> Step:
    return worker.connection.sending(json.dumps(content).encode())


def _checked(message: Message, worker: _Worker) -> Message:
    """Return ``message``. Raise ValueError if it is malformed, or comes at the wrong time."""
    ask = message["ask"]
    require(message, _SHAPES[ask], f"{ask!r}")
    if (ask == "hello") != (worker.number < 0) and ask != "stats":
        raise ValueError(f"{ask!r} came {'again' if ask == 'hello' else 'before hello'}")
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
