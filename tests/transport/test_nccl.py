"""NCCL without a GPU: a stand-in library on host memory, in a build with the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycomm._native as _native
from tests.transport.nccl_ranks import (
    NOW,
    Fake,
    close_all,
    contribution,
    groups,
    on_device,
    requires_emulator,
    run_ranks,
)

pytestmark = requires_emulator

FLOATS = (np.float32, np.float16, np.float64)
INTEGERS = (np.int8, np.uint8, np.int32, np.int64)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_reductions(fake: Fake, size: int, dtype: Any) -> None:
    members = groups(size, devices=2)
    ops: dict[str, Callable[..., Any]] = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}
    if dtype in FLOATS:
        ops["mean"] = np.mean
    for n in (0, 1, 5, 1000):
        parts = np.stack([contribution(p, n * size, np.float64) for p in range(size)])
        for op, reduce in ops.items():
            wanted = reduce(parts, axis=0).astype(dtype)

            def run(rank: int, op: str = op, wanted: Any = wanted, n: int = n) -> None:
                x = on_device(contribution(rank, n * size, dtype), rank % 2)
                out = on_device(np.full(n, 99, dtype), rank % 2)
                members[rank].reduce_scatter(out, x, op, **NOW)
                np.testing.assert_array_equal(out.host, wanted[rank * n : (rank + 1) * n])
                np.testing.assert_array_equal(x.host, contribution(rank, n * size, dtype))
                for dst in range(size):
                    members[rank].reduce(x, dst, op, **NOW)
                    own = contribution(rank, n * size, dtype)
                    np.testing.assert_array_equal(x.host, wanted if rank == dst else own)
                    x = on_device(own, rank % 2)
                members[rank].all_reduce(x, op, **NOW)
                np.testing.assert_array_equal(x.host, wanted)

            run_ranks(size, run)
    close_all(members)
    assert (fake.aborts(), fake.destroys()) == (0, size)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_moving(fake: Fake, size: int, dtype: Any) -> None:
    """Also what NCCL has no type for."""
    members = groups(size)
    for n in (0, 1, 777):
        parts = [contribution(p, n, dtype) for p in range(size)]

        def run(rank: int, n: int = n, parts: list[Any] = parts) -> None:
            everything = on_device(np.zeros(size * n, dtype))
            members[rank].all_gather(everything, on_device(parts[rank]), **NOW)
            np.testing.assert_array_equal(everything.host, np.concatenate(parts))
            for src in range(size):
                x = on_device(parts[rank])
                members[rank].broadcast(x, src, **NOW)
                np.testing.assert_array_equal(x.host, parts[src])

        run_ranks(size, run)
    close_all(members)


def test_send_and_recv(fake: Fake) -> None:
    members = groups(2)

    def run(rank: int) -> None:
        x = on_device(contribution(rank, 10, np.float32))
        if rank == 0:
            members[0].send(x, 1, **NOW)
        else:
            members[1].recv(x, 0, **NOW)
        np.testing.assert_array_equal(x.host, contribution(0, 10, np.float32))

    run_ranks(2, run)
    close_all(members)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups_of_sends_and_receives(fake: Fake, size: int) -> None:
    """Around the ring in both directions at once, and to oneself."""
    fake.in_progress(3)
    members = groups(size)

    def run(rank: int) -> None:
        after, before = (rank + 1) % size, (rank - 1) % size
        mine, back = on_device(contribution(rank, 9, np.int32)), on_device(contribution(rank + 10, 4, np.float16))
        from_before, from_after = on_device(np.zeros(9, np.int32)), on_device(np.zeros(4, np.float16))
        members[rank].group_start()
        members[rank].send(mine, after, **NOW)
        members[rank].recv(from_before, before, **NOW)
        members[rank].send(back, before, **NOW)
        members[rank].recv(from_after, after, **NOW)
        assert not from_before.host.any(), "nothing happens before the end of the group"
        members[rank].group_end(20.0)
        np.testing.assert_array_equal(from_before.host, contribution(before, 9, np.int32))
        np.testing.assert_array_equal(from_after.host, contribution(after + 10, 4, np.float16))

    run_ranks(size, run)
    close_all(members)
    assert fake.words("calls").count("ncclGroupEnd") == size


def test_a_group_can_be_given_up(alone: Any, fake: Fake) -> None:
    x = on_device(np.ones(3, np.float32))
    alone.group_start()
    alone.broadcast(x, 0, **NOW)
    with pytest.raises(ValueError, match="group_start: a group is open already"):
        alone.group_start()
    with pytest.raises(ValueError, match="stream is 0x8, wanted .* as in the first call of this group"):
        alone.broadcast(x, 0, stream=8, timeout=1.0)
    alone.group_abandon()
    with pytest.raises(ValueError, match="group_end: no group is open"):
        alone.group_end(1.0)
    assert "ncclBroadcast" not in fake.words("calls")
    alone.group_start()
    alone.group_end(1.0)  # of nothing
    assert "ncclGroupStart" not in fake.words("calls")


def test_mistakes(fake: Fake) -> None:
    members = groups(2)
    group = members[1]
    x, other = on_device(np.ones(4, np.float32)), on_device(np.ones(4, np.float32), 1)
    whole = on_device(np.ones(8, np.int32))
    mistakes: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "x is on cpu, wanted cuda:0", lambda: group.all_reduce(np.ones(4), "sum", **NOW)),
        (ValueError, "x is on cuda:1, wanted cuda:0", lambda: group.all_reduce(other, "sum", **NOW)),
        (ValueError, "out is on cuda:1, wanted cuda:0", lambda: group.all_gather(other, x, **NOW)),
        (ValueError, "op is 'average', wanted 'sum'", lambda: group.all_reduce(x, "average", **NOW)),
        (ValueError, "op is 'bor', which NCCL does not have", lambda: group.all_reduce(whole, "bor", **NOW)),
        (TypeError, "op 'bor' requires an integer dtype, x has float32", lambda: group.all_reduce(x, "bor", **NOW)),
        (TypeError, "op 'mean' requires a floating dtype, x has int32", lambda: group.all_reduce(whole, "mean", **NOW)),
        (TypeError, "x has dtype int32, wanted float32 as out", lambda: group.reduce_scatter(x, whole, "sum", **NOW)),
        (ValueError, "out has 4 elements, wanted 8: 2 ranks times the 4", lambda: group.all_gather(x, x, **NOW)),
        (ValueError, "src is 2, wanted 0 <= src < 2", lambda: group.broadcast(x, 2, **NOW)),
        (ValueError, "dst is 2, wanted 0 <= dst < 2", lambda: group.reduce(x, 2, "sum", **NOW)),
        (TypeError, "op 'mean' requires a floating dtype", lambda: group.reduce(whole, 0, "mean", **NOW)),
        (ValueError, "dst is -1, wanted 0 <= dst < 2", lambda: group.send(x, -1, **NOW)),
        (ValueError, "recv: rank 1 is this rank itself", lambda: group.recv(x, 1, **NOW)),
        (ValueError, "timeout is 0, wanted a positive", lambda: group.recv(x, 0, stream=0, timeout=0.0)),
        (ValueError, "timeout is nan", lambda: group.recv(x, 0, stream=0, timeout=float("nan"))),
        (ValueError, "unique_id has 3 bytes, wanted 128", lambda: _native.NcclGroup(0, 1, 0, b"abc", False, 1.0, [])),
        (ValueError, "rank is 1, wanted 0 <= rank < 1", lambda: _native.NcclGroup(1, 1, 0, b"", False, 1.0, [])),
    ]
    for kind, says, mistake in mistakes:
        with pytest.raises(kind, match=says):
            mistake()
    run_ranks(2, lambda rank: members[rank].all_reduce(on_device(np.ones(4, np.float32)), "sum", **NOW))
    close_all(members)
    assert fake.aborts() == 0
