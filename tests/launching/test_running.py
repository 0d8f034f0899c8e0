"""Starting ranks: messages come through, and a failure is blamed on the rank that began it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from pycomm.cli.demo.messages import Message, Progress
from pycomm.cli.demo.settings import Settings
from pycomm.launching import Failure, RankError, Tell, explain, run_ranks
from tests.cli.small import small_settings

SETTINGS = small_settings("none", 20)


def tells_much(_settings: Settings, tell: Tell) -> None:
    for step in range(2000):  # more than a pipe holds
        tell(Progress(dist.get_rank(), step, 1.0, 0.1))
    dist.barrier()


def rank_1_raises(_settings: Settings, _tell: Tell) -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 is to blame")
    dist.barrier()


def rank_1_hangs_when_rank_0_is_killed(_settings: Settings, _tell: Tell) -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


@pytest.fixture(autouse=True)
def _no_process_more() -> Iterator[None]:
    before = set(mp.active_children())  # of other tests
    yield
    assert set(mp.active_children()) <= before


@pytest.mark.timeout(60)
def test_messages_of_all_ranks_arrive_in_order() -> None:
    received: list[Message] = []
    run_ranks(tells_much, 2, [SETTINGS], received.append)
    for rank in range(2):
        steps = [m.step for m in received if isinstance(m, Progress) and m.run == rank]
        assert steps == list(range(2000))


@pytest.mark.parametrize(
    ("program", "begins", "contains"),
    [
        (rank_1_raises, "rank 1 failed:", "ArithmeticError: rank 1 is to blame"),
        (rank_1_hangs_when_rank_0_is_killed, "rank 0 was killed by SIGKILL", ""),
    ],
)
@pytest.mark.timeout(60)
def test_the_rank_that_began_it_is_named(program: object, begins: str, contains: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(program, 2, [SETTINGS], lambda _message: None)  # type: ignore[arg-type]
    assert str(caught.value).startswith(begins)
    assert contains in str(caught.value)


def test_a_rank_that_ended_without_a_word_comes_first() -> None:
    follower = Failure(2, 1.0, "Traceback: peer is gone\n")
    assert str(explain([None, 7, 1], [follower])) == (
        "rank 1 ended with exit code 7\nrank 2 failed after that:\n\nTraceback: peer is gone"
    )


def test_the_earliest_failure_is_the_cause() -> None:
    failures = [Failure(0, 5.0, "late"), Failure(1, 4.5, "early"), Failure(2, 4.6, "late")]
    assert str(explain([1, 1, 1], failures)) == "rank 1 failed:\n\nearly"
