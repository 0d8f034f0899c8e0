"""A short run of the fuzz in tests/kernels/fuzz.py, and that its oracle notices kernels that are wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from tests.kernels import fuzz
from tests.kernels.fuzz_arrays import NUMPY, Slot
from tests.kernels.fuzz_calls import Call
from tests.kernels.fuzz_memory import GUARD, Rng, block_of, fences
from tests.kernels.fuzz_oracle import Violation, check

Kernel = Callable[..., Any]


@pytest.mark.parametrize("seed", range(5))
def test_calls(seed: int) -> None:
    for number in range(300):
        found = fuzz.run(seed, number)
        if found is not None:
            again = f"python -m tests.kernels.fuzz --seed {seed} --only {number}"
            pytest.fail(f"{found[0]}\n{fuzz.describe(found[1])}\n{again}")


def test_a_call_follows_from_its_number_alone() -> None:
    def told(number: int) -> tuple[str, list[list[int]], list[str]]:
        call = fuzz.generate(3, number)
        held = [slot.read().flatten().view(torch.uint8).tolist() for slot in call.slots if slot.count]
        return call.function, held, [str(slot.form) for slot in call.slots]

    first = [told(number) for number in range(20)]
    assert [told(number) for number in reversed(range(20))] == first[::-1]


def test_every_function_is_called() -> None:
    classes = {"Chunks", "Decay", "EntryLayout", "FittingScale", "Gathered", "LowRank", "Moments", "Momentum"}
    classes |= {"Quantization", "Scratch", "Taken"}
    assert set(fuzz.FUNCTIONS) == set(kernels.__all__) - classes - {"cuda_devices", "num_threads"}
    called = {fuzz.generate(0, number).function for number in range(1500)}
    assert called == set(fuzz.FUNCTIONS)


def _off_by_a_bit(real: Kernel) -> Kernel:
    def reduce(out: Any, inputs: Any, *rest: Any, **more: Any) -> None:
        real(out, inputs, *rest, **more)
        bits = np.frombuffer(out, np.uint8)
        if len(bits):
            bits[0] ^= 1

    return reduce


def _before_the_beginning(real: Kernel) -> Kernel:
    def reduce(out: Any, *rest: Any, **more: Any) -> None:
        real(out, *rest, **more)
        ctypes.c_uint8.from_address(out.ctypes.data - 1).value ^= 1

    return reduce


def _changes_an_input(real: Kernel) -> Kernel:
    def reduce(out: Any, inputs: Any, *rest: Any, **more: Any) -> None:
        real(out, inputs, *rest, **more)
        bits = np.frombuffer(inputs[0], np.uint8)
        if len(bits):
            bits[0] ^= 1

    return reduce


def _raises(error: Exception) -> Callable[[Kernel], Kernel]:
    def wrapped(real: Kernel) -> Kernel:
        def reduce(*_: Any, **__: Any) -> None:
            raise error

        return reduce

    return wrapped


def _refuses_late(real: Kernel) -> Kernel:
    def reduce(out: Any, inputs: Any, *rest: Any, **more: Any) -> None:
        bits = np.frombuffer(out, np.uint8)
        if len(bits):
            bits[0] ^= 1
        real(out, inputs, *rest, **more)

    return reduce


def _takes_anything(real: Kernel) -> Kernel:
    return lambda *_, **__: None


WRONG: dict[str, tuple[str, Callable[[Kernel], Kernel]]] = {
    "one bit": ("wrong result", _off_by_a_bit),
    "a guard": ("wrote where it must not", _before_the_beginning),
    "an input": ("wrote where it must not", _changes_an_input),
    "refuses all": ("refused a valid call with a ValueError", _raises(ValueError("out overlaps inputs[0]"))),
    "another error": ("raised a RuntimeError", _raises(RuntimeError("out"))),
    "no name": ("raised what names no argument", _raises(TypeError("wrong"))),
    "pybind11": ("raised what pybind11 says", _raises(TypeError("out: incompatible function arguments"))),
    "refuses late": ("wrote and then raised", _refuses_late),
    "takes anything": ("accepted what it must refuse", _takes_anything),
}


def _as_numpy(call: Call) -> bool:
    """Make the arrays numpy's, so that the wrong kernels above can get at their memory, if that can be."""

    def can_be(slot: Slot) -> bool:
        return slot.dtype in NUMPY and slot.is_dense and slot.block is not None and slot.block.owner is None

    if call.function != "reduce" or not all(can_be(slot) for slot in call.slots):
        return False
    for slot in call.slots:
        if "read-only" not in str(slot.form):
            slot.form = "numpy"
    return True


@pytest.mark.parametrize("name", WRONG)
def test_the_oracle_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, wrong = WRONG[name]
    monkeypatch.setattr(kernels, "reduce", wrong(kernels.reduce))
    seen: set[str] = set()
    for number in count():
        assert number < 5000, f"only {seen}"
        call = fuzz.generate(0, number)
        if not _as_numpy(call):
            continue
        try:
            check(call)
        except Violation as violation:
            seen.add(violation.kind)
        if kind in seen:
            return


def test_fences_and_guards() -> None:
    fences().restart()
    for size in (0, 1, 64, 5000):
        block = block_of(Rng(size), size)
        assert block.begin == GUARD
        assert len(block.memory) in (size + GUARD, size + 2 * GUARD)
    assert fences().take(1 << 20) is None
