"""Bucket: gradients that are reduced together, in one flat buffer."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pycomm import kernels
from pycomm.collectives import gradients
from pycomm.collectives.layout import flat_alias, is_capturing, laid_out_like, on_gpu, strides_of
from pycomm.torch_internals import storage_uses

FINGERPRINT_BITS = 64
"""Bits that must be equal on all ranks, and are sent with the gradients.

Each bit takes two elements of a sum of any floating dtype. Each rank adds 1 to one of them: if neither sum is 0, ranks
differ.
"""
FINGERPRINT_PLACES = 2 * FINGERPRINT_BITS
"""Number of elements that a fingerprint takes in a sum."""


Factor = float | torch.Tensor | kernels.FittingScale


class Group(Protocol):
    """Ranks that a bucket is reduced over, and an allocator of memory that all of them can reach."""

    @property
    def size(self) -> int: ...
    def empty(self, shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class HasGradient(Protocol):
    """Object whose ``grad`` receives a gradient: a parameter, or a stand-in for one that is a DTensor."""

    grad: torch.Tensor | None


_LEAST_APART = 16 << 10
"""Mean number of elements from which reducing gradients where they lie, without packing them, pays off."""


class Bucket:
    """Bucket of the averaged gradients of ``params``, one after the other in ``flat``; ``places[i]`` is the i-th.

    ``flat`` lies in memory that the transport can reach directly. The gradients are followed by flags, which are summed
    in the same message: one per parameter, whether it was used; one that is not 0 if a rank's gradients are so large
    that the sum might overflow; and the elements of a fingerprint, bits that ranks compare. ``algorithm`` makes dense
    sums over the ranks. ``strides``: memory orders of the gradients in ``flat``, the same on all ranks; if ``None``, as
    in ``params``.

    The ``views`` of the places are handed out as ``.grad`` of ``owners``: ``params`` themselves, or their stand-ins. Of
    a parameter that has got another memory order since, the view is a copy: see :meth:`follow`. Users may do anything
    with their gradients without affecting later ones: see :meth:`repair` and :meth:`leave_to_users`.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.Tensor],
        group: Group,
        algorithm: str = "auto",
        owners: Sequence[HasGradient] | None = None,
        strides: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.names = list(names)
        self.algorithm = algorithm
        self.numels = [p.numel() for p in params]
        self.dtype = params[0].dtype
        self.device = params[0].device
        self.on_gpu = on_gpu(params[0])
        self.num_elements = sum(self.numels)
        self._params = list(params)
        self._shapes = [p.shape for p in params]
        self._strides = list(map(strides_of, params)) if strides is None else list(strides)
        self._orders = self._read_orders()
        self._owners: list[HasGradient] = list(self._params if owners is None else owners)
        self._scratch = kernels.Scratch()
        self.num_flags = len(params) + 1 + FINGERPRINT_PLACES
        self._group = group
        self._handed_out_uses = 0  # references to the storage when the views were handed out
        self.shares: Sequence[slice] | None = None
        self._has_graph = False  # whether a CUDA graph knows the address of the memory
        self._rank = 0
        self.use(self._new_memory())

    def reduce_part_only(self, shares: Sequence[slice], rank: int) -> None:
        """Give each rank only its own part of the sum: elements ``shares[rank]``.

        The rest of ``flat`` remains this rank's contribution.
        """
        self.shares, self._rank = shares, rank

    @property
    def has_flags_apart(self) -> bool:
        """Whether the flags are in other memory than the gradients, and so in another message."""
        return self.memory.numel() == self.num_elements

    @property
    def own(self) -> slice:
        """Elements of which this rank gets the sum."""
        return slice(0, self.num_elements) if self.shares is None else self.shares[self._rank]

    def own_parts(self) -> list[torch.Tensor]:
        """Return the elements of :attr:`own`, split by parameter; parts may be empty."""
        if self.shares is None:
            return self.parts(self.memory)
        first, last = self.own.start, self.own.stop
        ends = itertools.accumulate(self.numels, initial=0)
        places = [(max(first, begin), min(last, end)) for begin, end in itertools.pairwise(ends)]
        return [self.flat[begin : max(begin, end)] for begin, end in places]

    def _new_memory(self) -> torch.Tensor:
        return self._group.empty(self.num_elements + self.num_flags, self.dtype, self.device)

    def use(self, memory: torch.Tensor) -> None:
        """Keep the gradients in ``memory``, of ``num_elements + num_flags`` elements."""
        self._lay_out(memory, memory[self.num_elements :])

    def lie_in(self, flat: torch.Tensor) -> None:
        """Keep the gradients in ``flat``, which others own, and the flags in memory of their own.

        The flags then take a message of their own, if there is a fingerprint.
        """
        if flat.data_ptr() != self.flat.data_ptr():
            self._lay_out(flat, self._group.empty(self.num_flags, self.dtype, self.device))

    def _lay_out(self, memory: torch.Tensor, flags: torch.Tensor) -> None:
        self.memory, self.flags = memory, flags
        self.flat = memory[: self.num_elements]
        num_params = len(self.numels)
        self.used_flags, self.too_large_flag = flags[:num_params], flags[num_params]
        self.fingerprint_places = flags[num_params + 1 :]
        self.places = self.places_in(memory)
        self._is_contiguous = all(place.is_contiguous() for place in self.places)
        self._copied: set[int] = set()  # indices of views that are copies
        self.views = [self._view(index) for index in range(len(self.places))]
        self._addresses = gradients.addresses_of(self.views)

    def _view(self, index: int) -> torch.Tensor:
        """Return a tensor to hand out for ``places[index]``."""
        place, param = self.places[index], self._params[index]
        if flat_alias(param, place) is not None:
            self._copied.discard(index)
            return place.data  # which has a version counter of its own, which reveals writes to this gradient alone
        self._copied.add(index)
        return torch.empty_like(param)

    def _renew_view(self, index: int) -> None:
        self.views[index] = self._view(index)
        self._addresses[index] = self.views[index].data_ptr()

    def _read_orders(self) -> list[object]:
        return [p.is_contiguous() or p.stride() for p in self._params]

    def follow(self) -> None:
        """Hand out gradients in the memory orders that the parameters have now; the orders in ``flat`` stay."""
        before, self._orders = self._orders, self._read_orders()
        if self._orders == before:
            return
        for i in (i for i, order in enumerate(self._orders) if order != before[i]):
            view = self.views[i]
            self._renew_view(i)
            if self._owners[i].grad is view:
                self._owners[i].grad = self.views[i].copy_(view)

    def fill_copies(self) -> None:
        """Write the gradients to those views that are copies."""
        for i in self._copied:
            self.views[i].copy_(self.places[i])

    def params(self) -> list[torch.Tensor]:
        return [p.detach() for p in self._params]

    def parts(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Split memory that is laid out like the bucket's by parameter."""
        return list(torch.split(memory[: self.num_elements], self.numels))

    def places_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the places of the gradients in memory that is laid out like the bucket's."""
        parts = zip(self.parts(memory), self._shapes, self._strides, strict=True)
        return [part.as_strided(shape, stride) for part, shape, stride in parts]

    def holds(self, index: int, grad: torch.Tensor) -> bool:
        """Return whether ``grad`` already lies where the bucket keeps the ``index``-th gradient."""
        is_there = grad.data_ptr() == self._addresses[index] or grad.numel() == 0
        return is_there and grad.stride() == self.views[index].stride()

    def repair(self) -> None:
        """Replace views whose memory was swapped, as by ``p.grad.data = ...`` and ``module.to()``."""
        now = gradients.addresses_of(self.views)
        if now != self._addresses:
            for i in (
                i for i, (address, first) in enumerate(zip(now, self._addresses, strict=True)) if address != first
            ):
                self._renew_view(i)

    def leave_to_users(self) -> None:
        """Preserve the last gradients that users kept, before new ones are written.

        A kept view that is no longer ``.grad`` gets memory of its own. If a tensor derived from a view is kept, it
        keeps the whole memory, and the bucket gets new memory; unless a CUDA graph knows the address: each launch
        writes there, and so the derived tensor changes. A view that still is ``.grad`` is written in place, as autograd
        would.
        """
        dropped, kept, shared = gradients.dropped_views(self._owners, self.views, _ALONE)
        if dropped and not self._has_graph and (self._is_aliased() or shared):
            self.renew()
            return
        for i in kept:
            view = self.views[i]
            view.data = view.clone(memory_format=torch.preserve_format)
            del view
            self._renew_view(i)

    def show(self, but: int) -> None:
        """Make the views ``.grad`` where there is a gradient, except for parameter number ``but``."""
        gradients.show_views(self._owners, self.views, but)

    def hand_out(self, used: list[bool]) -> list[int]:
        """Make the views ``.grad``, or ``None`` where a parameter is not ``used``; return their version counters."""
        versions = gradients.hand_out_views(self._owners, self.views, used)
        self.note_handed_out()
        return versions

    def note_handed_out(self) -> None:
        """Note that the views are ``.grad`` now: any further reference to the memory belongs to a user."""
        self._handed_out_uses = storage_uses(self.memory)

    def grads(self) -> tuple[list[torch.Tensor | None], bool]:
        """Return the present gradients, and whether any of them is sparse."""
        return gradients.grads_of(self._owners)

    def renew(self) -> None:
        """Switch to new memory, and leave the old one to the owners of its views."""
        self.use(self._new_memory())
        self._handed_out_uses = 0

    def is_kept(self) -> bool:
        """Return whether anything other than ``.grad`` refers to the gradients handed out."""
        return self._is_aliased() or any(
            is_held(self.views, i, is_grad=owner.grad is self.views[i]) for i, owner in enumerate(self._owners)
        )

    def _is_aliased(self) -> bool:
        return bool(self._handed_out_uses) and storage_uses(self.memory) > self._handed_out_uses

    def gather(
        self,
        grads: Sequence[torch.Tensor | None],
        scale: float | torch.Tensor = 1.0,
        fingerprint: torch.Tensor | None = None,
        own: slice | None = None,
    ) -> list[torch.Tensor]:
        """Write ``grads`` times ``scale`` to ``flat``, zeros for ``None``, and set the flags.

        ``own``: elements of ``memory`` that this rank reduces. If the gradients there are large, and need neither scale
        nor cast, they are neither copied nor checked, but returned: flat, in order, as many elements as ``own`` has.
        """
        pieces = [] if own is None or isinstance(scale, torch.Tensor) or scale != 1.0 else self._pieces(grads, own)
        skip = (own.start, min(own.stop, self.num_elements)) if own is not None and pieces else (0, 0)
        self._pack_flagged(grads, self.flat, self.flags, scale, fingerprint, self._scratch, skip)
        return pieces

    def _pieces(self, grads: Sequence[torch.Tensor | None], own: slice) -> list[torch.Tensor]:
        """Return the elements ``own`` where they lie in ``grads``; none if that does not pay off, or one is missing."""
        pieces: list[torch.Tensor] = []
        ends = list(itertools.accumulate(self.numels, initial=0))
        own_params = range(
            bisect.bisect_right(ends, own.start) - 1, min(bisect.bisect_left(ends, own.stop), len(grads))
        )
        if own.stop - own.start < _LEAST_APART * len(own_params):
            return pieces
        for i in own_params:
            grad, begin, numel = grads[i], ends[i], self.numels[i]
            first, last = max(own.start, begin), min(own.stop, begin + numel)
            if first >= last:
                continue
            if grad is None or grad.dtype != self.dtype or self.holds(i, grad):
                return []
            pieces.append(laid_out_like(grad, self.places[i]).view(-1)[first - begin : last - begin])
        if not pieces or sum(piece.numel() for piece in pieces) < _LEAST_APART * len(pieces):
            return []
        flags = self.memory[self.num_elements : max(own.stop, self.num_elements)]
        return [*pieces, flags] if flags.numel() > 0 else pieces

    def pack_flagged(
        self,
        grads: Sequence[torch.Tensor | None],
        message: torch.Tensor,
        scale: Factor,
        fingerprint: torch.Tensor | None,
        scratch: kernels.Scratch,
    ) -> None:
        """Write ``grads`` times ``scale``, then the flags, to ``message`` by one kernel.

        On a GPU a kernel before it sends addresses. Missing gradients count as zeros.
        """
        flat, flags = message[: self.num_elements], message[self.num_elements :]
        self._pack_flagged(grads, flat, flags, scale, fingerprint, scratch)

    def _pack_flagged(
        self,
        grads: Sequence[torch.Tensor | None],
        flat: torch.Tensor,
        flags: torch.Tensor,
        scale: Factor,
        fingerprint: torch.Tensor | None,
        scratch: kernels.Scratch,
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        """Write to ``flat`` and ``flags``; elements ``skip`` are left alone."""
        self._has_graph = self._has_graph or (self.on_gpu and is_capturing())
        tensors = [place if grad is None else grad for grad, place in zip(grads, self.places, strict=True)]
        if not self._is_contiguous:
            tensors = [laid_out_like(tensor, place) for tensor, place in zip(tensors, self.places, strict=True)]
        kernels.pack_flagged(
            tensors,
            [grad is not None for grad in grads],
            *(flat, flags, fingerprint, scale),
            limit=self.limit(flat.dtype),
            skip=skip,
            scratch=scratch,
        )

    def limit(self, dtype: torch.dtype) -> float:
        """Return the magnitude below which the sum over all ranks is finite in ``dtype``."""
        return torch.finfo(dtype).max / self._group.size

    def finite(self) -> torch.Tensor:
        """Return, once flags are summed, whether the gradients of all ranks, and so their sum, are finite: 0-d bool."""
        return self.too_large_flag == 0.0


class FingerprintBits:
    """Converter of numbers to fingerprints on ``device``."""

    def __init__(self, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._shifts = None if on_host else torch.arange(FINGERPRINT_BITS, device=device, dtype=torch.int64)

    def of(self, value: int) -> torch.Tensor:
        """Return the bits of ``value``, the lowest first: bool."""
        if self._shifts is None:
            octets = np.frombuffer(value.to_bytes(FINGERPRINT_BITS // 8, "little"), np.uint8)
            return torch.from_numpy(np.unpackbits(octets, bitorder="little").view(np.bool_))
        signed = value - (1 << FINGERPRINT_BITS) if value >> (FINGERPRINT_BITS - 1) else value
        # A kernel fills it in: a copy to the GPU would have to be waited for.
        number = torch.full((), signed, dtype=torch.int64, device=self._shifts.device)
        return ((number >> self._shifts) & 1).bool()


def put_fingerprint(places: torch.Tensor, fingerprint: torch.Tensor | None) -> None:
    """Write this rank's part of a sum; ``None`` agrees with any fingerprint."""
    if fingerprint is None:
        places.zero_()
    else:
        places[:FINGERPRINT_BITS].copy_(fingerprint)
        places[FINGERPRINT_BITS:].copy_(~fingerprint)


def differing_places(places: torch.Tensor) -> torch.Tensor:
    """Return, for each bit, whether it differs between ranks, given the sum or mean over all ranks: bool."""
    there = places != 0
    return there[:FINGERPRINT_BITS] & there[FINGERPRINT_BITS:]


# The next reduction overwrites the memory of the gradients handed out. In plain autograd a gradient that the user keeps
# stays as it is after zero_grad(). To promise the same without copying every gradient, references are counted.


def _usual_references() -> tuple[int, int]:
    """Return the reference counts of a tensor that only a list holds, and of one that is also a ``.grad``."""
    tensors, param = [torch.empty(1)], torch.nn.Parameter(torch.empty(1))
    alone = gradients.references(tensors, 0)
    param.grad = tensors[0]
    return alone, gradients.references(tensors, 0)


_ALONE, _AS_GRAD = _usual_references()  # releases of Python and torch count differently


def is_held(tensors: list[torch.Tensor], index: int, is_grad: bool = False) -> bool:
    """Return whether Python refers to ``tensors[index]`` outside this list; ``is_grad``: and outside ``.grad``."""
    return gradients.references(tensors, index) > (_AS_GRAD if is_grad else _ALONE)
