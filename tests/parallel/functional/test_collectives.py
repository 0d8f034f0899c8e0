"""Tests of differentiable collectives: values, gradients of both orders, and refusals on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm.parallel import functional, mesh
from tests.backend.worlds import on_world, world
from tests.on_ranks import on_ranks
from tests.parallel.functional.gradients import check_gradients, check_transposed

D = torch.float64


def made(*shape: int, rank: int | None = None) -> torch.Tensor:
    """Return a tensor that only this rank has, or that of another ``rank``."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(*shape, dtype=D, generator=generator)


def check(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    check_transposed(function, x)
    check_gradients(function, x)


@on_world(2, 3)
def test_all_reduce() -> None:
    size = dist.get_world_size()
    total = torch.stack([made(2, 3, rank=rank) for rank in range(size)]).sum(0)
    torch.testing.assert_close(functional.all_reduce(made(2, 3)), total, rtol=1e-14, atol=0)
    for op in ("mean", "avg"):
        torch.testing.assert_close(functional.all_reduce(made(2, 3), op), total / size, rtol=1e-14, atol=0)
    x = made(3, 2)
    functional.all_reduce(x)
    assert torch.equal(x, made(3, 2)), "the input stays"
    check(functional.all_reduce, made(2, 2))
    check(lambda x: functional.all_reduce(x, "mean"), made(2, 2))
    assert functional.all_reduce(torch.ones(2, dtype=torch.int64)).tolist() == [size] * 2
    assert functional.all_reduce(torch.empty(0, 3)).shape == (0, 3)


@on_world(2, 3)
def test_all_gather_and_reduce_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [made(2, p + 1, 2, rank=p) for p in range(size)]
    lengths = [p + 1 for p in range(size)]
    assert torch.equal(functional.all_gather(parts[rank], dim=-2), torch.cat(parts, 1))
    whole = [made(2, sum(lengths), rank=p) for p in range(size)]
    mine = functional.reduce_scatter(whole[rank], dim=1, sizes=lengths)
    wanted = torch.stack(whole).sum(0).split(lengths, 1)[rank]
    torch.testing.assert_close(mine, wanted, rtol=1e-13, atol=1e-15)
    check(lambda x: functional.all_gather(x, 0), made(2, 1))
    check(lambda x: functional.all_gather(x, 1), made(2, rank))  # uneven, and empty on rank 0
    check(lambda x: functional.reduce_scatter(x, 1), made(1, size))
    check(lambda x: functional.reduce_scatter(x, 0, sizes=range(size)), made(sum(range(size)), 2))
    assert functional.all_gather(torch.empty(0, 2)).shape == (0, 2)


@on_world(2, 3)
def test_all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Rank r sends (r + p) % size rows to rank p: uneven, with empty parts.
    sizes = [[(r + p) % size for p in range(size)] for r in range(size)]
    sent = [made(sum(sizes[r]), 2, rank=r) for r in range(size)]
    wanted = torch.cat([torch.split(sent[r], sizes[r])[rank] for r in range(size)])
    assert torch.equal(functional.all_to_all(sent[rank], sizes[rank]), wanted)
    check(lambda x: functional.all_to_all(x, sizes[rank]), made(sum(sizes[rank]), 1))
    check(functional.all_to_all, made(size, 2))
    check(lambda x: functional.all_to_all(x.t().contiguous().t(), sizes[rank]), made(sum(sizes[rank]), 2))
    nothing = functional.all_to_all(torch.empty(0, 4), [0] * size)
    assert nothing.shape == (0, 4)


@on_world(2, 3)
def test_broadcast_and_reduce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    assert torch.equal(functional.broadcast(made(3), last), made(3, rank=last))
    total = torch.stack([made(3, rank=p) for p in range(size)]).sum(0)
    found = functional.reduce(made(3), last)
    torch.testing.assert_close(found, total if rank == last else torch.zeros(3, dtype=D), rtol=1e-14, atol=0)
    check(lambda x: functional.broadcast(x, last), made(2))
    check(lambda x: functional.reduce(x, last), made(2))


@on_world(2)
def test_all_ranks_take_part_in_backward_if_one_needs_a_gradient() -> None:
    x = made(2).requires_grad_(dist.get_rank() == 1)
    y = functional.all_reduce(x)
    assert y.requires_grad
    y.sum().backward()
    if dist.get_rank() == 1:
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
    assert not functional.all_reduce(made(2)).requires_grad
    with torch.no_grad():
        assert not functional.all_gather(x).requires_grad


@on_world(4)
def test_groups_and_meshes() -> None:
    devices, rank = mesh(dp=2, tp=2), dist.get_rank()
    for group in (devices["tp"], devices["tp"].get_group()):
        assert functional.all_reduce(torch.tensor(float(rank)), group=group).item() == rank // 2 * 4 + 1
        assert functional.broadcast(torch.tensor(rank), 1, group=group).item() == rank // 2 * 2 + 1
    with pytest.raises(ValueError, match="wanted one, such as"):
        functional.all_reduce(torch.ones(1), group=devices)


FREED = torch.ones(2, 2)
FREED.untyped_storage().resize_(0)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("all_reduce", {"x": 3}, "x is a int, wanted a tensor"),
    ("all_reduce", {"op": "max"}, "op is 'max'"),
    ("all_reduce", {"x": torch.ones(2, dtype=torch.int64), "op": "mean"}, "there is no mean"),
    ("all_reduce", {"x": torch.ones(2).to_sparse()}, "wanted a dense tensor"),
    ("all_reduce", {"x": FREED}, "x, of shape .2, 2., has no memory: it is fake, or was freed"),
    ("all_gather", {"dim": 2}, "dim is 2, but x has 2 dimensions"),
    ("all_gather", {"x": torch.tensor(1.0)}, "dim is 0, but x has 0 dimensions"),
    ("reduce_scatter", {"x": torch.ones(3, 2)}, "x is 3 long, which 2 ranks cannot share evenly: pass sizes"),
    ("reduce_scatter", {"sizes": [1, 2]}, "sizes is .1, 2., wanted 2 numbers with the sum 2"),
    ("all_to_all", {"sizes": [-1, 3]}, "sizes is -1, wanted at least 0"),
    ("broadcast", {"src": 2}, "src is 2, wanted a rank below 2"),
    ("reduce", {"dst": -1}, "dst is -1, wanted at least 0"),
]


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@on_ranks(2)
def test_wrong_arguments_are_refused_on_every_rank(backend: str) -> None:
    with world(backend):
        rank = dist.get_rank()
        right: dict[str, dict[str, Any]] = {"broadcast": {"src": 0}, "reduce": {"dst": 0}}
        for name, wrong, told in WRONG:
            arguments = {"x": torch.ones(2, 2), **right.get(name, {})}
            if rank == 1:
                arguments.update(wrong)
            with pytest.raises((TypeError, ValueError), match=told if rank else f"rank 1 could not call {name}: "):
                getattr(functional, name)(**arguments)
        for x, told in (
            (torch.ones(2, rank + 2), "disagree on the shape for all_gather: .2, 2. on rank 0, .2, 3. on rank 1"),
            (
                torch.ones(2, 2, dtype=(D, torch.float32)[rank]),
                "dtype: torch.float64 on rank 0, torch.float32 on rank 1",
            ),
            (torch.ones((2,) * (rank + 1)), "number of dimensions: 1 on rank 0, 2 on rank 1"),
        ):
            with pytest.raises(ValueError, match=told):
                functional.all_gather(x)
        with pytest.raises(ValueError, match="function: all_reduce on rank 0, all_gather on rank 1"):
            (functional.all_gather if rank else functional.all_reduce)(torch.ones(2))
        with pytest.raises(ValueError, match="argument: 0 on rank 0, 1 on rank 1"):
            functional.broadcast(torch.ones(2), rank)
        assert functional.all_reduce(torch.ones(1)).item() == 2.0  # the ranks are still in step


@on_ranks(2)
def test_gloo_has_the_same_values() -> None:
    rank = dist.get_rank()
    parts = [made(p + 1, 2, rank=p) for p in range(2)]
    assert torch.equal(functional.all_gather(parts[rank]), torch.cat(parts))
    whole = [made(3, 2, rank=p) for p in range(2)]
    found = functional.reduce_scatter(whole[rank], sizes=[1, 2])
    torch.testing.assert_close(found, (whole[0] + whole[1]).split([1, 2])[rank])
    check_transposed(lambda x: functional.all_to_all(x, [2 - rank, 1 + rank]), made(3, 2))
    check_transposed(lambda x: functional.all_reduce(functional.broadcast(x, 1)), made(3))
