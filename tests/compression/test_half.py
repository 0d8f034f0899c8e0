"""Scale that float16 buckets travel with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from pycomm.compression.methods.half import _room_of_sum

FLOAT32 = st.floats(min_value=2.0**-149, max_value=3.4028234663852886e38, width=32)


def scale_of(largest: float, size: int, *, inverse: bool = False, times: float = 1.0) -> float:
    """Return the factor by which a kernel multiplies where the ranks' ``largest`` magnitude is this."""
    scale = kernels.FittingScale(times, torch.tensor(largest), _room_of_sum(size), inverse)
    out = torch.empty(1, dtype=torch.float64)
    kernels.pack([torch.ones(1, dtype=torch.float64)], out, scale)
    return out.item()


@given(FLOAT32, st.integers(1, 4096))
def test_a_power_of_two_that_uses_float16_and_cannot_overflow(largest: float, size: int) -> None:
    scale = scale_of(largest, size)
    mantissa, exponent = math.frexp(scale)
    assert mantissa == 0.5
    assert largest * size * scale <= 2.0**15
    clamped = exponent - 1 in (-126, 126)
    assert clamped or largest * size * scale > 2.0**12
    assert scale_of(largest, size, inverse=True, times=3.0) == 3.0 / scale


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_what_cannot_be_scaled_is_left_alone(largest: float) -> None:
    assert scale_of(largest, 3) == 1.0
    assert scale_of(largest, 3, inverse=True, times=0.25) == 0.25


@pytest.mark.parametrize(
    ("scale", "says"),
    [((1.0, torch.ones(1)), "wanted a FittingScale"), ((1.0, torch.ones(1).double(), 3, False), "one float32")],
)
def test_a_scale_of_another_form(scale: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        kernels.pack([torch.ones(1)], torch.empty(1), scale)
