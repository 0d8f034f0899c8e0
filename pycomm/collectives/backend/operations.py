"""Operations of a process group as torch calls them: lists of tensors, options, a ``Work`` in return.

torch calls them from Python (``dist.all_reduce``) and from C++ (DistributedDataParallel, functional collectives). They
have the names of torch 2.14 and of older releases. An operation that need not be asynchronous runs on the
caller's thread, and raises there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from pycomm.collectives.backend.calls import METHODS, Calls, Planned, operation, raise_timed
from pycomm.collectives.backend.engine import GroupEngine, known_name, name_of
from pycomm.collectives.backend.work import BackendWork
from pycomm.collectives.transport.torch_messages import TAG_END
from pycomm.errors import CommError
from pycomm.torch_internals import current_graph_task

Tensors = Sequence[torch.Tensor]

USERS_TAG_END = TAG_END - 2
"""Users' messages have smaller tags."""
_ARRIVED, _RELEASED = USERS_TAG_END, USERS_TAG_END + 1

# Reductions.


@operation("allreduce", "allreduce_sparse")
def allreduce(calls: Calls, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Planned:
    """Reduce a tensor in place; sparse ones too."""
    tensor, in_backward = _only(tensors), current_graph_task() >= 0
    return Planned(
        "all_reduce", calls.engine.all_reduce, (tensor, _reduction(opts), in_backward), [tensor], opts, timeout
    )


def _allreduce_at_once(group: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
    """Reduce a small tensor in one call of C++ if the caller waits, who then gets no work, as from torch's own groups.

    It is on the path of every small all-reduce, so that it calls few functions. All else is for :func:`allreduce`.
    """
    calls: Calls = group.calls
    if timeout is None and type(tensors) is list and len(tensors) == 1 and not getattr(opts, "asyncOp", True):
        x, engine, seconds = tensors[0], calls.engine, calls.seconds(opts)
        op = known_name(opts.reduceOp)
        try:
            if calls.coalescing is None and engine.channel.at_once(x, op, seconds):
                engine.num_bytes["small"] += x.nbytes
                return None
        except CommError as error:
            raise_timed(error, seconds)
    return _allreduce(group, tensors, opts, timeout)


_allreduce, METHODS["allreduce"] = METHODS["allreduce"], _allreduce_at_once


@operation("allreduce_coalesced")
def allreduce_coalesced(calls: Calls, tensors: Tensors, opts: Any = None) -> Planned:
    """Reduce several tensors in place, together."""
    xs = list(tensors)
    return Planned("all_reduce", calls.engine.all_reduce_coalesced, (xs, _reduction(opts)), xs, opts)


@operation("reduce")
def reduce(calls: Calls, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Planned:
    """Reduce a tensor into the root's."""
    tensor, name = _only(tensors), _reduction(opts if op is None else op)
    return Planned("reduce", calls.engine.reduce, (tensor, _root_of(opts), name), [tensor], opts, timeout)


@operation("reduce_scatter")
def reduce_scatter(calls: Calls, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
    """Reduce a list of tensors, one per rank, into this rank's."""
    out, parts = _only(outputs), list(_only(inputs))
    calls.require_one_per_rank("reduce_scatter", "inputs", parts)
    return Planned("reduce_scatter", calls.engine.reduce_scatter_parts, (out, parts, _reduction(opts)), [out], opts)


@operation("reduce_scatter_single", "_reduce_scatter_base")
def reduce_scatter_single(calls: Calls, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Planned:
    """Reduce a tensor with a part per rank into this rank's part."""
    return Planned("reduce_scatter", calls.engine.reduce_scatter, (output, x, _reduction(opts)), [output], opts)


@operation("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
def reduce_scatter_single_coalesced(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
    """Do what :func:`reduce_scatter_single` does for several pairs of tensors."""
    pairs, run = list(zip(outputs, inputs, strict=True)), calls.engine.reduce_scatter
    args = "reduce_scatter of {} tensors", run, pairs, _reduction(opts)
    return Planned("reduce_scatter", calls.engine.each, args, list(outputs), opts)


# Movements.


@operation("broadcast")
def broadcast(calls: Calls, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Planned:
    """Overwrite a tensor with the root's."""
    tensor = _only(tensors)
    return Planned("broadcast", calls.engine.broadcast, (tensor, _root_of(opts)), [tensor], opts, timeout)


@operation("allgather")
def allgather(calls: Calls, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
    """Gather a tensor of every rank in a list of tensors, which may differ in size."""
    x = _only(inputs)
    outs = list(outputs if isinstance(inputs, torch.Tensor) else _only(outputs))
    calls.require_one_per_rank("all_gather", "outputs", outs)
    return Planned("all_gather", calls.engine.exchange, (outs, [x] * calls.engine.size), outs, opts)


@operation("allgather_coalesced")
def allgather_coalesced(calls: Calls, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Planned:
    """Gather several tensors of every rank: ``outputs[p][i]`` is ``inputs[i]`` of rank p."""
    calls.require_one_per_rank("all_gather", "outputs", outputs)
    size = calls.engine.size
    pairs = [(outs, [x] * size) for outs, x in zip(zip(*outputs, strict=True), inputs, strict=True)]
    args = "all_gather of {} tensors, to lists", calls.engine.exchange, pairs
    return Planned("all_gather", calls.engine.each, args, list(outputs), opts)


@operation("all_gather_single", "_allgather_base")
def all_gather_single(calls: Calls, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Planned:
    """Gather a tensor of every rank, one after the other, in one tensor."""
    size = calls.engine.size
    return Planned("all_gather", calls.engine.all_gather, (output, x), lambda: _parts(output, size), opts)


@operation("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
def all_gather_single_coalesced(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
    """Do what :func:`all_gather_single` does for several pairs of tensors."""
    args = "all_gather of {} tensors", calls.engine.all_gather, list(zip(outputs, inputs, strict=True))
    of_each = [_parts(out, calls.engine.size) for out in outputs]
    return Planned("all_gather", calls.engine.each, args, list(map(list, zip(*of_each, strict=True))), opts)


def _parts(gathered: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return the part of each rank in ``gathered``, which is all that Gloo's work has as a result."""
    is_in_rows = gathered.dim() > 0 and gathered.shape[0] % size == 0
    return list((gathered if is_in_rows else gathered.reshape(size, -1)).tensor_split(size))


@operation("gather")
def gather(calls: Calls, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
    """Gather a tensor of every rank in the root's list of tensors."""
    x, root, size = _only(inputs), _root_of(opts), calls.engine.size
    is_root = calls.engine.rank == root
    outs: list[Any] = list(_only(outputs)) if is_root else [None] * size
    calls.require_one_per_rank("gather", "outputs", outs)
    xs = [x if p == root else None for p in range(size)]
    return Planned("gather", calls.engine.exchange, (outs, xs), outs if is_root else [], opts)


@operation("scatter")
def scatter(calls: Calls, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
    """Give every rank its tensor of the root's list."""
    out, root, size = _only(outputs), _root_of(opts), calls.engine.size
    xs: list[Any] = list(_only(inputs)) if calls.engine.rank == root else [None] * size
    calls.require_one_per_rank("scatter", "inputs", xs)
    outs = [out if p == root else None for p in range(size)]
    return Planned("scatter", calls.engine.exchange, (outs, xs), [out], opts)


@operation("alltoall")
def alltoall(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
    """Send the p-th tensor to rank p, and receive the p-th from it; they may differ in size."""
    outs, xs = list(outputs), list(inputs)
    calls.require_one_per_rank("all_to_all", "outputs", outs)
    calls.require_one_per_rank("all_to_all", "inputs", xs)
    return Planned("all_to_all", calls.engine.exchange, (outs, xs), outs, opts)


@operation("all_to_all_single", "alltoall_base")
def all_to_all_single(
    calls: Calls,
    output: torch.Tensor,
    x: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    opts: Any = None,
) -> Planned:
    """Send slices of a tensor along its first dimension to the ranks; equal slices unless sizes are given."""
    if not output_splits and not input_splits:
        return Planned("all_to_all", calls.engine.all_to_all, (output, x), [output], opts)
    size = calls.engine.size
    slices = _slices(output, output_splits, "output", size), _slices(x, input_splits, "input", size)
    return Planned("all_to_all", calls.engine.exchange, slices, [output], opts)


def _slices(tensor: torch.Tensor, sizes: Sequence[int], name: str, num_ranks: int) -> list[torch.Tensor]:
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if length % num_ranks:
            raise ValueError(f"{name} has {length} rows, wanted a multiple of the {num_ranks} ranks")
        sizes = [length // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != length:
        raise ValueError(f"{name} has {length} rows, and {name} split sizes are {list(sizes)} for {num_ranks} ranks")
    return list(torch.split(tensor, list(sizes)))


@operation("barrier")
def barrier(calls: Calls, opts: Any = None) -> Planned:
    """Wait for all ranks."""
    return Planned("barrier", calls.engine.barrier, (), [], opts)


# Messages.


@operation("send", is_collective=False)
def send(calls: Calls, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
    """Send a tensor to rank ``dst``."""
    return calls.engine.send(_only(tensors), dst, _users_tag(tag), calls.engine.timeout)


@operation("recv", is_collective=False)
def recv(calls: Calls, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
    """Receive a tensor from rank ``src``."""
    return calls.engine.receive(_only(tensors), src, _users_tag(tag), calls.engine.timeout)


@operation("recv_anysource", is_collective=False)
def recv_anysource(calls: Calls, tensors: Tensors, tag: int = 0) -> BackendWork:
    """Receive a tensor from whichever rank sends one."""
    return calls.engine.receive(_only(tensors), None, _users_tag(tag), calls.engine.timeout)


# Their arguments.


def _reduction(opts: Any) -> str:
    """Return the name of the reduction in ``opts``."""
    return "sum" if opts is None else name_of(getattr(opts, "reduceOp", opts))


def _only(tensors: Any) -> Any:
    """Return the only element of a list; torch's calling convention allows one for each GPU of a process."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"the list has {len(tensors)} tensors, wanted one per process")
    return tensors[0]


def _users_tag(tag: int) -> int:
    """Return ``tag``; raise ValueError if it is reserved for monitored_barrier."""
    if tag >= USERS_TAG_END:
        raise ValueError(f"tag is {tag}, wanted one below {USERS_TAG_END}")
    return tag


def _root_of(opts: Any) -> int:
    """Return the root in ``opts``, a rank of the group."""
    return int(opts) if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


# monitored_barrier, by messages to and from rank 0.


def monitored_barrier(calls: Calls, timeout: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks of the group, for at most ``timeout`` seconds.

    Args:
        calls: the group's.
        timeout: seconds.
        wait_all_ranks: whether rank 0 names all missing ranks instead of the first.
    """
    engine, deadline = calls.engine, time.monotonic() + timeout
    number, calls.num_barriers = calls.num_barriers, calls.num_barriers + 1
    if engine.rank != 0:
        engine.transport.send(torch.tensor([number]), 0, _ARRIVED, timeout)
        try:
            _receive(engine, 0, _RELEASED, number, deadline)
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {engine.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. {error}"
            ) from None
        return
    missing = []
    for peer in range(1, engine.size):
        if not wait_all_ranks and time.monotonic() >= deadline:
            raise RuntimeError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {round(timeout * 1000)} ms, "
                f"before it could wait for rank {peer}"
            )
        try:
            _receive(engine, peer, _ARRIVED, number, deadline)
        except RuntimeError as error:
            missing.append(peer)
            if not wait_all_ranks:
                raise RuntimeError(
                    f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {round(timeout * 1000)} ms. {error}"
                ) from None
    if missing:
        ranks = ", ".join(str(peer) for peer in missing)
        raise RuntimeError(f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {round(timeout * 1000)} ms")
    for peer in range(1, engine.size):
        engine.transport.send(torch.tensor([number]), peer, _RELEASED, timeout)


def _receive(engine: GroupEngine, peer: int, tag: int, number: int, deadline: float) -> None:
    """Receive the message of ``peer`` for barrier ``number``; skip messages of earlier barriers that failed."""
    found = torch.tensor([-1])
    while found.item() < number:
        receipt = engine.transport.receive(found, peer, tag)
        try:
            receipt.wait(max(0.001, deadline - time.monotonic()))
        except RuntimeError:
            receipt.cancel()  # it must not take the message of a later barrier
            raise
