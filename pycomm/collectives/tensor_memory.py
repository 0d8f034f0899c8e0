"""Memory behind tensors of any kind: some can be overwritten byte by byte, some only compared.

Modules hold more than plain parameters: expanded buffers, sparse matrices, quantized weights made of several tensors.
Plain memory can be copied from rank to rank. Other memory can at least be read and compared between ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pycomm import kernels
from pycomm.agreement import digest
from pycomm.kernels.arrays import DTYPES
from pycomm.torch_internals import is_dtensor, local_of, without_conjugation, without_torch_function

Named = Sequence[tuple[str, torch.Tensor]]
"""Tensors with their names."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes by element size, as which tensors of any dtype can be viewed and copied."""

_KNOWN_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True)
class Memory:
    """Memory behind one tensor.

    Attributes:
        parts: plain tensors that cover it without overlaps, with dtypes that every operation knows.
        writable: whether writing to ``parts`` suffices to overwrite the tensor.
        text: properties other than shape and dtype that ranks must have in common; "" for plain memory.
    """

    parts: tuple[torch.Tensor, ...]
    writable: bool
    text: str = ""


NOTHING = Memory((), writable=False, text="without memory")
"""Memory of tensors that have none, or none that can be read."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the memory behind ``tensor``, or behind this rank's part of a DTensor. Plain memory is not copied."""
    if is_lazy(tensor):
        raise TypeError("is not initialized: first run a forward, which gives lazy modules their shapes")
    tensor = local_of(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [memory_of(getattr(tensor, name)) for name in names]
        text = f"{type(tensor).__name__}({', '.join([_numbers_in(context), *(m.text for m in inner)])})"
        return Memory(tuple(itertools.chain.from_iterable(m.parts for m in inner)), writable=False, text=text)
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return _odd_memory(tensor)
    if tensor.device.type == "meta" or (tensor.numel() > 0 and has_no_memory(tensor)):
        return NOTHING
    inside = [] if tensor.requires_grad else _tensors_inside(tensor)
    with without_torch_function():
        behind = _once(without_conjugation(tensor.detach()))
        writable = behind is not None
        if behind is None:
            behind = without_conjugation(tensor.detach()).contiguous()
        kinds = [
            f"{behind.numel()} elements in memory" if behind.numel() != tensor.numel() else "",
            "" if writable else "overlapping itself",
            "conjugated" if tensor.is_conj() else "",
            "negated" if tensor.is_neg() else "",
        ]
        if behind.numel() == 1:  # a stride of 0, meaningless here, would keep torch from viewing it as bytes
            behind = behind.as_strided((1,), (1,))
        parts = (behind.view(_INTEGERS[behind.element_size()]),)
    if inside:
        more = tuple(itertools.chain.from_iterable(memory_of(t).parts for t in inside))
        return Memory(parts + more, writable=False, text=f"{type(tensor).__name__} with {len(inside)} tensors")
    return Memory(parts, writable, ", ".join(filter(None, kinds)))


def look_at(name: str, tensor: torch.Tensor, what: str = "parameter or buffer") -> Memory:
    """Return the memory behind ``tensor``; raise TypeError, which calls it ``what``, if it is lazy."""
    try:
        return memory_of(tensor)
    except TypeError as error:
        raise TypeError(f"{what} {name!r} {error}") from None


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has no address."""
    try:
        return tensor.data_ptr() == 0
    except RuntimeError:  # a tensor subclass without storage
        return True


@torch.no_grad()
def _odd_memory(tensor: torch.Tensor) -> Memory:
    """Return the readable memory of a tensor that is sparse, quantized, nested or in a library's own layout."""
    try:
        parts, text = _opened(tensor)
    except (RuntimeError, NotImplementedError):  # torch cannot open it on this device, or for this dtype
        return Memory((), writable=False, text=str(tensor.layout))
    inner = [memory_of(part) for part in parts]
    return Memory(tuple(itertools.chain.from_iterable(m.parts for m in inner)), writable=False, text=text)


def _opened(tensor: torch.Tensor) -> tuple[Sequence[torch.Tensor], str]:
    """Return the plain tensors that ``tensor`` consists of, and its other properties as text."""
    if tensor.is_nested:
        return tensor.unbind(), f"nested {[list(part.shape) for part in tensor.unbind()]}"
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [tensor.int_repr()], f"scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
        return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()], "by channel"
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()  # ranks may hold the same matrix in another order
        return [tensor.indices(), tensor.values()], f"sparse, {tensor.values().numel()} values"
    if tensor.layout in _COMPRESSED:
        return [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]], str(tensor.layout)
    return [tensor.to_dense()], str(tensor.layout)


def _tensors_inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in the attributes of a subclass, such as the scales of bitsandbytes' quantized parameters."""
    if type(tensor) in _PLAIN or is_dtensor(tensor):
        return []
    found: list[torch.Tensor] = []
    for value in vars(tensor).values():
        inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) else [value]
        if not isinstance(value, (torch.nn.Module, type)):
            found += [each for each in inner if isinstance(each, torch.Tensor) and each is not tensor]
    return found


def _numbers_in(context: Any) -> str:
    """Return the numbers, texts and shapes in the context of a subclass's ``__tensor_flatten__``."""
    if isinstance(context, Mapping):
        return str({str(key): _numbers_in(value) for key, value in context.items()})
    if isinstance(context, (bool, int, float, str, torch.dtype, torch.Size)):
        return str(context)
    return str([_numbers_in(each) for each in context]) if isinstance(context, (list, tuple)) else ""


def _once(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view that has every element of the memory of ``tensor`` once; ``None`` if there is none.

    Many rows of an expanded tensor share one row of memory. Other overlaps, such as sliding windows, are one piece of
    memory if it has no gaps.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if not _may_overlap(tensor):
        return tensor
    positions = _positions(tensor)
    if len(positions) == tensor.numel():
        return tensor
    return tensor.as_strided((len(positions),), (1,)) if len(positions) == int(positions.max()) + 1 else None


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """Return the distinct places of elements of ``tensor`` in memory, counted in elements from the first."""
    positions = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        positions = torch.unique(positions.unsqueeze(-1) + torch.arange(size if stride else 1) * stride)
    return positions.view(-1)


def overlapping(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of indices of ``tensors`` that have elements in the same memory, in ascending order.

    Elements count, not storages: the weights of an LSTM lie in one storage, and strided views of one interleave.
    """
    spans: list[tuple[int, int, torch.Tensor]] = []
    for i, tensor in enumerate(tensors):
        parts = (tensor,) if is_plain(tensor) else () if is_lazy(tensor) else memory_of(tensor).parts
        spans += [(part.data_ptr(), i, part) for part in parts if part.numel() > 0]
    found: set[tuple[int, int]] = set()
    reached: list[tuple[int, int, torch.Tensor]] = []  # where the memory of those ends that may go on
    for begin, i, part in sorted(spans, key=itemgetter(0, 1)):
        reached = [each for each in reached if each[0] > begin]
        found |= {(min(i, j), max(i, j)) for _, j, other in reached if i != j and _have_common(other, part)}
        reached.append((begin + _extent(part), i, part))
    return sorted(found)


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _have_common(first: torch.Tensor, then: torch.Tensor) -> bool:
    """Return whether ``then``, which begins between the first and the last element of ``first``, shares one with it."""
    if _extent(first) == first.nbytes and not _may_overlap(first):
        return True  # there are no gaps
    begins = [_positions(part).unsqueeze(-1) * part.itemsize + part.data_ptr() for part in (first, then)]
    addresses = [begin + torch.arange(part.itemsize) for begin, part in zip(begins, (first, then), strict=True)]
    return bool(torch.isin(*addresses).any())


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return False if certainly no two elements share memory."""
    if tensor.numel() == 0:
        return False
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            return True
        end += (size - 1) * stride
    return False


def comparable(named: Named) -> list[tuple[str, torch.Tensor]]:
    """Return the ``named`` tensors in a form that ranks can compare: plain ones as they are, else their memory."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        if is_plain(tensor):
            found.append((name, tensor))
        else:
            found += [(name, part) for part in memory_of(tensor).parts]
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a strided tensor with memory, of no subclass, and of a dtype that kernels know."""
    is_known = type(tensor) in _PLAIN and tensor.dtype in _KNOWN_DTYPES and tensor.layout is torch.strided
    return is_known and tensor.data_ptr() != 0


def hashable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, as bytes if the kernels do not know its dtype."""
    tensor = tensor.detach()
    return tensor if tensor.dtype in _KNOWN_DTYPES else tensor.contiguous().view(-1).view(torch.uint8)


def shared_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the writable memory behind ``tensors``."""
    memories = [memory_of(tensor) for tensor in tensors]
    return [part for memory in memories if memory.writable for part in memory.parts]


def digests_of(memories: Iterable[Memory]) -> list[bytes]:
    """Return an eight-byte digest of the text and contents of each of ``memories``. Waits for GPUs."""
    known = list(memories)
    parts = [(index, hashable(part)) for index, memory in enumerate(known) for part in memory.parts]
    found: list[list[int]] = [[] for _ in known]
    for device in dict.fromkeys(part.device for _, part in parts):
        here = [(index, part) for index, part in parts if part.device == device]
        for (index, _), value in zip(here, _hashes([part for _, part in here]), strict=True):
            found[index].append(value)
    return [digest("\n".join([memory.text, *map(str, values)])) for memory, values in zip(known, found, strict=True)]


def _hashes(parts: list[torch.Tensor]) -> list[int]:
    if parts[0].device.type not in ("cpu", "cuda"):
        parts = [part.cpu() for part in parts]
    values: list[int] = kernels.hashes(parts).tolist()
    return values
