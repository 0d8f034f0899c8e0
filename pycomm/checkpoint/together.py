"""What all ranks do at the same time, or none of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pycomm.communicator import Communicator
from pycomm.errors import CommError

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, OSError, RuntimeError, TypeError, ValueError)
}


def exchanged(communicator: Communicator, what: str, job: Callable[[], Any]) -> list[Any]:
    """Run ``job`` on all ranks; return the results of all, in rank order, which travel as JSON. Collective.

    Args:
        communicator: the ranks.
        what: verb for the message about another rank, which "could not" do it.
        job: what to run.

    Raises:
        Exception: ``job`` has raised it on this rank, or on another, which is quoted: an error of the same kind.
    """
    error: Exception | None = None
    try:
        outcome = {"result": job()}
    except CommError:
        raise  # the other ranks cannot be told
    except Exception as raised:  # told to the others first
        error = raised
        outcome = {"kind": _kind_of(error), "text": str(error) or repr(error)}
    outcomes = [json.loads(text) for text in communicator.channel.all_gather_bytes(json.dumps(outcome).encode())]
    if error is not None:
        raise error
    for rank, other in enumerate(outcomes):
        if "kind" in other:
            raise _KINDS[other["kind"]](f"rank {rank} could not {what}: {other['text']}")
    return [other["result"] for other in outcomes]


def together(communicator: Communicator, what: str, job: Callable[[], T]) -> T:
    """Run ``job`` on all ranks; return its result on this one. As :func:`exchanged`, but nothing else travels."""
    results: list[T] = []
    exchanged(communicator, what, lambda: results.append(job()))
    return results[0]


def _kind_of(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")
