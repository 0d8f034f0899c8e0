"""Thousands of operations between hosts, with faults and new groups among them: nothing grows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pycomm import CommError, Communicator
from tests.hosts import on_hosts
from tests.on_ranks import Pools

EVERY = 250
"""Number of steps between two faults."""
_BIG = 300_000
_HOSTS = ("abc", "aab")


def held() -> dict[str, int]:
    """Return what this process holds: kilobytes of memory, descriptors, threads."""
    status = Path("/proc/self/status").read_text()
    numbers = {name: int(re.findall(rf"^{name}:\s+(\d+)", status, re.M)[0]) for name in ("VmRSS", "Threads")}
    return {**numbers, "descriptors": len(os.listdir("/proc/self/fd"))}


def step_of(c: Communicator, step: int) -> None:
    x = torch.full((1000,), float(c.rank + step))
    c.all_reduce(x)
    assert bool((x == sum(range(c.size)) + c.size * step).all())
    if step % 10 == 0:
        big = c.empty(_BIG).fill_(1.0)
        c.all_reduce(big)
        c.broadcast(big, step // 10 % c.size)
        assert bool((big == c.size).all())
    if step % 5 == 0:
        c.send(x, (c.rank + 1) % c.size, tag=step % 7)
        c.recv(x, (c.rank - 1) % c.size, tag=step % 7)


def sum_thrice(c: Communicator) -> None:
    for _ in range(3):  # the first may have ended before
        c.all_reduce(torch.ones(_BIG))


def fault(c: Communicator, number: int) -> Communicator:
    """Disagree, and go on; or let one rank leave, and meet again."""
    if number % 2 == 0:
        with pytest.raises(ValueError, match="the ranks disagree"):
            c.all_reduce(torch.ones(100_000 + (c.rank == number // 2 % c.size)))
        return c
    if c.rank == number // 2 % c.size:
        c.close("it has had enough")
    else:
        with pytest.raises(CommError, match="it has had enough"):
            sum_thrice(c)
        c.close()
    return Communicator(timeout=30)


def soak(hosts: str, steps: int) -> list[dict[str, int]]:
    found = []
    with on_hosts(hosts):
        c = Communicator(timeout=30)
        for step in range(1, steps + 1):
            step_of(c, step)
            if step % EVERY == 0:
                c = fault(c, step // EVERY)
            if step % (steps // 4) == 0:
                dist.barrier()
                found.append(held())
        c.close()
    return found


@pytest.mark.skipif("libasan" in Path("/proc/self/maps").read_text(), reason="AddressSanitizer keeps freed memory")
@pytest.mark.parametrize(
    ("hosts", "steps"),
    [*((hosts, 2000) for hosts in _HOSTS), *(pytest.param(hosts, 20_000, marks=pytest.mark.slow) for hosts in _HOSTS)],
)
@pytest.mark.timeout(300)
def test_nothing_grows(new_ranks: Pools, hosts: str, steps: int) -> None:
    for found in new_ranks(3).run(soak, hosts, steps, timeout=280):
        first, *_, last = found
        assert (last["descriptors"], last["Threads"]) == (first["descriptors"], first["Threads"]), found
        assert last["VmRSS"] < 1.05 * first["VmRSS"] + 4096, found
