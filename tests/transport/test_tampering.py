"""A peer that writes into shared memory what it should not: only what is shared suffers."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from pycomm import CommError, Communicator
from tests.on_ranks import Pools


def own_memory_file(communicator: Communicator) -> int:
    """The descriptor of the memory that this process's communicator shares: of the file that its arrays lie in.

    An earlier test's may still be open, and nothing about a descriptor or an inode says which is newer.
    """
    address = communicator.empty(1).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            inode = int(line.split()[4])
            break
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.fstat(int(fd)).st_ino == inode and "memfd:pycomm" in os.readlink(f"/proc/self/fd/{fd}"):
                return int(fd)
    raise AssertionError("its arrays do not lie in a file of pycomm's")


def tamper(seed: int) -> str:
    """Rank 1 writes random bytes over its announcements while operations go on."""
    communicator = Communicator(timeout=5)
    x = communicator.empty(200_000).fill_(1.0)
    private = torch.full((1_000_000,), 5.0)  # nobody has any business here
    mine = communicator.empty(1_000_000).fill_(5.0)  # nor here, on rank 0
    done = threading.Event()
    if communicator.rank == 1:
        page = mmap.mmap(own_memory_file(communicator), 4096)
        random = np.random.default_rng(seed)

        def scribble() -> None:
            while not done.is_set():
                at = int(random.integers(4, 84))  # behind the clock, the two announcements
                page[at] = int(random.integers(256))

        thread = threading.Thread(target=scribble)
        thread.start()
    said = "nothing"
    try:
        for i in range(20_000):
            communicator.all_reduce(x, algorithm="ring" if i % 3 == 0 else "native")
            communicator.broadcast(x, i % 2)
    except (CommError, ValueError, TypeError) as error:
        said = str(error)
    if communicator.rank == 1:
        done.set()
        thread.join()
    else:
        assert (private == 5).all()
        assert (mine == 5).all()
    communicator.close()
    return said


@pytest.mark.parametrize("seed", range(3))
def test_a_tampering_peer_harms_only_what_is_shared(new_ranks: Pools, seed: int) -> None:
    said = new_ranks(2).run(tamper, seed, timeout=60)
    assert "nothing" not in said[0], "the tampering went unnoticed"


def impossible(field: str) -> list[tuple[int, bytes]]:
    """Return what to write where in rank 1's file, as csrc/transport/shared_memory/call.h and parts.h have it."""
    table = {"sends": 0, "receives": 8, "at": 16, "staged": 16}  # of 24 bytes for each peer, in each mailbox
    if field in table:
        content = (-3 if field == "staged" else -(2**62) if field == "receives" else 2**62).to_bytes(
            8, "little", signed=True
        )
        return [(4096 + mailbox * 65536 + table[field], content) for mailbox in (0, 1)]
    # The clock, then two announcements of 48 bytes.
    at = {"kind": 0, "dtype": 1, "op": 2, "count": 8, "offset": 24, "shadow": 32, "staging": 40, "slack": 44}[field]
    content = (2**62).to_bytes(8, "little") if field in ("count", "offset", "shadow") else b"\xee"
    content = b"\xff\xff\xff\xff" if field == "slack" else content  # not a number
    return [(announcement + at, content) for announcement in (8, 56)]


def announce_impossibly(field: str) -> str:
    communicator = Communicator(timeout=20)
    x = communicator.empty(100_000).fill_(1.0)
    outs = [torch.empty(100_000) for _ in range(2)]

    def call() -> None:
        if field in ("sends", "receives", "at", "staged"):
            communicator.channel.transport.all_to_all_v(outs, [x, x], 20.0)
        else:
            communicator.all_reduce(x, algorithm="ring" if field == "shadow" else "native")

    said = ""
    if communicator.rank == 1:
        communicator.barrier()
        page = mmap.mmap(own_memory_file(communicator), 4096 + 2 * 65536)
        done = threading.Event()

        def overwrite() -> None:
            while not done.is_set():
                for at, content in impossible(field):
                    page[at : at + len(content)] = content

        thread = threading.Thread(target=overwrite)
        thread.start()
        try:
            while True:
                call()
        except CommError as error:
            said = str(error)
        done.set()
        thread.join()
    else:
        try:
            communicator.barrier()  # rank 1 may be out of it, and at its work, already
            while True:
                call()
        except (CommError, ValueError) as error:
            said = str(error)
    communicator.close()
    return said


@pytest.mark.parametrize(
    "field", ["kind", "dtype", "op", "offset", "shadow", "staging", "slack", "sends", "receives", "at", "staged"]
)
def test_what_cannot_be_is_refused(new_ranks: Pools, field: str) -> None:
    assert "rank 1 announced an impossible operation" in new_ranks(2).run(announce_impossibly, field, timeout=50)[0]
