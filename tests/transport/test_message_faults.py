"""Messages whose peers die, close, do not come or send too much; and signals and forks meanwhile."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from pycomm import CommError, Communicator
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool

TIMEOUT = 30.0


def transport_of(communicator: Communicator) -> SharedMemoryTransport:
    return cast(SharedMemoryTransport, communicator.channel.transport)


def send_endlessly(ranks: SharedMemoryTransport, dst: int) -> None:
    while True:
        ranks.send(torch.ones(3), dst, 0, TIMEOUT)


def receive_from_the_dead(any_source: bool) -> str:
    """The last rank sends two messages, a large and a small one, and is killed; the others receive more than that."""
    communicator = Communicator(timeout=TIMEOUT)
    ranks, last = transport_of(communicator), communicator.size - 1
    if communicator.rank == last:
        for p in range(last):
            ranks.send(torch.arange(500_000), p, 0, TIMEOUT)
            ranks.send(torch.arange(3), p, 0, TIMEOUT)
        communicator.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.barrier()
    time.sleep(0.3)
    src = None if any_source else last
    for n in (500_000, 3):
        x = torch.empty(n, dtype=torch.int64)
        assert ranks.receive(x, src, 0).wait(TIMEOUT) == last
        assert torch.equal(x, torch.arange(n))
    started = time.monotonic()
    receipt = ranks.receive(torch.empty(3), last, 0)
    with pytest.raises(CommError) as caught:
        receipt.wait(TIMEOUT)
    assert time.monotonic() - started < 3
    assert receipt.is_completed()
    with pytest.raises(CommError, match="died"):
        receipt.wait(TIMEOUT)
    assert caught.value.peer == last
    with pytest.raises(CommError, match=f"rank {last} died"):
        send_endlessly(ranks, last)
    if communicator.size == 3:  # the survivors' messages are not hurt
        other = 1 - communicator.rank
        ranks.send(torch.ones(3), other, 5, TIMEOUT)
        assert ranks.receive(torch.empty(3), None, 5).wait(TIMEOUT) == other
    else:
        with pytest.raises(CommError, match=f"rank {last} died"):
            ranks.receive(torch.empty(3), None, 0).wait(TIMEOUT)
    if communicator.size == 3 and communicator.rank == 0:
        ranks.receive(torch.empty(1), 1, 9).wait(TIMEOUT)
    elif communicator.size == 3:
        ranks.send(torch.ones(1), 0, 9, TIMEOUT)
    said = str(caught.value)
    communicator.close()
    return said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("any_source", [False, True])
def test_what_the_dead_have_sent_is_received(new_ranks: Pools, size: int, any_source: bool) -> None:
    outcomes = new_ranks(size).outcomes(receive_from_the_dead, any_source)
    assert isinstance(outcomes[-1].error, ChildProcessError)
    for rank, outcome in enumerate(outcomes[:-1]):
        assert outcome.error is None, outcome.trace
        assert f"rank {rank}: recv: rank {size - 1} died (its connection is closed) after" in outcome.result


VICTIM = 2


def run_ring(folder: str, transport: str, end: str, others_end: str) -> None:
    """Send to the next and receive from the one before, for ever. One ends, then each that hears of it, by itself."""
    communicator = Communicator(timeout=TIMEOUT, transport=transport)
    rank, size = communicator.rank, communicator.size
    x = torch.ones(3)
    try:
        for number in range(10**9):
            if rank == VICTIM and number == 20:
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                communicator.close("it has had enough")
                return
            communicator.send(x, (rank + 1) % size)
            communicator.recv(x, (rank - 1) % size)
    except CommError as error:
        Path(folder, str(rank)).write_text(f"{error.peer} {error}")
    if others_end == "exits":
        os._exit(0)
    communicator.close()


@pytest.mark.parametrize("end", ["killed", "closes"])
@pytest.mark.parametrize("others_end", ["closes", "exits"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_all_around_a_ring_blame_the_rank_that_ended_first(
    new_ranks: Pools, tmp_path: Path, transport: str, end: str, others_end: str
) -> None:
    new_ranks(4).outcomes(run_ring, str(tmp_path), transport, end, others_end)
    said = {rank: (tmp_path / str(rank)).read_text() for rank in range(4) if rank != VICTIM}
    what = f"rank {VICTIM} {'died' if end == 'killed' else 'gave up'}"
    assert all(text.startswith(f"{VICTIM} ") and what in text for text in said.values()), said


@on_ranks(2)
def test_a_death_ends_a_wait_that_has_begun() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    if communicator.rank == 0:
        with pytest.raises(CommError, match="rank 1 gave up .*it closed its communicator"):
            communicator.recv(torch.empty(3), 1)
    else:
        time.sleep(0.5)
    communicator.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "torch"])
@on_ranks(2)
def test_who_closes_early_is_received_by_who_comes_late(transport: str) -> None:
    communicator = Communicator(timeout=TIMEOUT, transport=transport)
    other = 1 - communicator.rank
    for n in (3, 300_000):
        communicator.send(torch.full((n,), float(communicator.rank)), other)
    time.sleep(0.7 * communicator.rank)
    for n in (3, 300_000):
        x = torch.empty(n)
        communicator.recv(x, other)
        assert (x == other).all()
    communicator.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "torch"])
@on_ranks(2, timeout=20)
def test_closing_waits_for_nobody_who_is_gone_and_not_for_ever(transport: str) -> None:
    communicator = Communicator(timeout=TIMEOUT, transport=transport)
    communicator.send(torch.ones(300_000), 1 - communicator.rank)
    communicator.barrier()  # rank 1 has sent, too, before rank 0 closes
    communicator.close("nothing is wanted any more" if communicator.rank == 0 else None)


@on_ranks(2)
def test_what_was_sent_before_closing_is_received() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    other = 1 - communicator.rank
    for n in (3, 300_000):
        communicator.send(torch.full((n,), float(communicator.rank)), other)
    communicator.barrier()  # rank 1 has sent, too, before rank 0 closes
    if communicator.rank == 0:
        communicator.close()
        with pytest.raises(CommError, match="closed"):
            communicator.send(torch.ones(3), other)
        with pytest.raises(CommError, match="closed"):
            communicator.recv(torch.ones(3), other)
        return
    time.sleep(0.5)
    for n in (3, 300_000):
        x = torch.empty(n)
        assert communicator.recv(x, None) == 0
        assert (x == 0).all()
    with pytest.raises(CommError, match="rank 0 gave up .*it closed its communicator"):
        communicator.recv(torch.empty(3))
    communicator.close()


@on_ranks(2)
def test_a_timeout_says_whom_it_waited_for_and_breaks_nothing() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    ranks = transport_of(communicator)
    if communicator.rank == 0:
        x = torch.zeros(3)
        receipt = ranks.receive(x, 1, 6)
        with pytest.raises(CommError, match="rank 0: recv: timed out waiting for rank 1 with tag 6 after 0.") as caught:
            receipt.wait(0.3)
        assert (caught.value.peer, caught.value.operation) == (1, "recv")
        assert 0.3 < caught.value.elapsed < 3
        with pytest.raises(CommError, match="timed out waiting for a message from any rank with tag 7"):
            ranks.receive(x, None, 7).wait(0.1)
        communicator.barrier()
        assert receipt.wait(TIMEOUT) == 1, "it has remained posted"
        assert (x == 1).all()
    else:
        communicator.barrier()
        ranks.send(torch.ones(3), 0, 6, TIMEOUT)
    communicator.barrier()
    communicator.close()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@on_ranks(2, 3)
def test_closing_ends_the_waits_of_other_threads(transport: str) -> None:
    """For messages of one rank and of any."""
    communicator = Communicator(timeout=TIMEOUT, transport=transport)
    said: list[str] = []

    def wait(operation: Callable[[], object]) -> None:
        with pytest.raises(CommError) as caught:
            operation()
        said.append(str(caught.value))

    if communicator.rank == 0:
        x = torch.zeros(3)
        waits: list[Callable[[], object]] = [
            functools.partial(communicator.recv, x.clone(), src) for src in (None, communicator.size - 1)
        ]
        threads = [threading.Thread(target=wait, args=(operation,)) for operation in waits]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        started = time.monotonic()
        communicator.close()
        for thread in threads:
            thread.join()
        assert time.monotonic() - started < 3
        assert len(said) == len(waits)
        assert all("closed" in text for text in said), said
    dist.barrier()
    communicator.close()


@on_ranks(2)
def test_a_receipt_keeps_its_array_and_gives_it_back() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    ranks = transport_of(communicator)
    other = 1 - communicator.rank
    gone: list[int] = []

    class Noted(torch.Tensor):
        def __del__(self) -> None:
            gone.append(1)

    receipt = ranks.receive(torch.zeros(5).as_subclass(Noted), other, 0)
    assert not gone
    communicator.barrier()
    ranks.send(torch.ones(5), other, 0, TIMEOUT)
    receipt.wait(TIMEOUT)
    assert len(gone) == 1, "after it was completed"
    ranks.receive(torch.zeros(5).as_subclass(Noted), other, 1).cancel()
    assert len(gone) == 2, "after it was cancelled"
    ranks.receive(torch.zeros(5).as_subclass(Noted), other, 2)  # nobody holds the receipt
    assert len(gone) == 2
    communicator.barrier()
    communicator.close()
    assert len(gone) == 3, "after the end"


@on_ranks(2)
def test_ctrl_c_ends_a_wait_and_breaks_nothing() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    x = torch.zeros(3)
    if communicator.rank == 0:
        ranks = transport_of(communicator)
        receipt = ranks.receive(x, 1, 0)
        threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            receipt.wait(TIMEOUT)
        assert time.monotonic() - started < 3
        communicator.barrier()
        receipt.wait(TIMEOUT)
        assert (x == 1).all()
    else:
        communicator.barrier()
        communicator.send(torch.ones(3), 0)
    communicator.barrier()
    communicator.close()


@on_ranks(2)
def test_signal_handlers() -> None:
    """One that closes the communicator ends the wait; one that begins another operation is told."""
    communicator = Communicator(timeout=TIMEOUT)
    said: list[str] = []

    def begin(*_: object) -> None:
        for operation in (lambda: communicator.send(torch.ones(1), 1), lambda: communicator.barrier()):
            with pytest.raises(CommError) as caught:
                operation()
            said.append(str(caught.value))
        communicator.close("a handler closed it")

    if communicator.rank == 0:
        before = signal.signal(signal.SIGUSR1, begin)
        threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(CommError, match="closed"):
            communicator.recv(torch.empty(3), 1)
        signal.signal(signal.SIGUSR1, before)
        assert len(said) == 2
        assert all("called by a signal handler while this thread is in another operation" in text for text in said)
        with pytest.raises(CommError, match="closed"):
            communicator.barrier()
    else:
        with pytest.raises(CommError, match="a handler closed it"):
            communicator.recv(torch.empty(3), 0)
        communicator.close()


@on_ranks(2)
def test_a_forked_child_is_told() -> None:
    communicator = Communicator(timeout=TIMEOUT)
    ranks, other = transport_of(communicator), 1 - communicator.rank
    receipt = ranks.receive(torch.zeros(3), other, 0)
    ranks.send(torch.ones(3), other, 1, TIMEOUT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for operation in (
                lambda: ranks.send(torch.ones(3), other, 0, TIMEOUT),
                lambda: ranks.receive(torch.ones(3), other, 0),
                lambda: receipt.wait(TIMEOUT),
                lambda: receipt.is_completed(),
                lambda: receipt.cancel(),
            ):
                with pytest.raises(CommError, match="inherited by a fork"):
                    operation()
            del receipt
            communicator.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ranks.send(torch.ones(3), other, 0, TIMEOUT)
    receipt.wait(TIMEOUT)
    communicator.recv(torch.empty(3), other, 1)
    communicator.barrier()
    communicator.close()


def fail_a_collective() -> str:
    communicator = Communicator(timeout=1.0)
    if communicator.rank == 0:
        with pytest.raises(CommError, match="timed out"):
            communicator.barrier()
        with pytest.raises(CommError) as caught:
            communicator.send(torch.ones(3), 1)
        with pytest.raises(CommError, match="broken since an earlier failure"):
            communicator.recv(torch.ones(3), 1)
    else:
        with pytest.raises(CommError) as caught:
            transport_of(communicator).receive(torch.ones(3), 0, 0).wait(TIMEOUT)
    communicator.close()
    return str(caught.value)


def test_who_gave_up_in_a_collective_sends_nothing_any_more(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(fail_a_collective)
    assert "this communicator is broken since an earlier failure (rank 0: barrier: timed out" in first
    assert "rank 0 gave up (rank 0: barrier: timed out" in second
