"""Tests of meshes: sizes and placement, refusals on every rank, and groups that are gone afterwards."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm import parallel, torch_internals
from tests.backend.worlds import BACKEND, on_world, world
from tests.on_ranks import on_ranks

MODULE: Any = importlib.import_module("pycomm.parallel.mesh")  # under the name is the function


@pytest.mark.parametrize(
    ("hosts", "tp", "wanted"),
    [
        ("aaaa", 2, [0, 1, 2, 3]),
        ("abab", 2, [0, 2, 1, 3]),
        ("abba", 2, [0, 3, 1, 2]),
        ("aabbbb", 2, [0, 1, 2, 3, 4, 5]),
        ("abcd", 1, [0, 1, 2, 3]),
    ],
)
def test_neighbors_share_a_host(hosts: str, tp: int, wanted: list[int]) -> None:
    assert MODULE.place(list(hosts), tp) == wanted


def test_hosts_without_room_are_refused_unless_that_is_allowed() -> None:
    with pytest.raises(ValueError, match="tp is 2, but hosts have 3, 3 ranks"):
        MODULE.place(list("aaabbb"), 2)
    assert MODULE.place(list("aaabbb"), 2, tp_between_hosts=True) == [0, 1, 3, 4, 2, 5]


def test_without_a_default_group_there_is_no_mesh() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        parallel.mesh(dp=1)


@on_world(4)
def test_every_dimension_has_groups_that_work() -> None:
    mesh = parallel.mesh(tp=2, dp=2)  # outermost first, in whichever order they are given
    assert mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    rank = dist.get_rank()
    for name, members in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh[name].get_group()
        assert dist.get_backend(group) == BACKEND
        assert dist.get_process_group_ranks(group) == members
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(members)
    assert parallel.group_over(mesh, "dp", "tp") is dist.group.WORLD
    three = parallel.mesh(pp=2, dp=2, tp=1)
    assert dist.get_process_group_ranks(parallel.group_over(three, "dp", "tp")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    for wrong in (("pp",), ("dp", "dp"), ()):
        with pytest.raises(ValueError, match="dimension"):
            parallel.group_over(mesh, *wrong)


@on_world(4)
def test_ranks_of_a_host_are_neighbors() -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "host_identity", lambda: f"host {rank % 2}")
        assert parallel.mesh(pp=1, dp=2, tp=2).mesh.tolist() == [[[0, 2], [1, 3]]]
        with pytest.raises(ValueError, match="tp is 4, but hosts have 2, 2 ranks"):
            parallel.mesh(tp=4)
        assert parallel.mesh(tp=4, tp_between_hosts=True).mesh.tolist() == [0, 2, 1, 3]


@on_world(2)
def test_wrong_requests_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    requests: list[tuple[dict[str, Any], str]] = [
        ({"dp": 3}, "dp=3 makes 3 ranks, but the world has 2"),
        ({"dp": 2, "tp": 2}, "dp=2 x tp=2 makes 4 ranks, but the world has 2"),
        ({"dp": 0}, "dp is 0, wanted at least 1"),
        ({}, "no dimension was given"),
        ({"dp": 2, "device_type": "abacus"}, "device_type is 'abacus'"),
    ]
    for sizes, told in requests:
        with pytest.raises(ValueError, match=told):
            parallel.mesh(**sizes)
    with pytest.raises(TypeError, match="tp is 'two'"):
        parallel.mesh(tp="two")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the ranks differ on how to make this mesh: rank 0 has '"):
        parallel.mesh(dp=2 if rank else None, tp=None if rank else 2)
    with pytest.raises(ValueError, match="dp=1 makes 1 ranks" if rank else "rank 1 could not make this mesh: dp=1"):
        parallel.mesh(dp=1 if rank else 2)
    assert parallel.mesh(dp=2).size() == 2  # the ranks are still in step


@on_ranks(2)
def test_nothing_is_left_of_a_mesh() -> None:
    for _ in range(2):
        with world():
            mesh = parallel.mesh(dp=1, tp=2)
            groups = [mesh[name].get_group() for name in ("dp", "tp")]
        assert not any(torch_internals.owns_process_group(group) for group in groups)
