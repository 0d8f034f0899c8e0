"""Settings with values of the wrong kind or out of range, and arrays that speak DLPack and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from pycomm.kernels import Moments, Quantization
from tests.transport.fuzz_arrays import Foreign


def step_with(moments: Any) -> list[torch.Tensor]:
    """One step of Adam; what it updates."""
    arrays = [torch.ones(5) for _ in range(4)]
    weights, grads, exp_avgs, exp_avg_sqs = ([array] for array in arrays)
    try:
        kernels.adam_step(weights, grads, exp_avgs, exp_avg_sqs, lr=0.1, moments=moments)
    except (TypeError, ValueError):
        assert all(torch.equal(array, torch.ones(5)) for array in arrays), "refused, and written to all the same"
        raise
    return arrays


@pytest.mark.parametrize(
    ("moments", "error", "says"),
    [
        (None, TypeError, "moments is"),
        ((0.9, 0.999), TypeError, "moments is"),
        (Moments((0.9, 0.99), 1e-8, 0), ValueError, "step is 0"),
        (Moments((0.9, 0.99), 1e-8, -1), ValueError, "step is -1"),
        (Moments((0.9, 0.99), 1e-8, 1.5), ValueError, "step is 1.5"),  # type: ignore[arg-type]
        (Moments((0.9, 0.99), 1e-8, math.nan), ValueError, "step is nan"),  # type: ignore[arg-type]
        (Moments((0.9, 0.99), 1e-8, math.inf), ValueError, "step is inf"),  # type: ignore[arg-type]
        (Moments((0.9, 0.99), 1e-8, "one"), TypeError, "step is"),  # type: ignore[arg-type]
        (Moments((1.0, 0.99), 1e-8, 1), ValueError, "betas"),
        (Moments((0.9, -0.1), 1e-8, 1), ValueError, "betas"),
        (Moments((0.9, math.nan), 1e-8, 1), ValueError, "betas"),
        (Moments((0.9,), 1e-8, 1), (TypeError, ValueError), "betas"),  # type: ignore[arg-type]
        (Moments((0.9, "b"), 1e-8, 1), TypeError, "betas"),  # type: ignore[arg-type]
        (Moments(0.9, 1e-8, 1), TypeError, "betas"),  # type: ignore[arg-type]
        (Moments((0.9, 0.99), "small", 1), TypeError, "eps"),  # type: ignore[arg-type]
        (Moments((0.9, 0.99), None, 1), TypeError, "eps"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_moments_with_bad_values(moments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        step_with(moments)


def test_moments_with_good_values() -> None:
    wanted = step_with(Moments((0.9, 0.99), 1e-8, 3))
    for step in (np.int64(3), 3.0):
        moments: Any = Moments((0.9, 0.99), 1e-8, step)  # type: ignore[arg-type]
        assert all(map(torch.equal, step_with(moments), wanted))


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"block": "64"}, TypeError, "block is"),
        ({"block": 64.5}, TypeError, "block is"),
        ({"block": None}, TypeError, "block is"),
        ({"block": -64}, ValueError, "block is -64"),
        ({"block": 2**70}, (OverflowError, TypeError, ValueError), "block is"),
        ({"levels": 1.5}, TypeError, "levels is"),
        ({"levels": True}, TypeError, "levels is"),
        ({"levels": -1}, ValueError, "levels is -1"),
        ({"levels": 128}, ValueError, "levels is 128, wanted 1 <= levels <= 127 with 8 bits"),
        ({"bits": "8"}, TypeError, "bits is"),
        ({"bits": 16}, ValueError, "bits is 16, wanted 2, 4 or 8"),
        ({"norm": 2}, TypeError, "norm is"),
        ({"norm": b"max"}, TypeError, "norm is"),
        ({"norm": "MAX"}, ValueError, "norm is 'MAX'"),
    ],
    ids=repr,
)
def test_quantization_with_bad_values(settings: dict[str, Any], error: Any, says: str) -> None:
    """Refused with memory of the caller's and without."""
    x, units, codes = torch.ones(100), torch.zeros(2), torch.zeros(100, dtype=torch.uint8)
    for out in (None, (units, codes)):
        with pytest.raises(error, match=says):
            kernels.quantize(x, Quantization(**{"block": 64, **settings}), out)
    assert not units.any()
    assert not codes.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_topk_on_what_speaks_dlpack_alone(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -4.0, 2.0, 0.0, 3.0], dtype=dtype)
    wanted = kernels.topk(x, 2)
    for found in (
        kernels.topk(Foreign(x), 2),
        kernels.topk(Foreign(x), 2, (torch.empty(2, dtype=dtype), torch.empty(2, dtype=torch.int32))),
    ):
        for array, right in zip(found, wanted, strict=True):
            assert torch.equal(torch.as_tensor(array), right)


def test_topk_into_what_speaks_dlpack_alone() -> None:
    x, threshold = torch.tensor([1.0, -4.0, 2.0, 0.0, 3.0]), torch.zeros(1)
    values, indices = torch.empty(2), torch.empty(2, dtype=torch.int32)
    kernels.topk(Foreign(x), 2, (Foreign(values), Foreign(indices)), threshold=Foreign(threshold))
    assert (values.tolist(), indices.tolist(), threshold.item()) == ([-4.0, 3.0], [1, 4], 3.0)
