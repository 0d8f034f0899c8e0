"""Tests of the functions around split layers, whose loss all ranks have alike, against one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pycomm.parallel import functional
from tests.backend.worlds import on_world

D = torch.float64


def random(*shape: int) -> torch.Tensor:
    """Return the same tensor on all ranks."""
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape)))


def second_order(loss: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [loss.detach(), first.detach(), second]


@on_world(2, 3)
def test_a_perceptron_in_columns_and_rows() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, up, down = random(3, 4).requires_grad_(), random(4, 2 * size), random(2 * size, 5)
    wanted = second_order(((x @ up).sin() @ down).square().sum(), x)
    mine = slice(2 * rank, 2 * rank + 2)
    hidden = (functional.copy_to_group(x) @ up[:, mine]).sin()
    found = second_order(functional.reduce_from_group(hidden @ down[mine]).square().sum(), x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@on_world(2, 3)
def test_parts_and_the_whole() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in (2 * size, 2 * size - 1, 1):
        x, scale = random(3, length).requires_grad_(), random(1, length)
        wanted = second_order((x.sin() * scale).square().sum(), x)
        part = functional.scatter_to_group(x, dim=1).sin()
        assert part.shape[1] == (-(-length // size) if rank == 0 else part.shape[1])
        found = second_order((functional.gather_from_group(part, dim=1) * scale).square().sum(), x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    even = functional.gather_from_group(torch.full((2,), float(rank)), 0, even=True)
    assert even.tolist() == [float(p) for p in range(size) for _ in range(2)]
