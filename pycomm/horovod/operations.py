"""Operations of Horovod's interface: functions made from a table, and a few written out.

Ranks match operations by name, in any order. Without a name, the n-th of a kind on one rank matches the n-th on the
others. Tensors may be any dense ones, even with gaps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from pycomm import threads
from pycomm.horovod.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Collective,
    ReduceScatter,
    Submission,
    Tensors,
    synchronize_all,
    waited,
)
from pycomm.horovod.coordinator import ALLGATHER, BARRIER, JOIN, Request, RequestTerms
from pycomm.horovod.engine import NegotiatingEngine, internal_error
from pycomm.horovod.names import (
    NAMES,
    Average,
    Compression,
    InvalidRequestError,
    ReduceOp,
    checked_op,
    op_or_error,
)
from pycomm.horovod.process_sets import ProcessSet, global_process_set, world
from pycomm.training.reducer import Reducer

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

_PATIENCE = 5.0  # seconds


# Forms: each defines the arguments of functions, and returns the collective and its tensor or tensors.


def _reduction(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    return AllReduce(name, process_set, op_or_error(op, average), prescale_factor, postscale_factor), tensor


def _reduction_compressed(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    chosen = op_or_error(op, average)
    return AllReduce(name, process_set, chosen, prescale_factor, postscale_factor, compression), tensor


def _gather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Call:
    return AllGather(name, process_set), tensor


def _root(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Broadcast(name, process_set, root_rank), tensor


def _exchange(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return AllToAll(name, process_set, splits), tensor


def _scatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    return ReduceScatter(name, process_set, op, prescale_factor, postscale_factor), tensor


def _scatter_compressed(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    return ReduceScatter(name, process_set, op, prescale_factor, postscale_factor, compression), tensor


# Ways: each runs the collective on the tensors that a form returned.


def _begin(call: Collective, tensors: Any) -> int:
    return call.submit(tensors).handle(call.finish)


def _begin_in_place(call: Collective, tensors: Any) -> int:
    call.in_place = True
    return _begin(call, tensors)


def _in_place(call: Collective, tensors: Any) -> torch.Tensor:
    return _in_place_all(call, tensors)[0]


def _in_place_all(call: Collective, tensors: Any) -> tuple[torch.Tensor, ...]:
    call.in_place = True
    return call.run(tensors)


def _differentiated(call: Collective, tensors: Any) -> torch.Tensor:
    return call.differentiated(tensors)[0]


def _differentiated_all(call: Collective, tensors: Any) -> list[torch.Tensor]:
    return list(call.differentiated(tensors))


def _rows_and_splits(call: Collective, tensors: Any) -> Any:
    both = call.result(call.differentiated(tensors))
    return both if call.splits is not None else both[0]


def _function(name: str, form: Callable[P, Call], way: Callable[[Collective, Any], R], doc: str) -> Callable[P, R]:
    """Return the function ``name`` of this module, with the arguments of ``form`` and the result of ``way``."""
    made: Callable[P, R] = _made(name, form, way, doc)
    return made


class _Grouped(Protocol[P, R]):
    def __call__(self, tensors: Tensors, *args: P.args, **kwargs: P.kwargs) -> R: ...


def _grouped(
    name: str, form: Callable[Concatenate[torch.Tensor, P], Call], way: Callable[[Collective, Any], R], doc: str
) -> _Grouped[P, R]:
    """Return such a function that takes ``tensors`` instead of ``tensor``."""
    made: _Grouped[P, R] = _made(name, form, way, doc, grouped=True)
    return made


def _made(name: str, form: Any, way: Any, doc: str, grouped: bool = False) -> Any:
    """Return a function with the name, signature and docstring that it would have if written out."""
    code, signature, returns = form.__code__, inspect.signature(form), way.__annotations__["return"]
    first, *others = signature.parameters.values()
    if grouped:
        first = first.replace(name="tensors", annotation="Tensors")
        code = code.replace(co_varnames=("tensors", *code.co_varnames[1:]))
    call = FunctionType(code, form.__globals__, name, form.__defaults__)  # errors of arguments name the function
    call.__qualname__ = name

    def function(*args: Any, **kwargs: Any) -> Any:
        collective, given = call(*args, **kwargs)
        collective.alone = not grouped
        return way(collective, given if grouped else [given])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    function.__annotations__ = {each.name: each.annotation for each in (first, *others)} | {"return": returns}
    made: Any = function
    made.__signature__ = signature.replace(parameters=[first, *others], return_annotation=returns)
    return made


# The table: name, form, way and docstring of each function.

allreduce = _function(
    "allreduce",
    _reduction_compressed,
    _differentiated,
    """Return the reduction of ``tensor`` over the ranks. Autograd differentiates it.

    Args:
        tensor: of any shape, the same on all ranks; of floating-point, integer, complex or boolean dtype.
        average: deprecated; use ``op``.
        name: by which the ranks match the operation, in any order; a number if ``None``.
        compression: ``Compression.none`` or ``.fp16``, or a class with the same methods.
        op: ``Average`` (of integers cut off), ``Sum``, ``Min``, ``Max``, ``Product``, ``Adasum``; Average if ``None``.
        prescale_factor, postscale_factor: factors before and after the reduction; of integers computed in float64 and
            cut off, of half types computed in float32.
        process_set: the ranks.

    Raises:
        InvalidRequestError: an argument is wrong, or the ranks disagree: on every rank, and the ranks go on.
        HorovodInternalError: a rank is lost.
        ValueError: before ``init()``; or an operation of that name is not done yet.
    """,
)
allreduce_async = _function(
    "allreduce_async", _reduction, _begin, "Begin an :func:`allreduce` into a new tensor; return a handle."
)
allreduce_async_ = _function(
    "allreduce_async_", _reduction, _begin_in_place, "Begin an :func:`allreduce` in place; return a handle."
)
allreduce_ = _function(
    "allreduce_", _reduction, _in_place, "Reduce ``tensor`` in place, and return it. See :func:`allreduce`."
)
grouped_allreduce = _grouped(
    "grouped_allreduce",
    _reduction_compressed,
    _differentiated_all,
    "Return the reductions of ``tensors``, of all or none. See :func:`allreduce`.",
)
grouped_allreduce_async = _grouped(
    "grouped_allreduce_async", _reduction, _begin, "Begin to reduce ``tensors``, all or none; return a handle."
)
grouped_allreduce_async_ = _grouped(
    "grouped_allreduce_async_",
    _reduction,
    _begin_in_place,
    "Begin to reduce ``tensors`` in place, all or none; return a handle.",
)
grouped_allreduce_ = _grouped(
    "grouped_allreduce_", _reduction, _in_place_all, "Reduce ``tensors`` in place, all or none, and return them."
)
allgather = _function(
    "allgather",
    _gather,
    _differentiated,
    """Return the rows of all ranks' ``tensor``, in rank order. Autograd differentiates it.

    ``tensor`` has one dimension or more, of which only the first may differ between ranks; any dtype. Errors: as of
    :func:`allreduce`.
    """,
)
allgather_async = _function("allgather_async", _gather, _begin, "Begin an :func:`allgather`; return a handle.")
grouped_allgather = _grouped(
    "grouped_allgather",
    _gather,
    _differentiated_all,
    "Return all ranks' rows of each of ``tensors``. See :func:`allgather`.",
)
grouped_allgather_async = _grouped(
    "grouped_allgather_async", _gather, _begin, "Begin to gather the rows of each of ``tensors``; return a handle."
)
broadcast = _function(
    "broadcast",
    _root,
    _differentiated,
    """Return the ``tensor`` of the global rank ``root_rank``. Autograd differentiates it.

    Shape and dtype, any, are the same on all ranks. Errors: as of :func:`allreduce`.
    """,
)
broadcast_async = _function(
    "broadcast_async", _root, _begin, "Begin a :func:`broadcast` into a new tensor; return a handle."
)
broadcast_async_ = _function(
    "broadcast_async_",
    _root,
    _begin_in_place,
    "Begin to overwrite ``tensor`` with ``root_rank``'s; return a handle.",
)
broadcast_ = _function(
    "broadcast_",
    _root,
    _in_place,
    "Overwrite ``tensor`` with ``root_rank``'s, and return it. See :func:`broadcast`.",
)
alltoall = _function(
    "alltoall",
    _exchange,
    _rows_and_splits,
    """Send rows to every rank, and return those that come, in rank order. Autograd differentiates it.

    Args:
        tensor: rows in the order of the ranks that they go to; dimensions but the first, and any dtype, are the same on
            all ranks.
        splits: how many rows go to each rank: a tensor or list of integers, none negative. Equally many if ``None``.
        name, process_set: as of :func:`allreduce`.

    Returns:
        The rows; if ``splits`` is given, also how many have come from each rank, a tensor like ``splits`` (of int32 if
        that is none).

    Raises:
        InvalidRequestError and others: as of :func:`allreduce`.
    """,
)
alltoall_async = _function("alltoall_async", _exchange, _begin, "Begin an :func:`alltoall`; return a handle.")
reducescatter = _function(
    "reducescatter",
    _scatter_compressed,
    _differentiated,
    """Return this rank's rows of the reduction of ``tensor`` over the ranks. Autograd differentiates it.

    Of n rows, each of P ranks gets n // P, the first n % P ranks one more. Arguments and errors: as of
    :func:`allreduce`, without Adasum.
    """,
)
reducescatter_async = _function(
    "reducescatter_async", _scatter, _begin, "Begin a :func:`reducescatter`; return a handle."
)
grouped_reducescatter = _grouped(
    "grouped_reducescatter",
    _scatter_compressed,
    _differentiated_all,
    "Return this rank's rows of each reduction. See :func:`reducescatter`.",
)
grouped_reducescatter_async = _grouped(
    "grouped_reducescatter_async", _scatter, _begin, "Begin a :func:`grouped_reducescatter`; return a handle."
)


# Others.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of ``process_set`` have called this."""
    with Submission(BARRIER, None, process_set) as submission:
        submission.submit(Request(submission.key, RequestTerms(BARRIER)), wake=False)
    waited(submission)


def join(device: int = -1) -> int:
    """Wait for all ranks to call this, and contribute zeros to their allreduces in the meantime.

    For a rank without further data: averages, including gradients of ``DistributedOptimizer``, still divide by the
    number of all ranks. Operations other than allreduce with Sum or Average are errors on the ranks that call them.
    Gradients that no step has used yet are dropped, and no step is taken. As parameters and optimizer state do not
    change here, broadcast the last rank's afterwards.

    Args:
        device: accepted without effect: zeros are made in CPU memory.

    Returns:
        The rank that came last; the same on all ranks.
    """
    with Submission(JOIN, None, global_process_set) as submission:
        if not isinstance(device, int):
            raise TypeError(f"device is {device!r}, wanted the number of a GPU, or -1")
        submission.submit(Request(submission.key, RequestTerms(JOIN)), wake=False)
    with _absence(submission.engine) as counts:
        last = int(waited(submission).result)
    last = _latest(sum(counts), last)
    # The ranks may have asked for different numbers of operations; none is pending now, so the counts can restart.
    submission.members.counters.clear()
    for checks in world().checks:
        checks.restart()
    return last


def _latest(absences: int, last: int) -> int:
    """Return the rank absent from the fewest reductions of gradients; of several, ``last`` if possible.

    Announcements are not enough: the last rank may announce nothing until the end, while its gradients are reduced.
    """
    mine = torch.tensor([absences])
    everyones = AllGather("join.absences", global_process_set).run([mine])[0].tolist()
    latest = [rank for rank, count in enumerate(everyones) if count == min(everyones)]
    return last if last in latest else latest[-1]


@contextlib.contextmanager
def _absence(engine: NegotiatingEngine) -> Iterator[list[int]]:
    """Contribute nothing to reductions of attached optimizers inside; exit once all ranks have joined.

    These reductions are not announced, as all ranks make the same ones in the same order. A rank that has joined waits
    in the next one of every optimizer, on a thread for each. When all ranks have joined, that reduction is empty; a
    message of two numbers then marks it as the last. Ranks with data have no overhead.

    Args:
        engine: engine of all ranks, by which this one waits meanwhile; closed if a reduction fails.

    Yields:
        A list: on exit, the number of reductions of each optimizer that this rank was absent from.
    """
    gc.collect()  # dropped Reducers must be freed on all ranks or on none
    counts: list[int] = []
    errors: list[BaseException] = []

    def stay(reducer: Reducer) -> None:
        try:
            counts.append(reducer.stay_absent())
        except BaseException as error:
            errors.append(error)
            engine.close(f"a reduction of gradients failed while this rank had joined: {error}")

    reducers = list(world().attached)
    staying = [threads.start(functools.partial(stay, each), "pycomm-horovod-joined") for each in reducers]
    patience: float | None = _PATIENCE  # an error that ends the wait usually ends the threads too
    try:
        yield counts
        patience = None
    finally:
        for reducer, thread in zip(reducers, staying, strict=True):
            thread.join(patience)
            if thread.is_alive():
                reducer.detach()
        if errors:
            raise internal_error(errors[0]) from errors[0]


class SparseHandle:
    """Handle of a sparse allreduce: call it, or pass it to ``synchronize``, for the sum or average, a COO tensor."""

    def __init__(self, tensor: torch.Tensor, handles: tuple[int, int], divisor: int) -> None:
        self.handles, self._shape, self._divisor = handles, tensor.shape, divisor

    def __call__(self) -> torch.Tensor:
        indices, values = synchronize_all(self.handles)
        return torch.sparse_coo_tensor(
            indices.t(), values / self._divisor if self._divisor > 1 else values, self._shape
        )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Begin to sum or average the COO ``tensor`` of all ranks by gathering all entries.

    Args:
        tensor: sparse, in COO form; its shape is the same on all ranks, its entries need not be.
        name: of the operation.
        op: ``Sum`` or ``Average``.
        process_set: the ranks.

    Raises:
        TypeError, ValueError: ``tensor`` is not sparse, or ``op`` is another one.
    """
    return begin_sparse_allreduce(tensor, name, op, process_set)


def begin_sparse_allreduce(
    tensor: torch.Tensor, name: str | None, op: Any, process_set: ProcessSet, detail: str = ""
) -> SparseHandle:
    """Begin a :func:`sparse_allreduce_async`; ``detail``: what else must be the same on all ranks."""
    label: Any = "sparse.noname" if name is None else name
    labels = [f"{label}.{part}" if isinstance(label, str) else label for part in ("indices", "values")]
    try:
        chosen, mine = _checked_sparse(tensor, op)
    except Exception as error:
        for label in labels:  # the other ranks are about to call both operations
            with contextlib.suppress(type(error), InvalidRequestError), Submission(ALLGATHER, label, process_set):
                raise
        raise
    form = f"of a sparse tensor {list(tensor.shape)}{detail and ' '}{detail}"
    parts = (mine.indices().t().contiguous(), mine.values())
    indices, values = (
        _begin(AllGather(label, process_set, form), [part]) for label, part in zip(labels, parts, strict=True)
    )
    size = process_set.size() or 1
    return SparseHandle(tensor, (indices, values), size if chosen == Average else 1)


def _checked_sparse(tensor: Any, op: Any) -> tuple[ReduceOp, torch.Tensor]:
    """Return the reduction and the tensor, each index once. Raises TypeError or ValueError if they are wrong."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise TypeError("tensor: wanted a sparse tensor in COO form; pass dense ones to allreduce_async()")
    if tensor.is_meta:
        raise TypeError("tensor is on the device meta, where it has no values")
    chosen = checked_op(op)
    if NAMES[chosen] not in ("sum", "mean"):
        raise ValueError(f"op is {chosen.name}, wanted Sum or Average of sparse tensors")
    return chosen, tensor.detach().coalesce()
