"""Base of the collectives: announcements of arguments, and movements out of place, along any dimension.

Ranks compare arguments before data moves. Movements get right arguments and known sizes; parts may be uneven, and
empty tensors move nothing on any rank. :func:`differentiable` makes functions of them that autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec

import torch
import torch.distributed as dist
from torch.autograd import Function

from pycomm.agreement import rows_of_all
from pycomm.collectives.tensor_memory import has_no_memory
from pycomm.parallel.mesh import agree
from pycomm.torch_internals import all_gather_single, backend_of, reduce_scatter_single

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
MOST_DIMENSIONS = 12
"""Most dimensions of a tensor that is sent."""
_HEADER = 5  # operation, dtype, whether it needs a gradient, argument, dimensions


@dataclass(frozen=True)
class Call:
    """Call of a collective on one rank.

    Attributes:
        name: of the function.
        x: its tensor.
        argument: number that must be the same on all ranks: a dimension, a root, the kind of a reduction.
        sizes: one number per rank, or ``None``.
        free_dim: dimension in which the ranks' tensors may differ; ``None`` if all their shapes must be equal.
    """

    name: str
    x: torch.Tensor
    argument: int = 0
    sizes: tuple[int, ...] | None = None
    free_dim: int | None = None


class Announcements(NamedTuple):
    """Announcements of all ranks.

    Attributes:
        needs_gradient: whether the tensor of any rank needs a gradient, so that all have to take part in backward.
        lengths: length of each rank's tensor along the dimension in which they may differ; 0 without one.
        sizes: ``sizes`` of each rank; -1 where it gave none.
    """

    needs_gradient: bool
    lengths: list[int]
    sizes: list[list[int]]


def announce(name: str, call: Call | Exception, group: dist.ProcessGroup, device: torch.device) -> Announcements:
    """Exchange the calls of all ranks of ``group``, and compare them."""
    size = group.size()
    numbers = call if isinstance(call, Exception) else _numbers_of(name, call, size)
    rows = agreed_rows(group, numbers, _HEADER + MOST_DIMENSIONS + size, f"call {name}", device)
    assert not isinstance(call, Exception)
    _compare(rows, call)
    lengths = [0 if call.free_dim is None else row[_HEADER + call.free_dim] for row in rows]
    return Announcements(any(row[2] for row in rows), lengths, [row[_HEADER + MOST_DIMENSIONS :] for row in rows])


def _numbers_of(name: str, call: Call, size: int) -> list[int]:
    """Return the row that describes ``call``: its header, the shape, and a number for each of ``size`` ranks."""
    needs, shape = torch.is_grad_enabled() and call.x.requires_grad, list(call.x.shape)
    header = [_NAMES.index(name), number_of(call.x.dtype), int(needs), call.argument, len(shape)]
    return [*header, *shape, *[0] * (MOST_DIMENSIONS - len(shape)), *(call.sizes or [-1] * size)]


def fail_together(name: str, error: Exception, group: dist.ProcessGroup, device: torch.device) -> NoReturn:
    """Raise ``error``, because of which this rank cannot call ``name``; ranks that call it get a ValueError."""
    announce(name, error, group, device)
    raise error


def exchange_rows(mine: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return the row of whole numbers of every rank of ``group``; all rows are as long as ``mine``.

    Over the CPU if the group has a backend for it, otherwise over ``device``, or the present GPU if that is none.
    """
    elsewhere = device if device.type != "cpu" else torch.device("cuda")
    place = torch.device("cpu") if backend_of(group, torch.device("cpu")) is not None else elsewhere
    mine = mine.to(place)
    gathered = torch.empty(group.size() * mine.numel(), dtype=mine.dtype, device=place)
    all_gather_single(gathered, mine, group=group)
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows


def agreed_rows(
    group: dist.ProcessGroup,
    outcome: Sequence[int] | Exception,
    width: int,
    what: str,
    device: torch.device,
    same: str = "",
) -> list[list[int]]:
    """Return the numbers of every rank of ``group``: one message, unless a rank has an error. Collective.

    Args:
        group: the ranks.
        outcome: numbers of this rank, at most ``width``, or its error.
        width: length of every rank's row, which is filled up with zeros.
        what: what the ranks are about to do, as for :func:`pycomm.parallel.mesh.agree`.
        device: as for :func:`exchange_rows`.
        same: text that must be the same on all ranks.

    Raises:
        ValueError: on every rank: another rank had an error, or another text. This rank's own error is raised as it is.
    """

    def gather(row: list[int]) -> list[list[int]]:
        return exchange_rows(torch.tensor(row), group, device)

    return rows_of_all(gather, outcome, width, same, lambda: agree(group, outcome, what, lambda _: [same]))


def require_tensor(x: object, dim: int | None = None, *, has_values: bool = True) -> int:
    """Return ``dim`` counted from the front, 0 if it is ``None``. Without ``has_values``, ``x`` may be on "meta"."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, wanted a tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x has the dtype {x.dtype}, wanted one of {', '.join(map(str, _DTYPES))}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"x {'is nested' if x.is_nested else f'has the layout {x.layout}'}, wanted a dense tensor")
    if x.is_cpu and x.numel() > 0 and type(x) in _PLAIN and has_no_memory(x):  # wrappers have theirs elsewhere
        raise ValueError(f"x, of shape {list(x.shape)}, has no memory: it is fake, or was freed")
    if has_values and x.is_meta:
        raise TypeError("x is on the device meta, where it has no values")
    if x.dim() > MOST_DIMENSIONS:
        raise ValueError(f"x has {x.dim()} dimensions, wanted at most {MOST_DIMENSIONS}")
    if dim is None:
        return 0
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim is {dim!r}, wanted an int")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}, but x has {x.dim()} dimensions")
    return dim % x.dim()


def require_dim(x: object, dim: object) -> int:
    """Return ``dim`` counted from the front. Raises TypeError or ValueError as :func:`require_tensor`."""
    if dim is None:
        raise TypeError("dim is None, wanted an int")
    return require_tensor(x, dim)  # type: ignore[arg-type]


def number_of(dtype: torch.dtype) -> int:
    """Return the number that stands for ``dtype``, one that :func:`require_tensor` takes, in announcements."""
    return _DTYPES.index(dtype)


def _compare(rows: Sequence[Sequence[int]], call: Call) -> None:
    first = rows[0]
    for rank, row in enumerate(rows):
        for index, what in ((0, "function"), (1, "dtype"), (4, "number of dimensions"), (3, "argument")):
            if row[index] != first[index]:
                values = [_shown(index, each[index]) for each in (first, row)]
                raise ValueError(f"the ranks disagree on the {what}: {values[0]} on rank 0, {values[1]} on rank {rank}")
        shapes = [list(each[_HEADER : _HEADER + first[4]]) for each in (first, row)]
        if any(a != b for d, (a, b) in enumerate(zip(*shapes, strict=True)) if d != call.free_dim):
            raise ValueError(
                f"the ranks disagree on the shape for {call.name}: {shapes[0]} on rank 0, {shapes[1]} on rank {rank}"
            )


def _shown(index: int, value: int) -> str:
    return _NAMES[value] if index == 0 else str(_DTYPES[value]) if index == 1 else str(value)


P = ParamSpec("P")
Move = Callable[Concatenate[torch.Tensor, P], torch.Tensor]
Group = dist.ProcessGroup


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' ``x``."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.all_reduce(out, group=group)
    return out


def gathered(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return all ranks' ``x``, which are ``lengths`` long along ``dim``, one after the other along it."""
    rows, longest = x.movedim(dim, 0).contiguous(), max(lengths)
    rest = rows.shape[1:]
    if longest * rest.numel() == 0:
        return rows.new_empty(sum(lengths), *rest).movedim(0, dim)
    if rows.shape[0] < longest:
        rows = torch.cat([rows, rows.new_zeros(longest - rows.shape[0], *rest)])
    out = rows.new_empty(group.size() * longest, *rest)
    all_gather_single(out, rows, group=group)
    if min(lengths) < longest:
        parts = zip(torch.split(out, longest), lengths, strict=True)
        out = torch.cat([part[:length] for part, length in parts])
    return out.movedim(0, dim).contiguous()


def summed_part(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' ``x``, of which rank r has ``lengths[r]`` along ``dim``."""
    rows, longest, mine = x.movedim(dim, 0), max(lengths), lengths[group.rank()]
    rest = rows.shape[1:]
    if longest * rest.numel() == 0:
        return rows.new_empty(mine, *rest).movedim(0, dim)
    if min(lengths) < longest:
        padded = rows.new_zeros(group.size(), longest, *rest)
        for part, own in zip(padded, torch.split(rows, list(lengths)), strict=True):
            part[: own.shape[0]] = own
        rows = padded.flatten(0, 1)
    out = rows.new_empty(longest, *rest)
    reduce_scatter_single(out, rows.contiguous(), group=group)
    return out[:mine].movedim(0, dim).contiguous()


def exchanged(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Group) -> torch.Tensor:
    """Send ``sends[r]`` rows of ``x`` to rank r, and return ``receives[r]`` rows from it, in the order of ranks."""
    out = x.new_empty(sum(receives), *x.shape[1:])
    if x.shape[1:].numel():  # also without rows here: other ranks may have some
        dist.all_to_all_single(out, x.contiguous(), list(receives), list(sends), group=group)
    return out


def copied(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """Return the ``x`` of rank ``src`` of ``group``."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.broadcast(out, dist.get_global_rank(group, src), group=group)
    return out


def summed_on(x: torch.Tensor, dst: int, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' ``x`` on rank ``dst`` of ``group``, and zeros on the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.reduce(out, dist.get_global_rank(group, dst), group=group)
    return out if group.rank() == dst else torch.zeros_like(out)


def returned(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Group) -> torch.Tensor:
    """Return to each rank what :func:`exchanged` has received from it."""
    return exchanged(x, receives, sends, group)


def viewed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x``, as a tensor of its own."""
    return x.view_as(x)


def own_part(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's part of ``x``, of which rank r has ``lengths[r]`` along ``dim``."""
    return torch.split(x, list(lengths), dim)[group.rank()].contiguous()


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Any, transpose: Any, given: Any) -> torch.Tensor:
        ctx.backwards = transpose, move, given
        made: torch.Tensor = move(x, *given)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _apply(grad, *ctx.backwards), None, None, None


_apply: Any = _Transposed.apply


def differentiable(move: Move[P], transpose: Move[P]) -> Move[P]:
    """Return ``move`` as a function that autograd differentiates by ``transpose``. Arguments: by position."""

    def moved(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        assert not kwargs
        made: torch.Tensor = _apply(x, move, transpose, args)
        return made

    return moved
