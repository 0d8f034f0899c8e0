"""Starting ranks: messages come through, and a failure is blamed on the rank that began it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pycomm.tools.launching import Failure, PerRank, RankError, RankPool, Send, explain, run_ranks, send
from tests.ranks import PRELOAD


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


def answers(number: int, variable: str) -> tuple[int, str | None, int]:
    total = torch.tensor(number)
    dist.all_reduce(total)
    send(number)
    return dist.get_rank(), os.environ.get(variable), int(total)


def rank_0_raises_and_rank_1_dies() -> int:
    if dist.get_rank() == 0:
        raise LookupError("of rank 0")
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.get_rank()


def rank_of() -> int:
    return dist.get_rank()


@pytest.mark.timeout(60)
def test_a_pool_goes_on_after_what_failed() -> None:
    received: list[int] = []
    with RankPool(3, environment={"OF_THE_RANKS": "here"}, preload=PRELOAD) as pool:
        given = PerRank([10, 20, 30]), "OF_THE_RANKS"
        assert pool.run(answers, *given, on_message=received.append) == [(rank, "here", 60) for rank in range(3)]
        assert sorted(received) == [10, 20, 30]
        raised, died, well = pool.outcomes(rank_0_raises_and_rank_1_dies)
        assert isinstance(raised.error, LookupError)
        assert "in rank_0_raises_and_rank_1_dies" in raised.trace
        assert (type(died.error), died.trace) == (ChildProcessError, "died, with exit code 3")
        assert (well.result, well.error) == (2, None)
        assert not pool.is_alive()
        pool.ask(rank_of, ranks=[0, 2])
        assert {rank: outcome.result for rank, outcome in pool.answers(20.0, [0, 2]).items()} == {0: 0, 2: 2}
        with pytest.raises(RankError, match="^rank 1 ended with exit code 3$"):
            pool.run(rank_of)


@pytest.mark.timeout(60)
def test_ranks_that_are_late_are_named_and_killed() -> None:
    with RankPool(2, preload=PRELOAD, output=None) as pool:
        with pytest.raises(RankError, match=r"^not done after 0.5 s: rank 1\n\nrank 1:\n(?s:.*) in sleeps\n"):
            pool.outcomes(sleeps, PerRank([0, 60]), timeout=0.5)
        assert not pool.is_alive()


@pytest.mark.timeout(60)
def test_forked_ranks_have_addresses_of_their_own() -> None:
    with RankPool(2, preload=PRELOAD) as pool:
        first, second = pool.run(address_of_a_mapping)
        assert abs(first - second) > 1 << 29


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def address_of_a_mapping() -> int:
    return torch.empty(1 << 26).data_ptr()
