"""Operations of a process group as torch calls them: lists of tensors, options, a ``Work`` in return.

torch calls them from Python (``dist.all_reduce``) and from C++ (DistributedDataParallel, functional
collectives); releases differ in the names, so some have two. An operation that need not be asynchronous
runs on the caller's thread, and raises there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch

from pycomm.backend.calls import Planned, Tensors, collective, message, only, reduction, root_of, users_tag
from pycomm.backend.life import Life
from pycomm.backend.monitored import monitored_barrier
from pycomm.backend.work import BackendWork
from pycomm.torch_internals import current_graph_task


class Operations(Life):
    """Operations of the group of an :class:`pycomm.backend.engine.Engine`."""

    # Reductions.

    @collective
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Planned:
        """Reduce a tensor in place; sparse ones too."""
        tensor = only(tensors)
        op, seconds = reduction(opts), self.seconds(opts, timeout)
        job = functools.partial(self.engine.all_reduce, tensor, op, seconds, current_graph_task() >= 0)
        return Planned("all_reduce", job, [tensor], opts)

    allreduce_sparse = allreduce

    @collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Planned:
        """Reduce several tensors in place, together."""
        op, seconds, all_of_them = reduction(opts), self.seconds(opts), list(tensors)
        job = functools.partial(self.engine.all_reduce_coalesced, all_of_them, op, seconds)
        return Planned("all_reduce", job, all_of_them, opts)

    @collective
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Planned:
        """Reduce a tensor into the root's."""
        tensor, root = only(tensors), root_of(opts)
        name, seconds = reduction(opts if op is None else op), self.seconds(opts, timeout)
        return Planned("reduce", lambda: self.engine.reduce(tensor, root, name, seconds), [tensor], opts)

    @collective
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
        """Reduce a list of tensors, one per rank, into this rank's."""
        out, parts = only(outputs), list(only(inputs))
        op, seconds = reduction(opts), self.seconds(opts)
        self.require_one_per_rank("reduce_scatter", "inputs", parts)
        job = functools.partial(self.engine.reduce_scatter_parts, out, parts, op, seconds)
        return Planned("reduce_scatter", job, [out], opts)

    @collective
    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Planned:
        """Reduce a tensor with a part per rank into this rank's part."""
        op, seconds = reduction(opts), self.seconds(opts)
        job = functools.partial(self.engine.reduce_scatter, output, x, op, seconds)
        return Planned("reduce_scatter", job, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    @collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
        """Do what :meth:`reduce_scatter_single` does for several pairs of tensors."""
        op, seconds, pairs = reduction(opts), self.seconds(opts), list(zip(outputs, inputs, strict=True))
        job = functools.partial(self.engine.reduce_scatter_coalesced, pairs, op, seconds)
        return Planned("reduce_scatter", job, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements.

    @collective
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Planned:
        """Overwrite a tensor with the root's."""
        tensor, root, seconds = only(tensors), root_of(opts), self.seconds(opts, timeout)
        return Planned("broadcast", lambda: self.engine.broadcast(tensor, root, seconds), [tensor], opts)

    @collective
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
        """Gather a tensor of every rank in a list of tensors, which may differ in size."""
        x = only(inputs)
        outs = list(outputs if isinstance(inputs, torch.Tensor) else only(outputs))
        self.require_one_per_rank("all_gather", "outputs", outs)
        seconds = self.seconds(opts)
        job = functools.partial(self.engine.exchange, outs, [x] * self.engine.size, seconds)
        return Planned("all_gather", job, [outs], opts)

    @collective
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Planned:
        """Gather several tensors of every rank: ``outputs[p][i]`` is ``inputs[i]`` of rank p."""
        seconds, xs = self.seconds(opts), list(inputs)
        self.require_one_per_rank("all_gather", "outputs", outputs)
        pairs = list(zip(zip(*outputs, strict=True), xs, strict=True))
        job = functools.partial(self.engine.all_gather_lists, pairs, seconds)
        return Planned("all_gather", job, list(outputs), opts)

    @collective
    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Planned:
        """Gather a tensor of every rank, one after the other, in one tensor."""
        seconds = self.seconds(opts)
        return Planned("all_gather", lambda: self.engine.all_gather(output, x, seconds), [output], opts)

    _allgather_base = all_gather_single

    @collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
        """Do what :meth:`all_gather_single` does for several pairs of tensors."""
        seconds, pairs = self.seconds(opts), list(zip(outputs, inputs, strict=True))
        job = functools.partial(self.engine.all_gather_coalesced, pairs, seconds)
        return Planned("all_gather", job, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @collective
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
        """Gather a tensor of every rank in the root's list of tensors."""
        x, root, seconds = only(inputs), root_of(opts), self.seconds(opts)
        size, is_root = self.engine.size, self.engine.rank == root
        outs: list[Any] = list(only(outputs)) if is_root else [None] * size
        self.require_one_per_rank("gather", "outputs", outs)
        xs = [x if p == root else None for p in range(size)]
        return Planned("gather", lambda: self.engine.exchange(outs, xs, seconds), [outs] if is_root else [], opts)

    @collective
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Planned:
        """Give every rank its tensor of the root's list."""
        out, root, seconds = only(outputs), root_of(opts), self.seconds(opts)
        size, is_root = self.engine.size, self.engine.rank == root
        xs: list[Any] = list(only(inputs)) if is_root else [None] * size
        self.require_one_per_rank("scatter", "inputs", xs)
        outs = [out if p == root else None for p in range(size)]
        return Planned("scatter", lambda: self.engine.exchange(outs, xs, seconds), [out], opts)

    @collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Planned:
        """Send the p-th tensor to rank p, and receive the p-th from it; they may differ in size."""
        outs, xs, seconds = list(outputs), list(inputs), self.seconds(opts)
        self.require_one_per_rank("all_to_all", "outputs", outs)
        self.require_one_per_rank("all_to_all", "inputs", xs)
        return Planned("all_to_all", lambda: self.engine.exchange(outs, xs, seconds), outs, opts)

    @collective
    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Planned:
        """Send slices of a tensor, along its first dimension, to the ranks; equal ones where no sizes are given."""
        seconds = self.seconds(opts)
        if not output_splits and not input_splits:
            return Planned("all_to_all", lambda: self.engine.all_to_all(output, x, seconds), [output], opts)
        outs, xs = self._slices(output, output_splits, "output"), self._slices(x, input_splits, "input")
        return Planned("all_to_all", lambda: self.engine.exchange(outs, xs, seconds), [output], opts)

    alltoall_base = all_to_all_single

    def _slices(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> list[torch.Tensor]:
        length, size = tensor.shape[0] if tensor.dim() else 0, self.engine.size
        if not sizes:
            if length % size:
                raise ValueError(f"{name} has {length} rows, wanted a multiple of the {size} ranks")
            sizes = [length // size] * size
        if len(sizes) != size or sum(sizes) != length:
            raise ValueError(f"{name} has {length} rows, and {name} split sizes are {list(sizes)} for {size} ranks")
        return list(torch.split(tensor, list(sizes)))

    def barrier(self, opts: Any = None) -> BackendWork:
        """Wait for all ranks."""
        device = getattr(opts, "device", None)
        try:
            side = self.side_of(None if device is None else torch.device(device))
        except RuntimeError as error:
            self.engine.channel.refuse_and_raise(error)
        if side is not None:
            return cast(BackendWork, side.call("barrier", opts))
        seconds = self.seconds(opts)
        return self.run(Planned("barrier", lambda: self.engine.barrier(seconds), [], opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; on rank 0, name those that did not come within ``timeout``.

        Args:
            timeout: as a ``timedelta``, in seconds, or in the options of a barrier: releases of torch differ.
            wait_all_ranks: whether rank 0 names all ranks that did not come, instead of the first of them.

        Raises:
            RuntimeError: a rank did not come.
        """
        limit = getattr(timeout, "timeout", timeout)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        number, self._num_barriers = self._num_barriers, self._num_barriers + 1
        monitored_barrier(self.engine, number, self.engine.timeout if seconds is None else seconds, wait_all_ranks)

    # Messages.

    @message
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        """Send a tensor to rank ``dst``."""
        return self.engine.send(only(tensors), dst, users_tag(tag), self.engine.timeout)

    @message
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        """Receive a tensor from rank ``src``."""
        return self.engine.receive(only(tensors), src, users_tag(tag), self.engine.timeout)

    @message
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        """Receive a tensor from whichever rank sends one."""
        return self.engine.receive(only(tensors), None, users_tag(tag), self.engine.timeout)
