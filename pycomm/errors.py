"""Exceptions that pycomm defines. The user's own mistakes are ``ValueError`` and ``TypeError``."""

from __future__ import annotations


class CommError(RuntimeError):
    """A peer or the link to it failed; the communicator it happened on is of no further use.

    Attributes:
        rank: this process's rank.
        peer: the rank that failed or was waited for, ``None`` if no single one is to blame.
        operation: the collective that was in progress.
        elapsed: seconds that this rank had waited.
    """

    def __init__(self, message: str, *, rank: int, peer: int | None, operation: str, elapsed: float) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.elapsed = elapsed

    @classmethod
    def during(
        cls, operation: str, what: str, *, rank: int, peer: int | None = None, elapsed: float = 0.0
    ) -> CommError:
        """The error of ``rank`` in ``operation``: ``what`` happened."""
        return cls(f"rank {rank}: {operation}: {what}", rank=rank, peer=peer, operation=operation, elapsed=elapsed)

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild,
            (self.args[0], self.rank, self.peer, self.operation, self.elapsed),
        )


def _rebuild(message: str, rank: int, peer: int | None, operation: str, elapsed: float) -> CommError:
    return CommError(message, rank=rank, peer=peer, operation=operation, elapsed=elapsed)
