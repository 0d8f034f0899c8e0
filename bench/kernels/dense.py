"""Kernels that touch every element: packing, summing, looking for extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from bench.kernels.case import (
    SCALE,
    Arrays,
    Calls,
    Case,
    require_equal,
    require_finite_check,
    require_written,
)
from pycomm import kernels

_AMP = "_amp_foreach_non_finite_check_and_unscale_"


def pack(n: int) -> Case:
    """Describe packing gradients into one array."""
    return Case("pack fp32 -> fp32", "_foreach_copy_", 8 * n, _pack)


def pack_half(n: int) -> Case:
    """Describe packing gradients into one array of float16, scaled and checked."""
    return Case("pack fp32 -> fp16, scale, finite", f"{_AMP} + _foreach_copy_", 6 * n, _pack_half)


def pack_by_cat(n: int) -> Case:
    """Describe packing gradients into one array of float16, against what a script would write."""
    return Case("pack fp32 -> fp16, finite", "cat(flatten) + half + isfinite + all", 6 * n, _pack_by_cat)


def unpack(n: int) -> Case:
    """Describe unpacking one array into gradients."""
    return Case("unpack fp32 -> fp32", "_foreach_copy_", 8 * n, _unpack)


def unpack_half(n: int) -> Case:
    """Describe unpacking one array of float16 into gradients, scaled."""
    return Case("unpack fp16 -> fp32, scale", "_foreach_copy_ + _foreach_mul_", 6 * n, _unpack_half)


def reduce(n: int, half: bool = False) -> Case:
    """Describe adding up four arrays; in float16, torch's side rounds each sum."""
    size, of = (2, " in fp16") if half else (4, "")
    return Case(f"reduce, 4 arrays{of}", "add(out) + add_ + add_", 5 * size * n, partial(_reduce, half=half))


def accumulate(n: int) -> Case:
    """Describe adding a gradient to a residual, and checking the sum."""
    return Case("accumulate, finite", f"add(out) + {_AMP}", 12 * n, _accumulate)


def absmax(n: int, by_norms: bool = False) -> Case:
    """Describe finding the largest magnitude, against torch's extremes or, which is faster on a GPU, its norms."""
    if by_norms:
        return Case("absmax", "_foreach_norm(inf) + max", 4 * n, _absmax_by_norms, floor="read")
    return Case("absmax", "aminmax of each", 4 * n, _absmax_by_extremes, floor="read")


def hashes(n: int) -> Case:
    """Describe hashing each gradient."""
    return Case("hashes of replicas", "view(int32).sum() of each", 4 * n, _hashes, floor="read")


def _pack(arrays: Arrays) -> Calls:
    grads, out, outs, scratch = arrays.grads, arrays.out, arrays.outs, kernels.Scratch()

    def ours() -> object:
        return kernels.pack(grads, out, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, grads)

    def verify() -> None:
        require_written(out, arrays.flat, (ours, peer), "pack fp32")
        require_finite_check(grads, ours, "pack fp32")

    return Calls(ours, peer, verify)


def _pack_half(arrays: Arrays) -> Calls:
    """Torch unscales in place: it gets gradients of its own, and a scale of 1 once its result has been verified."""
    grads, out, scratch = arrays.grads, torch.empty_like(arrays.half), kernels.Scratch()
    own, outs = [grad.clone() for grad in grads], arrays.views(out)
    found_inf, factor = torch.zeros(1, device=arrays.device), torch.ones(1, device=arrays.device)

    def ours() -> object:
        return kernels.pack(grads, out, SCALE, scratch=scratch)

    def peer() -> None:
        getattr(torch, _AMP)(own, found_inf, factor)
        torch._foreach_copy_(outs, own)

    def verify() -> None:
        torch._foreach_copy_(own, grads)
        factor.fill_(SCALE)
        require_written(out, (arrays.flat * SCALE).half(), (ours, peer), "pack fp16")
        factor.fill_(1.0)
        require_finite_check(grads, ours, "pack fp16")

    return Calls(ours, peer, verify)


def _pack_by_cat(arrays: Arrays) -> Calls:
    grads, out, scratch = arrays.grads, torch.empty_like(arrays.half), kernels.Scratch()

    def ours() -> object:
        return kernels.pack(grads, out, scratch=scratch)

    def peer() -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.cat([grad.flatten() for grad in grads]).half()
        return half, half.isfinite().all()

    def verify() -> None:
        wanted, finite = peer()
        if not bool(finite):
            raise AssertionError("pack by cat: torch finds gradients that are not finite")
        out.zero_()
        ours()
        require_equal(out, wanted, "pack against cat")
        require_finite_check(grads, ours, "pack against cat")

    return Calls(ours, peer, verify)


def _unpack(arrays: Arrays) -> Calls:
    flat, out, outs, scratch = arrays.flat, arrays.out, arrays.outs, kernels.Scratch()
    parts = arrays.views(flat)

    def ours() -> None:
        kernels.unpack(flat, outs, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, parts)

    return Calls(ours, peer, lambda: require_written(out, flat, (ours, peer), "unpack fp32"))


def _unpack_half(arrays: Arrays) -> Calls:
    flat, out, outs, scratch = arrays.half, arrays.out, arrays.outs, kernels.Scratch()
    parts = arrays.views(flat)

    def ours() -> None:
        kernels.unpack(flat, outs, SCALE, scratch=scratch)

    def peer() -> None:
        torch._foreach_copy_(outs, parts)
        torch._foreach_mul_(outs, SCALE)

    return Calls(ours, peer, lambda: require_written(out, flat.float() * SCALE, (ours, peer), "unpack fp16"))


def _reduce(arrays: Arrays, half: bool) -> Calls:
    inputs, out, scratch = [arrays.flat, *arrays.others], arrays.out, kernels.Scratch()
    if half:
        inputs, out = [array.half() for array in inputs], torch.empty_like(arrays.half)

    def ours() -> None:
        kernels.reduce(out, inputs, scratch=scratch)

    def peer() -> None:
        torch.add(inputs[0], inputs[1], out=out).add_(inputs[2]).add_(inputs[3])

    def verify() -> None:
        wide = [array.float() for array in inputs]
        wanted = (wide[0] + wide[1] + wide[2] + wide[3]).to(out.dtype)
        require_written(out, wanted, (ours,) if half else (ours, peer), "reduce")

    return Calls(ours, peer, verify)


def _accumulate(arrays: Arrays) -> Calls:
    residual, grad, out = arrays.others[0], arrays.flat, arrays.out
    found_inf, one = torch.zeros(1, device=arrays.device), torch.ones(1, device=arrays.device)

    def ours() -> object:
        return kernels.accumulate(out, residual, grad, SCALE)

    def peer() -> None:
        torch.add(residual, grad, alpha=SCALE, out=out)
        getattr(torch, _AMP)([out], found_inf, one)

    def verify() -> None:
        require_written(out, residual + grad * SCALE, (ours, peer), "accumulate")
        require_finite_check([grad], ours, "accumulate")

    return Calls(ours, peer, verify)


def _absmax_by_extremes(arrays: Arrays) -> Calls:
    def peer(grads: list[torch.Tensor]) -> torch.Tensor:
        extremes = [extreme for grad in grads for extreme in torch.aminmax(grad)]
        return torch.stack(extremes).abs().max()

    return _absmax(arrays, lambda: peer(arrays.grads))


def _absmax_by_norms(arrays: Arrays) -> Calls:
    return _absmax(arrays, lambda: torch.stack(torch._foreach_norm(arrays.grads, math.inf)).max())


def _absmax(arrays: Arrays, peer: Callable[[], torch.Tensor]) -> Calls:
    grads, scratch = arrays.grads, kernels.Scratch()

    def ours() -> torch.Tensor:
        largest: torch.Tensor = kernels.absmax(grads, scratch=scratch)
        return largest

    def verify() -> None:
        for call in (ours, peer):
            require_equal(call(), arrays.flat.abs().max(), "absmax")

    return Calls(ours, peer, verify)


def _hashes(arrays: Arrays) -> Calls:
    grads, scratch = arrays.grads, kernels.Scratch()

    def ours() -> torch.Tensor:
        found: torch.Tensor = kernels.hashes(grads, scratch=scratch)
        return found

    def peer() -> torch.Tensor:
        return torch.stack([grad.view(torch.int32).sum() for grad in grads])

    def verify() -> None:
        before, bits = ours(), grads[-2].view(-1).view(torch.int32)
        # Wherever an array lies, it has the hash that it has on the host.
        require_equal(before.cpu(), kernels.hashes([grad.cpu().clone() for grad in grads]), "hashes")
        bits[1] ^= 1
        seen = (ours() != before).nonzero().tolist()
        bits[1] ^= 1
        if seen != [[len(grads) - 2]]:
            raise AssertionError("hashes: a bit that changed is not seen, or elsewhere")

    return Calls(ours, peer, verify)
