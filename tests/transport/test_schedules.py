"""One suite for all that can run a schedule: every transport, algorithm, type, number of ranks and size."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from pycomm import Communicator, schedule
from pycomm.schedule.program import Program, program_of
from tests.on_ranks import Pools
from tests.transport.test_collectives import DTYPES, contribution
from tests.transport.threads import ThreadsTransport, run_threads

SOME = (torch.float32, torch.bfloat16, torch.int32)
LARGE = (torch.float32, torch.uint8)  # for arrays of a million elements
SIZES = [pytest.param(size, marks=() if size == 5 else pytest.mark.slow) for size in range(1, 9)]
# With parameters, where these do something that the plain names do not.
ALGORITHMS = [*schedule.names(), "double_tree(3)"]

Run = Callable[[torch.Tensor, str], None]
"""All-reduces a tensor by the operation of that name."""


def sizes_for(num_ranks: int) -> list[int]:
    return sorted({0, 1, num_ranks - 1, num_ranks, num_ranks + 1, 997, 1_000_000})


def digest(x: torch.Tensor) -> str:
    return f"{zlib.crc32(x.view(torch.uint8).numpy().data):08x}"


@functools.lru_cache(maxsize=64)
def case(size: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the ranks bring, and its sum."""
    parts = torch.stack([contribution(p, n, dtype) for p in range(size)])
    return parts, parts.sum(0).to(dtype)


def exact_results(rank: int, size: int, dtype: torch.dtype, run: Run, largest: int) -> Iterator[str]:
    """Sums of integers are exact, whatever the type; digests of what this rank ends with."""
    for n in sizes_for(size):
        if n > largest or (n > 1000 and dtype not in LARGE):
            continue
        parts, total = case(size, n, dtype)
        x = parts[rank].clone()
        run(x, "sum")
        assert torch.equal(x, total), (dtype, n)
        yield digest(x)
    parts, _ = case(size, 997, dtype)
    for op, wanted in (("min", parts.amin(0)), ("max", parts.amax(0))):
        x = parts[rank].clone()
        run(x, op)
        assert torch.equal(x, wanted), (dtype, op)
        yield digest(x)


def rounded_results(rank: int, size: int, dtype: torch.dtype, run: Run, largest: int) -> Iterator[str]:
    """Sums of random numbers: within the bound of P - 1 roundings, (P - 1) u sum |x|."""
    generator = torch.Generator().manual_seed(5)
    parts = (torch.randn(size, min(10_007, largest), generator=generator) * 100).to(dtype)
    unit = torch.finfo(dtype).eps / 2
    for op in ("sum", "mean"):
        x = parts[rank].clone()
        run(x, op)
        wanted, magnitude = parts.double().sum(0), parts.double().abs().sum(0)
        scale = size if op == "mean" else 1
        # A mean is rounded when it is divided, and when 1 / P is.
        bound = (1.01 * (size - 1) * magnitude + 3 * wanted.abs()) * unit / scale + torch.finfo(dtype).tiny
        assert ((x.double() - wanted / scale).abs() <= bound).all(), (dtype, op)
        yield digest(x)


def results(rank: int, size: int, dtypes: tuple[torch.dtype, ...], run: Run, largest: int = 1_000_000) -> list[str]:
    """Digests of everything, from this rank; ``largest`` limits the numbers of elements."""
    digests: list[str] = []
    for dtype in dtypes:
        digests += exact_results(rank, size, dtype, run, largest)
        if dtype.is_floating_point:
            digests += rounded_results(rank, size, dtype, run, largest)
    return digests


def require_same_bits(digests: list[list[str]]) -> None:
    assert all(theirs == digests[0] for theirs in digests), "ranks hold different bits"


@pytest.mark.parametrize("size", SIZES)
def test_threads(size: int) -> None:
    for name in ALGORITHMS:
        table = schedule.by_name(name, size)
        programs = [program_of(table, rank) for rank in range(size)]

        def rank_main(transport: ThreadsTransport, programs: list[Program] = programs) -> list[str]:
            def run(x: torch.Tensor, op: str) -> None:
                transport.run(programs[transport.rank], x, op, 30)

            return results(transport.rank, transport.size, DTYPES if size in (2, 3) else SOME, run)

        require_same_bits(run_threads(size, rank_main))


def on_processes(size: int, transport: str, memory: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, list[str]]:
    """Run on the pool's first ``size`` ranks, as a group of their own; the others have nothing to tell."""
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return {}
    digests = {}
    with Communicator(group, timeout=60, transport=transport) as communicator:
        for name in ALGORITHMS:

            def run(x: torch.Tensor, op: str, name: str = name) -> None:
                y = communicator.empty(x.shape, x.dtype).copy_(x) if memory == "empty" else x
                communicator.all_reduce(y, op, algorithm=name)
                x.copy_(y)

            digests[name] = results(communicator.rank, communicator.size, dtypes, run)
    dist.destroy_process_group(group)
    return digests


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("transport", "memory"), [("shared_memory", "empty"), ("shared_memory", "tensor"), ("tcp", "tensor")]
)
def test_processes(rank_pools: Pools, size: int, transport: str, memory: str) -> None:
    # Bytes are bytes, and what adds them is the same for any number of ranks.
    dtypes = DTYPES if size in (2, 3) else SOME
    by_rank = rank_pools(5 if size <= 5 else 8).run(on_processes, size, transport, memory, dtypes, timeout=280)
    for name in ALGORITHMS:
        require_same_bits([digests[name] for digests in by_rank[:size]])
