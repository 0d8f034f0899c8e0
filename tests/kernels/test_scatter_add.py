"""scatter_add: sums in order, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from pycomm import kernels
from tests.kernels.reference import FLOATS, assert_same_bits, pairs


@pytest.mark.parametrize(("target", "source"), pairs(FLOATS))
def test_scatter_add_adds_in_order(target: torch.dtype, source: torch.dtype) -> None:
    out = torch.randn(50).to(target)
    indices = torch.tensor([3, 3, 49, 0, 3], dtype=torch.int32)
    values = torch.randn(5).to(source)
    wide = torch.float64 if torch.float64 in (target, source) else torch.float32
    wanted = out.clone()
    for i, v in zip(indices.tolist(), values, strict=True):
        wanted[i] = (wanted[i].to(wide) + v.to(wide) * 0.3).to(target)
    kernels.scatter_add(out, indices, values, scale=torch.tensor(0.3, dtype=wide).item())
    assert_same_bits(out, wanted)


def test_scatter_add_refuses_bad_indices_and_writes_nothing() -> None:
    for bad in (-1, 10, 2**31 - 1):
        out = torch.zeros(10)
        with pytest.raises(ValueError, match=rf"indices\[1\] is {bad}, wanted 0 <= index < 10"):
            kernels.scatter_add(out, torch.tensor([0, bad], dtype=torch.int32), torch.ones(2))
        assert not out.any()
    with pytest.raises(TypeError, match="indices has dtype int64"):
        kernels.scatter_add(torch.zeros(3), torch.tensor([0]), torch.ones(1))
    with pytest.raises(ValueError, match="indices has 1 elements, wanted 2"):
        kernels.scatter_add(torch.zeros(3), torch.tensor([0], dtype=torch.int32), torch.ones(2))
