"""Thread that runs jobs in the order of their submission."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from pycomm import threads


class Work:
    """Collective in progress; :meth:`wait` returns its result."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job: Callable[[], Any] | None = job
        # Held until the end. Unlike an Event, waiting for it and ending takes no code in Python.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._has_ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        """Run the job; :meth:`wait` raises its exception."""
        self._run()
        self._end()

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._has_ended

    def ends_within(self, seconds: float | None) -> bool:
        """Wait for at most ``seconds`` (``None``: without limit); return whether it has ended."""
        if not self._has_ended and self._gate.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            self._gate.release()
        return self._has_ended

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, which must not raise, at the end: on the thread that ran the job, or at once."""
        self._callbacks.append(callback)
        if self._has_ended:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            callback()

    def wait(self) -> Any:
        """Block until it has ended; return the result of the job, or raise its exception."""
        self.ends_within(None)
        if self._error is not None:
            raise self._error
        return self._result

    def forget_trace(self) -> None:
        """Drop the traceback of the error, which keeps alive the objects of the job and, in a cycle, this work."""
        if self._error is not None:
            self._error.__traceback__ = None

    def _run(self) -> None:
        job, self._job = self._job, None  # releases the job, and the objects that it keeps alive, after the run
        assert job is not None
        try:
            self._result = job()
        except BaseException as error:  # raised by wait()
            self._error = error
        del self, job  # the error's traceback holds this frame: avoids a cycle

    def _end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._job, self._error = None, error
        self._has_ended = True
        self._gate.release()
        if self._callbacks:
            self._call_back()

    def _end_in_child(self, error: BaseException) -> None:
        self._gate = threading.Lock()  # the old one may be held by a thread that does not exist here
        self._gate.acquire()
        self._end(error)


class Worker:
    """Daemon thread that runs jobs in order; it starts with the first job.

    A ThreadPoolExecutor would be joined at interpreter exit *before* exit handlers run, so that a job waiting for a
    hung peer could not be interrupted. A signal handler may call any method while its thread is inside another one:
    hence the reentrant lock and the ``SimpleQueue``.

    Args:
        name: name of the thread.
        error: returns, for a reason, the exception of a job that will never run.
    """

    def __init__(self, name: str, error: Callable[[str], Exception] = RuntimeError) -> None:
        self._name = name
        self._make_error = error
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ident: int | None = None
        """That of the thread, as ``threading.get_ident()`` returns it."""
        self._refusal = ""  # the reason, once jobs are no longer run
        self.unfinished: deque[Work] = deque()
        """Jobs that have not ended; a job counts until its callbacks have returned."""
        _workers.add(self)

    def submit(self, job: Callable[[], Any]) -> Work:
        """Queue ``job``. After :meth:`stop`, and in a forked child, the returned work has already failed.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        work = Work(job)
        with self._lock:
            if self._refusal:
                work._end(self._make_error(self._refusal))
                return work
            if self._thread is None:
                # A new queue: if a signal handler raises in start(), the orphaned thread gets no jobs.
                jobs: SimpleQueue[Work | None] = SimpleQueue()
                run, end = functools.partial(self._loop, jobs), functools.partial(self._end_with_process, jobs)
                thread = threads.start(run, self._name, end)
                self._jobs, self._thread, self.ident = jobs, thread, thread.ident
            self.unfinished.append(work)
            self._jobs.put(work)
        return work

    def run_here(self, job: Callable[[], Any]) -> Work:
        """Run ``job`` now, on this thread; the returned work has ended."""
        work = Work(job)
        work.run()
        return work

    def is_current(self) -> bool:
        """Return whether the caller is a job of this worker."""
        return self.ident == threading.get_ident()

    def stop(self, patience: float) -> None:
        """Refuse further jobs, and wait for the queued ones for at most ``patience`` seconds."""
        with self._lock:
            stopped, self._refusal = self._refusal, self._refusal or "the communicator is closed"
            if self._thread is not None and not stopped:
                self._jobs.put(None)
        if self._thread is not None and not self.is_current():
            self._thread.join(patience)

    def _end_with_process(self, jobs: SimpleQueue[Work | None]) -> None:
        self._refusal = self._refusal or "the process ends"
        jobs.put(None)

    def _loop(self, jobs: SimpleQueue[Work | None]) -> None:
        while (work := jobs.get()) is not None:
            work._run()
            if work._callbacks:
                work._end()
                self.unfinished.popleft()
            else:
                self.unfinished.popleft()  # before work ends, so that its waiter finds this worker idle
                work._end()
            del work  # this frame would keep the last job's tensors alive until the next job

    def _reset_in_child(self) -> None:
        """Fail all jobs in a forked child, which does not inherit threads."""
        self._lock = threading.RLock()
        self._jobs = SimpleQueue()
        self._thread = self.ident = None
        self._refusal = f"it was inherited by a fork from process {os.getppid()}; make one in the new process"
        while self.unfinished:
            work = self.unfinished.popleft()
            if not work.is_completed():
                work._end_in_child(self._make_error(self._refusal))


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _reset_workers_in_child() -> None:
    for worker in list(_workers):
        worker._reset_in_child()


os.register_at_fork(after_in_child=_reset_workers_in_child)
