"""What is said of ranks that failed: which one began it, and how."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNGUARDED = 213
"""Exit code of a rank whose script calls ``launch`` while the rank imports it."""
UNKNOWN = 1000
"""In the place of the exit code of a rank that has ended and is no process of the driver's."""

_NOT_GUARDED = """the script calls pycomm.launch where it is imported, and every rank imports it to find the function.
Put the call where only the script itself gets to:

    if __name__ == "__main__":
        pycomm.launch(...)"""


class RankError(RuntimeError):
    """Failure of a rank; the message says which one began it, and how.

    Attributes:
        rank: which it was; ``None`` where it was not one alone.
        traceback: of the exception that it raised, as text; empty if it ended without a word.
        signal: number of the signal that it was killed by, or ``None``.
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
    """What a rank says before it gives up: its peers' failures that follow from this one are later.

    Attributes:
        when: on the clock that all processes of a host share.
        exception: the pickled exception; empty if it cannot be pickled.
    """

    rank: int
    when: float
    traceback: str
    exception: bytes = b""


def explain(
    exitcodes: Sequence[int | None], failures: Sequence[Failure], last_words: Mapping[int, str] | None = None
) -> RankError:
    """Return the error that says who began it: a rank that ended without a word, else the first to complain.

    The others only noticed.

    Args:
        exitcodes: by rank; ``None`` of those that are still there, or have done all that was asked of them.
        failures: what ranks have said.
        last_words: what ranks wrote last to their standard error.
    """
    unguarded = [rank for rank, code in enumerate(exitcodes) if code == UNGUARDED]
    if unguarded:
        return RankError(f"rank {unguarded[0]} did not start: {_NOT_GUARDED}", unguarded[0])
    told = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in enumerate(exitcodes) if code is not None and rank not in told}
    lines = [f"rank {rank} {_ending(code)}{_quoted((last_words or {}).get(rank))}" for rank, code in silent.items()]
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
    return f"; the last that it wrote to its standard error:\n\n{words.rstrip()}\n" if words else ""
