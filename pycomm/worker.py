"""One thread that runs jobs in the order they came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Work:
    """A collective in progress; :meth:`wait` returns its outcome."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job = job
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Block until it has ended; returns what the job returned or raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._job()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        del self._job  # and what it kept alive
        self._done.set()
        del self  # the error's traceback holds this frame: no cycle


def _refuse() -> None:
    raise RuntimeError("the communicator is closed")


class Worker:
    """The thread; starts with its first job. Not a ThreadPoolExecutor: that one is joined at interpreter exit *before*
    exit handlers run, so a job that waits for a hung peer could not be interrupted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._last_done: threading.Event | None = None  # not the work itself, whose error knows who waited for it

    def submit(self, job: Callable[[], Any]) -> Work:
        """Let ``job`` be run. After :meth:`stop` nobody would: the work has failed then."""
        if self._stopped:
            work = Work(_refuse)
            work._run()
            return work
        work = Work(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._last_done = work._done
        self._jobs.put(work)
        return work

    def idle(self) -> bool:
        """Whether everything submitted so far has ended."""
        return self._last_done is None or self._last_done.is_set()

    def is_current(self) -> bool:
        """Whether the caller is itself a job of this worker."""
        return self._thread is threading.current_thread()

    def stop(self, patience: float) -> None:
        """Let the jobs that wait end, for at most ``patience`` seconds."""
        self._stopped = True
        if self._thread is not None:
            self._jobs.put(None)
            if not self.is_current():
                self._thread.join(patience)

    def _loop(self) -> None:
        while (work := self._jobs.get()) is not None:
            work._run()
            del work  # or this frame keeps the last job's tensors until the next one comes
