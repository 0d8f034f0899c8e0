"""Scale that float16 buckets travel with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm.compression.codec import agreed_scale

FLOAT32 = st.floats(min_value=2.0**-149, max_value=3.4028234663852886e38, width=32)


@given(FLOAT32, st.integers(1, 4096))
def test_a_power_of_two_that_uses_float16_and_cannot_overflow(largest: float, size: int) -> None:
    scale = agreed_scale(torch.tensor(largest), size).item()
    mantissa, exponent = math.frexp(scale)
    assert mantissa == 0.5
    assert largest * size * scale <= 2.0**15
    clamped = exponent - 1 in (-126, 126)
    assert clamped or largest * size * scale > 2.0**12


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_what_cannot_be_scaled_is_left_alone(largest: float) -> None:
    scale = agreed_scale(torch.tensor(largest), 3)
    assert scale.item() == 1.0
    assert scale.dtype == torch.float32
