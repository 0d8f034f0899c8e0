"""Collectives: checks of arguments, requests to the other ranks, results and gradients.

The gradients are Horovod's, where the loss is the average over the ranks. So the gradients of a gather and a broadcast
are averaged over the ranks; a reduction's gradient is reduced like its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from pycomm.checks import shown
from pycomm.horovod.coordinator import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    Request,
    RequestTerms,
    terms_of,
)
from pycomm.horovod.engine import NegotiatingEngine
from pycomm.horovod.names import (
    NAMES,
    Adasum,
    Average,
    Compression,
    HorovodInternalError,
    InvalidRequestError,
    ReduceOp,
    Sum,
    checked_op,
    compressed,
)
from pycomm.horovod.process_sets import Members, ProcessSet, global_process_set, known_set, members_of, world

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

Tensors = Sequence[torch.Tensor]
Call = tuple["Collective", Any]
"""Collective, and the tensor or tensors that it is called with."""


class Submission:
    """Submission of one operation: from the arguments of a call to the result.

    Args:
        kind: kind of the operation.
        name: the caller's name for it; ``None``: a number.
        process_set: its ranks.

    Raises:
        TypeError, ValueError: there is no such set, or this rank is not in it. The other ranks raise too if there is
            only one set; with several, it is unknown which one they use.
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
        """Refuse the operation if the arguments were wrong: the other ranks would wait in vain."""
        if isinstance(error, Exception) and not isinstance(error, HorovodInternalError) and self.request is None:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        self.engine.await_refusal(self.key)
        refusal = Request(self.key, RequestTerms(self.kind), refusal=f"cannot take part: {error}")
        if not self.engine.knows(self.key):
            self.engine.submit(refusal)
        if isinstance(error, ValueError):
            raise InvalidRequestError(str(error)) from None
        raise error

    def submit(self, request: Request, wake: bool) -> None:
        """Submit the request. ``wake``: no thread is about to wait for its result."""
        self.request = request
        if any(not tensor.is_cpu for tensor in request.tensors):
            request.ready = [torch.cuda.current_stream(t.device).record_event() for t in request.tensors if t.is_cuda]
        self.engine.await_refusal(request.key)
        self.engine.submit(request, wake)

    def handle(self, finish: Callable[[Request], Any]) -> int:
        """Return a handle, for which :func:`synchronize` returns ``finish(request)``."""
        assert self.request is not None
        here = world()
        handle = next(here.numbers)
        here.handles[handle] = (self.request, self.engine, finish)
        return handle


def poll(handle: int | Callable[[], Any]) -> bool:
    """Return whether the operation has ended, so that :func:`synchronize` does not wait.

    Raises:
        ValueError: there is no such handle, or its result was taken.
    """
    parts = getattr(handle, "handles", None)
    if parts is not None:
        return all(map(poll, parts))
    found = world().handles.get(handle)  # type: ignore[arg-type]
    if found is None:
        raise ValueError(f"handle is {handle!r}, wanted one whose result has not been taken yet")
    return found[0].done


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an operation, and return its result; ``None`` if it was taken already.

    Args:
        handle: result of a function with ``_async`` in its name.

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


class Collective:
    """Call of a collective; it gets its tensors when it begins.

    Args:
        name: name by which the ranks match it; ``None``: a number.
        process_set: the ranks.
        compression: compression of the tensors sent.

    Attributes:
        alone: whether it is called with one tensor, and has one result.
        in_place: whether results overwrite the tensors.
        splits: of an all-to-all: rows for each rank.
        parts, received: results of a finished call, see :class:`Request`.
    """

    kind = ""
    alone = True
    in_place = False
    splits: Any = None

    def __init__(self, name: str | None, process_set: ProcessSet, compression: Any = Compression.none) -> None:
        self.name, self.process_set, self.compression = name, process_set, compression
        self.parts: list[list[int]] = []
        self.received: Any = None

    def request(self, submission: Submission, tensors: Any) -> Request:
        """Return the request to the other ranks. Raises TypeError or ValueError if an argument is wrong."""
        raise NotImplementedError

    def gradients(self, grads: Tensors) -> Tensors:
        """Return the gradients of the tensors, computed from the results' gradients. Collective."""
        raise NotImplementedError

    def submit(self, tensors: Any, wake: bool = True) -> Submission:
        """Begin. ``wake``: no thread is about to wait for the result."""
        with Submission(self.kind, self.name, self.process_set) as submission:
            submission.submit(self.request(submission, tensors), wake)
        return submission

    def run(self, tensors: Any) -> tuple[torch.Tensor, ...]:
        """Begin, wait for the end, and return the outputs."""
        return self._outputs(waited(self.submit(tensors, wake=False)))

    def differentiated(self, tensors: Any) -> tuple[torch.Tensor, ...]:
        """Run with autograd, on compressed tensors if there is a compression."""
        if self.compression is Compression.none:
            return _apply(self, *tensors) if _differentiates(tensors) else self.run(tensors)
        try:
            tensors, undo = compressed(tensors, self.compression)
        except Exception:  # of a user's compression: all ranks raise
            with Submission(self.kind, self.name, self.process_set):
                raise
        return tuple(undo(_apply(self, *tensors) if _differentiates(tensors) else self.run(tensors)))

    def result(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the result of the call, given its ``outputs``."""
        return outputs[0] if self.alone else outputs

    def finish(self, request: Request) -> Any:
        """Return the result of a request that has ended."""
        return self.result(self._outputs(request))

    def _outputs(self, request: Request) -> tuple[torch.Tensor, ...]:
        self.parts, self.received = request.parts, request.result
        return tuple(out for out in request.outputs if out is not None)


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Collective, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return call.run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *ctx.call.gradients(grads)


_apply: Any = _Differentiated.apply


def _differentiates(tensors: Any) -> bool:
    if not torch.is_grad_enabled() or not isinstance(tensors, Sequence):
        return False
    try:
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
    except Exception:  # of a foreign object, which raises again in request(), where all ranks raise
        return False


class AllReduce(Collective):
    """All-reduce of all tensors together, with a factor ``before`` and one ``after``.

    ``detail``: what else must be the same on all ranks.
    """

    kind = ALLREDUCE
    detail = ""

    def __init__(
        self,
        name: str | None,
        process_set: ProcessSet,
        op: Any = Average,
        before: Any = 1.0,
        after: Any = 1.0,
        compression: Any = Compression.none,
    ) -> None:
        super().__init__(name, process_set, compression)
        self._op, self._before, self._after = op, before, after

    def request(self, submission: Submission, tensors: Any) -> Request:
        op = checked_op(self._op)
        xs = checked_tensors(tensors)
        check_reducible(xs, op)
        check_adasum(op, self.process_set, submission.members)
        terms = self._terms(op)
        if self.in_place:
            check_writable(xs)
        return Request(submission.key, terms, xs, [*xs] if self.in_place else empty_like(xs))

    def gradients(self, grads: Tensors) -> Tensors:
        return AllReduce(None, self.process_set, self._op, self._before, self._after).run(grads)

    def _terms(self, op: ReduceOp) -> RequestTerms:
        before = check_factor("prescale_factor", self._before)
        return terms_of(self.kind, NAMES[op], before, check_factor("postscale_factor", self._after), self.detail)


class ReduceScatter(AllReduce):
    """Reduce-scatter of all tensors, each separately."""

    kind = REDUCESCATTER

    def request(self, submission: Submission, tensors: Any) -> Request:
        op = checked_op(self._op)
        xs = checked_tensors(tensors)
        check_rows(xs, self.kind)
        if op == Adasum:
            raise ValueError(
                "op is Adasum, which reducescatter does not support: wanted Average, Sum, Min, Max or Product"
            )
        check_reducible(xs, op)
        return Request(submission.key, self._terms(op), xs, [None] * len(xs))

    def gradients(self, grads: Tensors) -> Tensors:
        factor = self._before * self._after * ((self.process_set.size() or 1) if self._op == Sum else 1)
        return AllGather(None, self.process_set).differentiated([grad * factor for grad in grads])


class AllGather(Collective):
    """All-gather of all tensors, each separately. ``detail``: what else must be the same on all ranks."""

    kind = ALLGATHER

    def __init__(self, name: str | None, process_set: ProcessSet, detail: str = "") -> None:
        super().__init__(name, process_set)
        self._detail = detail

    def request(self, submission: Submission, tensors: Any) -> Request:
        xs = checked_tensors(tensors)
        check_rows(xs, ALLGATHER)
        return Request(submission.key, RequestTerms(ALLGATHER, detail=self._detail), xs, [None] * len(xs))

    def gradients(self, grads: Tensors) -> Tensors:
        rank = self.process_set.rank() or 0
        averages = AllReduce(None, self.process_set).run(grads)
        return [x.narrow(0, sum(p[:rank]), p[rank]) for x, p in zip(averages, self.parts, strict=True)]


class Broadcast(Collective):
    """Broadcast of one tensor of the global rank ``root_rank``."""

    kind = BROADCAST

    def __init__(self, name: str | None, process_set: ProcessSet, root_rank: Any) -> None:
        super().__init__(name, process_set)
        self._root_rank = root_rank

    def request(self, submission: Submission, tensors: Any) -> Request:
        check_tensor(tensors[0])
        terms = RequestTerms(BROADCAST, root=check_root(self._root_rank, submission.members))
        if self.in_place:
            check_writable(tensors)
        return Request(submission.key, terms, tensors, [*tensors] if self.in_place else empty_like(tensors))

    def gradients(self, grads: Tensors) -> Tensors:
        averages = AllReduce(None, self.process_set).run(grads)
        return averages if world().rank == self._root_rank else [torch.zeros_like(averages[0])]


class AllToAll(Collective):
    """All-to-all of one tensor, of which ``splits`` rows go to each rank."""

    kind = ALLTOALL

    def __init__(self, name: str | None, process_set: ProcessSet, splits: Any) -> None:
        super().__init__(name, process_set)
        self.splits, self._rows = splits, 0

    def request(self, submission: Submission, tensors: Any) -> Request:
        check_tensor(tensors[0])
        check_rows(tensors, ALLTOALL)
        splits = check_splits(self.splits, tensors[0], len(submission.members.ranks))
        self._rows = tensors[0].shape[0]
        return Request(submission.key, RequestTerms(ALLTOALL), tensors, [None], splits=splits)

    def result(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the output, and how many rows have come from each rank, in the form of ``splits``."""
        form = self.splits if isinstance(self.splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        return outputs[0], torch.tensor(self.received, dtype=form.dtype, device=form.device)

    def gradients(self, grads: Tensors) -> Tensors:
        (mine,) = AllToAll(None, self.process_set, self.received).run(grads)
        rest = self._rows - mine.shape[0]  # rows that went to nobody
        return [torch.cat([mine, mine.new_zeros(rest, *mine.shape[1:])]) if rest else mine]


def empty_like(tensors: Tensors) -> list[torch.Tensor | None]:
    """Return new tensors of the same shapes and kinds as ``tensors``, without gaps."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


# Checks of what is passed to them. The messages begin with the argument's name.


def check_tensor(tensor: Any) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}, wanted a torch.Tensor")
    if tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"tensor is {'nested' if tensor.is_nested else 'quantized'}, wanted a dense one")
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor has layout {tensor.layout}; pass sparse tensors to sparse_allreduce_async()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"tensor is on {tensor.device}, wanted one on the CPU or on a GPU")
    if tensor.is_cpu and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"tensor of shape {list(tensor.shape)} has no memory: it is fake, or was freed")


def checked_tensors(tensors: Any) -> list[torch.Tensor]:
    """Return ``tensors`` as a list. Raises TypeError or ValueError unless they are dense tensors, one or more."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"tensors is a {type(tensors).__name__}, wanted a list of tensors")
    if not tensors:
        raise ValueError("tensors is empty, wanted one tensor or more")
    for tensor in tensors:
        check_tensor(tensor)
    return list(tensors)


def check_writable(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if elements of one of ``tensors`` share memory: torch cannot write there."""
    for tensor in tensors:
        places = zip(tensor.stride(), tensor.shape, strict=True)
        if tensor.numel() > 0 and any(stride == 0 and length > 1 for stride, length in places):
            raise ValueError(f"tensor of shape {list(tensor.shape)} is expanded, and cannot be written to: clone it")


def check_rows(tensors: Sequence[torch.Tensor], kind: str) -> None:
    """Raise ValueError if one of ``tensors`` has no first dimension."""
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(f"tensor has no dimensions, and {kind} works on rows: pass tensor.reshape(1)")


def check_reducible(tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Raise TypeError if ``op`` is not defined for the dtype of one of ``tensors``."""
    known: tuple[torch.dtype, ...] = _INTEGERS + _FLOATS
    if op in (Sum, Average):
        known += _COMPLEX
    if op != Average:
        known += (torch.bool,)
    if op == Adasum:
        known = _FLOATS + _COMPLEX
    for tensor in tensors:
        if tensor.dtype not in known:
            raise TypeError(f"tensor is of {tensor.dtype}, for which op={op.name} is not defined")


def check_factor(name: str, value: Any) -> float:
    """Return the factor ``value``. Raises TypeError or ValueError unless it is a finite number."""
    if value == 1.0 and type(value) is float:  # nearly always
        return 1.0
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, wanted a finite number")
    return float(value)


def check_adasum(op: ReduceOp, process_set: ProcessSet, members: Members) -> None:
    """Raise NotImplementedError where Adasum is not defined."""
    if op != Adasum:
        return
    if process_set is not global_process_set:
        raise NotImplementedError("op is Adasum, which works on all ranks: leave process_set out")
    if len(members.ranks) & (len(members.ranks) - 1):
        raise NotImplementedError(
            f"op is Adasum, which requires a power of two of ranks, and there are {len(members.ranks)}"
        )


def check_root(root_rank: Any, members: Members) -> int:
    """Return the position of the global rank ``root_rank`` in the set."""
    if not isinstance(root_rank, int) or isinstance(root_rank, bool):
        raise TypeError(f"root_rank is {root_rank!r}, wanted a rank, which is an integer")
    if root_rank not in members.ranks:
        raise ValueError(f"root_rank is {root_rank}, wanted one of the ranks {list(members.ranks)}")
    return list(members.ranks).index(root_rank)


def check_splits(splits: Any, tensor: torch.Tensor, size: int) -> list[int]:
    """Return how many rows of ``tensor`` go to each rank: equally many if ``splits`` is ``None``."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"tensor has {rows} rows, wanted a multiple of {size}, the number of ranks, or splits")
        return [rows // size] * size
    given = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits)
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise ValueError(f"splits is of {given.dtype}, wanted integers")
    numbers = [int(n) for n in given.flatten().tolist()]
    if len(numbers) != size or min(numbers, default=0) < 0:
        raise ValueError(f"splits is {numbers}, wanted {size} numbers of rows, one for each rank, none negative")
    if sum(numbers) > rows:
        raise ValueError(f"splits is {numbers}, {sum(numbers)} rows in all, and tensor has {rows}")
    return numbers
