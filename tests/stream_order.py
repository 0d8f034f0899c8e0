"""Order of streams: pycomm's path for GPUs, run on CPU tensors, and checked for races.

``simulated_gpu()`` replaces the streams below :class:`GpuQueue`, and NCCL, by a simulation. Every operation of torch,
kernel of pycomm and collective runs at once, and its reads and writes are noted with the time of the stream that is
current then. A time is a vector clock (Lamport 1978; Mattern 1989): for each stream, the number of its operations that
have certainly ended. Two accesses to the same bytes race if one of them writes and neither certainly comes first.

Memory that is freed returns to the stream that allocated it, as in torch's allocator. If another stream has used it and
its use has not certainly ended when an operation of the first stream comes, which may get the memory, that is a race,
too.

The GPU is as slow as it may be: nothing has ended because time has passed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import pycomm
from pycomm import kernels
from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport import gpu, gpu_program

_PYCOMM, _TORCH = (str(Path(str(package.__file__)).parent) for package in (pycomm, torch))

MAIN = 7
"""The stream that torch starts with."""

_GPU_MODULES = (
    "collectives.bucket",
    "training.reducer.parameters",
    "training.reducer.buckets",
    "training.reductions.replicas",
    "ddp.registration",
)
"""Modules that ask whether a tensor is on a GPU."""

_OWN_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "pack": ["out"],
    "pack_flagged": ["out", "flags"],
    "unpack": ["tensors"],
    "reduce": ["out"],
    "accumulate": ["acc", "momentum.velocity"],
    "sparsify": ["acc", "out", "thresholds", "num_missed", "largest", "momentum.velocity"],
    "pack_entries": ["message", "taken.flat", "taken.velocity", "gathered.verdict"],
    "unpack_entries": ["gathered.indices", "gathered.verdict"],
    "add_entries": ["out", "states", "last_sources"],
    "hashes": ["out"],
    "squared_norms": ["out"],
    "absmax": [],
    "quantize": ["out", "remainder"],
    "dequantize": ["out"],
    "requantize": ["out", "remainder"],
    "scatter_add": ["out"],
    "pack_signs": ["out", "remainder"],
    "unpack_signs": ["out"],
    "pack_chunks": ["out", "remainder", "words"],
    "unpack_chunks": ["out"],
    "pack_indices": ["out"],
    "unpack_indices": ["out"],
    "topk": ["out", "threshold"],
}
"""Arguments that each kernel writes to."""


@dataclass(frozen=True)
class Access:
    """Access to the bytes from ``begin`` to ``end``, at ``time`` of ``stream``."""

    begin: int
    end: int
    stream: int
    time: int
    writes: bool
    label: str


@dataclass
class Memory:
    """Memory of one storage; ``home`` is the stream that allocated it."""

    storage: torch.UntypedStorage
    home: int
    accesses: list[Access] = field(default_factory=list)
    is_freed: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether anything but the simulation refers to it."""
        return bool(torch._C._storage_Use_Count(self.storage._cdata) > 1)


class Streams:
    """Clocks of all streams, and what they have accessed.

    Attributes:
        races: descriptions of what was found, each once.
        reads: number of values that pycomm has read on the host, by the stream.
        launches: number of operations on each stream.
        own_launches: number of kernels and operations of torch that pycomm has launched; collectives do not count.
    """

    def __init__(self) -> None:
        self.current, self._paused = MAIN, 0
        self.races: dict[str, str] = {}
        self.launches, self.reads, self.own_launches = Counter[int](), Counter[int](), 0
        self._clocks: dict[int, Counter[int]] = {}
        self._memories: dict[int, Memory] = {}  # by address; kept alive, so that no address is used twice
        self._scratches: dict[int, tuple[object, int, int]] = {}
        self._names = {MAIN: "main"}

    def new(self, name: str) -> int:
        """Return a new stream."""
        stream = 100 + len(self._names)
        self._names[stream] = name
        return stream

    def clock(self, stream: int) -> Counter[int]:
        return self._clocks.setdefault(stream, Counter())

    def snapshot(self, stream: int) -> Mapping[int, int]:
        return dict(self.clock(stream))

    def wait(self, stream: int, moment: Mapping[int, int]) -> None:
        """Let ``stream`` wait for a ``moment``."""
        clock = self.clock(stream)
        for other, time in moment.items():
            clock[other] = max(clock[other], time)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make ``stream`` the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    def note(self, label: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note an operation on the current stream."""
        self._reuse(label)
        self.launches[self.current] += 1
        clock = self.clock(self.current)
        clock[self.current] += 1
        written = set(map(id, writes))
        for tensors, is_write in (([x for x in reads if id(x) not in written], False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, is_write, f"{label} on {self._names.get(self.current, self.current)}")

    def use(self, scratch: object, label: str) -> None:
        """Note that the last kernel, of this ``label``, uses ``scratch``."""
        clock = self.clock(self.current)
        _, stream, time = self._scratches.get(id(scratch), (scratch, self.current, 0))
        if clock[stream] < time:
            self._found(f"scratch of {label}", "used by two streams")
        self._scratches[id(scratch)] = scratch, self.current, clock[self.current]

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` was allocated on the current stream, and not written to."""
        self._memory_of(tensor)

    def count_alive(self, num_bytes: int) -> int:
        """Return how many storages of ``num_bytes`` are in use, and were first used on the main stream."""
        memories = [memory for memory in self._memories.values() if memory.home == MAIN and memory.is_alive]
        return sum(memory.storage.nbytes() == num_bytes for memory in memories)

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() == 0:
            return None
        return self._memories.setdefault(storage.data_ptr(), Memory(storage, self.current))

    def _access(self, tensor: torch.Tensor, writes: bool, label: str) -> None:
        memory = self._memory_of(tensor) if tensor.numel() > 0 and tensor.device.type == "cpu" else None
        if memory is None:
            return
        extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin, clock = tensor.data_ptr(), self.clock(self.current)
        mine = Access(begin, begin + extent * tensor.element_size(), self.current, clock[self.current], writes, label)
        rest = []
        for other in memory.accesses:
            is_before = other.stream == self.current or clock[other.stream] >= other.time
            if other.begin < mine.end and mine.begin < other.end and (writes or other.writes) and not is_before:
                self._found(f"{_verb(other)} by {other.label}, {_verb(mine)} by {label}", str(tuple(tensor.shape)))
            covers = mine.begin <= other.begin and other.end <= mine.end
            if not (covers and ((writes and is_before) or (not other.writes and other.stream == self.current))):
                rest.append(other)
        memory.accesses = [*rest, mine]

    def _reuse(self, label: str) -> None:
        """Look for memory that the next operation of the current stream may get, and others may still use."""
        clock = self.clock(self.current)
        for address, memory in list(self._memories.items()):
            if memory.is_freed or memory.is_alive or memory.home != self.current:
                continue
            memory.is_freed = True
            for access in memory.accesses:
                if access.stream != self.current and clock[access.stream] < access.time:
                    self._found(f"freed while used by {access.label}", f"{memory.storage.nbytes()} bytes, by {label}")
            self._memories[address].accesses.clear()

    def _found(self, what: str, more: str) -> None:
        if what not in self.races:
            lines = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in traceback.extract_stack()]
            self.races[what] = f"{more}, {' < '.join(reversed(lines[-16:-4]))}"

    def assert_ordered(self) -> None:
        assert not self.races, "\n".join(f"{what}: {where}" for what, where in self.races.items())


def _verb(access: Access) -> str:
    return "written" if access.writes else "read"


class _Moment:
    """Event: never passed, as long as the host does not wait for it."""

    is_captured = False

    def __init__(self, streams: Streams, stream: int) -> None:
        self._streams, self._moment = streams, streams.snapshot(stream)

    def has_passed(self) -> bool:
        return False

    def hold_back(self, stream: int) -> None:
        self._streams.wait(stream, self._moment)


class _Stream:
    """Stream of pycomm: ``_native.CommStream``."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.handle = streams, streams.new("communication")

    def follow(self, stream: int) -> None:
        self._streams.wait(self.handle, self._streams.snapshot(stream))

    def now(self) -> _Moment:
        return _Moment(self._streams, self.handle)


class _Nccl:
    """NCCL's communicator: operations on a stream, which the channel's transport in CPU memory does."""

    registers = has_windows = False
    registered_bytes = 0
    windows = SimpleNamespace(num_bytes=0)

    def __init__(self, channel: Channel, streams: Streams) -> None:
        self._channel, self._streams = channel, streams
        self._receives: list[Callable[[], object]] = []  # of a group, after its sends

    def __getattr__(self, operation: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            *own, stream, _ = arguments  # the last one is the timeout
            tensors = _tensors_in(own)
            with self._streams.on(stream):
                self._streams.note(operation, tensors, tensors)
            with self._streams.paused():
                if operation == "send":
                    self._channel.send(own[0], own[1], 0)
                elif operation == "recv":
                    self._receives.append(functools.partial(self._channel.recv, own[0], own[1], 0))
                else:
                    self._channel.run(operation, False, *own)

        return call

    @contextlib.contextmanager
    def grouped(self, _timeout: float) -> Iterator[None]:
        yield
        with self._streams.paused():
            while self._receives:
                self._receives.pop(0)()

    def check(self) -> None:
        pass

    close = check


class _Operations(TorchDispatchMode):
    """Notes every operation of torch."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, streams = kwargs or {}, self._streams
        out = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if streams.is_paused or is_view or str(func) == "aten.detach.default":
            return out
        if str(func) == "aten._local_scalar_dense.default" and _is_called_by_pycomm():
            streams.reads[streams.current] += 1
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(_tensors_in(value))
        if not any(each.alias_info is not None for each in returns):
            writes += _tensors_in(out)
        # A number is a tensor in CPU memory, beside tensors on a GPU.
        streams.own_launches += str(func) != "aten.scalar_tensor.default" and _is_called_by_pycomm()
        streams.note(str(func), reads, writes)
        return out


def _is_called_by_pycomm() -> bool:
    """Return whether it is pycomm, and not the script or DistributedDataParallel, that calls torch."""
    names = [frame.filename for frame in traceback.extract_stack()]
    caller = next(name for name in reversed(names) if name != __file__ and not name.startswith(_TORCH))
    return caller.startswith(_PYCOMM)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for each in fields(value) for tensor in _tensors_in(getattr(value, each.name))]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


def _noted(kernel: Callable[..., Any], written: Sequence[str], streams: Streams) -> Callable[..., Any]:
    """Return ``kernel``, noted; ``written`` are the arguments that it writes to."""
    signature, name = inspect.signature(kernel), kernel.__name__

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        if streams.is_paused:
            return kernel(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with streams.paused():
            out = kernel(*args, **kwargs)
        writes = _tensors_in(out)
        for path in written:
            first, *rest = path.split(".")
            writes += _tensors_in(
                functools.reduce(lambda x, key: getattr(x, key, None), rest, bound.arguments.get(first))
            )
        streams.own_launches += 1
        streams.note(name, _tensors_in(list(bound.arguments.values())), writes)
        if bound.arguments.get("scratch") is not None:
            streams.use(bound.arguments["scratch"], name)
        return out

    return call


@contextlib.contextmanager
def simulated_gpu(is_on: bool = True) -> Iterator[Streams]:
    """Let tensors in CPU memory take the path of those on a GPU inside, one thread at a time; yield its streams."""
    streams, patch = Streams(), pytest.MonkeyPatch()
    if not is_on:
        yield streams
        return
    plain_empty = Communicator.empty

    def empty(self: Communicator, *args: Any, **options: Any) -> torch.Tensor:
        with streams.paused():
            made = plain_empty(self, *args, **options)
        streams.allocated(made)
        return made

    def side(self: Channel, x: Any) -> Any:
        return self.gpu(0) if isinstance(x, torch.Tensor) and not streams.is_paused else self

    cuda = SimpleNamespace(
        ExternalStream=lambda handle, _: handle, stream=streams.on, is_available=lambda: True, current_device=lambda: 0
    )
    native = SimpleNamespace(CommStream=lambda _: _Stream(streams), require_no_capture=lambda *_: None)
    try:
        patch.setattr(gpu, "torch", Module(torch, cuda=cuda))
        patch.setattr(gpu, "_native", native)
        patch.setattr(gpu, "raw_stream", lambda _: streams.current)
        patch.setattr(gpu, "register", lambda *_: None)
        patch.setattr(gpu_program, "Part", lambda whole, first, count, _: whole.view(-1)[first : first + count])
        patch.setattr(Channel, "_make_nccl", lambda self, *_: _Nccl(self, streams))
        patch.setattr(Channel, "side", side)
        patch.setattr(Channel, "current_stream_of", staticmethod(lambda _: lambda: streams.current))
        patch.setattr("pycomm.ddp.registration.tell_of_late_order", lambda: None)  # asks CUDA, which a build may lack
        patch.setattr("pycomm.collectives.channel.all_reduce_at_once", lambda *_: lambda x, op: False)
        patch.setattr(Communicator, "empty", empty)
        for module in _GPU_MODULES:
            patch.setattr(f"pycomm.{module}.on_gpu", lambda _: True)
        for name, written in _OWN_ARGUMENTS.items():
            patch.setattr(kernels, name, _noted(getattr(kernels, name), written, streams))
        with _Operations(streams):
            yield streams
    finally:
        patch.undo()


class Module:
    """``module``, with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
