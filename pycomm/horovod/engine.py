"""Engine of a process set: takes requests in any order, agrees with the other ranks, and runs what all requested.

A rank takes part in rounds (:mod:`pycomm.horovod.coordinator`) while it has unfinished requests; the others sleep until
it does. After rounds without new requests, the pause before the next round grows. A caller that waits for a result runs
rounds itself, which saves two thread switches; otherwise the engine's thread does. As in Horovod, that thread first
waits for a cycle's time, so that requests made meanwhile are fused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from pycomm import threads
from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError, reworded
from pycomm.horovod.coordinator import ALLREDUCE, JOIN, Key, Request, RequestTerms, Response, Rounds, full_name, op_of
from pycomm.horovod.execution import Execution, can_fuse
from pycomm.horovod.names import HorovodInternalError, InvalidRequestError, LostPeerError
from pycomm.horovod.timeline import Timeline

_SHORTEST_PAUSE = 5e-5
LONGEST_PAUSE = 5e-3
"""Longest pause between rounds without new requests, in seconds."""
_SLICE = 1.0  # seconds
_PATIENCE = 5.0
_LOG = logging.getLogger("pycomm")


class NegotiatingEngine:
    """Engine over ``communicator``, which it takes over.

    Args:
        communicator: communicator of the process set.
        name: name of the set, for messages.
        timeline: recorder of operations.
        stall_after: seconds after which this rank logs unfinished operations and the ranks they wait for; 0: never.
        cycle: seconds in which requests that nobody waits for are collected.

    Attributes:
        pause: seconds of the next pause.
    """

    def __init__(
        self, communicator: Communicator, name: str, timeline: Timeline, stall_after: float, cycle: float
    ) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self._name, self._timeline = name, timeline
        self._cycle = cycle
        self._rounds, self._execution = Rounds(communicator), Execution(communicator)
        self._fresh: deque[Request] = deque()
        self._outstanding: dict[Key, Request] = {}
        self._stalls = _StallWatch(stall_after, self)
        self._driving = threading.Lock()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.pause = _SHORTEST_PAUSE
        self._refusal = ""  # the reason, once requests are refused
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # Callers.

    def submit(self, request: Request, wake: bool = True) -> None:
        """Take ``request``. ``wake``: nobody is about to :meth:`wait` for it."""
        with self._lock:
            self._require_usable()
            if request.key in self._outstanding:
                raise ValueError(
                    f"an operation named {full_name(request.key)!r} is not done yet: pass another name=, or "
                    "synchronize() the first one before"
                )
            self._outstanding[request.key] = request
            self._fresh.append(request)
            if self._timeline.active:
                self._timeline.begin(full_name(request.key), f"NEGOTIATE_{request.terms.kind.upper()}")
            if self._thread is None:
                self._thread = threads.start(self._loop, f"pycomm-horovod-{self._name}", self._end_with_process)
            self._stalls.begin()
        if wake or self._driving.locked():  # whoever drives may be pausing
            self._wake.set()

    def outstanding(self) -> list[Request]:
        """Return the unfinished requests. On any thread."""
        return list(self._outstanding.values())

    def waiting(self) -> dict[Key, list[int]]:
        """Return the ranks that each announced operation waits for. On any thread."""
        return self._rounds.coordinator.waiting()

    def knows(self, key: Key) -> bool:
        """Return whether this rank has an unfinished request for the operation ``key``."""
        return key in self._outstanding

    def await_refusal(self, key: Key) -> None:
        """If this rank has refused the operation ``key``, wait until the others know: they may call the next one."""
        refused = self._outstanding.get(key)
        if refused is not None and refused.refusal:
            with contextlib.suppress(HorovodInternalError):  # the refusal itself
                self.wait(refused)

    def wait(self, request: Request) -> None:
        """Return once ``request`` has ended; take part in rounds meanwhile. Raises its error."""
        while not request.done:
            if self._driving.acquire(blocking=False):
                try:
                    while not request.done and self._outstanding:
                        self._round()
                finally:
                    self._driving.release()
                if self._outstanding:
                    self._wake.set()
            else:
                request.ends_within(_SLICE)
        if request.error is not None:
            raise request.error

    def close(self, reason: str) -> None:
        """End all requests with an error, and release the communicator. Idempotent."""
        if self._pid != os.getpid():
            return
        self._end(HorovodInternalError(reason), reason)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)
        self._stalls.close()

    def _require_usable(self) -> None:
        if self._pid != os.getpid():
            raise HorovodInternalError(
                "it was inherited by a fork: call hvd.init() in the new process, under a launcher"
            )
        if self._refusal:
            raise HorovodInternalError(self._refusal)

    # Rounds, under the lock ``_driving``.

    def _loop(self) -> None:
        while not self._refusal:
            self._wake.wait()
            self._wake.clear()
            time.sleep(self._cycle)
            while self._outstanding and not self._refusal:
                with self._driving:
                    if self._outstanding and not self._refusal:
                        self._round()

    def _round(self) -> None:
        try:
            if self._timeline.active:
                self._timeline.mark("CYCLE_START")
            responses, news = self._rounds.run(self._fresh)
            if responses:
                self._run_all(responses)
            if not news:
                self._require_progress()
        except BaseException as error:
            self._end(internal_error(error), f"an operation failed: {error}")
            if not isinstance(error, Exception):
                raise
            return
        if news or self._fresh:
            self.pause = _SHORTEST_PAUSE
            return
        self._wake.wait(self.pause)
        self._wake.clear()
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def _require_progress(self) -> None:
        """Raise HorovodInternalError if an operation has been unfinished for the limit of a wait; join() may be."""
        limit, now = self.communicator.channel.timeout, time.monotonic()
        if all(now - one.since < limit or one.terms.kind == JOIN for one in self.outstanding()):
            return
        waiting = (f"{full_name(key)} waits for {_named(ranks)}" for key, ranks in self.waiting().items() if ranks)
        raise HorovodInternalError(
            f"operations are not done after {limit:g} s, the limit (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS): "
            + "; ".join(waiting)
        )

    def _run_all(self, responses: Sequence[Response]) -> None:
        fused: list[Request] = []
        for response in responses:
            request = self._request_of(response)
            if request is None:
                continue
            if fused and not (can_fuse(request) and _same(request, fused[0])):
                self._run_fused(fused)
                fused = []
            if can_fuse(request):
                fused.append(request)
            else:
                self._run_one(response, request)
        if fused:
            self._run_fused(fused)

    def _request_of(self, response: Response) -> Request | None:
        """Return this rank's request to run now; ``None`` if there is nothing to run."""
        request = self._outstanding.get(response.key)
        if request is not None and self._timeline.active:
            self._timeline.end(full_name(response.key))
        if response.error:
            if request is not None:
                self._done(request, InvalidRequestError(response.error))
            return None
        if request is None:  # it has joined
            return self._execution.contribute_zeros(response, _terms_of(response))
        return request

    def _run_one(self, response: Response, request: Request) -> None:
        self._note(request, begins=True)
        if request.terms.kind == ALLREDUCE:
            self._execution.adasum(request)
        else:
            self._execution.run(response, request)
        self._done(request)

    def _run_fused(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._note(request, begins=True)
        self._execution.all_reduce_fused(requests)
        for request in requests:
            self._done(request)

    def _note(self, request: Request, begins: bool) -> None:
        if self._timeline.active:
            name = full_name(request.key)
            self._timeline.begin(name, request.terms.kind.upper()) if begins else self._timeline.end(name)

    def _done(self, request: Request, error: Exception | None = None) -> None:
        if error is None:
            self._note(request, begins=False)
        self._outstanding.pop(request.key, None)
        request.end(error)

    def _end(self, error: Exception, reason: str) -> None:
        """Refuse further requests, and end unfinished ones with ``error``."""
        with self._lock:
            first, self._refusal = not self._refusal, self._refusal or str(error)
            left = list(self._outstanding.values())
            self._outstanding.clear()
            self._fresh.clear()
        for request in left:
            request.end(error)
        self._wake.set()
        if first:
            self.communicator.close(reason)

    def _end_with_process(self) -> None:
        reason = "the process ends"
        self._end(HorovodInternalError(reason), reason)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _same(a: Request, b: Request) -> bool:
    """Return whether both are reduced the same way, apart from details, which a rank that has joined does not know."""
    one, other = a.terms, b.terms
    return one is other or (one.op, one.prescale, one.postscale) == (other.op, other.prescale, other.postscale)


def _terms_of(response: Response) -> RequestTerms:
    words = dict(word.split("=", 1) for word in response.signature.split(" ") if "=" in word)
    before, after = (float(words.get(name, "1")) for name in ("prescale_factor", "postscale_factor"))
    return RequestTerms(ALLREDUCE, op_of(response.signature), 0, before, after)


def internal_error(error: BaseException) -> HorovodInternalError:
    """Return ``error`` as the exception from which elastic runs recover."""
    if isinstance(error, HorovodInternalError):
        return error
    if isinstance(error, CommError):
        return reworded(error, str(error), LostPeerError)
    return HorovodInternalError(f"{type(error).__name__}: {error}")


class _StallWatch:
    """Watch that logs each operation of ``engine`` once, when it has been unfinished for ``after`` seconds (0: never).

    It has its own thread while requests are unfinished, as other threads may be inside a round, waiting for a rank.
    """

    def __init__(self, after: float, engine: NegotiatingEngine) -> None:
        self._after, self._engine = after, engine
        self._others = [other for other in range(engine.size) if other != engine.rank]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._named: set[Request] = set()

    def begin(self) -> None:
        """Watch, now that something is outstanding."""
        if self._after <= 0:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threads.start(self._watch, "pycomm-horovod-stalls", self._closing.set)

    def close(self) -> None:
        """End the thread, and wait for it. Idempotent."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _watch(self) -> None:
        while True:
            with self._lock:
                requests = self._engine.outstanding()
                if not requests or self._closing.is_set():
                    self._thread = None
                    return
            self._named &= set(requests)
            now = time.monotonic()
            stalled = [request for request in requests if now - request.since >= self._after]
            if not self._named.issuperset(stalled):
                self._named.update(stalled)
                self._name(stalled, now)
            ends = [request.since + self._after for request in requests if request not in self._named]
            self._closing.wait(min(ends, default=now + self._after) - now)

    def _name(self, stalled: Sequence[Request], now: float) -> None:
        known = self._engine.waiting()
        lines = [f"{full_name(request.key)} waits for {self._whom(known.get(request.key))}" for request in stalled]
        longest = max(now - request.since for request in stalled)
        _LOG.warning(
            "Horovod operations have stalled for %.0f s on rank %d: %s", longest, self._engine.rank, "; ".join(lines)
        )

    def _whom(self, ranks: Sequence[int] | None) -> str:
        if ranks:
            return _named(ranks)
        names = ", ".join(map(str, self._others))
        some = "" if len(self._others) == 1 else "one or more of "
        return f"{some}rank {names}, to come and say what it asks for: it asks for nothing, is in other code, or hangs"
