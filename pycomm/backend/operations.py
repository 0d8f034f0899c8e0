"""Operations of a process group as torch calls them: lists of tensors, options, a ``Work`` in return.

torch calls them from Python (``dist.all_reduce``) and from C++ (DistributedDataParallel, functional
collectives); releases differ in the names, so some have two. An operation that need not be asynchronous
runs on the caller's thread, and raises there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from pycomm.backend.engine import Engine, Job
from pycomm.backend.gpu import GpuSide
from pycomm.backend.monitored import monitored_barrier
from pycomm.backend.reduction import name_of
from pycomm.backend.work import BackendWork
from pycomm.torch_internals import PrefixStore, Store
from pycomm.transport.own_group import Place

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]


def _by_device(operation: F) -> F:
    """Hand calls of ``operation`` with tensors on GPUs to the group's side that has them."""

    @functools.wraps(operation)
    def call(self: Operations, *args: Any, **kwargs: Any) -> Any:
        device = _device_of(args)
        if device is not None and device.type != "cpu":
            return self.gpu_side(device).call(operation.__name__, *args, **kwargs)
        work = operation(self, *args, **kwargs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    return cast(F, call)


def _device_of(args: Sequence[Any]) -> torch.device | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        if isinstance(arg, (list, tuple)) and (found := _device_of(arg)) is not None:
            return found
    return None


class Operations:
    """Operations of the group of an :class:`pycomm.backend.engine.Engine`."""

    engine: Engine

    def set_engine(self, engine: Engine) -> None:
        """Use ``engine`` from now on."""
        self.engine = engine
        self._gpu_side: GpuSide | None = None
        self._coalescing: list[BackendWork] | None = None

    def gpu_side(self, device: torch.device) -> GpuSide:
        """Return what operates on tensors of ``device``, which is made at first use."""
        if self._gpu_side is None:
            self._gpu_side = GpuSide(self.engine, device)
        return self._gpu_side

    # Reductions.

    @_by_device
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> BackendWork:
        """Reduce a tensor in place; sparse ones too."""
        tensor = self._only(tensors)
        op, seconds = self._reduction(opts), self._seconds(opts, timeout)
        return self._run("all_reduce", lambda: self.engine.all_reduce(tensor, op, seconds), [tensor], opts)

    allreduce_sparse = allreduce

    @_by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> BackendWork:
        """Reduce several tensors in place, together."""
        op, seconds, all_of_them = self._reduction(opts), self._seconds(opts), list(tensors)
        job = functools.partial(self.engine.all_reduce_coalesced, all_of_them, op, seconds)
        return self._run("all_reduce", job, all_of_them, opts)

    @_by_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> BackendWork:
        """Reduce a tensor into the root's."""
        tensor, root = self._only(tensors), _root(opts)
        name, seconds = self._reduction(opts if op is None else op), self._seconds(opts, timeout)
        return self._run("reduce", lambda: self.engine.reduce(tensor, root, name, seconds), [tensor], opts)

    @_by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        """Reduce a list of tensors, one per rank, into this rank's."""
        out, parts = self._only(outputs), list(self._only(inputs))
        op, seconds = self._reduction(opts), self._seconds(opts)
        self._require_one_per_rank("reduce_scatter", "inputs", parts)
        job = functools.partial(self.engine.reduce_scatter_parts, out, parts, op, seconds)
        return self._run("reduce_scatter", job, [out], opts)

    @_by_device
    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> BackendWork:
        """Reduce a tensor with a part per rank into this rank's part."""
        op, seconds = self._reduction(opts), self._seconds(opts)
        job = functools.partial(self.engine.reduce_scatter, output, x, op, seconds)
        return self._run("reduce_scatter", job, [output], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_by_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> BackendWork:
        """Do what :meth:`reduce_scatter_single` does for several pairs of tensors."""
        op, seconds, pairs = self._reduction(opts), self._seconds(opts), list(zip(outputs, inputs, strict=True))

        def job() -> None:
            for out, x in pairs:
                self.engine.reduce_scatter(out, x, op, seconds)

        return self._run("reduce_scatter", job, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Movements.

    @_by_device
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> BackendWork:
        """Overwrite a tensor with the root's."""
        tensor, root, seconds = self._only(tensors), _root(opts), self._seconds(opts, timeout)
        return self._run("broadcast", lambda: self.engine.broadcast(tensor, root, seconds), [tensor], opts)

    @_by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        """Gather a tensor of every rank in a list of tensors, which may differ in size."""
        x = self._only(inputs)
        outs = list(outputs if isinstance(inputs, torch.Tensor) else self._only(outputs))
        self._require_one_per_rank("all_gather", "outputs", outs)
        seconds = self._seconds(opts)
        job = functools.partial(self.engine.exchange, outs, [x] * self.engine.size, seconds)
        return self._run("all_gather", job, [outs], opts)

    @_by_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> BackendWork:
        """Gather several tensors of every rank: ``outputs[p][i]`` is ``inputs[i]`` of rank p."""
        seconds, xs = self._seconds(opts), list(inputs)
        self._require_one_per_rank("all_gather", "outputs", outputs)
        lists = [list(outs) for outs in zip(*outputs, strict=True)]

        def job() -> None:
            for outs, x in zip(lists, xs, strict=True):
                self.engine.exchange(outs, [x] * self.engine.size, seconds)

        return self._run("all_gather", job, list(outputs), opts)

    @_by_device
    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> BackendWork:
        """Gather a tensor of every rank, one after the other, in one tensor."""
        seconds = self._seconds(opts)
        return self._run("all_gather", lambda: self.engine.all_gather(output, x, seconds), [output], opts)

    _allgather_base = all_gather_single

    @_by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> BackendWork:
        """Do what :meth:`all_gather_single` does for several pairs of tensors."""
        seconds, pairs = self._seconds(opts), list(zip(outputs, inputs, strict=True))

        def job() -> None:
            for out, x in pairs:
                self.engine.all_gather(out, x, seconds)

        return self._run("all_gather", job, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        """Gather a tensor of every rank in the root's list of tensors."""
        x, root, seconds = self._only(inputs), _root(opts), self._seconds(opts)
        size, is_root = self.engine.size, self.engine.rank == root
        outs: list[Any] = list(self._only(outputs)) if is_root else [None] * size
        self._require_one_per_rank("gather", "outputs", outs)
        xs = [x if p == root else None for p in range(size)]
        return self._run("gather", lambda: self.engine.exchange(outs, xs, seconds), [outs] if is_root else [], opts)

    @_by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> BackendWork:
        """Give every rank its tensor of the root's list."""
        out, root, seconds = self._only(outputs), _root(opts), self._seconds(opts)
        size, is_root = self.engine.size, self.engine.rank == root
        xs: list[Any] = list(self._only(inputs)) if is_root else [None] * size
        self._require_one_per_rank("scatter", "inputs", xs)
        outs = [out if p == root else None for p in range(size)]
        return self._run("scatter", lambda: self.engine.exchange(outs, xs, seconds), [out], opts)

    @_by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> BackendWork:
        """Send the p-th tensor to rank p, and receive the p-th from it; they may differ in size."""
        outs, xs, seconds = list(outputs), list(inputs), self._seconds(opts)
        self._require_one_per_rank("all_to_all", "outputs", outs)
        self._require_one_per_rank("all_to_all", "inputs", xs)
        return self._run("all_to_all", lambda: self.engine.exchange(outs, xs, seconds), outs, opts)

    @_by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> BackendWork:
        """Send slices of a tensor, along its first dimension, to the ranks; equal ones where no sizes are given."""
        seconds = self._seconds(opts)
        if not output_splits and not input_splits:
            return self._run("all_to_all", lambda: self.engine.all_to_all(output, x, seconds), [output], opts)
        outs = self._checked(lambda: self._slices(output, output_splits, "output"))
        xs = self._checked(lambda: self._slices(x, input_splits, "input"))
        return self._run("all_to_all", lambda: self.engine.exchange(outs, xs, seconds), [output], opts)

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
        if device is not None and torch.device(device).type != "cpu":
            return cast(BackendWork, self.gpu_side(torch.device(device)).call("barrier", opts))
        seconds = self._seconds(opts)
        return self._run("barrier", lambda: self.engine.barrier(seconds), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; on rank 0, name those that did not come within ``timeout``.

        Raises:
            RuntimeError: a rank did not come.
        """
        seconds = self.engine.timeout if timeout is None else timeout.total_seconds()
        monitored_barrier(self.engine, seconds, wait_all_ranks)

    # Messages.

    @_by_device
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> BackendWork:
        """Send a tensor to rank ``dst``."""
        return self.engine.send(self._only(tensors), dst, tag, self.engine.timeout)

    @_by_device
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> BackendWork:
        """Receive a tensor from rank ``src``."""
        return self.engine.receive(self._only(tensors), src, tag, self.engine.timeout)

    @_by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> BackendWork:
        """Receive a tensor from whichever rank sends one."""
        return self.engine.receive(self._only(tensors), None, tag, self.engine.timeout)

    # Coalescing of operations one by one, as the group's users ask for on devices with streams.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.gpu_side(device).call("_start_coalescing", device)
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self.gpu_side(device).call("_end_coalescing", device)
        works, self._coalescing = self._coalescing or [], None
        for work in works:
            work.wait()
        return BackendWork(None, [], "coalesced", self.engine.rank)

    # Other groups, and the end.

    def split_engine(
        self, ranks: Sequence[int], timeout: timedelta | None, name: str | None, store: Store | None = None
    ) -> Engine | None:
        """Return the engine of a group of some ranks, given by their ranks in this group; ``None`` on the others."""
        if self.engine.rank not in ranks:
            return None
        place = self.engine.place
        name = name or f"{place.name}/{'_'.join(str(rank) for rank in ranks)}"
        part = Place(
            name,
            PrefixStore(f"{name}/", store or place.store),
            list(ranks).index(self.engine.rank),
            [place.ranks[rank] for rank in ranks],
            place.backends,
        )
        return Engine(part, self.engine.timeout if timeout is None else timeout.total_seconds())

    def abort(self) -> None:
        """End operations in progress with an error, here and on the ranks that wait for this one."""
        if self._gpu_side is not None:
            self._gpu_side.call("abort")
        self.engine.abort()

    def shutdown(self) -> None:
        """Release everything. Peers that still wait for this rank get a CommError."""
        if self._gpu_side is not None:
            self._gpu_side.call("shutdown")
        self.engine.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit every single wait of operations from now on."""
        self.engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Arguments.

    def _checked(self, check: Callable[[], T]) -> T:
        """Return the result of ``check``; if it raises, tell the ranks that call the same operation."""
        try:
            return check()
        except Exception as error:
            self.engine.channel.refuse_and_raise(error)

    def _reduction(self, opts: Any) -> str:
        return "sum" if opts is None else self._checked(lambda: name_of(getattr(opts, "reduceOp", opts)))

    def _only(self, tensors: Any) -> Any:
        return self._checked(lambda: _only(tensors))

    def _run(self, name: str, job: Job, result: Sequence[Any], opts: Any) -> BackendWork:
        return self.engine.run(name, job, result, bool(getattr(opts, "asyncOp", True)))

    def _seconds(self, opts: Any, timeout: timedelta | None = None) -> float:
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else 0.0
        return seconds if seconds > 0 else self.engine.timeout

    def _require_one_per_rank(self, operation: str, name: str, tensors: Sequence[Any]) -> None:
        if len(tensors) == self.engine.size:
            return
        problem = f"{operation}: {name} has {len(tensors)} tensors, wanted one for each of {self.engine.size} ranks"
        self.engine.channel.refuse_and_raise(ValueError(problem))


def _only(tensors: Any) -> Any:
    """Return the one element of a list, which torch's calling convention has for several GPUs of a process."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"one tensor per process is wanted, {len(tensors)} came")
    return tensors[0]


def _root(opts: Any) -> int:
    return int(opts) if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))
