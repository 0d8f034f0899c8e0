"""absmax of every type, alignment and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from tests.kernels.reference import FLOATS, interesting, misaligned, simd

__all__ = ["simd"]


@pytest.mark.usefixtures("simd")
@given(n=st.integers(0, 200), offset=st.integers(0, 63), seed=st.integers(0, 99))
def test_absmax(n: int, offset: int, seed: int) -> None:
    x = interesting(n, torch.float32, seed)
    found = float(kernels.absmax([misaligned(x, offset), np.zeros(3, np.float16)]))
    if torch.isnan(x).any():
        assert np.isnan(found)
    else:
        assert found == (x.abs().max().item() if n else 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_absmax_of_every_type(dtype: torch.dtype) -> None:
    x = torch.randn(100_000).to(dtype)
    x[-1] = -77.0
    assert kernels.absmax([x]).item() == 77.0
    x[50] = float("nan")
    assert torch.isnan(kernels.absmax([torch.ones(3), x]))
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.absmax([])
