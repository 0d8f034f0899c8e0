"""Prepared steps are the steps of kernels/step.py, to the bit; also those that count, and that may find infinities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import step as steps
from pycomm.kernels.arrays import PackScaling, PreparedStep
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, simd
from tests.kernels.steps import KINDS, Given, Kind, clone, given

__all__ = ["gpu", "simd"]

SIZES = [5, 0, 1030, 1, 33]
TAKEN = 2.0  # steps before MOMENTS.step
WIDE = [torch.float32, torch.float64]


class HostGpu(Gpu):
    """The CPU, where kernels count and find as they do on a GPU."""

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        return clone(tensor)

    def get(self, array: torch.Tensor) -> torch.Tensor:
        return array


def coefficients_of(kind: Kind) -> Any:
    options = dict(kind.options)
    decay = options.pop("weight_decay", 0.0)
    if kind.rule == "momentum":
        momentum, dampening = (options.get(name, 0.0) for name in ("momentum", "dampening"))
        return steps.momentum_coefficients(options["lr"], momentum, dampening, decay, bool(options.get("nesterov")))
    if kind.rule == "adam":
        return steps.adam_coefficients(options["lr"], options["moments"], decay, options.get("decoupled", False))
    if kind.rule == "rmsprop":
        return steps.rmsprop_coefficients(
            options["lr"], options["alpha"], options["eps"], options.get("momentum", 0.0), decay
        )
    if kind.rule == "adagrad":
        return steps.adagrad_coefficients(options["lr"], options["eps"], decay)
    return steps.lamb_coefficients(options["moments"], decay)


def run(
    gpu: Gpu, now: Given, counts: list[Any] | None, scaling: PackScaling, scratch: Any = None, **shared: Any
) -> Any:
    """Take the step of ``now`` by a prepared one; return LAMB's squares."""
    lamb = now.kind.rule == "lamb"
    rule = "lamb_moments" if lamb else now.kind.rule
    c = coefficients_of(now.kind)
    prepared = PreparedStep(rule, now.weights, now.grads, now.copies, now.states, counts, **shared)
    if not lamb:
        prepared.step(rule, c, scaling, rates=now.rates, scratch=scratch)
        return None
    squares = gpu.put(torch.zeros(len(now.weights), 2, dtype=torch.float64))
    prepared.step("lamb_moments", c, scaling, squares=squares, scratch=scratch)
    prepared.step("lamb_apply", c, scaling, rates=now.rates)
    return squares


def counts_on(gpu: Gpu, *taken: float) -> list[Any]:
    return gpu.puts([torch.tensor(count) for count in taken])


def assert_same(gpu: Gpu, moved: Given, wanted: Given) -> None:
    for array, right in zip(moved.everything(), wanted.everything(), strict=True):
        assert_same_bits(gpu.get(array), right)


def check(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    before = given(name, SIZES, dtype)
    scratch = kernels.Scratch()
    for counts, more in ((None, {}), (counts_on(gpu, *[TAKEN] * len(SIZES)), {"found": gpu.put(torch.tensor(0.0))})):
        wanted, moved = before.moved(clone), before.moved(gpu.put)
        squares, found = wanted.run(), run(gpu, moved, counts, PackScaling(before.scale, **more), scratch)
        assert_same(gpu, moved, wanted)
        if found is not None:
            torch.testing.assert_close(gpu.get(found), squares, rtol=1e-12, atol=0.0)
        for count in counts or []:
            assert gpu.get(count).item() == TAKEN + 1


def check_found(gpu: Gpu, name: str) -> None:
    """Nothing happens, and nothing is counted."""
    before = given(name, SIZES, torch.float32)
    before.grads[0].fill_(torch.inf)
    moved, counts = before.moved(gpu.put), counts_on(gpu, *[TAKEN] * len(SIZES))
    for bad in (1.0, 2.0, torch.nan):
        run(gpu, moved, counts, PackScaling(1.0, gpu.put(torch.tensor(4.0)), gpu.put(torch.tensor(bad))))
        assert_same(gpu, moved, before)
        assert [gpu.get(count).item() for count in counts] == [TAKEN] * len(SIZES)


def check_divisor(gpu: Gpu, dtype: torch.dtype) -> None:
    for divisor in (1024.0, 3.0):
        before = given("amsgrad", SIZES, dtype)
        wanted, moved = replace(before.moved(clone), scale=0.7 / divisor), before.moved(gpu.put)
        wanted.run()
        run(gpu, moved, None, PackScaling(0.7, gpu.put(torch.tensor(divisor))))
        assert_same(gpu, moved, wanted)


def check_many_counts(gpu: Gpu, name: str) -> None:
    """Every parameter has a bias correction of its own, at every count that a float32 can have."""
    taken = [*range(40), 99, 355, 999, 9_999, 99_999, 2**24 - 1]
    for dtype, ulps in ((torch.float32, 0), (torch.float64, 8)):
        before = given(name, [3] * len(taken), dtype)
        moved = before.moved(gpu.put)
        run(gpu, moved, counts_on(gpu, *map(float, taken)), PackScaling(before.scale))
        for j, count in enumerate(taken):
            options = {**before.kind.options, "moments": replace(before.kind.options["moments"], step=count + 1)}
            one = Given(
                replace(before.kind, options=options),
                [before.weights[j]],
                [before.grads[j]],
                [None if arrays is None else [arrays[j]] for arrays in before.states],
                rates=None if before.rates is None else before.rates[j : j + 1],
                scale=before.scale,
            ).moved(clone)
            one.run()
            tolerance = ulps * torch.finfo(dtype).eps
            torch.testing.assert_close(gpu.get(moved.weights[j]), one.weights[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", KINDS)
def test_prepared(name: str, dtype: torch.dtype) -> None:
    check(HostGpu(), name, dtype)


@pytest.mark.pairwise
@requires_gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", KINDS)
def test_gpu_prepared(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    check(gpu, name, dtype)


@pytest.mark.parametrize("name", KINDS)
def test_found(name: str) -> None:
    check_found(HostGpu(), name)


@requires_gpu
@pytest.mark.parametrize("name", KINDS)
def test_gpu_found(gpu: Gpu, name: str) -> None:
    check_found(gpu, name)


@pytest.mark.parametrize("dtype", WIDE)
def test_divisor(dtype: torch.dtype) -> None:
    check_divisor(HostGpu(), dtype)


@requires_gpu
@pytest.mark.parametrize("dtype", WIDE)
def test_gpu_divisor(gpu: Gpu, dtype: torch.dtype) -> None:
    check_divisor(gpu, dtype)


@pytest.mark.parametrize("name", ["amsgrad", "lamb"])
def test_many_counts(name: str) -> None:
    check_many_counts(HostGpu(), name)


@requires_gpu
@pytest.mark.parametrize("name", ["amsgrad", "lamb"])
def test_gpu_many_counts(gpu: Gpu, name: str) -> None:
    check_many_counts(gpu, name)


@requires_gpu
@pytest.mark.skipif(not EMULATED, reason="counts the emulator's launches")
def test_gpu_launches(gpu: Gpu) -> None:
    """Counting takes one kernel more."""
    from tests.emulator.arrays import library

    moved, scratch = given("adam", [5] * 161, torch.float32).moved(gpu.put), kernels.Scratch()
    counts, found = counts_on(gpu, *[TAKEN] * 161), gpu.put(torch.tensor(0.0))

    def launches() -> int:
        before = library().emulator_num_launches()
        run(gpu, moved, counts, PackScaling(1.0, None, found), scratch)
        return library().emulator_num_launches() - before

    launches()
    assert [launches(), launches()] == [2, 2]


def test_what_is_refused() -> None:
    now = given("adam", [4, 3], torch.float32)
    prepare = partial(PreparedStep, "adam", now.weights, now.grads, now.copies, now.states)
    counts = [torch.zeros(()), torch.zeros(())]
    with pytest.raises(ValueError, match="counts has 1 elements, wanted 2: one for each of weights"):
        prepare(counts[:1])
    with pytest.raises(TypeError, match=r"counts\[1\] has dtype float64, wanted float32 as a count of steps"):
        prepare([counts[0], counts[1].double()])
    with pytest.raises(ValueError, match=r"counts\[1\] overlaps counts\[0\]"):
        prepare([counts[0], counts[0]])
    prepared, c = prepare(counts), coefficients_of(now.kind)
    with pytest.raises(TypeError, match="found has dtype int64, wanted float32"):
        prepared.step("adam", c, PackScaling(1.0, None, torch.tensor(1)))
    with pytest.raises(ValueError, match="divisor has 2 elements, wanted 1: one float32"):
        prepared.step("adam", c, PackScaling(1.0, torch.ones(2)))
    with pytest.raises(ValueError, match="wanted momentum, adam,"):
        prepared.step("adams", c, PackScaling())


@requires_gpu
def test_gpu_refuses_what_lies_elsewhere(gpu: Gpu) -> None:
    now = given("adam", [4, 3], torch.float32).moved(gpu.put)
    prepare = partial(PreparedStep, "adam", now.weights, now.grads, now.copies, now.states)
    with pytest.raises(ValueError, match=r"counts\[0\] is on cpu, weights\[0\] on cuda:0"):
        prepare([torch.zeros(()), torch.zeros(())])
    prepared, c = prepare(None), coefficients_of(now.kind)
    for scaling in (PackScaling(1.0, torch.ones(())), PackScaling(1.0, None, torch.ones(()))):
        with pytest.raises(ValueError, match="(divisor|found) is on cpu, weights on cuda:0"):
            prepared.step("adam", c, scaling)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("halves", [False, True])
def test_mirrors_are_copies_after(name: str, halves: bool, simd: str) -> None:
    now = given(name, SIZES, torch.float32)
    generator = torch.Generator().manual_seed(7)
    dtype = torch.bfloat16 if halves else torch.float32
    grads = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    copies = [torch.empty(n, dtype=dtype) for n in SIZES] if halves else None
    wanted = replace(now.moved(clone), grads=grads, copies=copies)
    run(HostGpu(), wanted, None, PackScaling(0.5))
    now = replace(now, grads=grads, copies=clone_all(copies))
    mirrors = [[torch.zeros(n + 1, dtype=dtype)[1:] for n in SIZES] for _ in range(2)]
    run(HostGpu(), now, None, PackScaling(0.5), mirrors=mirrors)
    assert_same(HostGpu(), now, wanted)
    written = now.weights if now.copies is None else now.copies
    for mirror in mirrors:
        for one, other in zip(mirror, written, strict=True):
            assert_same_bits(one, other)


def clone_all(arrays: list[Any] | None) -> list[Any] | None:
    return None if arrays is None else [clone(array) for array in arrays]


def test_mirrors_of_another_type_are_refused() -> None:
    weights, grads = [torch.ones(3)], [torch.ones(3)]
    with pytest.raises(TypeError, match=r"mirrors\[0\]"):
        PreparedStep("momentum", weights, grads, None, [], None, mirrors=[[torch.ones(3, dtype=torch.float64)]])
