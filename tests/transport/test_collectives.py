"""One suite that every transport passes: all operations, types and sizes, against exact results."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pycomm import Communicator
from pycomm.kernels import arrays
from tests.on_ranks import Pools, on_ranks

DTYPES = tuple(getattr(torch, name) for name in arrays.DTYPES)
TRANSPORTS = ["shared_memory", "tcp", "torch"]


def sizes_for(num_ranks: int) -> list[int]:
    """Around every border: none, fewer than ranks, cache lines, mailbox, segment."""
    return sorted({0, 1, num_ranks - 1, num_ranks, num_ranks + 1, 127, 129, 4096, 4099, 16384, 16385, 70_001, 300_007})


def contribution(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, different for every rank and place, exactly summable in every type."""
    return ((torch.arange(n) * (rank + 3) + rank) % 7 - (0 if dtype == torch.uint8 else 3)).to(dtype)


def place(communicator: Communicator, x: torch.Tensor, memory: str) -> torch.Tensor:
    in_reach = memory == "empty" or (memory == "mixed" and communicator.rank % 2 == 0)
    return communicator.empty(x.shape, x.dtype).copy_(x) if in_reach else x.clone()


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    of_two: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": torch.mul,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(of_two[op], parts.unbind())


def check_all_reduce(transport: str, dtype: torch.dtype, memory: str) -> list[str]:
    digests = []
    with Communicator(timeout=30, transport=transport) as communicator:
        for n in sizes_for(communicator.size):
            parts = torch.stack([contribution(p, n, dtype) for p in range(communicator.size)])
            for op in ("sum", "mean", "min", "max", "product", "band", "bor", "bxor"):
                if (op == "mean" and not dtype.is_floating_point) or (op[0] == "b" and dtype.is_floating_point):
                    continue
                x = place(communicator, parts[communicator.rank], memory)
                communicator.all_reduce(x, op)
                if op == "mean":
                    wanted = parts.double().sum(0) / communicator.size
                    torch.testing.assert_close(x.double(), wanted, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
                else:
                    assert torch.equal(x, reduced(parts, op).to(dtype)), (n, op)
                digests.append(digest(x))
    return digests


def check_the_others(transport: str, dtype: torch.dtype, memory: str) -> None:
    with Communicator(timeout=30, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        for n in sizes_for(size):
            parts = torch.stack([contribution(p, n * size, dtype) for p in range(size)])
            x, out = place(communicator, parts[rank], memory), place(communicator, torch.zeros(n, dtype=dtype), memory)
            communicator.reduce_scatter(out, x)
            assert torch.equal(out, parts.sum(0).to(dtype)[rank * n : (rank + 1) * n])
            assert torch.equal(x, parts[rank])

            mine, all_ = (
                place(communicator, parts[rank][:n], memory),
                place(communicator, torch.zeros_like(parts[0]), memory),
            )
            communicator.all_gather(all_, mine)
            assert torch.equal(all_.view(size, n), parts[:, :n])

            for src in range(size):
                x = place(communicator, parts[rank], memory)
                communicator.broadcast(x, src)
                assert torch.equal(x, parts[src])
            communicator.barrier()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("memory", "transport"),
    [("tensor", "shared_memory"), ("empty", "shared_memory"), ("mixed", "shared_memory"), ("tensor", "torch")],
)  # over torch.distributed "empty" is any tensor
def test_every_operation_type_and_size(rank_pools: Pools, size: int, transport: str, memory: str) -> None:
    # One type of each width and kind where all combinations would only repeat themselves.
    dtypes = DTYPES if (size, transport) == (2, "shared_memory") else (torch.float32, torch.bfloat16, torch.int8)
    for dtype in dtypes:
        digests = rank_pools(size).run(check_all_reduce, transport, dtype, memory)
        assert all(d == digests[0] for d in digests), "ranks hold different bits"
        rank_pools(size).run(check_the_others, transport, dtype, memory)


@pytest.mark.parametrize("memory", ["tensor", "mixed"])
@on_ranks(2, 3)
def test_however_large_arrays_are_staged_sums_are_right(memory: str) -> None:
    """Rank 0 tries out sizes of segments on arrays of 8 MiB or more: each of three others in three of six sums."""
    with Communicator(timeout=30) as communicator:
        rank, size = communicator.rank, communicator.size
        n = 2_100_003
        steps = torch.arange(n, dtype=torch.float32) % 251
        x = place(communicator, steps, memory)
        for number in range(33):
            x.copy_(steps).add_(rank + number)
            communicator.all_reduce(x)
            assert torch.equal(x, size * steps + size * number + sum(range(size))), number


def random_sums(seed: int, sizes: list[int], memory: str) -> list[str]:
    digests = []
    with Communicator(timeout=30) as communicator:
        for n in sizes:
            generator = torch.Generator().manual_seed(seed * 100 + communicator.rank)
            x = place(communicator, torch.randn(n, generator=generator) * 1e3, memory)
            communicator.all_reduce(x, "mean")
            digests.append(digest(x))
    return digests


@pytest.mark.parametrize("size", [2, 3])
def test_same_inputs_same_bits_wherever_they_lie(rank_pools: Pools, size: int) -> None:
    """Between ranks, between runs, and between the ways that arrays travel."""
    pool, sizes = rank_pools(size), [5, 4096, 16383, 100_003, 1_000_003, 5_000_000]
    results = [pool.run(random_sums, 7, sizes, memory) for memory in ("tensor", "empty", "empty", "tensor")]
    assert len({tuple(digests) for run in results for digests in run}) == 1


@on_ranks(2)
def test_avg_is_torchs_word_for_mean() -> None:
    """Ranks may use either."""
    with Communicator(timeout=30) as communicator:
        op = ("avg", "mean")[communicator.rank]
        for async_op in (False, True):
            x = torch.tensor([1.0, 3.0]) * (communicator.rank + 1)
            work = communicator.all_reduce(x, op, async_op=async_op)
            if work is not None:
                work.wait()
            assert x.tolist() == [1.5, 4.5]
        communicator.reduce(x, 0, op)
        part = torch.empty(1)
        communicator.reduce_scatter(part, torch.tensor([2.0, 4.0]) * (communicator.rank + 1), op)
        assert part.tolist() == [[3.0], [6.0]][communicator.rank]
        communicator.all_reduce(x := torch.ones(8), op, algorithm="ring")
        assert x.tolist() == [1.0] * 8


@on_ranks(2, 3)
def test_large_arrays() -> None:
    with Communicator(timeout=60) as communicator:
        n, rank, size = 25_000_003, communicator.rank, communicator.size
        ramp = (torch.arange(n) % 1000).float()
        for x in (communicator.empty(n), torch.empty(n)):
            x.copy_(ramp * (rank + 1))
            communicator.all_reduce(x, "sum")
            assert torch.equal(x, ramp * (size * (size + 1) // 2))


@pytest.mark.parametrize("seed", [0, 1])
@on_ranks(2, 3, 5)
def test_random_programs(seed: int) -> None:
    """A long random sequence, so that slots, mailboxes and staging are reused in every order."""
    shared = torch.Generator().manual_seed(seed)
    with Communicator(timeout=30) as communicator:
        rank, size = communicator.rank, communicator.size
        for _ in range(150):
            kind, length, in_arena = torch.randint(0, 10_000, (3,), generator=shared).tolist()
            n = [3, 1000, 16_000, 17_000, 150_000, 600_000][length % 6]
            # Every rank decides for itself where its array lies.
            memory = "empty" if (in_arena + rank * 7) % 3 else "tensor"
            parts = [contribution(p + kind, n, torch.float32) for p in range(size)]
            x = place(communicator, parts[rank], memory)
            if kind % 3 == 0:
                communicator.all_reduce(x)
                assert torch.equal(x, torch.stack(parts).sum(0))
            elif kind % 3 == 1:
                communicator.broadcast(x, kind % size)
                assert torch.equal(x, parts[kind % size])
            else:
                out = place(communicator, torch.zeros(size * n), memory)
                communicator.all_gather(out, x)
                assert torch.equal(out, torch.cat(parts))


@on_ranks(2)
def test_async_operations_keep_their_order() -> None:
    with Communicator(timeout=30) as communicator:
        rank, size = communicator.rank, communicator.size
        arrays = [torch.full((50_000,), float(rank + i)) for i in range(20)]
        works = [communicator.all_reduce(x, async_op=True) for x in arrays]
        last = torch.tensor([float(rank)])
        communicator.all_reduce(last)  # waits its turn behind them
        assert all(work is not None and work.is_completed() for work in works)
        for i, x in enumerate(arrays):
            assert torch.equal(x, torch.full((50_000,), float(sum(range(size)) + i * size)))
        assert last.item() == sum(range(size))
        bad = communicator.all_reduce(torch.ones(3, dtype=torch.complex64), async_op=True)
        assert bad is not None
        with pytest.raises(TypeError, match="complex64"):
            bad.wait()


@on_ranks(2)
def test_numpy_dlpack_and_types_that_only_move() -> None:
    with Communicator(timeout=30) as communicator:
        x = np.full((3, 4), communicator.rank + 1, np.float64)
        communicator.all_reduce(x)
        assert (x == 3).all()

        class Foreign:
            """Speaks DLPack and nothing else."""

            def __init__(self) -> None:
                self.array = np.arange(4, dtype=np.float32) + communicator.rank

            def __dlpack__(self, **kwargs: object) -> object:
                return self.array.__dlpack__()

            def __dlpack_device__(self) -> tuple[int, int]:
                return self.array.__dlpack_device__()

        foreign = Foreign()
        communicator.all_reduce(foreign)
        assert foreign.array.tolist() == [1, 3, 5, 7]
        for dtype in (torch.bool, torch.complex64, torch.int16):
            flags = torch.tensor([communicator.rank == 1]).to(dtype)
            communicator.broadcast(flags, 1)
            assert flags.item()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, 3)
def test_all_gather_of_types_that_gloo_lacks(transport: str) -> None:
    """Gloo knows no uint32: bytes travel."""
    with Communicator(timeout=30, transport=transport) as communicator:
        mine = np.array([0, 2**31, 2**32 - 1, communicator.rank], np.uint32)
        out = np.zeros(4 * communicator.size, np.uint32)
        communicator.all_gather(out, mine)
        assert out.tolist() == [x for rank in range(communicator.size) for x in (0, 2**31, 2**32 - 1, rank)]
        tensor = torch.zeros(4 * communicator.size, dtype=torch.uint32)
        communicator.all_gather(tensor, torch.from_numpy(mine))
        assert tensor.tolist() == out.tolist()


@on_ranks(4)
def test_subgroups() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.tensor([float(rank)])
    with Communicator(groups[rank % 2], timeout=30) as communicator:
        assert (communicator.rank, communicator.size) == (rank // 2, 2)
        communicator.all_reduce(x)
    with pytest.raises(ValueError, match="not a member"):
        Communicator(groups[1 - rank % 2])
    assert x.tolist() == [[2.0, 4.0][rank % 2]]


@on_ranks(2)
def test_empty() -> None:
    with Communicator(timeout=30) as communicator:
        x = communicator.empty((1000, 300))
        assert x.shape == (1000, 300)
        x.fill_(communicator.rank)
        row = x[100:900]  # a part of an arena tensor is reached directly too
        communicator.all_reduce(row)
        assert (x[100:900] == 1).all()
        assert (x[:100] == communicator.rank).all()
        kept = communicator.empty(10, torch.int64)
        assert communicator.empty(0).shape == (0,)
        assert communicator.empty((), torch.float16).shape == ()
    kept.fill_(7)  # outlives the communicator
    assert kept.sum() == 70


@on_ranks(2)
def test_arena_reuses_memory() -> None:
    with Communicator(timeout=30) as communicator:
        pointers = set()
        for i in range(50):
            x = communicator.empty(1_000_000 + i)
            pointers.add(x.data_ptr())
            del x
        assert len(pointers) == 1, "freed memory is handed out again"
        blocks = [communicator.empty(1000 * (i + 1)) for i in range(20)]
        for i, block in enumerate(blocks):
            block.fill_(i)
        assert all((block == i).all() for i, block in enumerate(blocks))
