"""Ranks that others wait for are named in the log while they wait, and by one rank only."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport import late_ranks
from tests.on_ranks import on_ranks
from tests.reducer.attaching import Training
from tests.reducer.models import loss_of

SOON = 0.8
AGAIN = 1.2
NAP = 3.5


class Log(logging.Handler):
    """What is said of ranks that are waited for, and how many seconds after ``began``."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.times: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "wait for" in record.getMessage():
            prefix, _, line = record.getMessage().partition("] ")
            assert prefix == f"[pycomm rank {dist.get_rank()}"
            self.lines.append(line)
            self.times.append(time.monotonic() - self.began)


@contextlib.contextmanager
def named_soon() -> Iterator[Log]:
    """Have ranks named sooner than in earnest; the log of this rank is yielded."""
    before = late_ranks.NAMED_AFTER, late_ranks.NAMED_AGAIN
    late_ranks.NAMED_AFTER, late_ranks.NAMED_AGAIN = SOON, AGAIN
    log = Log()
    logging.getLogger("pycomm").addHandler(log)
    try:
        yield log
    finally:
        logging.getLogger("pycomm").removeHandler(log)
        late_ranks.NAMED_AFTER, late_ranks.NAMED_AGAIN = before


def everyones(log: Log) -> list[list[str]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, log.lines)
    return found


def assert_named(log: Log, sleeper: int, start: str) -> None:
    """One rank, the first that waited, has said it, and again; the others nothing, or once before they knew of it."""
    said = everyones(log)
    logger = 1 if sleeper == 0 else 0
    assert len(said[logger]) >= 2, said
    others = [line for rank, lines in enumerate(said) if rank != logger for line in lines]
    assert len(others) <= len(said) - 2, said  # on a busy machine, where word from another host comes late
    assert all(re.match(rf"ranks? (\d, )*{sleeper}\b", line) for line in others), said
    assert all(line.startswith(f"rank {sleeper} has not come to {start}") for line in said[logger]), said
    if dist.get_rank() == logger:
        assert log.times[0] >= SOON  # how much later depends on the load
        assert log.times[1] >= SOON + AGAIN * 0.9  # the first one may have been written late


KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "dense": ({}, False),
    "hosts": ({}, True),
    "TopK": ({"compression": pycomm.TopK(0.5)}, False),
    "shard": ({"shard": "optimizer"}, False),
    "shrink": ({"on_failure": "shrink"}, False),
    "shrink over hosts": ({"on_failure": "shrink"}, True),
}


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`... not come to ... for ... s: the others wait for ...`",
    "That rank is slow, stuck or elsewhere: run `py-spy dump --pid`. Waits on GPUs are not logged.",
)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_late_rank_is_named_while_it_is_waited_for(kind: str) -> None:
    name_late_rank(kind, sleeper=1)


@pytest.mark.parametrize(("kind", "sleeper"), [("dense", 0), ("dense", 1), ("hosts", 0), ("hosts", 2)])
@on_ranks(3)
def test_the_first_that_waits_names_it(kind: str, sleeper: int) -> None:
    name_late_rank(kind, sleeper)


def name_late_rank(kind: str, sleeper: int) -> None:
    options, over_hosts = KINDS[kind]
    training = Training(over_hosts, **options)
    for index in range(3):
        training.step(index)
    dist.barrier()
    with named_soon() as log:
        if training.rank == sleeper:
            time.sleep(NAP)
        training.step(3)
        assert_named(log, sleeper, "reduction 4 for ")
        assert all("(last seen at reduction 3)" in line for line in log.lines)
    training.reducer.detach()


@on_ranks(3)
def test_several_late_ranks_are_named_together() -> None:
    training = Training()
    training.step(0)
    dist.barrier()
    with named_soon() as log:
        if training.rank != 2:
            time.sleep(2 * SOON)
        training.step(1)
        said = everyones(log)
        assert [len(lines) for lines in said] == [0, 0, 1], said
        assert said[2][0].startswith("ranks 0, 1 have not come to reduction 2 for 1 s: the others wait for them")
    training.reducer.detach()


@on_ranks(3)
def test_a_rank_that_came_meanwhile_is_not_named() -> None:
    """On one host the board says that rank 2 has come, which has not waited long enough to say so."""
    training = Training()
    training.step(0)
    dist.barrier()
    with named_soon() as log:
        time.sleep((0.0, NAP, SOON * 0.9)[training.rank])
        training.step(1)
        said = everyones(log)
        assert said[0], said
        assert said[1] == said[2] == []
        assert said[0][-1].startswith("rank 1 has not come to reduction 2 "), said  # on a busy machine not the first
    training.reducer.detach()


@pytest.mark.parametrize("sleeper", [0, 2])
@on_ranks(3)
def test_before_anything_was_reduced(sleeper: int) -> None:
    """A rank that does not call ``attach``."""
    dist.barrier()
    with named_soon() as log:
        if dist.get_rank() == sleeper:
            time.sleep(NAP)
        training = Training()
        assert_named(log, sleeper, "make a communicator (attach, Communicator) for ")
    training.reducer.detach()


@pytest.mark.parametrize("call", ["flush", "barrier", "all_reduce", "broadcast", "clip"])
@on_ranks(2)
def test_whatever_waits(call: str) -> None:
    """What is no reduction is named by its operation, and the line of the script that called it."""
    of_calls: dict[str, dict[str, Any]] = {"flush": {"accumulate": 3}, "clip": {"shard": "optimizer"}}
    options = of_calls.get(call, {})
    training = Training(**options)
    with pycomm.Communicator(timeout=30) as communicator:
        if call == "flush":
            loss_of(training.model, training.rank, 0).backward()
        elif call == "clip":
            training.step(0)
        dist.barrier()
        with named_soon() as log:
            if training.rank == 0:
                time.sleep(NAP)
            if call == "flush":
                training.reducer.flush()
            elif call == "clip":
                training.reducer.clip_grad_norm(1.0)
            elif call == "barrier":
                communicator.barrier()
            else:
                getattr(communicator, call)(torch.ones(4), *([0] if call == "broadcast" else []))
            if call == "flush":
                assert_named(log, 0, "reduction 1 for ")
            else:
                assert_named(log, 0, "operation ")
                assert all("test_late_ranks.py:" in line for line in log.lines), log.lines
    training.reducer.detach()


@on_ranks(3)
def test_a_rank_that_has_got_what_it_wanted_is_not_named() -> None:
    """The source of a broadcast waits for the last rank; another one has long gone on."""
    x = torch.ones(1 << 22)
    with pycomm.Communicator(timeout=30) as communicator:
        communicator.barrier()
        with named_soon() as log:
            if dist.get_rank() == 2:
                time.sleep(NAP)
            communicator.broadcast(x, 0)
            if dist.get_rank() == 1:
                time.sleep(NAP)
            communicator.barrier()
            said = everyones(log)
        broadcasts = [line for line in said[0] if "(broadcast, " in line]
        assert broadcasts, said
        assert all(line.startswith("rank 2 has not come to ") for line in broadcasts), said


@on_ranks(3)
def test_nobody_is_named_where_the_wait_is_short_or_backward_is_long() -> None:
    training = Training(bucket_mb=1e-4)
    for index in range(2):
        training.step(index)
    dist.barrier()
    with named_soon() as log:
        time.sleep(SOON / 2 * (training.rank == 1))
        training.step(2)
        # Its first buckets have set out, and nobody waits: all ranks are in the middle of their backwards.
        first = next(training.model.parameters())
        handle = first.register_hook(lambda _: time.sleep(2 * SOON))
        training.step(3)
        handle.remove()
        assert not any(everyones(log)), log.lines
    training.reducer.detach()


@on_ranks(2, fresh=True)
def test_the_thread_ends_with_what_it_looks_at() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("pycomm-late-ranks")]

    training = Training()
    assert len(threads()) == 1
    training.step(0)
    training.reducer.detach()
    assert threads() == []


def test_no_garbage_is_collected_while_a_group_is_at_work() -> None:
    """A collection holds up all threads: a group that only pauses while another one works must not cause it."""
    watch, asking, long_ago = late_ranks.LateRankWatch(), late_ranks._Asking(), time.monotonic() - 100.0
    recorders = [Recorder("pauses", 0, [0, 1]), Recorder("works", 0, [0, 1])]
    pausing, working = (late_ranks._Group(since=long_ago) for _ in recorders)
    watch._groups.update(zip(recorders, (pausing, working), strict=True))
    working.since = time.monotonic()
    assert not watch._look(asking)
    working.since = long_ago
    assert watch._look(asking)
    assert pausing.is_collected
    assert not watch._look(asking)  # once
    asking.close()


@on_ranks(2)
def test_a_store_that_hangs_or_fails_only_costs_names() -> None:
    class Broken:
        def set(self, *_: str) -> None:
            raise RuntimeError("it is gone")

        check = get = set

    class Hanging:
        def set(self, *_: str) -> None:
            time.sleep(60)

        check = get = set

    training = Training()
    training.step(0)
    for store in (Broken(), Hanging()):
        dist.barrier()
        with named_soon() as log, pytest.MonkeyPatch.context() as patch:
            patch.setattr(late_ranks, "_ANSWER", 0.2)
            patch.setattr(late_ranks, "_store_of", lambda _, store=store: store)
            if training.rank == 1:
                time.sleep(NAP)
            training.step(1)
            said = everyones(log)
        assert said[1] == [], said
        assert said[0], said
        assert all(line.startswith("rank 1 has not come to reduction ") for line in said[0])  # by the board
    began = time.monotonic()
    training.reducer.detach()
    assert time.monotonic() - began < 10.0


@on_ranks(2, fresh=True)
def test_a_forked_child_looks_at_nothing() -> None:
    training = Training()
    training.step(0)
    child = os.fork()
    if child == 0:
        os._exit(1 if any(t.name.startswith("pycomm-late") for t in threading.enumerate()) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.step(1)
    training.reducer.detach()


def test_lines() -> None:
    assert late_ranks.names_of([3]) == "rank 3"
    assert late_ranks.names_of([3, 5]) == "ranks 3, 5"
    assert late_ranks.names_of(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    line = late_ranks.absence("rank 1", "reduction 21", 10.2, "last seen at reduction 20", is_one=True)
    assert line == ("rank 1 has not come to reduction 21 for 10 s: the others wait for it (last seen at reduction 20)")
