"""What the kernels must compute, in torch operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import pycomm._native as _native

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ALL_DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)


def instruction_sets() -> list[str]:
    widest = _native.simd()
    return ["baseline", "avx2", "avx512"][: ["baseline", "avx2", "avx512"].index(widest) + 1]


@pytest.fixture(params=instruction_sets())
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once per instruction set of this machine."""
    widest = _native.simd()
    _native.select_simd(request.param)
    yield request.param
    _native.select_simd(widest)


def cast(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """``x * scale`` in float (double if either side is), then rounded to ``dtype``; doubles go to halves by float."""
    if torch.float64 in (x.dtype, dtype):
        wide = x.double() * scale
        return wide.to(dtype) if dtype in (torch.float64, torch.float32) else wide.float().to(dtype)
    return (x.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)


def assert_same_bits(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bit for bit, except that any NaN equals any NaN; signs of zeros count."""
    assert actual.dtype == wanted.dtype
    nan = torch.isnan(wanted) if wanted.is_floating_point() else torch.zeros_like(wanted, dtype=torch.bool)
    assert torch.equal(torch.isnan(actual) if actual.is_floating_point() else nan, nan)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    different = (actual.contiguous().view(bits) != wanted.contiguous().view(bits)) & ~nan
    where = different.nonzero().flatten()[:5].tolist()
    assert not where, f"at {where}: {actual.flatten()[where]} instead of {wanted.flatten()[where]}"


def interesting(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values over the whole range of float16 and beyond, with zeros, subnormals, infs and NaNs mixed in."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 20, (n,), generator=generator)
    values = torch.randn(n, generator=generator, dtype=torch.float64) * torch.exp2(exponents.double())
    special = torch.tensor(
        [
            *(0.0, -0.0, 65504.0, 65519.0, 65520.0, -65520.0, 6e-8, 3e-8, 2.9e-8, 1e-40, -1e-45, 3.39e38, 3.4028e38),
            *(float("inf"), -float("inf"), float("nan"), 1.0009765625, 1.00048828125, 1.00146484375),
        ],
        dtype=torch.float64,
    )
    where = torch.rand(n, generator=generator) < 0.2
    picks = special[torch.randint(0, len(special), (n,), generator=generator)]
    return torch.where(where, picks, values).to(dtype)


def misaligned(x: torch.Tensor, offset: int) -> np.ndarray:
    """A numpy copy of ``x`` whose memory begins ``offset`` bytes after a cache line."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    begin = (-raw.ctypes.data) % 64 + offset
    array = raw[begin : begin + x.nbytes].view(x.numpy().dtype)
    array[:] = x.numpy()
    return array


def pairs(dtypes: tuple[torch.dtype, ...]) -> list[tuple[torch.dtype, torch.dtype]]:
    return list(itertools.product(dtypes, dtypes))


def assert_refused(message: str, call: Callable[[], object]) -> None:
    """Assert that ``call`` raises ``message``: TypeError if it is about a type, else ValueError."""
    kind = TypeError if "dtype" in message or "is a" in message else ValueError
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)
