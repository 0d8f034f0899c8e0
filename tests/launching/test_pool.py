"""Starting ranks: messages come through, and a failure is blamed on the rank that began it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from pycomm.launching import Failure, RankError, Send, explain, run_ranks


def sends_much(send: Send) -> None:
    for step in range(2000):  # more than a pipe holds
        send((dist.get_rank(), step))
    dist.barrier()


def rank_1_is_killed_and_others_send(kills: bool, send: Send) -> None:
    if dist.get_rank() == 1 and kills:
        os.kill(os.getpid(), signal.SIGKILL)
    send((dist.get_rank(), os.environ["A_VARIABLE"]))


def rank_1_raises(_send: Send) -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("rank 1 is to blame")
    dist.barrier()


def rank_1_hangs_when_rank_0_is_killed(_send: Send) -> None:
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
    received: list[tuple[int, int]] = []
    run_ranks(sends_much, 2, [], received.append)
    for rank in range(2):
        assert [step for sender, step in received if sender == rank] == list(range(2000))


@pytest.mark.parametrize("kills", [True, False])
@pytest.mark.timeout(60)
def test_a_mortal_rank_may_be_killed_and_the_others_are_waited_for(kills: bool) -> None:
    received: list[tuple[int, str]] = []
    variables = {"A_VARIABLE": "its value"}
    run_ranks(rank_1_is_killed_and_others_send, 3, [kills], received.append, mortal=[1], environment=variables)
    expected = {(0, "its value"), (2, "its value")} | (set() if kills else {(1, "its value")})
    assert expected - {(1, "its value")} <= set(received) <= expected


@pytest.mark.timeout(60)
def test_of_a_mortal_rank_another_death_is_still_a_failure() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run_ranks(
            rank_1_is_killed_and_others_send, 3, [True], lambda _: None, mortal=[2], environment={"A_VARIABLE": ""}
        )


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
        run_ranks(program, 2, [], lambda _message: None)  # type: ignore[arg-type]
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
