"""DistributedDataParallel's hook on the path for GPUs: no race, and no value that the host reads in backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.ddp
from tests.on_ranks import on_ranks
from tests.reducer.test_gpu_path import METHODS
from tests.stream_order import Module, simulated_gpu

USUAL = ("none", "fp16", "topk", "powersgd")
"""Methods; the others rarely tell anything new, and are slow."""

WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "matrices": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


class Branches(nn.Module):
    """Layers of which the last is used in the first ``num_steps`` forwards only."""

    def __init__(self, num_steps: int, bias: bool) -> None:
        super().__init__()
        self.always = nn.Sequential(*(nn.Linear(16, 16, bias) for _ in range(6)))
        self.first, self._left = nn.Linear(16, 16, bias), num_steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        y: torch.Tensor = self.always(x)
        return self.first(y) if self._left >= 0 else y


def steps(method: Any, way: str, *, is_simulated: bool, num_steps: int = 5) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after some steps, and how many values the host has read in the last backward pass."""
    torch.manual_seed(0)
    model = Branches(3 if way == "find_unused_parameters" else num_steps, bias=way != "matrices")
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, **WAYS[way])  # type: ignore[arg-type]
    reads = 0
    with pytest.MonkeyPatch.context() as patch, simulated_gpu(is_simulated) as streams:
        future: Any = torch.futures.Future
        futures = SimpleNamespace(Future=lambda devices=None: future())  # of devices that are in CPU memory
        patch.setattr("pycomm.ddp.steps.torch", Module(torch, futures=futures))
        handle = pycomm.ddp.register(ddp, compression=method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rank, taken, take = torch.distributed.get_rank(), set[int](), handle._take

        def taking(bucket: Any) -> Any:
            taken.add(bucket.buffer().data_ptr())
            return take(bucket)

        patch.setattr(handle, "_take", taking)
        for step in range(num_steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = ddp(torch.randn(4, 16, generator=generator)).square().mean()
            streams.reads.clear()
            loss.backward()
            reads = sum(streams.reads.values())
            optimizer.step()
        assert handle.stats()["steps"] == num_steps
        # Nothing is copied to memory of pycomm's, if one method has the whole bucket.
        if is_simulated and (way == "matrices" or not method.transactional):
            assert {part.bucket.flat.data_ptr() for part in handle._registration.exchanges.parts()} <= taken
        handle.remove()
        streams.assert_ordered()
    return [param.detach().clone() for param in model.parameters()], reads


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "method", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
@on_ranks(2)
def test_no_race_no_read_and_the_results_of_the_cpu(method: str, way: str) -> None:
    wanted, _ = steps(METHODS[method], way, is_simulated=False)
    got, reads = steps(METHODS[method], way, is_simulated=True)
    assert reads == 0
    for x, y in zip(wanted, got, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
