"""Operations as they are submitted: the functions with ``_async`` in their names, and those that write in place.

Operations are matched by name, whatever the order in which ranks ask for them. Without a name, the n-th of a kind on
one rank goes with the n-th on the others. Tensors may be anything dense, also with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.horovod import checks
from pycomm.horovod.absence import absence
from pycomm.horovod.handles import (
    Submission,
    checked_tensors,
    empty_like,
    grouped,
    single,
)
from pycomm.horovod.process_sets import ProcessSet, global_process_set
from pycomm.horovod.reduce_ops import NAMES, Adasum, Average, checked_op
from pycomm.horovod.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Request,
    Terms,
    terms_of,
)

Tensors = Sequence[torch.Tensor]


def submit_allreduce(
    tensors: Any,
    name: str | None,
    op: Any,
    factors: tuple[Any, Any],
    process_set: ProcessSet,
    *,
    average: bool | None = None,
    in_place: bool = False,
    wake: bool = True,
) -> Submission:
    """Submit an allreduce of all ``tensors`` together. ``factors``: prescale and postscale."""
    with Submission(ALLREDUCE, name, process_set) as submission:
        chosen = checked_op(op, average)
        xs = checked_tensors(tensors)
        checks.check_reducible(xs, chosen)
        checks.check_adasum(chosen, process_set, submission.members)
        before = checks.check_factor("prescale_factor", factors[0])
        after = checks.check_factor("postscale_factor", factors[1])
        terms = terms_of(ALLREDUCE, NAMES[chosen], before, after)
        if in_place:
            checks.check_writable(xs)
        outputs: list[torch.Tensor | None] = [*xs] if in_place else empty_like(xs)
        submission.submit(Request(submission.key, terms, xs, outputs), wake)
    return submission


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensor`` over the ranks into a new one; return a handle. See :func:`allreduce`."""
    factors = (prescale_factor, postscale_factor)
    return submit_allreduce([tensor], name, op, factors, process_set, average=average).handle(single)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensor`` over the ranks in place; return a handle. See :func:`allreduce`."""
    factors = (prescale_factor, postscale_factor)
    return submit_allreduce([tensor], name, op, factors, process_set, average=average, in_place=True).handle(single)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` over the ranks in place, and return it. See :func:`allreduce`."""
    factors = (prescale_factor, postscale_factor)
    made = submit_allreduce([tensor], name, op, factors, process_set, average=average, in_place=True, wake=False)
    return single(waited(made))


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensors`` over the ranks, all or none of them; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return submit_allreduce(tensors, name, op, factors, process_set, average=average).handle(grouped)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensors`` over the ranks in place, all or none of them; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return submit_allreduce(tensors, name, op, factors, process_set, average=average, in_place=True).handle(grouped)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce ``tensors`` over the ranks in place, all or none of them, and return them."""
    factors = (prescale_factor, postscale_factor)
    made = submit_allreduce(tensors, name, op, factors, process_set, average=average, in_place=True, wake=False)
    return grouped(waited(made))


def submit_allgather(
    tensors: Any, name: str | None, process_set: ProcessSet, wake: bool = True, detail: str = ""
) -> Submission:
    """Submit an allgather of all ``tensors``, each by itself. ``detail``: what else must be the same on all ranks."""
    with Submission(ALLGATHER, name, process_set) as submission:
        xs = checked_tensors(tensors)
        checks.check_rows(xs, ALLGATHER)
        submission.submit(Request(submission.key, Terms(ALLGATHER, detail=detail), xs, [None] * len(xs)), wake)
    return submission


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to gather the rows of all ranks; return a handle. See :func:`allgather`."""
    return submit_allgather([tensor], name, process_set).handle(single)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather the rows of all ranks, of each of ``tensors``; return a handle."""
    return submit_allgather(tensors, name, process_set).handle(grouped)


def submit_broadcast(
    tensor: Any, root_rank: Any, name: str | None, process_set: ProcessSet, in_place: bool, wake: bool = True
) -> Submission:
    """Submit a broadcast."""
    with Submission(BROADCAST, name, process_set) as submission:
        checks.check_tensor(tensor)
        terms = Terms(BROADCAST, root=checks.check_root(root_rank, submission.members))
        if in_place:
            checks.check_writable([tensor])
        outputs: list[torch.Tensor | None] = [tensor] if in_place else empty_like([tensor])
        submission.submit(Request(submission.key, terms, [tensor], outputs), wake)
    return submission


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to broadcast the ``tensor`` of ``root_rank`` into a new one; return a handle. See :func:`broadcast`."""
    return submit_broadcast(tensor, root_rank, name, process_set, False).handle(single)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to overwrite ``tensor`` with that of ``root_rank``; return a handle. See :func:`broadcast`."""
    return submit_broadcast(tensor, root_rank, name, process_set, True).handle(single)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` with that of ``root_rank``, and return it. See :func:`broadcast`."""
    return single(waited(submit_broadcast(tensor, root_rank, name, process_set, True, wake=False)))


def submit_alltoall(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, wake: bool = True
) -> Submission:
    """Submit an alltoall."""
    with Submission(ALLTOALL, name, process_set) as submission:
        checks.check_tensor(tensor)
        checks.check_rows([tensor], ALLTOALL)
        numbers = checks.check_splits(splits, tensor, len(submission.members.ranks))
        submission.submit(Request(submission.key, Terms(ALLTOALL), [tensor], [None], splits=numbers), wake)
    return submission


def received_of(request: Request, splits: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of an alltoall, and how many rows have come from each rank, in the form of ``splits``."""
    form = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
    return single(request), torch.tensor(request.result, dtype=form.dtype, device=form.device)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to exchange rows with all ranks; return a handle. See :func:`alltoall`."""
    submission = submit_alltoall(tensor, splits, name, process_set)
    return submission.handle(lambda request: received_of(request, splits))


def submit_reducescatter(
    tensors: Any,
    name: str | None,
    op: Any,
    factors: tuple[Any, Any],
    process_set: ProcessSet,
    wake: bool = True,
) -> Submission:
    """Submit a reducescatter of all ``tensors``, each by itself."""
    with Submission(REDUCESCATTER, name, process_set) as submission:
        chosen = checked_op(op)
        xs = checked_tensors(tensors)
        checks.check_rows(xs, REDUCESCATTER)
        if chosen == Adasum:
            raise ValueError(
                "op is Adasum, which a reducescatter does not know: wanted Average, Sum, Min, Max or Product"
            )
        checks.check_reducible(xs, chosen)
        before = checks.check_factor("prescale_factor", factors[0])
        after = checks.check_factor("postscale_factor", factors[1])
        terms = terms_of(REDUCESCATTER, NAMES[chosen], before, after)
        submission.submit(Request(submission.key, terms, xs, [None] * len(xs)), wake)
    return submission


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce ``tensor`` over the ranks, of which each gets some rows; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return submit_reducescatter([tensor], name, op, factors, process_set).handle(single)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce ``tensors`` over the ranks, of which each gets some rows of each; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return submit_reducescatter(tensors, name, op, factors, process_set).handle(grouped)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of ``process_set`` have called this."""
    with Submission(BARRIER, None, process_set) as submission:
        submission.submit(Request(submission.key, Terms(BARRIER)), wake=False)
    waited(submission)


def join(device: int = -1) -> int:
    """Wait for all ranks to call this, and contribute zeros to their allreduces in the meantime.

    For a rank that has no more data: averages still divide by the number of all ranks. Those of gradients by
    ``DistributedOptimizer`` are among these allreduces. Other operations than allreduce with Sum or Average are errors
    on the ranks that ask for them. Gradients that no step has used yet are dropped, and no step is taken: parameters
    and the state of optimizers remain what they are here, so that the last rank's have to be broadcast afterwards.

    Args:
        device: accepted, and of no effect: zeros are made in CPU memory.

    Returns:
        The rank that came last; the same on all ranks.
    """
    with Submission(JOIN, None, global_process_set) as submission:
        if not isinstance(device, int):
            raise TypeError(f"device is {device!r}, wanted the number of a GPU, or -1")
        submission.submit(Request(submission.key, Terms(JOIN)), wake=False)
    with absence(submission.engine) as counts:
        last = int(waited(submission).result)
    last = _latest(sum(counts), last)
    # The ranks may have asked for different numbers of operations; none is left now, so that they can count anew.
    submission.members.counters.clear()
    return last


def _latest(absences: int, last: int) -> int:
    """Return the rank that has been absent from the fewest reductions of gradients; of several, ``last`` if possible.

    Announcements alone do not tell: a rank may announce nothing until the end, while its gradients are reduced.
    """
    mine = torch.tensor([absences])
    everyones = single(waited(submit_allgather([mine], "join.absences", global_process_set, wake=False))).tolist()
    latest = [rank for rank, count in enumerate(everyones) if count == min(everyones)]
    return last if last in latest else latest[-1]


def waited(submission: Submission) -> Request:
    """Return the request of ``submission``, once it has ended. Raises its error."""
    assert submission.request is not None
    submission.engine.wait(submission.request)
    return submission.request
