"""Tests of messages that autograd differentiates, and of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm.parallel import functional
from tests.backend.worlds import on_world
from tests.on_ranks import on_ranks
from tests.parallel.functional.gradients import check_gradients, check_transposed

D = torch.float64


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """Give ``x`` to the next rank of a ring, and return the one before's, times this rank's number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    token = functional.send(x, (rank + 1) % size, tag=5)
    return functional.recv(x, (rank - 1) % size, tag=5, token=token) * (rank + 1)


@on_world(2, 3)
def test_a_ring_is_differentiated_backwards() -> None:
    x = torch.randn(2, 2, dtype=D, generator=torch.Generator().manual_seed(dist.get_rank()))
    check_transposed(passed_on, x)
    check_transposed(lambda x: passed_on(passed_on(x.t())), x)
    check_gradients(passed_on, x)


def there_and_back() -> None:
    """Compute a layer on rank 1 for rank 0, which has the loss, and compare with one process."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(3, 3, dtype=D, generator=generator).requires_grad_() for _ in range(2))
    wanted = torch.autograd.grad((x.sin() @ weight).cos().sum(), [x, weight])
    if dist.get_rank() == 0:
        token = functional.send(x.sin(), 1)
        reply = functional.recv(torch.empty(3, 3, dtype=D, device="meta"), 1, token=token)
        reply.cos().sum().backward()
        torch.testing.assert_close(x.grad, wanted[0], rtol=1e-12, atol=1e-14)
    else:
        hidden = functional.recv(torch.empty(3, 3, dtype=D), 0)
        functional.send(hidden @ weight, 0).sum().backward()
        torch.testing.assert_close(weight.grad, wanted[1], rtol=1e-12, atol=1e-14)


@on_world(2)
def test_a_layer_on_another_rank() -> None:
    there_and_back()


@on_ranks(2)
def test_a_layer_on_another_rank_over_gloo() -> None:
    there_and_back()


@on_world(2)
def test_tied_tokens_take_part() -> None:
    rank = dist.get_rank()
    x = torch.ones(2, dtype=D, requires_grad=True)
    total = functional.reduce(x, 0)
    own = (3 * x).sum()
    loss = total.sum() if rank == 0 else functional.tie(own, total)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([1.0, 1.0] if rank == 0 else [4.0, 4.0])
    if rank == 0:
        assert functional.send(torch.ones(1, dtype=torch.int64), 1).requires_grad is False
    else:
        assert functional.recv(torch.empty(1, dtype=torch.int64), 0).tolist() == [1]


@on_world(2)
def test_wrong_arguments_are_refused() -> None:
    x, other = torch.ones(1), 1 - dist.get_rank()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dst": 2}, "dst is 2, wanted a rank below 2"),
        ({"dst": dist.get_rank()}, "this rank itself"),
        ({"dst": other, "tag": 2**14}, "tag is 16384, wanted one below 16384"),
        ({"dst": other, "tag": -1}, "tag is -1"),
    ]
    for arguments, told in wrong:
        with pytest.raises(ValueError, match=told):
            functional.send(x, **arguments)
    with pytest.raises(TypeError, match="x is a list"):
        functional.recv([1.0], other)  # type: ignore[arg-type]
