"""Handles: numbers by which callers ask for the results of what they have submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from pycomm.checks import shown
from pycomm.horovod.engine import NegotiatingEngine
from pycomm.horovod.names import HorovodInternalError, InvalidRequestError
from pycomm.horovod.process_sets import ProcessSet, known_set, members_of
from pycomm.horovod.requests import Request, Terms
from pycomm.horovod.state import world

Finish = Callable[[Request], Any]


class Submission:
    """Submission of one operation: from the arguments of a call to the result.

    Args:
        kind: of the operation.
        name: what the caller calls it; ``None`` for a number.
        process_set: whose ranks it is for.

    Raises:
        TypeError, ValueError: there is no such set, or this rank is not in it. The other ranks are told if there is
            only one set; otherwise nobody knows which of them they use.
    """

    def __init__(self, kind: str, name: Any, process_set: ProcessSet) -> None:
        ranks, problem = known_set(process_set)
        if name is not None and not isinstance(name, str):
            problem, name = problem or TypeError(f"name is {shown(name)}, wanted a string"), None
        self._problem = problem
        self.members = members_of(ranks)
        self.kind = kind
        self.key = self.members.key(kind, name)
        assert self.members.engine is not None
        self.engine: NegotiatingEngine = self.members.engine
        self.request: Request | None = None

    def __enter__(self) -> Submission:
        if self._problem is not None:
            self._refuse(self._problem)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Tell the others about a mistake in the arguments, for which they would wait in vain."""
        if isinstance(error, Exception) and not isinstance(error, HorovodInternalError) and self.request is None:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        self.engine.await_refusal(self.key)
        refusal = Request(self.key, Terms(self.kind), refusal=f"cannot take part: {error}")
        if not self.engine.knows(self.key):
            self.engine.submit(refusal)
        if isinstance(error, ValueError):
            raise InvalidRequestError(str(error)) from error
        raise error

    def submit(self, request: Request, wake: bool) -> None:
        """Hand the request over. ``wake``: nobody is about to wait for its result."""
        self.request = request
        if any(not tensor.is_cpu for tensor in request.tensors):
            request.ready = [torch.cuda.current_stream(t.device).record_event() for t in request.tensors if t.is_cuda]
        self.engine.await_refusal(request.key)
        self.engine.submit(request, wake)

    def handle(self, finish: Finish) -> int:
        """Return a handle, by which :func:`synchronize` returns ``finish(request)``."""
        assert self.request is not None
        here = world()
        handle = next(here.numbers)
        here.handles[handle] = (self.request, self.engine, finish)
        return handle


def poll(handle: int | Callable[[], Any]) -> bool:
    """Return whether the operation has ended: whether :func:`synchronize` returns at once.

    Raises:
        ValueError: there is no such handle, or its result has been taken.
    """
    parts = getattr(handle, "handles", None)
    if parts is not None:
        return all(map(poll, parts))
    found = world().handles.get(handle)  # type: ignore[arg-type]
    if found is None:
        raise ValueError(f"handle is {handle!r}, wanted one whose result has not been taken yet")
    return found[0].done


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an operation, and return its result; ``None`` if that has been taken already.

    Args:
        handle: what a function with ``_async`` in its name has returned.

    Returns:
        A tensor; a tuple of tensors of a grouped operation; a tensor and ``received_splits`` of an alltoall.

    Raises:
        HorovodInternalError: the ranks disagree about the operation, or one is lost.
    """
    if callable(handle):
        return handle()
    found = world().handles.pop(handle, None)
    if found is None:
        return None
    request, engine, finish = found
    engine.wait(request)
    return finish(request)


def synchronize_all(handles: Sequence[int]) -> list[Any]:
    """Wait for all of these operations, and return their results; then raise the first error, if there is one."""
    results, errors = [], []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def waited(submission: Submission) -> Request:
    """Return the request of ``submission``, once it has ended. Raises its error."""
    assert submission.request is not None
    submission.engine.wait(submission.request)
    return submission.request


def outputs_of(request: Request) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a request that has ended."""
    return tuple(out for out in request.outputs if out is not None)
