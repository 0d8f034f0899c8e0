"""Any number of ranks train as one process would on all of their samples: to 1e-12 after 100 steps, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size

STEPS = 100
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.002, momentum=0.5),
    "LARS": lambda params: pycomm.LARS(params, lr=2.0, weight_decay=0.01, trust_coefficient=0.01),
    "LAMB": lambda params: pycomm.LAMB(params, lr=0.01, weight_decay=0.01),
}
Sizes = Callable[[int], list[int]]
"""How many samples the passes of a step have, over all ranks."""


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def batches(sizes: Sizes) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(11)
    for step in range(STEPS):
        yield [
            (torch.randn(n, 7, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator))
            for n in sizes(step)
        ]


def alone(name: str, sizes: Sizes, fused: bool) -> list[torch.Tensor]:
    """One process, torch's own operations, the samples of all passes and ranks in one batch."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    if fused and name not in ("LARS", "LAMB"):
        pycomm.fuse(optimizer)
    for passes in batches(sizes):
        x, y = (torch.cat(parts) for parts in zip(*passes, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def together(name: str, sizes: Sizes, options: dict[str, Any], weighted: bool, fused: bool) -> list[torch.Tensor]:
    """Every rank on its share of each pass; the last window may be ragged."""
    rank, size = rank_and_size()
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    if fused and name not in ("LARS", "LAMB"):
        pycomm.fuse(optimizer)
    with attached(optimizer, model, **options) as reducer:
        for passes in batches(sizes):
            optimizer.zero_grad()
            for x, y in passes:
                share = pycomm.optim.shard_batch((x, y), rank=rank, world_size=size)
                if weighted:
                    reducer.set_weight(share.num_samples)
                nn.functional.cross_entropy(model(share.data[0]), share.data[1]).backward()
            if options.get("accumulate", 1) > 1:
                reducer.flush()
            optimizer.step()
        assert_replicas_equal(model)
    return [p.detach() for p in model.parameters()]


def fixed(step: int) -> list[int]:
    return [12]  # divides by 1, 2 and 3


def uneven(step: int) -> list[int]:
    return [7 + step % 5]


def windows(step: int) -> list[int]:
    """Passes of several sizes; every fourth window has fewer passes."""
    return [6 + step % 3, 5, 9] if step % 4 else [5 + step % 2]


CASES: dict[str, tuple[Sizes, dict[str, Any], bool]] = {
    "even shares": (fixed, {}, False),
    "uneven shares": (uneven, {}, True),
    "ragged windows": (windows, {"accumulate": 3}, True),
}


def far_apart(name: str, case: str, fused: bool) -> float:
    """The largest distance between parameters, over the norm of the one process's."""
    sizes, options, weighted = CASES[case]
    pairs = zip(together(name, sizes, options, weighted, fused), alone(name, sizes, fused), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 3)
def test_ranks_equal_one_process(name: str, case: str) -> None:
    assert far_apart(name, case, True) < 1e-12


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
@on_ranks(2)
def test_with_torchs_own_steps(name: str) -> None:
    assert far_apart(name, "ragged windows", False) < 1e-12
