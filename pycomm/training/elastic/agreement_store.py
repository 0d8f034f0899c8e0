"""Store in which ranks agree on who remains, and the counts of ranks that are ready. It must outlive every rank.

Ranks of one host share an anonymous file in memory, which lasts as long as one of them and needs no server. Between
hosts it is the store of the process group, which is served by torchrun's agent, or by rank 0 and then dies with it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from torch.distributed import FileStore  # type: ignore[attr-defined]

from pycomm import untrusted
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.board import Board, StoreError
from pycomm.collectives.transport.rendezvous import anonymous_memory, is_sealed_memory
from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store, root_store

_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_ANSWER = 10.0  # seconds for the store to answer

_LOG = logging.getLogger("pycomm")

T = TypeVar("T")


class AgreementStore:
    """Store in which a group of ranks agrees.

    Args:
        rank: this rank.
        store: the process group's store.
        name: prefix of the keys in it.
        file: descriptor of the file to use instead, which this object then owns; -1 for none.

    Attributes:
        name: the same for all ranks, and unique in the store.
        path: path of the file for other processes of this host, or empty.
        store: read and written through :meth:`ask`; also the store in which ranks meet.
    """

    def __init__(self, rank: int, store: Store, name: str, file: int = -1) -> None:
        self._rank, self.name = rank, name
        self._board = Board(f"pycomm-agreement-{rank}")
        self.path = "" if file < 0 else f"/proc/{os.getpid()}/fd/{file}"
        self.store: Store = (
            PrefixStore(f"pycomm/membership/{name}", root_store(store))
            if file < 0
            else FileStore(f"/proc/self/fd/{file}", -1)
        )

    def ask(self, question: Callable[[], T]) -> T:
        """Return the result of ``question``, which reads or writes the store."""
        start = time.monotonic()
        try:
            return self._board.ask(question, _ANSWER)
        except StoreError as error:
            problem = str(error)
        except ValueError as error:  # somebody else has written there
            problem = f"holds what no rank has written: {error}"
        raise CommError.during(
            "recover",
            f"the store in which the remaining ranks agree {problem}; on several hosts it is the process group's, "
            "which must outlive every rank, as torchrun's does, and rank 0's own does not",
            rank=self._rank,
            elapsed=time.monotonic() - start,
        )

    def close(self) -> None:
        """Stop the thread that asks the store. Idempotent.

        The file stays open until the process ends: torch's store opens its path again when its last reference goes,
        which C++ may hold, and the descriptor must not have been reused by then.
        """
        self._board.close(patience=1.0)


def open_agreement_store(communicator: Communicator) -> AgreementStore:
    """Return the store of the ranks of ``communicator``. Collective."""
    name = communicator.channel.all_gather_bytes(secrets.token_hex(8).encode())[0].decode()
    otherwise = "the ranks can agree on who is left only while the process group's own store is there"
    is_local = communicator.transport == "shared_memory"
    file = shared_file(communicator, "pycomm-agreement", otherwise) if is_local else -1
    return AgreementStore(communicator.rank, communicator.place.store, name, file)


def shared_file(communicator: Communicator, name: str, otherwise: str, num_bytes: int = 0) -> int:
    """Return a descriptor of a file in memory that all ranks share; -1 if they cannot share one. Collective.

    Args:
        communicator: the ranks, all on this host.
        name: name of the file, for debugging.
        otherwise: consequence of sharing none, for the log.
        num_bytes: size at which the file is sealed; 0 for one that grows, and is never mapped.
    """
    mine, path, problem = -1, "", ""
    if communicator.rank == 0:
        with contextlib.suppress(OSError):
            mine = anonymous_memory(num_bytes) if num_bytes else os.memfd_create(name, os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{mine}"
    path = communicator.channel.all_gather_bytes(path.encode())[0].decode()
    if communicator.rank != 0:
        try:
            mine = open_file(path)
            if num_bytes and not is_sealed_memory(mine, num_bytes):
                problem = f"it is not sealed at {num_bytes} bytes"
        except (OSError, ValueError) as error:  # /proc may hide other processes
            problem = str(error)
    for rank, text in enumerate(communicator.channel.all_gather_bytes(problem.encode())):
        if text:
            if mine >= 0:
                os.close(mine)
            if communicator.rank == 0:
                _LOG.warning("rank %d cannot open a file of rank 0's (%s): %s", rank, text.decode(), otherwise)
            return -1
    return mine


def open_file(path: str) -> int:
    """Return a descriptor of another process's memory file, by the ``path`` that this process sent."""
    if not _PATH.fullmatch(path):
        raise OSError(f"{path[:80]!r} is no memory of a process")
    return untrusted.opened(path, os.O_RDWR)


_TIME_BITS = 48  # microseconds, for nine years; the rest of a word numbers the event
_SLOTS = 2
"""Events kept per rank: none starts the event after next before all have ended this one."""


class ReadyPage:
    """Page of shared memory in which each rank of a host writes the time at which it reached an event.

    Args:
        file: descriptor of the memory, which is sealed; it is closed.
        rank, size: this rank and the number of ranks.
    """

    def __init__(self, file: int, rank: int, size: int) -> None:
        self._rank, self.size = rank, size
        try:
            memory = mmap.mmap(file, size * _SLOTS * 8)
        finally:
            os.close(file)
        # Words are written and read atomically.
        self._words = np.frombuffer(memory, np.int64).reshape(size, _SLOTS)

    @classmethod
    def shared(cls, communicator: Communicator, name: str, otherwise: str) -> ReadyPage | None:
        """Return a page that all ranks share; ``None`` if they cannot. Collective. Arguments as :func:`shared_file`."""
        file = shared_file(communicator, name, otherwise, communicator.size * _SLOTS * 8)
        return None if file < 0 else cls(file, communicator.rank, communicator.size)

    def write(self, event: int) -> None:
        """Write the time at which this rank has reached ``event``."""
        word = _number(event) << _TIME_BITS | time.monotonic_ns() // 1000
        self._words[self._rank, event % _SLOTS] = word

    def read(self, event: int) -> dict[int, float]:
        """Return the times at which ranks reached ``event``, in seconds of a shared clock; only those that have."""
        words = self._words[:, event % _SLOTS].tolist()
        number, mask = _number(event), (1 << _TIME_BITS) - 1
        return {rank: (word & mask) * 1e-6 for rank, word in enumerate(words) if word >> _TIME_BITS == number}


def _number(event: int) -> int:
    return event % 0x7FFF + 1  # positive, unlike the 0 of a fresh page
