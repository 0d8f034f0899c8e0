"""Engine of one process group: every operation of torch.distributed on tensors in CPU memory, over a transport.

It knows torch's operations, not its calling conventions (:mod:`pycomm.collectives.backend.operations`), nor which
kind of torch class stands in front of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pycomm.agreement import Words, agreed, prepared, rows_of_all
from pycomm.collectives.backend.moved import MovedStorages
from pycomm.collectives.backend.work import BackendWork, BackwardErrors, MessageWork, Reception, Result
from pycomm.collectives.channel import Channel
from pycomm.collectives.transport.base import Transport
from pycomm.collectives.transport.choice import choose_transport
from pycomm.collectives.transport.own_group import Place


@dataclass
class Target:
    """Contiguous memory for the elements of ``tensor``: its own, or a buffer that is copied back."""

    tensor: torch.Tensor
    dense: torch.Tensor

    def finish(self) -> None:
        """Copy the elements back to ``tensor`` if they are in a buffer."""
        if self.dense.data_ptr() == self.tensor.data_ptr():
            return
        # An inference tensor can be written in inference mode only, which this thread need not be in.
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.detach().copy_(self.dense)


def contiguous(tensor: Any) -> torch.Tensor:
    """Return ``tensor`` detached and contiguous, for reading; a copy if necessary."""
    _require_plain(tensor)
    found: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return found


def to_change(tensor: Any) -> Target:
    """Return contiguous memory with the elements of ``tensor``, for reading and writing."""
    dense = contiguous(tensor)
    if dense.data_ptr() != tensor.data_ptr():
        require_writable(tensor)
    return Target(tensor, dense)


def to_fill(tensor: Any, *sources: torch.Tensor) -> Target:
    """Return contiguous memory of the shape of ``tensor``, for writing; its elements are undefined.

    It overlaps none of ``sources``, which torch's own groups read before they write. Transports refuse what overlaps.
    """
    _require_plain(tensor)
    target = tensor.detach()
    is_dense = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if is_dense and not any(overlap(target, source) for source in sources):
        return Target(tensor, target)
    require_writable(tensor)
    return Target(tensor, torch.empty(target.shape, dtype=target.dtype))


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether contiguous tensors have elements in common."""
    a, b = x.data_ptr(), y.data_ptr()
    return a < b + y.nbytes and b < a + x.nbytes and x.nbytes > 0 < y.nbytes


def is_part(x: torch.Tensor, whole: torch.Tensor, number: int = 0) -> bool:
    """Return whether ``x`` is part ``number`` of ``whole``, counted in parts of the size of ``x``; both contiguous."""
    return x.data_ptr() == whole.data_ptr() + number * x.nbytes


def require_writable(tensor: Any) -> torch.Tensor:
    """Return ``tensor``; raise TypeError or ValueError unless it is an ordinary tensor that can be written to."""
    _require_plain(tensor)
    repeated = (stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() > 0 and any(repeated):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is expanded, and cannot be written to: clone it")
    found: torch.Tensor = tensor
    return found


def _require_plain(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} was given, wanted a tensor")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"in layout {tensor.layout}"
        raise TypeError(f"a tensor is {kind}, wanted a dense one")
    if not tensor.is_cpu:
        raise TypeError(f"a tensor is on {tensor.device}, wanted it on the CPU, like another tensor of this call")
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no memory: it is fake, or was freed")


_NAMES = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)
# Reductions of booleans, as bytes of 0 or 1.
_OF_BOOL = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min", "bxor": "bxor"}
_OF_COMPLEX = ("sum", "mean")


def known_name(op: Any) -> str | None:
    """Return pycomm's name of a ``torch.distributed.ReduceOp``; ``None`` if it has none."""
    for known, name in _NAMES:
        if op == known:
            return name
    return None


def name_of(op: Any) -> str:
    """Return pycomm's name of a ``torch.distributed.ReduceOp``."""
    name = known_name(op)
    if name is not None:
        return name
    shown = "PREMUL_SUM" if op == dist.ReduceOp.PREMUL_SUM else op  # its repr is an address
    raise ValueError(f"op is {shown}, wanted SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR")


def reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a view of contiguous ``tensor``, and the reduction of the view that is equivalent to ``op``."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        if op not in _OF_BOOL:
            raise TypeError(f"op is {op!r}, which is not defined for a tensor of torch.bool")
        return tensor.view(torch.uint8), _OF_BOOL[op]
    if tensor.is_complex():
        if op not in _OF_COMPLEX:
            raise TypeError(f"op is {op!r}, which is not defined for a tensor of {tensor.dtype}")
        return torch.view_as_real(tensor.resolve_conj()), op
    return tensor, op


T = TypeVar("T")
Job = Callable[[], None]

_MAILBOX_BYTES = 64 << 10
_DTYPES = (
    *("nothing", "another dtype", "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_WORDS = Words(differ="the ranks disagree: {here} on rank {rank}, {there} on rank 0")


class GroupEngine:
    """Engine of the group whose ranks meet at ``place``. Its creation is collective.

    Args:
        place: where they meet.
        timeout: limit of every single wait, in seconds.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.place, self.timeout = place, timeout
        self.transport = choose_transport(place, "auto", timeout)
        self.channel = Channel(self.transport, timeout)
        self.rank, self.size = place.rank, place.size
        self._moved = MovedStorages(self.transport.host_memory)
        self.num_bytes = {"direct": 0, "staged": 0, "small": 0}
        self._flat: torch.Tensor | None = None
        self._backward_errors = BackwardErrors()
        self.close = weakref.finalize(self, self.channel.close)

    # Running.

    def run(self, name: str, job: Job, result: Result, async_op: bool) -> BackendWork:
        """Run ``job`` after all earlier collectives: on this thread if ``async_op`` is false; return its work.

        A callback that was added to a future before its operation ended runs on the communication thread. Operations
        that it starts run at once, so that they come next on every rank, and it may wait for them.
        """
        worker = self.channel.worker
        if async_op:
            pending = worker.run_here(job) if worker.is_current() else self.channel.submit(job)
            work = BackendWork(pending, result, name, self.rank)
            self._backward_errors.watch(work)
            return work
        self.channel.enqueue(job)
        return BackendWork(None, result, name, self.rank)

    def stats(self) -> dict[str, Any]:
        """Return the result of :func:`pycomm.collectives.backend.stats`."""
        counted = {f"bytes_{way}": count for way, count in self.num_bytes.items()}
        return {"transport": self.transport.name, "storages_moved": self._moved.num_moved, **counted}

    # Reductions.

    def all_reduce(self, tensor: torch.Tensor, op: str, in_backward: bool, timeout: float) -> None:
        """Reduce ``tensor`` over all ranks, in place; ``in_backward``: a backward pass has asked for it."""
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
            _all_reduce_sparse(self.channel, tensor, op, timeout)
            return

        def prepare() -> tuple[Target, torch.Tensor, torch.Tensor, str]:
            target = to_change(tensor)
            memory = self._moved.reachable(target.dense, in_backward)
            return target, memory, *reducible(memory, op)

        target, memory, array, name = _prepared(self.transport, prepare, timeout)
        self._count(memory)
        self.transport.all_reduce(array, name, timeout)
        target.finish()

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce all ``tensors`` over all ranks, in place; tensors of one dtype travel together."""

        def prepare() -> list[torch.Tensor]:
            return [require_writable(tensor).detach() for tensor in tensors]

        targets = _prepared(self.transport, prepare, timeout)
        counts: Counter[torch.dtype] = Counter()
        for x in targets:
            counts[x.dtype] += x.numel()
        forms = ", ".join(f"{count} elements of {str(dtype)[6:]}" for dtype, count in counts.items())
        _require_same(self.channel, f"all_reduce_coalesced({forms})", timeout)
        for dtype, count in counts.items():
            same = [x for x in targets if x.dtype == dtype]
            flat = self._flat_of(count, dtype)
            parts = torch.split(flat, [x.numel() for x in same])
            views = [part.view(x.shape) for part, x in zip(parts, same, strict=True)]
            torch._foreach_copy_(views, same)
            self.all_reduce(flat, op, False, timeout)
            torch._foreach_copy_(same, views)

    def _flat_of(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = count * dtype.itemsize
        if self._flat is None or self._flat.numel() < num_bytes:
            self._flat = None  # released first
            self._flat = self.transport.empty((max(num_bytes, 1),), torch.uint8)
        return self._flat[:num_bytes].view(dtype)

    def reduce(self, tensor: torch.Tensor, dst: int, op: str, timeout: float) -> None:
        """Reduce ``tensor`` over all ranks into the ``tensor`` of rank ``dst``."""

        def prepare() -> tuple[Target, torch.Tensor, str]:
            target = to_change(tensor)
            return target, *reducible(target.dense, op)

        target, array, name = _prepared(self.transport, prepare, timeout)
        self._count(target.dense)
        self.transport.reduce(array, dst, name, timeout)
        target.finish()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str, timeout: float) -> None:
        """Reduce ``x`` over all ranks and write part ``rank`` of the result into ``out``."""

        def prepare() -> tuple[Target, torch.Tensor, torch.Tensor, str]:
            target, (source, name) = to_fill(out), reducible(contiguous(x), op)
            if not is_part(target.dense, source, self.rank):
                target = to_fill(out, source)
            return target, reducible(target.dense, op)[0], source, name

        target, array, source, name = _prepared(self.transport, prepare, timeout)
        self._count(source)
        self.transport.reduce_scatter(array, source, name, timeout)
        target.finish()

    def reduce_scatter_parts(self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, timeout: float) -> None:
        """Reduce ``parts[rank]`` over all ranks into ``out``; parts may differ in size."""

        def prepare() -> tuple[Target, torch.Tensor, list[torch.Tensor], str]:
            target, sources = to_fill(out), [reducible(contiguous(part), op)[0] for part in parts]
            own = is_part(target.dense, sources[self.rank])
            target = to_fill(out, *(x for p, x in enumerate(sources) if p != self.rank or not own))
            array, name = reducible(target.dense, op)
            return target, array, sources, name

        target, array, sources, name = _prepared(self.transport, prepare, timeout)
        self._count(*sources)
        self.transport.reduce_scatter_v(array, sources, name, timeout)
        target.finish()

    def each(self, name: str, run: Callable[..., None], pairs: Sequence[Any], *args: Any) -> None:
        """Call ``run(out, x, *args)`` for each of ``pairs``; all ranks must have equally many.

        ``args`` end with the limit of every single wait, in seconds.
        """
        _require_same(self.channel, name.format(len(pairs)), args[-1])
        for out, x in pairs:
            run(out, x, *args)

    # Movements.

    def broadcast(self, tensor: torch.Tensor, src: int, timeout: float) -> None:
        """Overwrite ``tensor`` with the ``tensor`` of rank ``src``."""
        target = _prepared(self.transport, lambda: to_change(tensor), timeout)
        self._count(target.dense)
        self.transport.broadcast(target.dense, src, timeout)
        target.finish()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Write the ``x`` of all ranks, in rank order, into ``out``."""

        def prepare() -> tuple[Target, torch.Tensor]:
            target, source = to_fill(out), contiguous(x)
            return target if is_part(source, target.dense, self.rank) else to_fill(out, source), source

        target, source = _prepared(self.transport, prepare, timeout)
        self._count(source)
        self.transport.all_gather(target.dense, source, timeout)
        target.finish()

    def exchange(self, outs: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor | None], timeout: float) -> None:
        """Send ``xs[p]`` to every rank p, and receive ``outs[p]`` from it; nothing where there is ``None``."""

        def prepare() -> tuple[list[Target | None], list[torch.Tensor | None]]:
            dense = {id(x): contiguous(x) for x in {id(x): x for x in xs if x is not None}.values()}
            targets = [None if out is None else to_fill(out) for out in outs]
            own = dense.get(id(xs[self.rank]))
            for p, target in enumerate(targets):
                if target is not None and (p != self.rank or own is None or not is_part(target.dense, own)):
                    targets[p] = to_fill(outs[p], *dense.values())
            return targets, [None if x is None else dense[id(x)] for x in xs]

        targets, sources = _prepared(self.transport, prepare, timeout)
        self._count(*{id(x): x for x in sources if x is not None}.values())
        arrays = [None if target is None else target.dense for target in targets]
        _require_same_dtypes(self.channel, arrays, sources, timeout)
        self.transport.all_to_all_v(arrays, sources, timeout)
        for target in targets:
            if target is not None:
                target.finish()

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, timeout: float) -> None:
        """Send part p of ``x`` to rank p, where it becomes part ``rank`` of ``out``; all parts are equal."""

        target, source = _prepared(self.transport, lambda: (to_fill(out, read := contiguous(x)), read), timeout)
        self._count(source)
        self.transport.all_to_all(target.dense, source, timeout)
        target.finish()

    def barrier(self, timeout: float) -> None:
        """Wait for all ranks."""
        self.transport.barrier(timeout)

    # Messages.

    def send(self, tensor: torch.Tensor, dst: int, tag: int, timeout: float) -> BackendWork:
        """Send ``tensor`` to rank ``dst``; returns once it has been buffered."""
        self.transport.send(contiguous(tensor), dst, tag, timeout)
        return BackendWork(None, [tensor], "send", self.rank)

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int, timeout: float) -> MessageWork:
        """Receive ``tensor`` from rank ``src``, or from any rank if that is ``None``."""
        target = to_fill(tensor)
        reception = Reception(self.transport.receive(target.dense, src, tag), timeout, target.finish)
        return MessageWork(reception, [tensor], self.rank)

    def _count(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            num_bytes = tensor.nbytes
            if num_bytes <= _MAILBOX_BYTES:
                self.num_bytes["small"] += num_bytes
            elif self._reaches(tensor):
                self.num_bytes["direct"] += num_bytes
            else:
                self.num_bytes["staged"] += num_bytes

    def _reaches(self, tensor: torch.Tensor) -> bool:
        memory = self.transport.host_memory
        return memory is not None and memory.offset_of(tensor.data_ptr(), tensor.nbytes) >= 0


def _prepared(transport: Transport, prepare: Callable[[], T], timeout: float) -> T:
    """Return the result of ``prepare``; if it raises, refuse the operation first."""
    return prepared(prepare, lambda reason: transport.refuse(reason, timeout))


def _require_same(channel: Channel, mine: str, timeout: float) -> None:
    """Raise ValueError, on every rank, unless all ranks pass the same text. Collective."""

    def gather(row: list[int]) -> list[list[int]]:
        everyones = torch.empty((channel.size, 1), dtype=torch.int64)
        channel.transport.all_gather(everyones, torch.tensor(row), timeout)
        return everyones.tolist()

    def disagree() -> None:
        agreed(channel.all_gather_bytes, mine, "call", lambda text: {"": [text]}, _WORDS)

    rows_of_all(gather, (), 0, mine, disagree)


def _require_same_dtypes(
    channel: Channel, outs: Sequence[torch.Tensor | None], xs: Sequence[torch.Tensor | None], timeout: float
) -> None:
    """Raise ValueError, on every rank, unless every sent tensor has the dtype that its receiver expects. Collective.

    The transports compare numbers of bytes only. ``outs[p]`` is received from rank p, ``xs[p]`` sent to it.
    """
    numbers, size = [_number_of(x) for x in (*xs, *outs)], channel.size
    everyones = torch.empty(size * len(numbers), dtype=torch.uint8)
    channel.transport.all_gather(everyones, torch.tensor(numbers, dtype=torch.uint8), timeout)
    table = everyones.view(size, 2, size)
    wrong = (table[:, 0] != table[:, 1].T).nonzero().tolist()
    if wrong:
        p, q = wrong[0]
        has, expected = (_DTYPES[int(number)] for number in (table[p, 0, q], table[q, 1, p]))
        raise ValueError(f"the ranks disagree: rank {p} has {has} for rank {q}, which expects {expected}")


def _number_of(x: torch.Tensor | None) -> int:
    """Return the index of the dtype of ``x`` in ``_DTYPES``."""
    name = _DTYPES[0] if x is None else str(x.dtype).removeprefix("torch.")
    return _DTYPES.index(name) if name in _DTYPES else 1


def _all_reduce_sparse(channel: Channel, tensor: torch.Tensor, op: str, timeout: float) -> None:
    """Sum COO tensors over all ranks, in place: every rank gathers the indices and values of all.

    Raises:
        TypeError, ValueError: on every rank: ``op`` is another one than "sum", or the ranks' tensors do not fit.
    """

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        if op != "sum":
            raise ValueError(f"op is {op!r}, wanted 'sum' for a sparse tensor")
        mine = tensor.detach().coalesce()
        return contiguous(mine.indices()), contiguous(mine.values())

    transport, size = channel.transport, channel.size
    indices, values = _prepared(transport, prepare, timeout)
    form = f"{list(tensor.shape)} {str(tensor.dtype)[6:]}, {indices.shape[0]} sparse dimensions"
    _require_same(channel, f"all_reduce of a sparse tensor ({form})", timeout)
    counts = torch.empty(size, dtype=torch.int64)
    transport.all_gather(counts, torch.tensor([indices.shape[1]]), timeout)
    lengths = counts.tolist()
    all_indices = [torch.empty(indices.shape[0], n, dtype=torch.int64) for n in lengths]
    all_values = [torch.empty(n, *values.shape[1:], dtype=values.dtype) for n in lengths]
    transport.all_to_all_v(all_indices, [indices] * size, timeout)
    transport.all_to_all_v(all_values, [values] * size, timeout)
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # not tensor.detach(), which has its own indices
