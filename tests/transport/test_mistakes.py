"""The user's mistakes: an error that names them, on every rank, and the communicator goes on working."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycomm import Communicator
from tests.on_ranks import on_ranks
from tests.ranks import PerRank, RankPool

TRANSPORTS = ["shared_memory", "tcp", "torch"]


def call(communicator: Communicator, name: str) -> None:
    """Calls with which ranks may disagree, by name so that they can be dealt out."""
    n = 100_000
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: communicator.all_reduce(torch.ones(n)),
        "longer": lambda: communicator.all_reduce(torch.ones(n + 1)),
        "short": lambda: communicator.all_reduce(torch.ones(3)),
        "double": lambda: communicator.all_reduce(torch.ones(n, dtype=torch.float64)),
        "max": lambda: communicator.all_reduce(torch.ones(n), "max"),
        "gather": lambda: communicator.all_gather(torch.ones(communicator.size * n), torch.ones(n)),
        "from 0": lambda: communicator.broadcast(torch.ones(n), 0),
        "from 1": lambda: communicator.broadcast(torch.ones(n), 1),
        "barrier": lambda: communicator.barrier(),
    }
    calls[name]()


def disagree(transport: str, name: str) -> str:
    with Communicator(timeout=20, transport=transport) as communicator:
        with pytest.raises(ValueError, match="the ranks disagree: rank 1 called") as caught:
            call(communicator, name)
        x = torch.ones(5)
        communicator.all_reduce(x)  # nothing was lost
        assert torch.equal(x, torch.full((5,), 2.0))
    return str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("sum", "longer", ["100000 elements of float32", "100001 elements"]),
        ("sum", "short", ["rank 1 called all_reduce(3 elements"]),
        ("sum", "double", ["float64", "float32"]),
        ("sum", "max", ['op="max"', 'op="sum"']),
        ("sum", "gather", ["all_gather(100000", "all_reduce(100000"]),
        ("from 0", "from 1", ["src=1", "src=0"]),
        ("barrier", "sum", ["all_reduce", "barrier()"]),
    ],
)
def test_ranks_that_disagree(two_ranks: RankPool, transport: str, first: str, second: str, says: list[str]) -> None:
    messages = two_ranks.run(disagree, transport, PerRank([first, second]))
    assert messages[0] == messages[1]
    for words in says:
        assert words in messages[0]


@pytest.mark.parametrize("length", [1_000, 100_000], ids=["gathered", "in parts"])
@on_ranks(3)
def test_ranks_that_agree_leave_nothing_behind_when_another_one_does_not(length: int) -> None:
    """Ranks 0 and 1 send each other data before they know of rank 2."""
    rank = dist.get_rank()
    with Communicator(timeout=20, transport="torch") as communicator:
        for _ in range(2):
            x = torch.full((length,), float(rank))
            with pytest.raises(ValueError, match="the ranks disagree: rank 2 called all_reduce"):
                communicator.all_reduce(x if rank < 2 else x[1:])
            y = torch.arange(float(length)) * (rank + 1)
            communicator.all_reduce(y)
            assert torch.equal(y, torch.arange(float(length)) * 6)
        refused = {0: "rank 2 could not take part", 1: "rank 2 could not take part", 2: "op is 'sun'"}
        with pytest.raises(ValueError, match=refused[rank]):
            communicator.all_reduce(y, "sum" if rank < 2 else "sun")
        communicator.all_reduce(y, "mean")
        assert torch.equal(y, torch.arange(float(length)) * 6)


class Raising:
    """Says that it is in CPU memory, and does not hand that over."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: object) -> object:
        raise ArithmeticError("not today")


class NoComparison(str):
    """Text that does not say what it is equal to."""

    def __eq__(self, _: object) -> bool:
        raise ArithmeticError("not today")

    __hash__ = str.__hash__


def one_is_wrong(transport: str, wrong: str) -> str:
    with Communicator(timeout=20, transport=transport) as communicator:
        bad: dict[str, Callable[[], Any]] = {
            "dtype": lambda: communicator.all_reduce(torch.ones(4, dtype=torch.complex64)),
            "device": lambda: communicator.all_reduce(torch.ones(4, device="meta")),
            "strides": lambda: communicator.all_reduce(torch.ones(4, 2)[:, 0]),
            "list": lambda: communicator.all_reduce([1.0, 2.0]),
            "op": lambda: communicator.all_reduce(torch.ones(4), "average"),
            "uncomparable op": lambda: communicator.all_reduce(torch.ones(4), NoComparison("average")),
            "bits": lambda: communicator.all_reduce(torch.ones(4), "bxor"),
            "algorithm": lambda: communicator.all_reduce(torch.ones(4), algorithm="magic"),
            "uncomparable algorithm": lambda: communicator.all_reduce(torch.ones(4), algorithm=NoComparison("magic")),
            "mean": lambda: communicator.all_reduce(torch.ones(4, dtype=torch.int32), "mean"),
            "scatter size": lambda: communicator.reduce_scatter(torch.ones(4), torch.ones(9)),
            "gather size": lambda: communicator.all_gather(torch.ones(9), torch.ones(4)),
            "gather dtype": lambda: communicator.all_gather(torch.ones(8, dtype=torch.int32), torch.ones(4)),
            "src": lambda: communicator.broadcast(torch.ones(4), 2),
            "no op": lambda: communicator.all_reduce(torch.ones(4), None),  # type: ignore[arg-type]
            "src of letters": lambda: communicator.broadcast(torch.ones(4), "a"),  # type: ignore[arg-type]
            "large src": lambda: communicator.broadcast(torch.ones(4), 2**31),
            "text for bytes": lambda: communicator.channel.all_gather_bytes("text"),  # type: ignore[arg-type]
            "raising": lambda: communicator.all_reduce(Raising()),
        }
        with pytest.raises((TypeError, ValueError)) as caught:
            bad[wrong]() if communicator.rank == 1 else communicator.all_reduce(torch.ones(4))
        for n in (3, 50_000, 3, 3):
            x = torch.full((n,), communicator.rank + 1.0)
            communicator.all_reduce(x)
            assert (x == 3).all()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("dtype", "TypeError: x has dtype torch.complex64, wanted one of"),
        ("device", "ValueError: x is on device meta"),
        ("strides", "ValueError: x is not contiguous"),
        ("list", "TypeError: x is a list, wanted a torch tensor"),
        ("op", "ValueError: op is 'average', wanted"),
        ("uncomparable op", "ValueError: op is 'average', wanted"),
        ("bits", "TypeError: op 'bxor' requires an integer dtype, x has float32"),
        ("algorithm", "ValueError: algorithm is 'magic', wanted one of auto"),
        ("uncomparable algorithm", "ValueError: algorithm is 'magic', wanted one of auto"),
        ("mean", "TypeError: op 'mean' requires a floating dtype, x has"),
        ("scatter size", "ValueError: x has 9 elements"),
        ("gather size", "ValueError: out has 9 elements"),
        ("gather dtype", "out has"),
        ("src", "ValueError: src is 2, wanted 0 <= src < 2"),
        ("no op", "TypeError: op is None, wanted"),
        ("src of letters", "TypeError: src is 'a', wanted"),
        ("large src", "ValueError: src is 2147483648, wanted 0 <= src < 2"),
        ("text for bytes", "TypeError: mine is"),
        ("raising", "TypeError: x is a Raising whose __dlpack__ fails: ArithmeticError: not today"),
    ],
)
def test_a_mistake_on_one_rank_is_an_error_on_all(two_ranks: RankPool, transport: str, wrong: str, says: str) -> None:
    innocent, guilty = two_ranks.run(one_is_wrong, transport, wrong)
    assert says in guilty
    assert innocent.startswith("ValueError: all_reduce: rank 1 could not take part")
    if transport == "shared_memory":
        assert guilty.split(": ", 1)[1] in innocent  # the reason travels


@on_ranks(2)
def test_a_refusal_waits_to_be_read() -> None:
    """One rank alone makes mistakes, without waiting; the others find them one by one."""
    with Communicator(timeout=20) as communicator:
        if communicator.rank == 1:
            with pytest.raises(ValueError, match="op is 'x'"):
                communicator.all_reduce(torch.ones(4), "x")
            time.sleep(0.5)
        else:
            time.sleep(0.2)
            with pytest.raises(ValueError, match="rank 1 could not take part: op is 'x'"):
                communicator.all_reduce(torch.ones(4))
        for i in range(5):
            x = torch.full((30_000,), float(i))
            communicator.all_reduce(x)
            assert (x == 2 * i).all()


def test_arguments_of_the_constructor() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        Communicator()
    with pytest.raises(ValueError, match="transport is 'pigeon'"):
        Communicator(transport="pigeon")
    for timeout in (0, -1.0, timedelta(0), float("nan")):
        with pytest.raises(ValueError, match="timeout is"):
            Communicator(timeout=timeout)


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "`shared memory: ... MiB needed for a block of ... MiB, ... MiB found (...)`",
    "The host or container lacks memory; the size of `/dev/shm` does not matter.",
)
@on_ranks(2)
def test_too_little_memory_says_how_much() -> None:
    with Communicator(timeout=20) as communicator:
        with pytest.raises(TypeError, match="dtype is <class 'numpy.float32'>, wanted a torch.dtype"):
            communicator.empty(3, np.float32)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="wanted no negative length"):
            communicator.empty((3, -1))
        with pytest.raises(
            MemoryError, match=r"shared memory: .* MiB (needed .* MiB found|.*no free block of that size)"
        ) as caught:
            communicator.empty(2**40, torch.uint8)
        assert "1048576.0 MiB" in str(caught.value)
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with pytest.raises(MemoryError, match=r"MiB needed for a block of .* MiB, .* MiB found"):
            communicator.empty(physical - (64 << 20), torch.uint8)  # fits the arena, not what is free
        communicator.barrier()


@on_ranks(2)
def test_use_after_close() -> None:
    from pycomm import CommError

    communicator = Communicator(timeout=20)
    communicator.barrier()
    communicator.close()
    communicator.close()
    with pytest.raises(CommError, match="this communicator is closed"):
        communicator.barrier()
