"""Values of every kind, right or wrong for an argument: whatever becomes of one on one rank becomes of it on all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.one_rank.backend_calls import EXPANDED, ones
from tests.one_rank.calls import Make
from tests.one_rank.horovod_calls import itself
from tests.one_rank.parallel_calls import Awkward


class Subclass(torch.Tensor):
    """Tensor of which nothing can be asked."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise LookupError("ask me nothing")


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return ones()


def _raises() -> None:
    raise LookupError("this function raises")


ANYTHING: tuple[Make, ...] = (
    *(lambda: None, str, lambda: "x", lambda: "\udc80", lambda: b"x", lambda: True, object, Awkward, lambda: int),
    *(lambda: 0, lambda: 1, lambda: 5, lambda: -1, lambda: 2**70, lambda: 10**400),
    *(lambda: 2.5, lambda: math.nan, lambda: math.inf, lambda: np.float64(1.5)),
    *(list, dict, lambda: (1, 2), lambda: {0: 0}, lambda: ["a", "b"], lambda: iter([1]), itself),
    *(lambda: _raises, lambda: lambda *_, **__: None, lambda: nn.Linear(3, 3), lambda: lambda: nn.Linear(3, 3)),
    *(ones, lambda: ones(2), lambda: torch.tensor(1.0), lambda: torch.ones([1] * 13 + [4]), EXPANDED),
    *(lambda: [ones()], lambda: [torch.ones(4, 4, device="meta")] * 2, lambda: np.ones((4, 4), np.float32)),
    *(
        lambda: np.array([object()]),
        lambda: ones().requires_grad_(),
        _of_inference,
        lambda: ones().as_subclass(Subclass),
    ),
    lambda: torch.ones(4, 4, device="meta"),
    *(lambda: torch.eye(4).to_sparse(), lambda: torch.eye(4).to_sparse_csr(), lambda: ones().to_mkldnn()),
    *(lambda: ones().double(), lambda: ones().half(), lambda: ones().bool(), lambda: ones().int()),
    *(lambda: ones().to(torch.complex64), lambda: ones().to(torch.float8_e4m3fn), lambda: ones().to(torch.uint16)),
    lambda: torch.quantize_per_tensor(ones(), 1.0, 0, torch.qint8),
    lambda: torch.nested.nested_tensor([ones(2), ones(3)]),
)
