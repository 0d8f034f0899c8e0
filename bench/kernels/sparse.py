"""Kernels that find few elements among many, or add few to many."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from bench.kernels.case import Arrays, Calls, Case, require, require_equal
from pycomm import kernels

_MOMENTUM = 0.5  # a power of two: both sides' results are then equal to the bit
_CACHE_LINE = 64  # bytes that a CPU moves at least
NUM_INDICES = 100_000  # that are packed
_LIMIT = 100_000_000  # below which they are


def share_of(n: int, ratio: float) -> int:
    """Return how many of ``n`` elements the part ``ratio`` is, at least one."""
    return max(1, round(ratio * n))


def topk(n: int, ratio: float, warm: bool = False) -> Case:
    """Describe selecting the largest elements; with ``warm``, there is the threshold of an earlier call to go by."""
    name = f"topk, {100 * ratio:g} %{', warm' if warm else ''}"
    # One threshold for all arrays that take turns, as for the similar ones of successive steps.
    shared: dict[torch.device, torch.Tensor] | None = {} if warm else None
    return Case(name, "topk(x.abs(), k)", 4 * n, partial(_topk, k=share_of(n, ratio), shared=shared), floor="read")


def scatter_add(n: int, ratio: float, line: int = _CACHE_LINE) -> Case:
    """Describe adding to few places. A cache would hold all of them: calls take turns on many sets, in two arrays.

    The least that must move: indices and values once, and each ``line`` of memory that holds one of the places there
    and back. How many those are, on average, is computed.
    """
    k, per_line = share_of(n, ratio), line // 4
    lines = n / per_line * (1 - (1 - ratio) ** per_line)
    num_bytes = round(8 * k + 2 * line * lines)
    return Case(f"scatter_add, {100 * ratio:g} %", "scatter_add_", num_bytes, partial(_scatter_add, k=k), num_arrays=2)


def dgc_step(n: int, ratio: float, warm: bool) -> Case:
    """Describe a step of DGC: momentum, residual, selection, and zeros where something was selected."""
    name = f"DGC step {100 * ratio:g} %, {'warm' if warm else 'cold'}"
    peer_name = "add + add + abs + topk + index + index_put_ x 2, by parameter"
    return Case(name, peer_name, 20 * n, partial(_dgc, ratio=ratio, warm=warm))


def indices_to_bits() -> Case:
    """Describe packing a hundred thousand indices below a hundred million, against 4 bytes for each."""
    return Case("indices to bits, 0.1 %", "copy_ of int32", _index_bytes(), partial(_indices, packs=True), num_arrays=1)


def bits_to_indices() -> Case:
    """Describe unpacking the same indices."""
    return Case(
        "bits to indices, 0.1 %", "copy_ of int32", _index_bytes(), partial(_indices, packs=False), num_arrays=1
    )


def _topk(arrays: Arrays, k: int, shared: dict[torch.device, torch.Tensor] | None) -> Calls:
    x, out, scratch = arrays.flat, (arrays.empty(k), arrays.empty(k, torch.int32)), kernels.Scratch()
    threshold = None
    if shared is not None:
        threshold = shared.setdefault(arrays.device, torch.zeros((), device=arrays.device))

    def ours() -> object:
        return kernels.topk(x, k, out, threshold=threshold, scratch=scratch)

    def peer() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(x.abs(), k)

    def verify() -> None:
        magnitudes, kth = x.abs(), peer()[0].min()
        above = (magnitudes > kth).nonzero().view(-1)
        ties = (magnitudes == kth).nonzero().view(-1)[: k - above.numel()]
        wanted = torch.cat([above, ties]).sort().values
        for _ in range(2):  # the second time warm, where there is a threshold
            out[1].zero_()
            ours()
            require_equal(out[1].long(), wanted, "topk indices")
            require_equal(out[0], x[wanted], "topk values")

    return Calls(ours, peer, verify)


def _scatter_add(arrays: Arrays, k: int) -> Calls:
    """Both sides add to the same places, each once and in ascending order; torch wants them as int64."""
    out, scratch = arrays.out, kernels.Scratch()
    places = torch.randint(out.numel(), (k,), generator=arrays.generator, device=arrays.device)
    wide = places.unique(sorted=True)  # type: ignore[no-untyped-call]
    indices, values = wide.int(), arrays.normal(wide.numel())

    def ours() -> None:
        kernels.scatter_add(out, indices, values, scratch=scratch)

    def peer() -> None:
        out.scatter_add_(0, wide, values)

    def verify() -> None:
        before, wanted = out.clone(), out.clone()
        wanted[wide] += values
        for call in (ours, peer):
            out.copy_(before)
            call()
            require_equal(out, wanted, "scatter_add")

    return Calls(ours, peer, verify)


class _DgcStep:
    """One step of DGC from fixed states, so that every turn does the same work."""

    def __init__(self, arrays: Arrays, ratio: float, warm: bool) -> None:
        self._warm = warm
        self._grads, self._acc, self._residual = arrays.grads, arrays.out, arrays.others[1]
        self._velocity = torch.zeros_like(self._acc)
        self._momentum = kernels.Momentum(self._velocity, arrays.others[0], _MOMENTUM)
        self._counts = [share_of(grad.numel(), ratio) for grad in self._grads]
        total = sum(self._counts)
        self._out = arrays.empty(total), arrays.empty(total, torch.int32)
        self._thresholds = torch.zeros(len(self._counts), device=arrays.device)
        self._scratch = kernels.Scratch()
        flats = (self._momentum.old_velocity, self._residual, self._velocity, self._acc)
        self._parts = list(zip(self._grads, *(arrays.views(flat) for flat in flats), self._counts, strict=True))
        self._places: list[torch.Tensor] = []
        self.ours()  # finds the thresholds

    def ours(self) -> None:
        if not self._warm:
            self._thresholds.zero_()
        arguments = (self._acc, self._residual, self._grads, self._counts, self._out, self._thresholds)
        kernels.sparsify(*arguments, momentum=self._momentum, scratch=self._scratch)
        indices = self._out[1].long()
        self._velocity.index_fill_(0, indices, 0.0)
        self._acc.index_fill_(0, indices, 0.0)

    def peer(self) -> torch.Tensor:
        """Do the same with torch's operations, parameter by parameter; returns what is sent."""
        found = []
        self._places.clear()
        for grad, old_velocity, residual, velocity, acc, k in self._parts:
            torch.add(grad, old_velocity, alpha=_MOMENTUM, out=velocity)
            torch.add(residual, velocity, out=acc)
            chosen = acc.view(-1).abs().topk(k, sorted=False).indices
            found.append(acc.view(-1)[chosen])
            velocity.view(-1)[chosen] = 0.0
            acc.view(-1)[chosen] = 0.0
            self._places.append(chosen)
        return torch.cat(found)

    def verify(self) -> None:
        velocities = torch.cat([torch.add(part[0], part[1], alpha=_MOMENTUM).view(-1) for part in self._parts])
        sums = self._residual + velocities
        for _ in range(2):  # the second time warm, where that is asked for
            for array in (self._acc, self._velocity, self._out[1]):
                array.zero_()
            self.ours()
            self._require_step(sums, velocities, self._out[1].long(), "DGC's step, ours")
            require_equal(self._out[0], sums[self._out[1].long()], "DGC's step, values")
        sent = self.peer()
        starts = [0, *itertools.accumulate(grad.numel() for grad in self._grads)]
        places = torch.cat([chosen + start for chosen, start in zip(self._places, starts, strict=False)])
        self._require_step(sums, velocities, places, "DGC's step, torch's")
        # Of equal magnitudes they may take others.
        require_equal(self._out[0].abs().sort().values, sent.abs().sort().values, "DGC's step, magnitudes")

    def _require_step(self, sums: torch.Tensor, velocities: torch.Tensor, places: torch.Tensor, what: str) -> None:
        require_equal(self._acc, sums.index_fill(0, places, 0.0), what)
        require_equal(self._velocity, velocities.index_fill(0, places, 0.0), what)


def _dgc(arrays: Arrays, ratio: float, warm: bool) -> Calls:
    step = _DgcStep(arrays, ratio, warm)
    return Calls(step.ours, step.peer, step.verify)


def _index_bytes() -> int:
    return 4 * (NUM_INDICES + kernels.packed_words(_LIMIT, NUM_INDICES))


def _indices(arrays: Arrays, packs: bool) -> Calls:
    apart = _LIMIT // NUM_INDICES
    random = torch.randint(apart, (NUM_INDICES,), generator=arrays.generator, device=arrays.device)
    indices = (random + apart * torch.arange(NUM_INDICES, device=arrays.device)).int()
    words = arrays.empty(kernels.packed_words(_LIMIT, NUM_INDICES), torch.int32)
    back, scratch = torch.empty_like(indices), kernels.Scratch()

    def pack() -> None:
        kernels.pack_indices(indices, _LIMIT, words)

    def unpack() -> None:
        kernels.unpack_indices(words, _LIMIT, NUM_INDICES, back, scratch=scratch)

    def verify() -> None:
        for array in (words, back):
            array.zero_()
        pack()
        unpack()
        require(torch.equal(back, indices), "indices")

    pack()
    return Calls(pack if packs else unpack, lambda: back.copy_(indices), verify)
