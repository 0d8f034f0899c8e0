"""The bound on what is sent and not yet received."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest
import torch

from pycomm import CommError, Communicator
from pycomm.collectives.transport.base import buffer_limit
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from tests.on_ranks import on_ranks

TIMEOUT = 30.0
TRANSPORTS = ["shared_memory", "tcp", "torch"]
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def transport_of(communicator: Communicator) -> SharedMemoryTransport:
    return cast(SharedMemoryTransport, communicator.channel.transport)


def error_of_sending(ranks: SharedMemoryTransport, x: torch.Tensor, dst: int) -> str:
    """Return what was wrong with it, "" if nothing was."""
    try:
        ranks.send(x, dst, 0, TIMEOUT)
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "buffer messages that nobody receives",
    "`send` waits above `PYCOMM_BUFFER_BYTES`: 1 GiB, or a quarter of the memory if that is less.",
)
def test_the_bound_is_the_environments_or_1_gib_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCOMM_BUFFER_BYTES", raising=False)
    assert 0 < buffer_limit() <= 1 << 30
    monkeypatch.setenv("PYCOMM_BUFFER_BYTES", "12345")
    assert buffer_limit() == 12345
    for wrong in ("", "-1", "1e9", "9" * 30, "\N{SUPERSCRIPT TWO}"):
        monkeypatch.setenv("PYCOMM_BUFFER_BYTES", wrong)
        with pytest.raises(ValueError, match="the environment variable PYCOMM_BUFFER_BYTES is '.*', wanted a number"):
            buffer_limit()


@each_transport
@on_ranks(2)
def test_a_message_that_never_fits(transport: str) -> None:
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        ranks, other = transport_of(communicator), 1 - communicator.rank
        ranks.buffer_limit = 100_000
        with pytest.raises(ValueError, match=r"x has 400000 bytes, wanted .* 100000 bytes .*PYCOMM_BUFFER_BYTES"):
            ranks.send(torch.ones(100_000), other, 0, TIMEOUT)
        ranks.send(torch.ones(20_000), other, 0, TIMEOUT)
        ranks.receive(torch.empty(20_000), other, 0).wait(TIMEOUT)
        with pytest.raises(ValueError, match="buffer_limit is"):
            ranks.buffer_limit = -1
        communicator.barrier()


@each_transport
@pytest.mark.parametrize("n", [10, 5_000, 30_000])
@on_ranks(2)
def test_a_fast_sender_waits_for_the_receiver(transport: str, n: int) -> None:
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        ranks = transport_of(communicator)
        ranks.buffer_limit = limit = 250_000
        count = 20 * limit // (4 * n)
        count = min(count, 3000)
        if communicator.rank == 0:
            for i in range(count):
                ranks.send(torch.full((n,), float(i)), 1, 0, TIMEOUT)
                assert ranks.buffered_bytes <= limit
        else:
            x = torch.empty(n)
            time.sleep(0.2)
            for i in range(count):
                ranks.receive(x, 0, 0).wait(TIMEOUT)
                assert (x == i).all()
        communicator.barrier()
        if transport == "shared_memory":
            assert ranks.buffered_bytes == 0, "everything was taken"


@on_ranks(2)
def test_both_send_more_than_fits_with_receives_posted() -> None:
    """A sender that waits for room receives meanwhile."""
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks, other = transport_of(communicator), 1 - communicator.rank
        ranks.buffer_limit = 200_000
        arrays = [torch.empty(10_000) for _ in range(30)]
        receipts = [ranks.receive(x, other, 0) for x in arrays]
        communicator.barrier()
        for i in range(30):
            ranks.send(torch.full((10_000,), float(i)), other, 0, TIMEOUT)
        for i, receipt in enumerate(receipts):
            receipt.wait(TIMEOUT)
            assert (arrays[i] == i).all()
        communicator.barrier()


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "`no room: at most ... bytes may be buffered (PYCOMM_BUFFER_BYTES), in use are: ...`",
    "A receive is missing. For large messages, raise the limit on all ranks.",
)
@on_ranks(2)
def test_what_would_wait_for_ever_is_an_error_soon_and_nothing_is_broken() -> None:
    """Rank 1 waits for a message that rank 0 would send after those that do not fit."""
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = transport_of(communicator)
        ranks.buffer_limit = 100_000
        x = torch.empty(5_000)
        if communicator.rank == 0:
            for _ in range(4):
                ranks.send(torch.ones(5_000), 1, 0, TIMEOUT)
            time.sleep(0.2)
            started = time.monotonic()
            with pytest.raises(CommError) as caught:
                ranks.send(torch.ones(9_000), 1, 0, TIMEOUT)
            assert time.monotonic() - started < 5
            assert "no room: at most 100000 bytes" in str(caught.value)
            assert "PYCOMM_BUFFER_BYTES" in str(caught.value)
            assert "for rank 1; rank 1 does not take them: it waits for this rank" in str(caught.value)
            assert (caught.value.peer, caught.value.operation) == (1, "send")
            ranks.send(torch.ones(10), 1, 1, TIMEOUT)
        else:
            ranks.receive(torch.empty(10), 0, 1).wait(TIMEOUT)
            for _ in range(4):
                ranks.receive(x, 0, 0).wait(TIMEOUT)
        communicator.barrier()


@on_ranks(3)
def test_a_circle_of_senders() -> None:
    """Each rank sends to the next more than fits, and receives afterwards. At least one hears of it."""
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = transport_of(communicator)
        ranks.buffer_limit = 50_000
        after, before = (communicator.rank + 1) % 3, (communicator.rank - 1) % 3
        communicator.barrier()
        started = time.monotonic()
        sent, said = 0, ""
        while sent < 10 and not said:
            said = error_of_sending(ranks, torch.ones(4_000), after)
            sent += not said
        assert sent == 10 or "it waits for this rank" in said
        assert time.monotonic() - started < 10
        ranks.send(torch.full((1,), float(sent)), after, 1, TIMEOUT)
        count = torch.empty(1)
        ranks.receive(count, before, 1).wait(TIMEOUT)
        for _ in range(int(count)):
            ranks.receive(torch.empty(4_000), before, 0).wait(TIMEOUT)
        failures = torch.tensor([sent < 10], dtype=torch.int32)
        communicator.all_reduce(failures)
        assert failures.item() >= 1


@on_ranks(2)
def test_a_receiver_that_only_works_is_waited_for() -> None:
    """Until the timeout: nothing proves that it will not receive."""
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = transport_of(communicator)
        ranks.buffer_limit = 50_000
        if communicator.rank == 0:
            ranks.send(torch.ones(9_000), 1, 0, TIMEOUT)
            with pytest.raises(CommError, match="timed out waiting for rank 1 to take them after 1") as caught:
                ranks.send(torch.ones(9_000), 1, 0, 1.0)
            assert 1.0 <= caught.value.elapsed < 5
            communicator.barrier()
            ranks.send(torch.ones(9_000), 1, 0, TIMEOUT)
        else:
            time.sleep(2.0)
            communicator.barrier()
            for _ in range(2):
                ranks.receive(torch.empty(9_000), 0, 0).wait(TIMEOUT)
        communicator.barrier()


@on_ranks(2)
def test_memory_is_used_again() -> None:
    """Whatever the order in which messages are taken."""
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks, other = transport_of(communicator), 1 - communicator.rank
        ranks.buffer_limit = 3_000_000
        for _ in range(30):
            for tag in range(8):
                ranks.send(torch.full((50_000 if tag % 2 else 300,), float(tag)), other, tag, TIMEOUT)
            for tag in reversed(range(8)):
                x = torch.empty(50_000 if tag % 2 else 300)
                ranks.receive(x, other, tag).wait(TIMEOUT)
                assert (x == tag).all()
        communicator.barrier()
        assert ranks.buffered_bytes == 0


@on_ranks(2)
def test_several_threads_wait_for_room() -> None:
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = transport_of(communicator)
        ranks.buffer_limit = 60_000
        if communicator.rank == 0:

            def send(tag: int) -> None:
                for i in range(40):
                    ranks.send(torch.full((5_000,), float(i)), 1, tag, TIMEOUT)

            threads = [threading.Thread(target=send, args=(tag,)) for tag in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            receipts, arrays = [], [torch.empty(5_000) for _ in range(120)]
            for i in range(40):
                receipts += [ranks.receive(arrays[3 * i + tag], 0, tag) for tag in range(3)]
            for i, receipt in enumerate(receipts):
                receipt.wait(TIMEOUT)
                assert (arrays[i] == i // 3).all()
        communicator.barrier()
        assert ranks.buffered_bytes == 0
