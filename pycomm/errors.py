"""Exceptions of pycomm, and errors that are sent to other ranks. A user's mistake is a ValueError or TypeError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
_E = TypeVar("_E", bound="CommError")

HALF_SENT = (
    "the last backward() ended with an exception after part of its gradients had been sent: the ranks are out of step; "
    "restart from a checkpoint"
)
"""Text of the error after which no rank can continue."""


class CommError(dist.DistBackendError):
    """Failure of a peer or of the link to it. The communicator on which it happened can no longer be used.

    It derives from ``torch.distributed.DistBackendError``, so that handlers for NCCL's errors catch it, and
    ``RuntimeError``.

    Attributes:
        rank: rank of this process.
        peer: the rank that failed or was waited for; ``None`` if it is not a single rank.
        operation: name of the operation in progress.
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
        """Return the error of ``rank`` in ``operation``; ``what`` happened."""
        return cls(f"rank {rank}: {operation}: {what}", rank=rank, peer=peer, operation=operation, elapsed=elapsed)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args[0], vars(self))


def _rebuild(kind: type[_E], message: str, attributes: dict[str, Any]) -> _E:
    error = kind(message, rank=attributes["rank"], peer=None, operation="", elapsed=0.0)
    vars(error).update(attributes)
    return error


class DamageError(CommError):
    """CommError about ranks whose data differ from the majority's, or were damaged in memory.

    All ranks raise it together after a complete exchange, so the communicator remains usable.

    Attributes:
        ranks: the damaged ranks, by their numbers in ``Reducer.world``; empty without a majority.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], what: str, *, rank: int) -> DamageError:
        """Create the error on ``rank`` that accuses ``ranks``."""
        error = cls(f"rank {rank}: {what}", rank=rank, peer=next(iter(ranks), None), operation="backward", elapsed=0.0)
        error.ranks = tuple(ranks)
        return error

    def spares(self, rank: int) -> bool:
        """Return whether ``rank`` can continue without the accused ranks."""
        return bool(self.ranks) and rank not in self.ranks


def reworded(error: CommError, text: str, kind: type[_E]) -> _E:
    """Return an error of this ``kind`` with the attributes of ``error`` and another ``text``."""
    return kind(text, rank=error.rank, peer=error.peer, operation=error.operation, elapsed=error.elapsed)


def attempt(make: Callable[[], _T], problem: Exception | None = None) -> _T | Exception:
    """Return the result of ``make``, or the error that it raises, to share with other ranks before raising it.

    Returns ``problem`` instead if there is one already. A CommError, of a lost rank, is raised at once.
    """
    if problem is not None:
        return problem
    try:
        return make()
    except CommError:
        raise
    except Exception as error:  # what users pass may raise anything
        return error


def text_of(error: BaseException) -> str:
    """Return the text of ``error`` and of its first cause, for other ranks."""
    cause: BaseException | None = error
    try:
        text = str(error) or type(error).__name__
        while not isinstance(cause, CommError) and cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(error, CommError) and str(cause) not in text:
            text = f"{text.strip()}: {cause}"
    except Exception:  # a foreign one may raise anything
        text = type(error).__name__
    return text.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
