"""Functional collectives on "pycomm", and their compilation, which calls the group from C++ and finds it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable

from tests.backend.worlds import on_world


def everyone() -> Any:
    """Return the default group, which torch's stubs call optional."""
    return dist.group.WORLD


def ranks_tensor() -> torch.Tensor:
    return torch.arange(6.0).view(6, 1) + 10.0 * dist.get_rank()


@on_world(2, 3)
def test_each_of_them() -> None:
    rank, size, x = dist.get_rank(), dist.get_world_size(), ranks_tensor()
    all_of_them = [torch.arange(6.0).view(6, 1) + 10.0 * peer for peer in range(size)]
    total = sum(all_of_them, torch.zeros(6, 1))
    world = everyone()
    part = slice(rank * 6 // size, (rank + 1) * 6 // size)
    assert torch.equal(functional.all_reduce(x, "sum", world), total)
    assert torch.equal(functional.all_reduce(x, "avg", world), total / size)
    assert torch.equal(functional.all_gather_tensor(x, 0, world), torch.cat(all_of_them))
    assert torch.equal(functional.all_gather_tensor(x, 1, world), torch.cat(all_of_them, 1))
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", 0, world), total[part])
    assert torch.equal(functional.broadcast(x, 1, world), all_of_them[1])
    parts = functional.all_to_all_single(x, None, None, world)
    assert torch.equal(parts, torch.cat([theirs[part] for theirs in all_of_them]))


@on_world(2)
def test_uneven_parts() -> None:
    rank, x = dist.get_rank(), ranks_tensor()
    sent, received = ([1, 5], [1, 2]) if rank == 0 else ([2, 4], [5, 4])
    found = functional.all_to_all_single(x, received, sent, everyone())
    zero, one = torch.arange(6.0).view(6, 1), torch.arange(6.0).view(6, 1) + 10.0
    expected = torch.cat([zero[:1], one[:2]]) if rank == 0 else torch.cat([zero[1:], one[2:]])
    assert torch.equal(found, expected)


@on_world(3)
def test_coalesced() -> None:
    x, y = ranks_tensor(), torch.ones(3)
    reduced = functional.all_reduce_coalesced([x, y], "sum", everyone())
    assert torch.equal(reduced[1], torch.full((3,), 3.0))
    assert reduced[0][0].item() == 30.0
    gathered = functional.all_gather_into_tensor_coalesced([x, y], everyone())
    assert [part.shape[0] for part in gathered] == [18, 9]
    scattered = functional.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0], everyone())
    assert [part.shape[0] for part in scattered] == [2, 1]


@on_world(2)
def test_the_coalescing_manager() -> None:
    xs = [torch.full((5,), float(i + dist.get_rank())) for i in range(3)]
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert [x[0].item() for x in xs] == [1.0, 3.0, 5.0]


@on_world(2)
def test_gradients_through_collectives() -> None:
    x = torch.full((3,), float(dist.get_rank() + 1), requires_grad=True)
    y = differentiable.all_reduce(x * 2.0, group=everyone())  # whose default is that of its import
    (y * (dist.get_rank() + 1)).sum().backward()
    assert y[0].item() == 6.0
    assert x.grad is not None
    assert x.grad[0].item() == 6.0  # 2 x (1 + 2)
    gathered = differentiable.all_gather(x, group=everyone())
    assert [part[0].item() for part in gathered] == [1.0, 2.0]


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_world(2, timeout=110.0)
def test_compiled_without_a_break(compiler: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        dist.all_reduce(y)
        gathered = functional.all_gather_tensor(y + 1.0, 0, everyone())
        return functional.reduce_scatter_tensor(gathered, "sum", 0, everyone())

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for repeat in range(2):
        x = torch.full((8,), float(dist.get_rank() + repeat))
        assert torch.equal(compiled(x), step(x.clone()))
    torch._dynamo.reset()


@on_world(2)
def test_results_that_nobody_has_waited_for_are_arguments_of_the_next() -> None:
    rank, x = dist.get_rank(), ranks_tensor()
    total = 2 * torch.arange(6.0).view(6, 1) + 10.0

    def pending() -> torch.Tensor:
        made: torch.Tensor = functional.all_reduce(x, "sum", everyone())
        assert type(made) is not torch.Tensor
        return made

    dist.all_reduce(twice := pending())
    assert torch.equal(twice, 2 * total)
    dist.all_gather(parts := [torch.zeros(6, 1) for _ in range(2)], pending())
    assert torch.equal(parts[1 - rank], total)
    sent = dist.isend(pending(), 1 - rank, tag=3)
    dist.recv(received := torch.zeros(6, 1), 1 - rank, tag=3)
    assert sent is not None
    sent.wait()
    assert torch.equal(received, total)
