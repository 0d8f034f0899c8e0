"""Collectives of Python objects on "pycomm"."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.backend.worlds import on_world


def thing(rank: int) -> dict[str, Any]:
    """Return an object whose pickle has another length on every rank."""
    return {"rank": rank, "text": "x" * 1000 * rank}


@on_world(2, 3)
def test_all_gather_object() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, thing(rank))
    assert found == [thing(peer) for peer in range(size)]


@pytest.mark.parametrize("root", [0, 1])
@on_world(2, 3)
def test_gather_and_scatter_objects(root: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] | None = [None] * size if rank == root else None
    dist.gather_object(thing(rank), found, dst=root)
    assert found == ([thing(peer) for peer in range(size)] if rank == root else None)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [thing(peer) for peer in range(size)] if rank == root else None, src=root)
    assert mine == [thing(rank)]


@on_world(2, 3)
def test_broadcast_object_list() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things: list[Any] = [thing(5), "second", None] if rank == size - 1 else [None] * 3
    dist.broadcast_object_list(things, src=size - 1)
    assert things == [thing(5), "second", None]


@on_world(3)
def test_send_and_receive_object_lists() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things: list[Any] = [None, None]
    if rank == 0:
        for peer in range(1, size):
            dist.send_object_list([thing(peer), peer], dst=peer)
        return
    assert dist.recv_object_list(things, src=0) == 0
    assert things == [thing(rank), rank]
