"""Steps of optimizers: the CPU's against their formulas and torch.optim; a GPU's against the CPU's, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import pycomm._native as _native
from pycomm import kernels
from tests.kernels import bucket
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, instruction_sets, misaligned, simd
from tests.kernels.steps import KINDS, MOMENTS, Given, clone, given

__all__ = ["gpu", "simd"]

SIZES = [0, 1, 3, 15, 16, 17, 31, 32, 33, 700, 0, 130, 2]
BIG = [16_383, 5, 16_384, 16_385, 33_001]
"""Around the blocks that the CPU works on."""
WIDE = [torch.float32, torch.float64]


def check(before: Given) -> None:
    """On the CPU."""
    wanted, squares = before.wanted()
    now = before.moved(clone)
    found = now.run()
    for array, right in zip(now.everything(), wanted, strict=True):
        assert_same_bits(array, right)
    if found is not None:
        torch.testing.assert_close(found, squares, rtol=1e-12, atol=0.0, equal_nan=True)


def assert_same(gpu: Gpu, moved: Given, wanted: Given) -> None:
    for array, right in zip(moved.everything(), wanted.everything(), strict=True):
        assert_same_bits(gpu.get(array), right)


def check_on_gpu(gpu: Gpu, before: Given, scratch: kernels.Scratch | None = None) -> None:
    now, moved = before.moved(clone), before.moved(gpu.put)
    squares, found = now.run(), moved.run(scratch)
    assert_same(gpu, moved, now)
    if found is not None:
        torch.testing.assert_close(gpu.get(found), squares, rtol=1e-12, atol=0.0, equal_nan=True)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", KINDS)
def test_against_the_formulas(name: str, dtype: torch.dtype) -> None:
    for sizes in ([0], [1], SIZES, BIG):
        check(given(name, sizes, dtype))
    check(given(name, SIZES, dtype, gap=1))
    check(given(name, SIZES, dtype, special=True))


@hypothesis.given(
    name=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(WIDE),
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
    special=st.booleans(),
)
def test_anything(name: str, dtype: torch.dtype, sizes: list[int], gap: int, seed: int, special: bool) -> None:
    check(given(name, sizes, dtype, gap, special, seed))


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RMSPROP, ADAGRAD = torch.optim.RMSprop, torch.optim.Adagrad
_OF_RMSPROP = {"lr": 0.02, "alpha": 0.9, "eps": 1e-6}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD, momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.01}),
    "SGD, Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD, maximize": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": True}),
    "Adam": (ADAM, {"lr": 0.02}),
    "Adam, decay": (ADAM, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}),
    "AMSGrad": (ADAM, {"lr": 0.02, "betas": (0.5, 0.6), "amsgrad": True}),
    "AdamW": (ADAMW, {"lr": 0.02, "weight_decay": 0.1}),
    "AdamW, AMSGrad": (ADAMW, {"lr": 0.02, "betas": (0.5, 0.6), "weight_decay": 0.1, "amsgrad": True}),
    "RMSprop": (RMSPROP, _OF_RMSPROP),
    "RMSprop, momentum": (RMSPROP, {**_OF_RMSPROP, "momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop, centered": (RMSPROP, {**_OF_RMSPROP, "centered": True}),
    "RMSprop, both": (RMSPROP, {**_OF_RMSPROP, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (ADAGRAD, {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01}),
}


class OneStep:
    """Of ours, with the options of torch's."""

    def __init__(self, kind: type[torch.optim.Optimizer], options: dict[str, Any], weights: list[torch.Tensor]) -> None:
        self.kind = kind
        self.options = dict(options)
        self.weights = weights
        self.steps = 0
        self.scale = -1.0 if self.options.pop("maximize", False) else 1.0
        third = self.options.pop("amsgrad", False) or self.options.pop("centered", False)
        has = {SGD: ["momentum" in options], RMSPROP: [True, "momentum" in options, third], ADAGRAD: [True]}.get(
            kind, [True, True, third]
        )
        self.states: list[Any] = [[torch.zeros_like(weight) for weight in weights] if there else None for there in has]

    def __call__(self, grads: list[torch.Tensor]) -> None:
        self.steps += 1
        step: Callable[..., None]
        options = dict(self.options)
        if self.kind is SGD:
            step = kernels.momentum_step
            if self.steps == 1:
                options.pop("dampening", None)  # torch begins with the whole gradient
        elif self.kind in (RMSPROP, ADAGRAD):
            step = kernels.rmsprop_step if self.kind is RMSPROP else kernels.adagrad_step
        else:
            moments = kernels.Moments(options.pop("betas", (0.9, 0.999)), options.pop("eps", 1e-8), self.steps)
            step = partial(kernels.adam_step, moments=moments, decoupled=self.kind is ADAMW)
        step(self.weights, grads, *self.states, scale=self.scale, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_torch(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(2)
    parameters = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 33, 1)]
    ours = OneStep(kind, options, [parameter.clone() for parameter in parameters])
    floats = OneStep(kind, options, [parameter.float() for parameter in parameters])
    theirs = kind(parameters, **options, foreach=False)
    for _ in range(40):
        grads = [weight.sin() + torch.randn(weight.shape, generator=generator) for weight in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        theirs.step()
        ours(grads)
        floats(grads)
    torch.testing.assert_close(ours.weights, parameters, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(floats.weights, [parameter.float() for parameter in parameters], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["nesterov", "amsgrad", "rmsprop centered", "lamb"])
def test_neither_threads_nor_instructions_change_the_bits(name: str) -> None:
    before = given(name, BIG, torch.float32)
    results = []
    widest = _native.simd()
    try:
        for set_name in instruction_sets():
            _native.select_simd(set_name)
            for threads in (1, 2, 3):
                kernels.set_num_threads(threads)
                now = before.moved(clone)
                squares = now.run()
                results.append(now.everything() + ([] if squares is None else [squares]))
    finally:
        _native.select_simd(widest)
        kernels.set_num_threads(None)
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert_same_bits(same, one)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_are_the_new_weights(name: str, dtype: torch.dtype) -> None:
    now = given(name, SIZES, torch.float32, special=True)
    now = replace(now, copies=[torch.full_like(weight, 77.0, dtype=dtype) for weight in now.weights])
    without = replace(now, copies=None).moved(clone)
    now.run()
    without.run()
    assert now.copies is not None
    for copy, weight, other in zip(now.copies, now.weights, without.weights, strict=True):
        assert_same_bits(copy, weight.to(dtype))
        assert_same_bits(weight, other)


def test_scale_and_rates() -> None:
    """A scale is a number or an array, and multiplies gradients alone; all rates are 1 where there are none."""
    before = given("nesterov", SIZES, torch.float32)
    results = []
    for scale in (0.37, torch.tensor(0.37), np.float32(0.37).reshape(1)):
        now = replace(before.moved(clone), scale=scale)
        now.run()
        results.append(now.everything())
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert_same_bits(same, one)
    check(replace(before, rates=None))
    check(replace(before, rates=torch.ones(len(SIZES)).double()))


def test_arrays_of_any_shape_and_strided_gradients() -> None:
    weights, grad = np.ones((3, 5), np.float32), torch.arange(15.0).view(5, 3).t()
    kernels.momentum_step([weights], [grad], lr=1.0)
    assert np.array_equal(weights, 1 - grad.numpy())


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", [1, 7, 31, 33, 16_385])
def test_lamb_without_eps(size: int, dtype: torch.dtype) -> None:
    """What lies behind the end of an array, where the direction is 0 / 0, is no part of its squares."""
    weights, grads = [torch.randn(size).to(dtype)], [torch.ones(size)]
    states = [[torch.zeros(size).to(dtype)] for _ in range(2)]
    squares = kernels.lamb_moments(weights, grads, *states, moments=kernels.Moments((0.9, 0.99), 0.0, 1))
    wanted = torch.stack([weights[0].double().square().sum(), torch.tensor(size).double()])
    torch.testing.assert_close(squares[0], wanted, rtol=1e-5, atol=0.0)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_lamb_marks_what_is_not_finite(bad: float) -> None:
    for place in (0, 31, 32, 16_384, 16_389):
        now = given("lamb", [16_390] * 3, torch.float32)
        now.grads[1][place] = bad
        assert now.run().isfinite().tolist() == [[True, True], [True, False], [True, True]]
        now = given("lamb", [16_390] * 3, torch.float32)
        now.weights[1][place] = bad
        assert now.run().isfinite().tolist() == [[True, True], [False, False], [True, True]]


def test_lamb_moments_leave_weights() -> None:
    before = given("lamb", SIZES, torch.float32)
    now = before.moved(clone)
    kernels.lamb_moments(now.weights, now.grads, *now.states, **now.kind.options)
    for weight, old in zip(now.weights, before.weights, strict=True):
        assert_same_bits(weight, old)


def _read_only() -> np.ndarray:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


F = torch.zeros
BAD: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "weights is empty": (ValueError, {"weights": []}),
    "weights is a int": (TypeError, {"weights": 3}),
    "weights[0] has dtype float16, wanted float32 or float64": (TypeError, {"weights": [F(4).half(), F(2).half()]}),
    "weights[1] has dtype float64, wanted float32 as weights[0]": (TypeError, {"weights": [F(4), F(2).double()]}),
    "weights[1] is not contiguous": (ValueError, {"weights": [F(4), F(4)[::2]]}),
    "weights[0] is read-only": (ValueError, {"weights": [_read_only(), F(2)]}),
    "weights[0] is not aligned to its elements": (ValueError, {"weights": [misaligned(F(4), 2), F(2)]}),
    "grads is None, wanted one array for each of weights": (TypeError, {"grads": None}),
    "grads has 1 elements, wanted 2: one for each of weights": (ValueError, {"grads": [F(4)]}),
    "grads[1] has 3 elements, wanted 2: as its weight has": (ValueError, {"grads": [F(4), F(3)]}),
    "grads[1] has dtype int32, wanted float32, float16": (TypeError, {"grads": [F(4), F(2).int()]}),
    "grads[0] is not aligned to its elements": (ValueError, {"grads": [misaligned(F(4), 1), F(2)]}),
    "exp_avgs is None": (TypeError, {"exp_avgs": None}),
    "exp_avg_sqs has 3 elements, wanted 2": (ValueError, {"exp_avg_sqs": [F(4)] * 3}),
    "exp_avg_sqs[0] has 2 elements, wanted 4": (ValueError, {"exp_avg_sqs": [F(2), F(4)]}),
    "exp_avg_sqs[1] has dtype float64, wanted float32 as w": (TypeError, {"exp_avg_sqs": [F(4), F(2).double()]}),
    "max_exp_avg_sqs[1] is not contiguous": (ValueError, {"max_exp_avg_sqs": [F(4), F(4)[::2]]}),
    "copies[0] has dtype float32, wanted float16 or bfloat16": (TypeError, {"copies": [F(4), F(2)]}),
    "copies[1] has 4 elements, wanted 2": (ValueError, {"copies": [F(4).half(), F(4).half()]}),
    "scale has 2 elements, wanted 1": (ValueError, {"scale": F(2)}),
    "scale has dtype float64, wanted float32": (TypeError, {"scale": F(1).double()}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    kind, changed = BAD[message]
    arguments: dict[str, Any] = {
        **{name: [F(4), F(2)] for name in ("weights", "exp_avgs", "exp_avg_sqs")},
        "grads": [torch.ones(4), torch.ones(2)],
        **changed,
    }
    with pytest.raises(kind) as raised:
        kernels.adam_step(**arguments, lr=0.1, moments=MOMENTS)
    assert message in str(raised.value)
    for name in ("weights", "exp_avgs", "exp_avg_sqs"):
        assert arguments[name] in (None, 3) or not any(np.asarray(array).any() for array in arguments[name])


def test_other_bad_arguments() -> None:
    doubles, halves = [F(4).double()], [F(4).half()]
    with pytest.raises(TypeError, match=r"copies\[0\] has dtype float16, wanted .* copies of float32 weights"):
        kernels.momentum_step(doubles, [F(4)], lr=0.1, copies=halves)
    with pytest.raises(TypeError, match="rates has dtype float32, wanted float64 as one float64 for each of weights"):
        kernels.momentum_step([F(4)], [F(4)], lr=0.1, rates=F(1))
    with pytest.raises(ValueError, match="rates has 2 elements, wanted 1: one float64 for each of weights"):
        kernels.lamb_apply([F(4)], [F(4)], [F(4)], F(2).double(), moments=MOMENTS)
    with pytest.raises(TypeError, match="square_avgs is None"):
        kernels.rmsprop_step([F(4)], [F(4)], None, lr=0.1, alpha=0.9, eps=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum_buffers has 2 elements, wanted 1"):
        kernels.rmsprop_step([F(4)], [F(4)], [F(4)], [F(4)] * 2, lr=0.1, alpha=0.9, eps=0.1)
    with pytest.raises(ValueError, match=r"buffers\[0\] has 3 elements, wanted 4"):
        kernels.momentum_step([F(4)], [F(4)], [F(3)], lr=0.1)
    with pytest.raises(ValueError, match="weights is empty"):
        kernels.lamb_moments([], [], [], [], moments=MOMENTS)


@pytest.mark.pairwise
@requires_gpu
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", KINDS)
def test_gpu(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    check_on_gpu(gpu, given(name, bucket.SIZES, dtype))
    check_on_gpu(gpu, given(name, [2049, 3], dtype, gap=1, special=True))


@requires_gpu
@pytest.mark.parametrize("name", ["nesterov", "amsgrad", "lamb"])
def test_gpu_sizes_and_alignments(gpu: Gpu, name: str) -> None:
    for sizes in ([0], [1], [0, 0, 1], [4095], [4096, 0], [4097], [511, 512, 513, 3072]):
        check_on_gpu(gpu, given(name, sizes, torch.float32))
    for gap in (1, 2, 3, 4):
        check_on_gpu(gpu, given(name, [1030, 5, 700, 1021], torch.float32, gap=gap))
    before = given(name, [1030, 5, 700, 1021], torch.float32)
    mixed = given(name, [1030, 5, 700, 1021], torch.float32, gap=1)
    check_on_gpu(gpu, replace(before, grads=mixed.grads, copies=mixed.copies))


@requires_gpu
def test_gpu_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    sizes = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    now = given("lamb", sizes, torch.float32)
    moved = now.moved(gpu.put)
    for _ in range(3):  # the table is there already from the second one on
        now.run()
        moved.run(scratch)
        assert_same(gpu, moved, now)
    check_on_gpu(gpu, given("momentum", [7, 3], torch.float32), scratch)


@requires_gpu
@pytest.mark.skipif(not EMULATED, reason="counts the emulator's launches")
@pytest.mark.parametrize(("name", "wanted"), [("sgd", 1), ("amsgrad", 1), ("rmsprop centered", 1)])
def test_gpu_launches(gpu: Gpu, name: str, wanted: int) -> None:
    """ResNet-50's number of arrays: one kernel, and others before it that bring the addresses when they are new."""
    from tests.emulator.arrays import library

    moved, scratch = given(name, [5] * 161, torch.float32).moved(gpu.put), kernels.Scratch()

    def launches() -> int:
        before = library().emulator_num_launches()
        moved.run(scratch)
        return library().emulator_num_launches() - before

    tables = -(-(161 * (3 + sum(KINDS[name].states)) + 1) // 160)
    assert [launches(), launches(), launches()] == [tables + wanted, wanted, wanted]


@requires_gpu
@pytest.mark.parametrize("dtype", WIDE)
def test_gpu_reads_scale_and_rates_on_the_device(gpu: Gpu, dtype: torch.dtype) -> None:
    now = given("nesterov", bucket.SIZES, dtype)
    moved = replace(now.moved(gpu.put), scale=gpu.put(torch.tensor(0.37)))
    replace(now, scale=torch.tensor(0.37)).run()
    moved.run()
    assert_same(gpu, moved, now)


@requires_gpu
def test_gpu_lamb_without_eps(gpu: Gpu) -> None:
    weights, grads = [torch.randn(n) for n in (7, 1030)], [torch.ones(n) for n in (7, 1030)]
    states = [[torch.zeros(n) for n in (7, 1030)] for _ in range(2)]
    moments = kernels.Moments((0.9, 0.99), 0.0, 1)
    squares = kernels.lamb_moments(
        gpu.puts(weights), gpu.puts(grads), *[gpu.puts(state) for state in states], moments=moments
    )
    wanted = kernels.lamb_moments(weights, grads, *states, moments=moments)
    torch.testing.assert_close(gpu.get(squares), wanted, rtol=1e-12, atol=0.0)


@requires_gpu
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gpu_lamb_marks_what_is_not_finite(gpu: Gpu, bad: float) -> None:
    for j, place in ((0, 0), (1, 2), (2, 4800), (3, 699)):
        now = given("lamb", [300, 3, 5000, 700], torch.float32)
        now.grads[j][place] = bad
        squares = gpu.get(now.moved(gpu.put).run())
        assert squares.isfinite().tolist() == [[True, k != j] for k in range(4)]


@requires_gpu
def test_gpu_mixed_devices(gpu: Gpu) -> None:
    weights, ones = [gpu.put(F(4))], [torch.ones(4)]
    with pytest.raises(
        ValueError, match=r"grads\[0\] is on cpu, weights\[0\] on cuda:0; wanted all arrays on one device"
    ):
        kernels.momentum_step(weights, ones, lr=0.1)
    with pytest.raises(ValueError, match=r"weights\[0\] is on cpu, .* on cuda:0|grads\[0\] is on cuda:0, .* on cpu"):
        kernels.momentum_step(ones, weights, lr=0.1)
    with pytest.raises(ValueError, match=r"rates is on cpu, weights\[0\] on cuda:0"):
        kernels.momentum_step(weights, gpu.puts(ones), lr=0.1, rates=torch.ones(1).double())
    with pytest.raises(ValueError, match="scale is on cuda:0, .* on cpu"):
        kernels.momentum_step([F(4)], ones, lr=0.1, scale=gpu.put(F(1)))
    assert not gpu.get(weights[0]).any()
