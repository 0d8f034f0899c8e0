"""Errors of failed ranks: which rank failed first, and how."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNGUARDED = 213
"""Exit code of a rank whose script calls ``launch`` while the rank imports it."""
UNKNOWN = 1000
"""Stands for the exit code of an ended rank that is not a child process of the driver."""

_NOT_GUARDED = """the script calls pycomm.launch where it is imported, and every rank imports it to find the function.
Put the call under a guard, so that only the script itself runs it:

    if __name__ == "__main__":
        pycomm.launch(...)"""


class RankError(RuntimeError):
    """Failure of a rank; the message says which rank failed first, and how.

    Attributes:
        rank: the rank that failed first; ``None`` if it was not a single one.
        traceback: of its exception, as text; empty if it ended without one.
        signal: signal that killed it, or ``None``.
    """

    def __init__(
        self, message: str, rank: int | None = None, traceback: str = "", signal: signal.Signals | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal = signal


@dataclass(frozen=True)
class Failure:
    """Exception of a rank. Failures that it causes on other ranks have later times.

    Attributes:
        when: seconds of ``time.monotonic()``, which all processes of a host share.
        exception: the pickled exception; empty if it cannot be pickled.
    """

    rank: int
    when: float
    traceback: str
    exception: bytes = b""


def explain(
    exitcodes: Sequence[int | None], failures: Sequence[Failure], stderr_ends: Mapping[int, str] | None = None
) -> RankError:
    """Return the error of the rank that failed first: one that ended without an exception, else the earliest failure.

    Args:
        exitcodes: by rank; ``None`` for ranks that are alive or ended as expected.
        failures: exceptions of ranks.
        stderr_ends: end of the ranks' standard error.
    """
    unguarded = [rank for rank, code in enumerate(exitcodes) if code == UNGUARDED]
    if unguarded:
        return RankError(f"rank {unguarded[0]} did not start: {_NOT_GUARDED}", unguarded[0])
    reported = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in enumerate(exitcodes) if code is not None and rank not in reported}
    lines = [f"rank {rank} {_ending(code)}{_quoted((stderr_ends or {}).get(rank))}" for rank, code in silent.items()]
    first = min(failures, key=lambda failure: failure.when, default=None)
    if first is not None:
        lines.append(f"rank {first.rank} failed{' after that' if lines else ''}:\n\n{first.traceback.rstrip()}")
    message = "\n".join(lines)
    if not silent:
        return RankError(message, first.rank, first.traceback) if first is not None else RankError(message)
    rank, code = next(iter(silent.items()))
    return RankError(message, rank, signal=signal.Signals(-code) if code < 0 else None)


def _ending(exitcode: int) -> str:
    if exitcode == UNKNOWN:
        return "died"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}" + ("" if exitcode else ", and without a result")
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _quoted(words: str | None) -> str:
    return f"; the end of its standard error:\n\n{words.rstrip()}\n" if words else ""
