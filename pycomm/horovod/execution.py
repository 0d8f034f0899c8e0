"""Execution of the operations that the ranks have agreed on, in the agreed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch

from pycomm.collectives.backend.engine import reducible
from pycomm.collectives.communicator import Communicator
from pycomm.horovod.coordinator import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Request,
    RequestTerms,
    Response,
    zeros_for,
)

T = TypeVar("T")

_FUSED_ALONE = 1 << 20
"""Bytes from which a tensor is reduced alone, as copying it costs more than another operation."""
_AT_ONCE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_REDUCED_AS = {torch.int16: torch.int32}
"""Dtypes that are reduced as others."""


class Execution:
    """Execution of operations over ``communicator``. Tensors on GPUs are copied to CPU memory and back."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._size = communicator, communicator.size
        self._transport, self._timeout = communicator.channel.transport, communicator.channel.timeout
        self._flat: torch.Tensor | None = None

    def run(self, response: Response, request: Request) -> None:
        """Run one operation, and write its results to ``request``."""
        kind = request.terms.kind
        if kind == JOIN:
            request.result = response.last
        elif kind != BARRIER:
            xs = [_in_cpu_memory(tensor) for tensor in _waited_for(request)]
            _OPERATIONS[kind](self, request, xs)

    # All-reduce.

    def all_reduce_fused(self, requests: Sequence[Request]) -> None:
        """Run several allreduces whose terms differ in shapes only, fusing small tensors."""
        if len(requests) == 1 and self._all_reduce_at_once(requests[0]):
            return
        pairs = []
        for request in requests:
            pairs += [(request, i, tensor) for i, tensor in enumerate(_waited_for(request))]
        small: defaultdict[torch.dtype, list[tuple[Request, int, torch.Tensor]]] = defaultdict(list)
        for request, i, tensor in pairs:
            if len(pairs) > 1 and tensor.nbytes < _FUSED_ALONE:
                small[tensor.dtype].append((request, i, tensor))
            else:
                self._put(request, i, self._reduced(_in_cpu_memory(tensor), request.terms, request.outputs[i]))
        for together in small.values():
            self._all_reduce_together(together)

    def _all_reduce_at_once(self, request: Request) -> bool:
        """Run an allreduce that needs only the transport, and return True; return False for any other."""
        terms = request.terms
        if len(request.tensors) != 1 or request.ready or terms.prescale != 1.0 or terms.postscale != 1.0:
            return False
        x, out = request.tensors[0], request.outputs[0]
        if out is None or x.dtype not in _AT_ONCE or not (out.is_contiguous() and out.is_cpu):
            return False
        target = out.detach()
        if out is not x:
            target.copy_(x.detach())
        self._transport.all_reduce(target, terms.op, self._timeout)
        return True

    def _all_reduce_together(self, together: Sequence[tuple[Request, int, torch.Tensor]]) -> None:
        tensors = [tensor.detach() for _, _, tensor in together]
        counts = [tensor.numel() for tensor in tensors]
        flat = self._flat_of(sum(counts), tensors[0].dtype)
        views = [part.view(x.shape) for part, x in zip(torch.split(flat, counts), tensors, strict=True)]
        torch._foreach_copy_(views, tensors)
        reduced = self._reduced(flat, together[0][0].terms, flat)
        parts = [part.view(x.shape) for part, x in zip(torch.split(reduced, counts), tensors, strict=True)]
        for (request, i, _), part in zip(together, parts, strict=True):
            self._put(request, i, part)

    def contribute_zeros(self, response: Response, terms: RequestTerms) -> Request:
        """Return the request of this rank, which has joined, for an allreduce of the others."""
        zeros = zeros_for(response.signature)
        return Request(response.key, terms, zeros, [*zeros])

    def _put(self, request: Request, i: int, value: torch.Tensor) -> None:
        """Make ``value`` the ``i``-th output."""
        out = request.outputs[i]
        assert out is not None
        if out.data_ptr() != value.data_ptr():
            out.detach().copy_(value)

    def _flat_of(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = max(1, count * dtype.itemsize)
        if self._flat is None or self._flat.numel() < num_bytes:
            self._flat = None  # released first
            self._flat = self._communicator.empty((num_bytes,), torch.uint8)
        return self._flat[: count * dtype.itemsize].view(dtype)

    def _reduced(self, x: torch.Tensor, terms: RequestTerms, out: torch.Tensor | None) -> torch.Tensor:
        """Return the reduction of all ranks' ``x``, in ``out`` if possible."""
        fits = out is not None and out.is_cpu and out.is_contiguous()
        target = out.detach() if out is not None and fits else torch.empty_like(x)
        _scaled_into(target, x, terms.prescale)
        work = target.to(_REDUCED_AS.get(target.dtype, target.dtype))
        array, op = reducible(work, self._op_on(work, terms))
        if work.numel() or self._size > 1:
            self._transport.all_reduce(array, op, self._timeout)
        if work is not target:
            target.copy_(work)
        _finish(target, terms, self._size)
        return target

    @staticmethod
    def _op_on(x: torch.Tensor, terms: RequestTerms) -> str:
        native = terms.op != "mean" or (x.is_floating_point() and terms.postscale == 1.0)
        return terms.op if native else "sum"

    def adasum(self, request: Request) -> None:
        """Combine each tensor by Adasum: every rank gathers all inputs and computes the result itself."""
        for i, tensor in enumerate(_waited_for(request)):
            x = _in_cpu_memory(tensor)
            scaled = torch.empty_like(x)
            _scaled_into(scaled, x, request.terms.prescale)
            everyones = torch.empty(self._size, *x.shape, dtype=x.dtype)
            self._transport.all_gather(everyones, scaled, self._timeout)
            combined = combine(list(everyones))
            _scaled_into(combined, combined, request.terms.postscale)
            self._put(request, i, combined)

    # The others.

    def _all_gather(self, request: Request, xs: Sequence[torch.Tensor]) -> None:
        rows = self._gather_numbers([x.shape[0] for x in xs])
        for i, x in enumerate(xs):
            parts = [int(row[i]) for row in rows]
            out = torch.empty(sum(parts), *x.shape[1:], dtype=x.dtype)
            self._transport.all_gather_v(list(torch.split(out, parts)), x, self._timeout)
            request.outputs[i] = _like(out, request.tensors[i])
            request.parts.append(parts)

    def _gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        everyones = torch.empty(self._size, len(mine), dtype=torch.int64)
        self._transport.all_gather(everyones, torch.tensor([mine]), self._timeout)
        return everyones.tolist()

    def _broadcast(self, request: Request, xs: Sequence[torch.Tensor]) -> None:
        for i, x in enumerate(xs):
            out = request.outputs[i]
            fits = out is not None and out.is_cpu and out.is_contiguous()
            target = out.detach() if out is not None and fits else torch.empty_like(x)
            if target.data_ptr() != x.data_ptr() and self._communicator.rank == request.terms.root:
                target.copy_(x)
            self._transport.broadcast(target, request.terms.root, self._timeout)
            self._put(request, i, target)

    def _all_to_all(self, request: Request, xs: Sequence[torch.Tensor]) -> None:
        x, splits = xs[0], request.splits
        assert splits is not None
        received = [row[self._communicator.rank] for row in self._gather_numbers(splits)]
        out = torch.empty(sum(received), *x.shape[1:], dtype=x.dtype)
        sent = torch.split(x[: sum(splits)], splits)
        self._transport.all_to_all_v(list(torch.split(out, received)), list(sent), self._timeout)
        request.outputs[0] = _like(out, request.tensors[0])
        request.result = received

    def _reduce_scatter(self, request: Request, xs: Sequence[torch.Tensor]) -> None:
        for i, x in enumerate(xs):
            parts = lengths(x.shape[0], self._size)
            scaled = torch.empty_like(x)
            _scaled_into(scaled, x, request.terms.prescale)
            work = scaled.to(_REDUCED_AS.get(x.dtype, x.dtype))
            out = torch.empty(parts[self._communicator.rank], *x.shape[1:], dtype=work.dtype)
            op = self._op_on(work, request.terms)
            arrays = [reducible(part, op)[0] for part in torch.split(work, parts)]
            target, name = reducible(out, op)
            self._transport.reduce_scatter_v(target, arrays, name, self._timeout)
            out = out.to(x.dtype)
            _finish(out, request.terms, self._size)
            request.outputs[i] = _like(out, request.tensors[i])


_OPERATIONS = {
    ALLGATHER: Execution._all_gather,
    BROADCAST: Execution._broadcast,
    ALLTOALL: Execution._all_to_all,
    REDUCESCATTER: Execution._reduce_scatter,
}


def can_fuse(request: Request) -> bool:
    """Return whether ``request`` goes through :meth:`Execution.all_reduce_fused`."""
    return request.terms.kind == ALLREDUCE and request.terms.op != "adasum"


def _waited_for(request: Request) -> Sequence[torch.Tensor]:
    """Return the inputs once GPUs have computed them."""
    for event in request.ready:
        event.synchronize()
    return request.tensors


def _in_cpu_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _like(out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return out.to(tensor.device)


def _scaled_into(target: torch.Tensor, x: torch.Tensor, factor: float) -> None:
    """Write ``x * factor`` into ``target``; integers are computed in float64 and truncated."""
    if factor == 1.0:
        if target.data_ptr() != x.data_ptr():
            target.copy_(x)
    elif x.is_floating_point() or x.is_complex():
        torch.mul(x, factor, out=target)
    else:
        target.copy_(x.double() * factor)


def _finish(x: torch.Tensor, terms: RequestTerms, size: int) -> None:
    """Apply, in place, the division and scale that remain after the reduction."""
    mean = terms.op == "mean" and not (x.is_floating_point() and terms.postscale == 1.0)
    if mean and terms.postscale == 1.0:
        x.div_(size, **({} if x.is_floating_point() or x.is_complex() else {"rounding_mode": "trunc"}))
    elif terms.postscale != 1.0:
        _scaled_into(x, x, terms.postscale / size if mean else terms.postscale)


def combine(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of ``tensors``, a power of two of them, in their dtype; computed in float64 (complex128).

    Of two gradients a and b it is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are orthogonal, their
    mean if they are equal. Of more than two, pairs are combined, then pairs of pairs (Maleki et al., "Scaling
    distributed training with adaptive summation", MLSys 2021, sections 3 and 4).
    """
    assert tensors
    assert len(tensors) & (len(tensors) - 1) == 0
    dtype = tensors[0].dtype
    wide = [tensor.to(torch.complex128 if dtype.is_complex else torch.float64) for tensor in tensors]
    while len(wide) > 1:
        wide = [_pair(a, b) for a, b in zip(wide[::2], wide[1::2], strict=True)]
    return wide[0].to(dtype)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = torch.vdot(a.flatten(), b.flatten()).real
    norms = [torch.vdot(x.flatten(), x.flatten()).real for x in (a, b)]
    factors = [1.0 - common / (2.0 * norm) if norm > 0 else torch.ones(()) for norm in norms]
    return factors[0] * a + factors[1] * b


def lengths(count: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` pieces of ``count`` things: the first ones have one more."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def split_list(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return ``values`` in ``parts`` pieces, in order; with more pieces than values the last ones are empty."""
    return [values[a:b] for a, b in pairwise(accumulate(lengths(len(values), parts), initial=0))]
