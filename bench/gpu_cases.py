"""The kernels that ``bench.gpu`` measures, and the best torch has for the same.

Written for any device, so that they can be verified where there is no GPU. A plan says what is
measured and how many bytes must move; it makes its memory when its turn comes, in as many copies as
the cache asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu_targets import COLD_READS, COPY, FOUR_TIMES, TEN_TIMES, WARM_READS, Target
from bench.resnet50 import Shape
from pycomm import kernels

_RATIOS = (0.001, 0.01)
_PIECES = 100  # tensors that the flat arrays are cut into
_SCALE = 0.5  # a power of two: results of both sides are then equal to the bit
_SECTOR = 32  # what a GPU reads and writes at least


class Source:
    """Where random arrays come from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, shape: int | Shape) -> torch.Tensor:
        size = (shape,) if isinstance(shape, int) else shape
        return torch.randn(size, generator=self.generator, device=self.device)

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Copy:
    """A call of ours and of the peer's on memory of their own.

    Attributes:
        verify: raises ``AssertionError`` if either is wrong.
    """

    ours: Callable[[], object]
    peer: Callable[[], object]
    verify: Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """One line of the table.

    Attributes:
        bytes: what has to move, whoever does it, each byte once.
        make: that many copies.
    """

    name: str
    elements: int
    bytes: int
    peer_name: str
    make: Callable[[Source, int], list[Copy]]
    target: Target | None = None


def make_plans(small: int, large: int, shapes: Sequence[Shape]) -> list[Plan]:
    """All of them, in the order of the table: gradients of these shapes, and arrays of two sizes."""
    plans = _resnet50(shapes)
    for n in (small, large):
        plans += [*_dense(n, COPY if n == large else None), *_sparse(n, n == large)]
    return plans


def _dense(n: int, target: Target | None) -> list[Plan]:
    amp = "_amp_foreach_non_finite_check_and_unscale_"
    return [
        Plan("pack fp32 -> fp32, finite", n, 8 * n, "_foreach_copy_", _each(_pack, n)),
        Plan("pack fp32 -> fp16, scale, finite", n, 6 * n, f"{amp} + _foreach_copy_", _each(_pack_half, n), target),
        Plan("unpack fp32 -> fp32", n, 8 * n, "_foreach_copy_", _each(_unpack, n), target),
        Plan("unpack fp16 -> fp32, scale", n, 6 * n, "_foreach_copy_ + _foreach_mul_", _each(_unpack_half, n), target),
        Plan("reduce, 4 arrays", n, 20 * n, "add(out) + add_ + add_", _each(_reduce, n), target),
        Plan("accumulate, finite", n, 12 * n, f"add(out) + {amp}", _each(_accumulate, n)),
        Plan("absmax", n, 4 * n, "_foreach_norm(inf) + max", _each(_absmax, n)),
        Plan("hashes", n, 4 * n, "view(int32).sum() of each", _each(_hashes, n)),
    ]


def _sparse(n: int, large: bool) -> list[Plan]:
    plans = []
    for ratio in _RATIOS:
        cold, warm = (COLD_READS, WARM_READS) if large else (TEN_TIMES if ratio == _RATIOS[0] else None, None)
        for name, is_warm, target in (("cold", False, cold), ("warm", True, warm)):
            make = partial(_topk, n, _share(n, ratio), is_warm)
            plans.append(Plan(f"topk {100 * ratio:g} %, {name}", n, 4 * n, "topk(x.abs(), k)", make, target))
    for ratio in _RATIOS:
        make = partial(_scatter_add, n, _share(n, ratio))
        plans.append(Plan(f"scatter_add {100 * ratio:g} %", n, _scatter_bytes(n, ratio), "scatter_add_", make))
    return plans


def _resnet50(shapes: Sequence[Shape]) -> list[Plan]:
    n = sum(math.prod(shape) for shape in shapes)
    name = f"pack {len(shapes)} gradients of ResNet-50, fp32 -> fp16, finite"
    amp = "_amp_foreach_non_finite_check_and_unscale_ + _foreach_copy_"
    return [
        Plan(name, n, 6 * n, "cat(flatten) + half + isfinite + all", _each(_pack_by_cat, shapes), FOUR_TIMES),
        Plan(f"{name}, scale", n, 6 * n, amp, _each(_pack_half_of, shapes)),
    ]


def _each(one: Callable[..., Copy], what: object) -> Callable[[Source, int], list[Copy]]:
    """Copies that share nothing."""

    def make(source: Source, count: int) -> list[Copy]:
        return [one(source, what) for _ in range(count)]

    return make


def _share(n: int, ratio: float) -> int:
    return max(1, round(ratio * n))


def _scatter_bytes(n: int, ratio: float) -> int:
    """Indices and values once, and each sector that holds one of the places there and back (how many, on average)."""
    per_sector = _SECTOR // 4
    sectors = n / per_sector * (1 - (1 - ratio) ** per_sector)
    return round(8 * _share(n, ratio) + 2 * _SECTOR * sectors)


def _cut(flat: torch.Tensor, shapes: Sequence[Shape] | None = None) -> list[torch.Tensor]:
    """Views of ``flat``, one after the other: of these shapes, or of equal lengths."""
    if shapes is None:
        return list(torch.split(flat, -(-flat.numel() // _PIECES)))
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _require_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(got, wanted):
        differ = int((got != wanted).sum()) if got.shape == wanted.shape else got.numel()
        raise AssertionError(f"{what}: {differ} of {wanted.numel()} elements are wrong")


def _require_written(out: torch.Tensor, wanted: torch.Tensor, calls: Sequence[Callable[[], object]], what: str) -> None:
    """Each of ``calls`` fills ``out`` with ``wanted``."""
    for call, side in zip(calls, ("ours", "torch's"), strict=True):
        out.zero_()
        call()
        _require_equal(out, wanted, f"{what}, {side}")


def _require_finite_check(tensors: Sequence[torch.Tensor], call: Callable[[], object], what: str) -> None:
    """``call`` returns whether ``tensors`` are finite: one infinity must be seen, and none where there is none."""
    place = tensors[-1].view(-1)[-1:]
    kept = place.clone()
    place.fill_(math.inf)
    seen = not bool(call())
    place.copy_(kept)
    if not seen or not bool(call()):
        raise AssertionError(f"{what}: the finite check is wrong")


def _pack(source: Source, n: int) -> Copy:
    flat, out, scratch = source.normal(n), source.empty(n), kernels.Scratch()
    pieces, outs = _cut(flat), _cut(out)

    def ours() -> object:
        return kernels.pack(pieces, out, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, pieces)

    def verify() -> None:
        _require_written(out, flat, (ours, peer), "pack fp32")
        _require_finite_check(pieces, ours, "pack fp32")

    return Copy(ours, peer, verify)


def _pack_half(source: Source, n: int) -> Copy:
    return _scaled_pack(source, _cut(source.normal(n)))


def _pack_half_of(source: Source, shapes: Sequence[Shape]) -> Copy:
    return _scaled_pack(source, [source.normal(shape) for shape in shapes])


def _scaled_pack(source: Source, tensors: list[torch.Tensor]) -> Copy:
    """Torch unscales in place: it gets tensors of its own, and a scale of 1 once its result has been verified."""
    count = sum(tensor.numel() for tensor in tensors)
    out, scratch = source.empty(count, torch.float16), kernels.Scratch()
    own = [tensor.clone() for tensor in tensors]
    outs = _cut(out, [tuple(tensor.shape) for tensor in tensors])
    found_inf, factor = torch.zeros(1, device=source.device), torch.ones(1, device=source.device)

    def ours() -> object:
        return kernels.pack(tensors, out, _SCALE, scratch=scratch)

    def peer() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, factor)
        torch._foreach_copy_(outs, own)

    def verify() -> None:
        wanted = (torch.cat([tensor.view(-1) for tensor in tensors]) * _SCALE).half()
        torch._foreach_copy_(own, tensors)
        factor.fill_(_SCALE)
        _require_written(out, wanted, (ours, peer), "pack fp16")
        factor.fill_(1.0)
        _require_finite_check(tensors, ours, "pack fp16")

    return Copy(ours, peer, verify)


def _pack_by_cat(source: Source, shapes: Sequence[Shape]) -> Copy:
    grads = [source.normal(shape) for shape in shapes]
    out, scratch = source.empty(sum(grad.numel() for grad in grads), torch.float16), kernels.Scratch()

    def ours() -> object:
        return kernels.pack(grads, out, scratch=scratch)

    def peer() -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.cat([grad.flatten() for grad in grads]).half()
        return half, half.isfinite().all()

    def verify() -> None:
        wanted, finite = peer()
        if not bool(finite):
            raise AssertionError("pack by cat: torch finds gradients that are not finite")
        ours()
        _require_equal(out, wanted, "pack against cat")
        _require_finite_check(grads, ours, "pack against cat")

    return Copy(ours, peer, verify)


def _unpack(source: Source, n: int) -> Copy:
    flat, out, scratch = source.normal(n), source.empty(n), kernels.Scratch()
    parts, outs = _cut(flat), _cut(out)

    def ours() -> None:
        kernels.unpack(flat, outs, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, parts)

    return Copy(ours, peer, lambda: _require_written(out, flat, (ours, peer), "unpack fp32"))


def _unpack_half(source: Source, n: int) -> Copy:
    flat, out, scratch = source.normal(n).half(), source.empty(n), kernels.Scratch()
    parts, outs = _cut(flat), _cut(out)

    def ours() -> None:
        kernels.unpack(flat, outs, _SCALE, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, parts)
        torch._foreach_mul_(outs, _SCALE)

    return Copy(ours, peer, lambda: _require_written(out, flat.float() * _SCALE, (ours, peer), "unpack fp16"))


def _reduce(source: Source, n: int) -> Copy:
    inputs, out, scratch = [source.normal(n) for _ in range(4)], source.empty(n), kernels.Scratch()

    def ours() -> None:
        kernels.reduce(out, inputs, scratch=scratch)

    def peer() -> None:
        torch.add(inputs[0], inputs[1], out=out).add_(inputs[2]).add_(inputs[3])

    def verify() -> None:
        _require_written(out, inputs[0] + inputs[1] + inputs[2] + inputs[3], (ours, peer), "reduce")

    return Copy(ours, peer, verify)


def _accumulate(source: Source, n: int) -> Copy:
    residual, grad, out = source.normal(n), source.normal(n), source.empty(n)
    found_inf, one = torch.zeros(1, device=source.device), torch.ones(1, device=source.device)

    def ours() -> object:
        return kernels.accumulate(out, residual, grad, _SCALE)

    def peer() -> None:
        torch.add(residual, grad, alpha=_SCALE, out=out)
        torch._amp_foreach_non_finite_check_and_unscale_([out], found_inf, one)

    def verify() -> None:
        _require_written(out, residual + grad * _SCALE, (ours, peer), "accumulate")
        _require_finite_check([grad], ours, "accumulate")

    return Copy(ours, peer, verify)


def _absmax(source: Source, n: int) -> Copy:
    flat, scratch = source.normal(n), kernels.Scratch()
    pieces = _cut(flat)

    def ours() -> torch.Tensor:
        largest: torch.Tensor = kernels.absmax(pieces, scratch=scratch)
        return largest

    def peer() -> torch.Tensor:
        return torch.stack(torch._foreach_norm(pieces, math.inf)).max()

    def verify() -> None:
        for call in (ours, peer):
            _require_equal(call(), flat.abs().max(), "absmax")

    return Copy(ours, peer, verify)


def _hashes(source: Source, n: int) -> Copy:
    pieces, scratch = _cut(source.normal(n)), kernels.Scratch()

    def ours() -> torch.Tensor:
        found: torch.Tensor = kernels.hashes(pieces, scratch=scratch)
        return found

    def peer() -> torch.Tensor:
        return torch.stack([piece.view(torch.int32).sum() for piece in pieces])

    def verify() -> None:
        found = ours()
        if len(set(found.flatten().tolist())) != len(pieces):
            raise AssertionError("hashes: different arrays have one")
        # Wherever an array lies, it has the hash that it has on the host.
        _require_equal(found.cpu(), kernels.hashes([piece.cpu() for piece in pieces]), "hashes")

    return Copy(ours, peer, verify)


def _topk(n: int, k: int, warm: bool, source: Source, count: int) -> list[Copy]:
    """Warm: all copies share the threshold, as the similar arrays of successive steps do."""
    threshold, scratch = (torch.zeros((), device=source.device) if warm else None), kernels.Scratch()
    return [_topk_copy(source, n, k, threshold, scratch) for _ in range(count)]


def _topk_copy(source: Source, n: int, k: int, threshold: torch.Tensor | None, scratch: kernels.Scratch) -> Copy:
    x, out = source.normal(n), (source.empty(k), source.empty(k, torch.int32))

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
            _require_equal(out[1].long(), wanted, "topk indices")
            _require_equal(out[0], x[wanted], "topk values")

    return Copy(ours, peer, verify)


def _scatter_add(n: int, k: int, source: Source, count: int) -> list[Copy]:
    """So few places that the cache would hold them: many sets of places, in two arrays."""
    outs, scratch = [source.normal(n) for _ in range(2)], kernels.Scratch()
    return [_scatter_add_copy(source, outs[i % 2], k, scratch) for i in range(count)]


def _scatter_add_copy(source: Source, out: torch.Tensor, k: int, scratch: kernels.Scratch) -> Copy:
    """Both sides add to the same places, each once and in ascending order; torch wants them as int64."""
    places = torch.randint(out.numel(), (k,), generator=source.generator, device=source.device)
    wide = places.unique(sorted=True)
    indices, values = wide.int(), source.normal(wide.numel())

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
            _require_equal(out, wanted, "scatter_add")

    return Copy(ours, peer, verify)
