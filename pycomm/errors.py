"""Exceptions that pycomm defines. The user's own mistakes are ``ValueError`` and ``TypeError``."""

from __future__ import annotations

import torch.distributed as dist


class CommError(dist.DistBackendError):
    """Failure of a peer or of the link to it. The communicator on which it happened can no longer be used.

    It is torch's ``torch.distributed.DistBackendError`` too, so that handlers for NCCL's errors see it, and a
    ``RuntimeError``.

    Attributes:
        rank: rank of this process.
        peer: the rank that failed or was waited for; ``None`` if it is not a single rank.
        operation: name of the operation that was in progress.
        elapsed: time that this rank had waited, in seconds.
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
        """Make the error of ``rank`` in ``operation``, whose message says ``what`` happened."""
        return cls(f"rank {rank}: {operation}: {what}", rank=rank, peer=peer, operation=operation, elapsed=elapsed)

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild,
            (self.args[0], self.rank, self.peer, self.operation, self.elapsed),
        )


def _rebuild(message: str, rank: int, peer: int | None, operation: str, elapsed: float) -> CommError:
    return CommError(message, rank=rank, peer=peer, operation=operation, elapsed=elapsed)
