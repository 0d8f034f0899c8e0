"""Transport "hierarchical", on hosts that are invented. Ranks are real processes."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm._native as _native
from pycomm import CommError, Communicator
from pycomm.collectives.transport import rendezvous
from pycomm.collectives.transport.rendezvous import hosts_of, log_isolation
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.transport.test_collectives import check_all_reduce, check_the_others

LAYOUTS = ["aab", "abbc", *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("aabb", "abab", "aaab"))]


@contextmanager
def communicator_on(hosts: str, transport: str = "auto") -> Iterator[Communicator]:
    with on_hosts(hosts), Communicator(timeout=20, transport=transport) as communicator:
        yield communicator


def conforms(hosts: str, dtype: torch.dtype, memory: str) -> list[str]:
    with on_hosts(hosts):
        check_the_others("hierarchical", dtype, memory)
        return check_all_reduce("hierarchical", dtype, memory)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_operation_type_and_size(rank_pools: Pools, hosts: str) -> None:
    for dtype, memory in ((torch.float32, "tensor"), (torch.bfloat16, "empty"), (torch.int8, "tensor")):
        digests = rank_pools(len(hosts)).run(conforms, hosts, dtype, memory)
        assert all(d == digests[0] for d in digests), "ranks hold different bits"


@on_ranks(4)
def test_real_numbers_get_the_same_bits_everywhere() -> None:
    with communicator_on("abbc") as communicator:
        for dtype in (torch.float32, torch.float16):
            everyones = [torch.randn(70_001, generator=torch.Generator().manual_seed(p)).to(dtype) for p in range(4)]
            x = everyones[communicator.rank].clone()
            communicator.all_reduce(x)
            total = torch.stack(everyones).double().sum(0)
            torch.testing.assert_close(x.double(), total, rtol=0, atol=1e-2 if dtype == torch.float16 else 1e-5)
            assert len(set(communicator.channel.all_gather_bytes(x.view(torch.uint8).numpy().tobytes()))) == 1


@pytest.mark.parametrize("hosts", ["aabb", "abbb", "abbc"])
@on_ranks(4)
def test_several_segments(hosts: str) -> None:
    """They overlap: while one is between the hosts, its neighbors are on theirs."""
    with communicator_on(hosts) as communicator:
        rank, size = communicator.rank, communicator.size
        for count, dtype, memory in ((2_500_001, torch.float32, "empty"), (3_000_000, torch.int32, "tensor")):
            pattern = torch.arange(count, dtype=torch.int64) % 1009
            x = (pattern + 7 * rank).to(dtype)
            x = communicator.empty(count, dtype).copy_(x) if memory == "empty" else x
            communicator.all_reduce(x)
            assert torch.equal(x.long(), size * pattern + 7 * sum(range(size)))
        half = torch.full((5_000_001,), 3.0 + rank, dtype=torch.float16)
        communicator.all_reduce(half, "mean")
        assert bool((half == 3.0 + sum(range(size)) / size).all())


@on_ranks(3)
def test_hosts_must_be_those_of_both_groups() -> None:
    with communicator_on("aab") as communicator:
        transport: Any = communicator.channel.transport
        for wrong in ([], [[0, 1]], [[0, 1, 2]], [[0, 1], [2, 2]], [[0, 1], [3]]):
            with pytest.raises(ValueError, match="hosts do not match the two groups"):
                _native.HierarchicalGroup(transport.flat.group, transport.local.group, wrong)


@on_ranks(4)
def test_other_ways() -> None:
    with communicator_on("aabb") as communicator:
        assert communicator.transport == "hierarchical"
        big = torch.full((3 << 20,), communicator.rank, dtype=torch.uint8)  # several segments of the chain
        communicator.broadcast(big, 2)
        assert bool((big == 2).all())
        x = torch.full((1000,), float(communicator.rank))
        communicator.all_reduce(x, algorithm="ring")
        assert bool((x == 6).all())
        works = [communicator.all_reduce(torch.full((9000,), 1.0), async_op=True) for _ in range(5)]
        for work in works:
            assert work is not None
            work.wait()


@pytest.mark.parametrize(("operation", "times"), [("all_reduce", 1.0), ("all_gather", 2.0)])
@on_ranks(4)
def test_bytes_between_hosts(operation: str, times: float) -> None:
    """For each host and direction n for an all-reduce among two hosts, and each other host's arrays once."""
    hosts, num_bytes = "aabb", 4 * 100_000
    with communicator_on(hosts) as communicator:
        x = torch.ones(num_bytes // 4)
        mine = sent_to_others(communicator, hosts, lambda: one(communicator, operation, x))
        everyones = communicator.channel.all_gather_bytes(str(mine).encode())
        of_host = sum(int(mine) for p, mine in enumerate(everyones) if hosts[p] == hosts[communicator.rank])
        assert 0 <= of_host - times * num_bytes <= FRAMES


FRAMES = 4_000
"""Most bytes of all frames of an operation."""


def sent_to_others(communicator: Communicator, hosts: str, operation: Callable[[], object]) -> int:
    """Return how many bytes this rank sends to other hosts in ``operation``."""

    def sent() -> int:
        of_ranks = communicator.channel.transport.flat.group.bytes_sent()  # type: ignore[attr-defined]
        return sum(num_bytes for p, num_bytes in enumerate(of_ranks) if hosts[p] != hosts[communicator.rank])

    before = sent()
    operation()
    return sent() - before


def one(communicator: Communicator, operation: str, x: torch.Tensor) -> None:
    if operation == "all_reduce":
        communicator.all_reduce(x)
    else:
        communicator.all_gather(torch.empty(4 * len(x)), x)


@on_ranks(4)
def test_mistakes_are_told_to_all_ranks() -> None:
    with communicator_on("aabb") as communicator:
        x = torch.ones(70_000 + (communicator.rank == 3))
        with pytest.raises(ValueError, match="rank 3 called all_reduce"):
            communicator.all_reduce(x)
        x = torch.ones(70_000, dtype=torch.bool if communicator.rank == 2 else torch.float32)
        with pytest.raises((ValueError, TypeError), match=r"rank 2 could not take part|bool"):
            communicator.all_reduce(x)
        x = torch.ones(70_000)
        communicator.all_reduce(x)
        assert bool((x == 4).all())


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    '`transport="shared_memory"` over several hosts, containers or users',
    '`ValueError`. Leave it at "auto".',
)
@pytest.mark.parametrize(("hosts", "why"), [("aaaa", "all ranks are on one host"), ("abcd", "no two ranks share")])
@on_ranks(4)
def test_insisting_where_hosts_are_not_shared(hosts: str, why: str) -> None:
    with pytest.raises(ValueError, match=why), communicator_on(hosts, "hierarchical"):
        pass
    with communicator_on(hosts) as communicator:
        assert communicator.transport == ("shared_memory" if hosts == "aaaa" else "tcp")
    with pytest.raises(ValueError, match="not all on one host"), communicator_on("aabb", "shared_memory"):
        pass


def again(communicator: Communicator, x: torch.Tensor) -> None:
    for _ in range(3):  # a rank that leaves at once may have ended the first
        communicator.all_reduce(x)


def leaves(hosts: str, victim: int, how: str) -> CommError | None:
    with communicator_on(hosts) as communicator:
        x = torch.ones(1 << 20 if how == "close" else 5 << 20)
        communicator.all_reduce(x)
        if communicator.rank == victim:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            communicator.close("it had enough")
            return None
        with pytest.raises(CommError) as caught:
            again(communicator, x)
        with pytest.raises(CommError, match="broken since"):
            communicator.all_reduce(x)
        return caught.value


@pytest.mark.parametrize(("hosts", "victim", "how"), [("aabb", 3, "kill"), ("aabb", 3, "close"), ("aaab", 3, "kill")])
def test_a_rank_that_leaves_is_named_everywhere(new_ranks: Pools, hosts: str, victim: int, how: str) -> None:
    for rank, outcome in enumerate(new_ranks(4).outcomes(leaves, hosts, victim, how)):
        if rank == victim:
            continue
        assert outcome.error is None, outcome.trace
        assert (outcome.result.rank, outcome.result.peer) == (rank, victim), str(outcome.result)
        assert outcome.result.elapsed < 10
        assert how == "kill" or "it had enough" in str(outcome.result)


def test_hosts() -> None:
    hosts = hosts_of(3, [{"host": host} for host in "abacb"])
    assert hosts.ranks == ((0, 2), (1, 4), (3,))
    assert (hosts.members, hosts.local_rank, hosts.are_one, hosts.are_shared) == ((3,), 0, False, True)
    assert not hosts_of(0, [{"host": host} for host in "ab"]).are_shared
    assert hosts_of(0, [{"host": host} for host in "aa"]).are_one


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`... are on one machine but share no memory, as they differ in ...`",
    "They exchange messages, which is slower. Containers must share what the text lists.",
)
def test_walls_between_ranks_of_one_machine_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = [
        {"host": host}
        for host in (
            "boot/net:1/pid:1/user:1/0",
            "boot/net:2/pid:1/user:1/7",
            "boot/net:2/pid:1/user:1/7",
            "other/n/p/u/0",
        )
    ]
    with caplog.at_level(logging.WARNING, "pycomm"):
        for rank in (1, 2, 3):  # rank 0 says it for all of its machine, and rank 3 is alone on one
            log_isolation(rank, machine, "torch")
        assert not caplog.records
        log_isolation(0, machine, "torch")
    (record,) = caplog.records
    assert "ranks 0 and 1 are on one machine but share no memory" in record.getMessage()
    assert "differ in network namespace and user:" in record.getMessage()
    assert "'torch' is used" in record.getMessage()


def denied(_num_bytes: int) -> int:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... is denied memory that processes share (...)`",
    "The sandbox of that rank forbids it; messages are used.",
)
@on_ranks(3)
def test_without_memory_to_share_messages_are_used() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(rendezvous, "anonymous_memory", denied)
        with pytest.raises(ValueError, match="rank 1 is denied it: .*not permitted"):
            Communicator(timeout=20, transport="shared_memory")
        with pytest.MonkeyPatch.context() as logs:
            lines: list[str] = []
            logs.setattr(logging.getLogger("pycomm"), "warning", lambda text, *values: lines.append(text % values))
            with Communicator(timeout=20) as communicator:
                assert communicator.transport == "tcp"
        assert len(lines) == (dist.get_rank() == 0)
        assert all("rank 1 is denied memory that processes share" in line for line in lines)


def for_ever(communicator: Communicator, x: torch.Tensor) -> None:
    while True:
        communicator.all_reduce(x, "max")


def interrupted(hosts: str, how: str) -> str:
    """Rank 1 is interrupted, or closes on another thread, in the middle of large operations."""
    with on_hosts(hosts):
        communicator = Communicator(timeout=20)
    x = torch.ones(5 << 20)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        end = communicator.close if how == "close" else functools.partial(signal.raise_signal, signal.SIGINT)
        threading.Timer(0.3, end).start()
    started = time.monotonic()
    try:
        while time.monotonic() - started < 15:
            communicator.all_reduce(x, "mean")
        return "nothing happened"
    except (CommError, KeyboardInterrupt) as error:
        return f"{type(error).__name__} {getattr(error, 'peer', None)} {time.monotonic() - started < 10}"
    finally:
        communicator.close()


@pytest.mark.parametrize("how", ["signal", "close"])
def test_a_rank_that_is_interrupted_ends_the_operation_on_all(new_ranks: Pools, how: str) -> None:
    outcomes = new_ranks(4).run(interrupted, "aabb", how)
    assert outcomes[1] in ("KeyboardInterrupt None True", "CommError None True"), outcomes
    assert [outcomes[p] for p in (0, 2, 3)] == ["CommError 1 True"] * 3, outcomes


def stopped_inside(hosts: str, timeout: float) -> CommError | None:
    with on_hosts(hosts), Communicator(timeout=timeout) as communicator:
        x = torch.ones(1 << 15)
        communicator.all_reduce(x)
        if communicator.rank == 1:
            pid = os.getpid()
            command = f"sleep 0.5; kill -STOP {pid}; sleep 8; kill -KILL {pid}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
        with pytest.raises(CommError) as caught:
            for_ever(communicator, x)
        return caught.value


def test_a_rank_that_is_stopped_is_named_within_the_timeout(new_ranks: Pools) -> None:
    """On its own host, too, and by other hosts, which wait for a rank that only waits."""
    timeout = 5.0
    outcomes = new_ranks(3).outcomes(stopped_inside, "aab", timeout)
    for rank in (0, 2):
        error = outcomes[rank].result
        assert (error.rank, error.peer) == (rank, 1), str(error)
        assert error.elapsed <= timeout + 1.0
