"""One thread that runs jobs in the order they came."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Work:
    """A collective in progress; :meth:`wait` returns its outcome."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job: Callable[[], Any] | None = job
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, for at most ``seconds``; whether it has ended."""
        return self._done.wait(seconds)

    def wait(self) -> Any:
        """Block until it has ended; returns what the job returned or raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        job, self._job = self._job, None  # and what it keeps alive
        assert job is not None
        try:
            self._result = job()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        del self, job  # the error's traceback holds this frame: no cycle

    def _end(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._job, self._error = None, error
        self._done.set()

    def _end_in_child(self, error: BaseException) -> None:
        self._done = threading.Event()  # the old one's lock may be held by a thread that is not here
        self._end(error)


class Worker:
    """The thread; starts with its first job. Not a ThreadPoolExecutor: that one is joined at interpreter exit *before*
    exit handlers run, so a job that waits for a hung peer could not be interrupted.

    Signal handlers may call anything of it while the same thread is in it: hence the reentrant lock, and a
    ``SimpleQueue``.

    Args:
        error: makes what a job fails with that nobody will run, of the reason.
    """

    def __init__(self, name: str, error: Callable[[str], Exception] = RuntimeError) -> None:
        self._name = name
        self._make_error = error
        self._lock = threading.RLock()
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refuses = ""  # why, once nobody runs jobs any more
        self._unfinished: deque[Work] = deque()
        _workers.add(self)

    def submit(self, job: Callable[[], Any]) -> Work:
        """Let ``job`` be run. After :meth:`stop`, and in a forked child, nobody would: the work has failed then.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        work = Work(job)
        with self._lock:
            if self._refuses:
                work._end(self._make_error(self._refuses))
                return work
            if self._thread is None:
                # Its queue is its own: a signal handler that raises in start() leaves a thread that nobody feeds.
                jobs: SimpleQueue[Work | None] = SimpleQueue()
                thread = threading.Thread(target=self._loop, args=(jobs,), name=self._name, daemon=True)
                thread.start()
                self._jobs, self._thread = jobs, thread
            self._unfinished.append(work)
            self._jobs.put(work)
        return work

    def idle(self) -> bool:
        """Whether everything submitted so far has ended."""
        return not self._unfinished

    def is_current(self) -> bool:
        """Whether the caller is itself a job of this worker."""
        return self._thread is threading.current_thread()

    def stop(self, patience: float) -> None:
        """Let the jobs that wait end, for at most ``patience`` seconds."""
        with self._lock:
            stopped, self._refuses = self._refuses, self._refuses or "the communicator is closed"
            if self._thread is not None and not stopped:
                self._jobs.put(None)
        if self._thread is not None and not self.is_current():
            self._thread.join(patience)

    def _loop(self, jobs: SimpleQueue[Work | None]) -> None:
        while (work := jobs.get()) is not None:
            work._run()
            self._unfinished.popleft()  # before anybody who waited looks whether it is idle
            work._end()
            del work  # or this frame keeps the last job's tensors until the next one comes

    def _lose_thread(self) -> None:
        """In a forked child, to which threads do not go."""
        self._lock = threading.RLock()
        self._jobs = SimpleQueue()
        self._thread = None
        self._refuses = f"it was inherited by a fork from process {os.getppid()}; make one in the new process"
        while self._unfinished:
            self._unfinished.popleft()._end_in_child(self._make_error(self._refuses))


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _lose_threads() -> None:
    for worker in list(_workers):
        worker._lose_thread()


os.register_at_fork(after_in_child=_lose_threads)
