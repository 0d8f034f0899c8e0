"""Board: the thread that asks a store of torch.distributed, within a time limit.

Ranks meet, agree and leave notes in a store. One whose server hangs never answers, and some of its calls have no
timeout. So whoever reads or writes a store while others wait asks it through a board.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pycomm.errors import CommError
from pycomm.worker import Work, Worker

T = TypeVar("T")


class StoreError(RuntimeError):
    """Failure of a store, or of the connection to it: "did not answer", or "failed: " and the reason."""


class Board:
    """Board whose thread, of the name ``thread``, starts with the first question."""

    def __init__(self, thread: str) -> None:
        self._worker = Worker(thread)
        self._last: Work | None = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_stuck(self) -> bool:
        """Whether the last question has not been answered, so that the next one would wait behind it."""
        return self._last is not None and not self._last.is_completed()

    def submit(self, question: Callable[[], object]) -> Work:
        """Ask without waiting; the work's result is the answer."""
        self._last = self._worker.submit(question)
        return self._last

    def ask(self, question: Callable[[], T], patience: float) -> T:
        """Return the result of ``question``, which calls the store.

        Args:
            patience: seconds to wait for it.

        Raises:
            StoreError: there is no answer by then, or the store failed.
            CommError, ValueError: as ``question`` raises them.
        """
        work = self.submit(question)
        if not work.ends_within(patience):
            raise StoreError("did not answer")
        try:
            answer: T = work.wait()
        except RuntimeError as error:  # torch's DistStoreError is one, and so is CommError
            if isinstance(error, CommError):
                raise
            raise StoreError(f"failed: {error}") from None
        return answer

    def close(self, patience: float = 0.0) -> None:
        """Stop the thread; wait ``patience`` seconds for its present question. Idempotent."""
        self._worker.stop(patience)
