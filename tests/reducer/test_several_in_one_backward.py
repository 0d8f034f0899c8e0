"""Several Reducers in one backward pass, and the user's own collectives beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import over_tcp
from tests.reducer.models import Normed, average_gradients, close, loss_of, make_model, sgd


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2)
def test_two_attaches_in_one_backward(over_hosts: bool, uneven: bool) -> None:
    """Muon beside AdamW: two attaches, one backward. Ranks may begin with either."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    first, second = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(vectors, lr=0.1)
    with over_tcp(over_hosts):
        reducers = [pycomm.attach(o, model, tuning=pycomm.Tuning(timeout=30, bucket_mb=0.001)) for o in (first, second)]

    def loss(module: Any, rank: int, step: int) -> torch.Tensor:
        if uneven and rank == 0:  # the last layer's bias takes no part here, so that the other reducer hears first
            x = module[:4](torch.ones(3, 12, dtype=torch.float64) * (step + 1))
            return (x @ module[4].weight.t()).pow(2).mean()
        return loss_of(module, rank, step)

    for step in range(5):
        for o in (first, second):
            o.zero_grad()
        loss(model, rank, step).backward()
        wanted = average_gradients(plain, [partial(loss, rank=r, step=step) for r in range(2)])
        for name, p in model.named_parameters():
            close(p.grad, wanted[name])
    for reducer in reducers:
        reducer.detach()


@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2)
def test_two_attaches_that_keep_buffers(over_hosts: bool) -> None:
    """Both exchange buffers; the order in which gradients come differs: nobody waits for the other's turn."""
    rank = dist.get_rank()
    model = Normed()
    first = torch.optim.SGD([model.body.weight], lr=0.1)
    second = torch.optim.SGD([model.body.bias, *model.norm.parameters()], lr=0.1)
    with over_tcp(over_hosts):
        reducers = [
            pycomm.attach(o, model, tuning=pycomm.Tuning(timeout=20), buffers="average") for o in (first, second)
        ]
    for step in range(6):
        model.zero_grad()
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        # What was used last comes first: the matrix on rank 0, the vectors on rank 1.
        loss = model(x).pow(2).mean()
        last = model.body.weight if rank == 0 else model.norm.weight
        (loss + 0 * last.sum()).backward()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [b.tolist() for b in model.buffers()])
    assert everyone[0] == everyone[1]
    for reducer in reducers:
        reducer.detach()


class GatherAll(torch.autograd.Function):
    """CLIP's: features of all ranks, with a collective in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x.contiguous())
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2)
def test_the_users_own_collectives_in_backward(over_hosts: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = make_model(), make_model()
    with over_tcp(over_hosts):
        reducer = pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=30, bucket_mb=0.0001))
    for step in range(10):
        model.zero_grad()
        x = [torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + r)).double() for r in range(size)]
        middle = GatherAll.apply(model[:2](x[rank]))
        model[2:](middle).pow(2).mean().backward()
        grads = torch.autograd.grad(plain[2:](plain[:2](torch.cat(x))).pow(2).mean(), list(plain.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            close(p.grad, grad, 1e-9)
    reducer.detach()
