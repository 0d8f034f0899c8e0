"""Checks of gradients of functions that several ranks compute together.

torch's ``gradcheck`` perturbs the inputs of one process, and looks at its outputs. Here an input of one rank
changes the outputs of others, so every element of every rank is perturbed in turn, by all ranks together, and what is
differentiated is the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Function = Callable[[torch.Tensor], torch.Tensor]
_STEP = 1e-5


def check_transposed(function: Function, x: torch.Tensor) -> None:
    """Check to 1e-12 that backward is the transpose of a linear ``function``: <w, J x> = <J^T w, x> over all ranks."""
    x = x.detach().requires_grad_()
    y = function(x)
    w = random_like(y)
    (gradient,) = torch.autograd.grad(y, x, w)
    sides = torch.stack([(w * y).sum(), (gradient * x).sum()]).detach()
    dist.all_reduce(sides)
    assert abs(sides[0] - sides[1]) <= 1e-12 * (1 + abs(sides[0])), sides.tolist()


def check_gradients(function: Function, x: torch.Tensor) -> None:
    """Check first and second derivatives with respect to all ranks' ``x`` against central differences."""
    w = random_like(function(x.detach()))
    u = random_like(x)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (function(x.sin()).square() * w).sum()

    def slope(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return (gradient * u).sum()

    for objective in (loss, slope):
        each = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(each), each)
        torch.testing.assert_close(gradient, _differences(objective, x), rtol=1e-6, atol=1e-7)


def random_like(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(x.shape, dtype=x.dtype, generator=generator)


def _differences(objective: Function, x: torch.Tensor) -> torch.Tensor:
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([x.numel()]))
    found = torch.zeros_like(x)
    for rank, number in enumerate(counts):
        for i in range(int(number)):
            totals = []
            for step in (_STEP, -_STEP):
                moved = x.detach().clone().contiguous()
                if rank == dist.get_rank():
                    moved.view(-1)[i] += step
                total = objective(moved.requires_grad_()).detach()
                dist.all_reduce(total)
                totals.append(total)
            if rank == dist.get_rank():
                found.view(-1)[i] = (totals[0] - totals[1]) / (2 * _STEP)
    return found
