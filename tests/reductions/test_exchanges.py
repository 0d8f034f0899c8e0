"""Exchanges of buckets that others have made: the averages may lie in the memory that holds the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Scaling
from pycomm.training.cost.pricing import Costs
from pycomm.training.reductions.exchanges import BucketExchanges
from tests.on_ranks import on_ranks
from tests.reducer.test_gpu_path import METHODS

SHAPES = ((7, 30), (40, 5))


@dataclass(frozen=True)
class Chosen(pycomm.Auto):
    """``Auto`` that finds ``winner`` the fastest: what it measures would differ between two runs."""

    winner: str = "dense"

    def costs(self, *_: Any) -> dict[str, Costs]:
        return {name: Costs(0.1 if name == self.winner else 1.0) for name in self.methods()}


METHODS_HERE = {
    **METHODS,
    **{f"auto {name}": Chosen(0.2, winner=name) for name in pycomm.Auto().methods()},
    "fp8": pycomm.FP8(),
    "chunktopk": pycomm.ChunkTopK(8),
}


def averages_of(method: Any, dtype: torch.dtype, *, in_place: bool) -> list[torch.Tensor]:
    """Return the averages of some steps, of which one is not finite, and then the state."""
    rank, found = dist.get_rank(), []
    with Communicator() as communicator:
        params = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
        exchanges = BucketExchanges(["a", "b"], params, method, communicator, "auto")
        buffers = [torch.empty(sum(p.numel() for p in params), dtype=dtype) for _ in range(2)]
        for step in range(6):
            buffer = buffers[step > 2]  # torch may have made another
            grads = [part.view(s) for part, s in zip(buffer.split([p.numel() for p in params]), SHAPES, strict=True)]
            generator = torch.Generator().manual_seed(10 * step + rank)
            for grad in grads:
                grad.copy_(torch.randn(grad.shape, generator=generator))
            if step == 2 and rank == 1:
                grads[1][0, 0] = math.inf
            if in_place:
                exchanges.lie_in(buffer)
            exchanges.pack(grads, Scaling(communicator.size, step=step))
            exchanges.send()
            finite = all(bool(part.exchange.finite()) for part in exchanges.parts)
            exchanges.finish(finite)
            averages = exchanges.averages(buffer, grads)
            assert not in_place or averages.data_ptr() == buffer.data_ptr()
            found.append(averages.clone())
        return [*found, *(t.clone() for entry in exchanges.state().values() for t in entry.values())]


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(2)
def test_the_same_bits_where_the_gradients_lie(method: str, dtype: torch.dtype) -> None:
    wanted = averages_of(METHODS_HERE[method], dtype, in_place=False)
    got = averages_of(METHODS_HERE[method], dtype, in_place=True)
    for x, y in zip(wanted, got, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=0.0, equal_nan=True)
