"""reduce against torch in higher precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from tests.kernels.reference import ALL_DTYPES, FLOATS, assert_same_bits, interesting, misaligned, simd

__all__ = ["simd"]


_OF_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
OPS = ("sum", "mean", "min", "max", "product", *_OF_BITS)


def is_defined(op: str, dtype: torch.dtype) -> bool:
    """Integers have no mean, floats no bits."""
    return op not in ("mean" if dtype not in FLOATS else "", *(_OF_BITS if dtype in FLOATS else ()))


def expected(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """In the order of the inputs; halves in float."""
    half = inputs[0].dtype in (torch.float16, torch.bfloat16)
    wide = [x.float() if half else x for x in inputs]
    total = wide[0].clone()
    for x in wide[1:]:
        if op in ("sum", "mean"):
            total = total + x
        elif op == "product":
            total = total * x
        elif op in _OF_BITS:
            total = _OF_BITS[op](total, x)
        else:
            best = torch.minimum(total, x) if op == "min" else torch.maximum(total, x)
            total = torch.where(total == x, x, best)  # of +0 and -0 the later one
    if op == "mean":
        total = total * torch.tensor(1.0 / len(inputs), dtype=total.dtype)
    return total.to(inputs[0].dtype)


def values(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return interesting(n, dtype, seed)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (n,), dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in ALL_DTYPES for op in OPS if is_defined(op, dtype)],
)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_type_and_operation(dtype: torch.dtype, op: str, count: int) -> None:
    for n in (0, 1, 31, 32, 33, 64, 1000):
        inputs = [values(n, dtype, seed=10 * n + i) for i in range(count)]
        out = torch.empty(n, dtype=dtype)
        kernels.reduce(out, inputs, op)
        assert_same_bits(out, expected(inputs, op))


@pytest.mark.usefixtures("simd")
@given(n=st.integers(0, 300), offsets=st.lists(st.integers(0, 63), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_any_alignment(n: int, offsets: list[int], seed: int) -> None:
    tensors = [interesting(n, torch.float32, seed + i) for i in range(len(offsets) - 1)]
    out = misaligned(torch.zeros(n), offsets[-1])
    kernels.reduce(out, [misaligned(t, offset) for t, offset in zip(tensors, offsets, strict=False)])
    assert_same_bits(torch.from_numpy(out.copy()), expected(tensors, "sum"))


def test_half_types_accumulate_in_float() -> None:
    inputs = [torch.full((100,), 2048.0, dtype=torch.float16)] + [torch.ones(100, dtype=torch.float16)] * 8
    out = torch.empty(100, dtype=torch.float16)
    kernels.reduce(out, inputs)
    assert torch.equal(out, torch.full((100,), 2056.0, dtype=torch.float16))  # adding ones in half would stay at 2048


@pytest.mark.parametrize("threads", [1, 2])
def test_in_place_large_and_threaded(threads: int) -> None:
    inputs = [torch.randn(5_000_003) for _ in range(3)]
    wanted = expected(inputs, "mean")
    kernels.set_num_threads(threads)
    try:
        kernels.reduce(inputs[1], inputs, "avg")
    finally:
        kernels.set_num_threads(None)
    assert_same_bits(inputs[1], wanted)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="inputs is empty"):
        kernels.reduce(torch.empty(3), [])
    with pytest.raises(TypeError, match=r"inputs\[0\] has dtype float64, wanted float32 as out"):
        kernels.reduce(torch.empty(3), [torch.ones(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"inputs\[0\] has 2 elements, wanted 3 as out"):
        kernels.reduce(torch.empty(3), [torch.ones(2)])
    with pytest.raises(TypeError, match="op 'mean' requires a floating dtype, out has int32"):
        kernels.reduce(torch.empty(3, dtype=torch.int32), [torch.ones(3, dtype=torch.int32)], "mean")
    with pytest.raises(TypeError, match="op 'band' requires an integer dtype, out has float32"):
        kernels.reduce(torch.empty(3), [torch.ones(3)], "band")
    with pytest.raises(ValueError, match="op is 'median', wanted"):
        kernels.reduce(torch.empty(3), [torch.ones(3)], "median")
