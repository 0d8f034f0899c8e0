"""A peer that writes what it should not into the memory by which messages are found: only what is shared suffers."""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import pytest
import torch

from pycomm import CommError, Communicator
from tests.on_ranks import Pools, on_ranks
from tests.transport.test_tampering import own_memory_file

# As csrc/transport/shared_memory/call.h and message_layout.h have it, for two ranks.
FIRST = 4096 + 2 * (64 << 10) + 2 * (2 << 20) + 4096 + 64  # where the first envelope for rank 0 is
FIELDS = {"next": 0, "ready": 8, "number": 24, "num_bytes": 32, "payload": 40}
TIMEOUT = 30.0


class OwnMemory:
    def __init__(self, communicator: Communicator) -> None:
        self.file = mmap.mmap(own_memory_file(communicator), 1 << 26)

    def read(self, at: int) -> int:
        return int.from_bytes(self.file[at : at + 8], "little", signed=True)

    def write(self, at: int, value: int) -> None:
        self.file[at : at + 8] = value.to_bytes(8, "little", signed=True)


@pytest.mark.parametrize("n", [10, 100_000])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("first", value) for value in (64, -64, 2**62, 2**63 - 64)),
        *(("number", value) for value in (1, -1)),
        *(("num_bytes", value) for value in (-1, 2**62, 2**63 - 1)),
        *(("payload", value) for value in (0, -8, 2**62, 2**63 - 1)),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(field: str, value: int, n: int) -> None:
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = communicator.channel.transport
        private = torch.full((100_000,), 5.0)
        if communicator.rank == 1:
            ranks.send(torch.ones(n), 0, 0, TIMEOUT)
            memory = OwnMemory(communicator)
            envelope = memory.read(FIRST)
            assert memory.read(envelope + FIELDS["num_bytes"]) == 4 * n, "the layout has changed: so must the test"
            memory.write(FIRST if field == "first" else envelope + FIELDS[field], value)
        communicator.barrier()
        if communicator.rank == 0:
            with pytest.raises(CommError, match="rank 1 announced an impossible message") as caught:
                ranks.receive(torch.empty(n), 1, 0).wait(TIMEOUT)
            assert caught.value.peer == 1
            with pytest.raises(CommError, match="rank 1 announced an impossible message"):
                ranks.receive(torch.empty(n), None, 0).wait(TIMEOUT)
            assert (private == 5).all()
        communicator.barrier()  # collectives go on


@pytest.mark.parametrize(("ready", "says"), [(-1, "timed out"), (2**62, "")])
@on_ranks(2)
def test_how_much_is_ready_is_not_believed(ready: int, says: str) -> None:
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = communicator.channel.transport
        if communicator.rank == 1:
            ranks.send(torch.ones(100_000), 0, 0, TIMEOUT)
            memory = OwnMemory(communicator)
            memory.write(memory.read(FIRST) + FIELDS["ready"], ready)
        communicator.barrier()
        if communicator.rank == 0:
            x = torch.full((100_002,), 5.0)
            receipt = ranks.receive(x[1:-1], 1, 0)
            if says:
                with pytest.raises(CommError, match=says):
                    receipt.wait(0.3)
                assert receipt.cancel()
            else:
                receipt.wait(TIMEOUT)
            assert x[0] == x[-1] == 5
        communicator.barrier()


@on_ranks(2)
def test_a_list_that_leads_into_itself() -> None:
    with Communicator(timeout=TIMEOUT) as communicator:
        ranks = communicator.channel.transport
        if communicator.rank == 1:
            ranks.send(torch.ones(10), 0, 0, TIMEOUT)
            memory = OwnMemory(communicator)
            envelope = memory.read(FIRST)
            memory.write(envelope + FIELDS["next"], envelope)
        communicator.barrier()
        if communicator.rank == 0:
            ranks.receive(torch.empty(10), 1, 0).wait(TIMEOUT)
            with pytest.raises(CommError, match="rank 1 announced an impossible message"):
                ranks.receive(torch.empty(10), 1, 0).wait(TIMEOUT)
        communicator.barrier()


def scribble(seed: int) -> int:
    """Rank 1 sends, and writes random bytes over the envelopes meanwhile; returns how many."""
    communicator = Communicator(timeout=5)
    ranks, written = communicator.channel.transport, 0
    private = torch.full((1_000_000,), 5.0)  # nobody has any business here
    mine = communicator.empty(1_000_000).fill_(5.0)  # nor here, on rank 0
    done = threading.Event()
    if communicator.rank == 1:
        ranks.send(torch.ones(100), 0, 0, TIMEOUT)
        memory, random = OwnMemory(communicator), np.random.default_rng(seed)
        slab = memory.read(FIRST) // 4096 * 4096

        def write() -> None:
            nonlocal written
            while not done.is_set():
                written += 1
                memory.file[slab + int(random.integers(0, 64 << 10))] = int(random.integers(256))
                envelope = memory.read(FIRST)
                if slab <= envelope < slab + (64 << 10):  # a message is on its way
                    memory.file[envelope + int(random.integers(max(FIELDS.values()) + 8))] = int(random.integers(256))

        thread = threading.Thread(target=write)
        thread.start()
        with contextlib.suppress(CommError):
            for i in range(5_000):
                ranks.send(torch.ones((i * 37) % 5_000), 0, 0, 0.2)
        done.set()
        thread.join()
    else:
        x = torch.empty(5_000)
        with contextlib.suppress(CommError, ValueError):
            ranks.receive(x[:100], 1, 0).wait(TIMEOUT)
            for i in range(5_000):
                ranks.receive(x[: (i * 37) % 5_000], 1, 0).wait(2.0)
        assert (private == 5).all()
        assert (mine == 5).all()
    communicator.close()
    return written


@pytest.mark.parametrize("seed", range(3))
def test_a_tampering_peer_harms_only_what_is_shared(new_ranks: Pools, seed: int) -> None:
    """Whether it is noticed depends on which bytes are read before the owner writes them again."""
    assert new_ranks(2).run(scribble, seed, timeout=50)[1] > 100, "nothing was tampered with"
