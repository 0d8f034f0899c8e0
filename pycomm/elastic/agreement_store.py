"""Store in which ranks agree on who is left. It must outlive every one of them.

Ranks of one host share a file that has no name, in memory: it lasts as long as one of them, and nobody has to
serve it. Between hosts it is the store of the process group, which somebody serves: torchrun's agent, or rank 0,
with which it would die.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import FileStore  # type: ignore[attr-defined]

from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store, root_store
from pycomm.worker import Worker

_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_ANSWER = 10.0  # seconds for the store to answer

_LOG = logging.getLogger("pycomm")

T = TypeVar("T")


class AgreementStore:
    """Store in which some ranks agree.

    Args:
        rank: this one.
        store: the process group's store, or the one that it is a part of.
        name: name of this part of it.
        file: descriptor of the file to use instead, which is owned from now on; -1 for none.

    Attributes:
        name: the same for all ranks, and unique in the store.
        path: path of the file for other processes of this host, or empty.
        store: store to read and write through :meth:`ask`, and for ranks to meet in.
    """

    def __init__(self, rank: int, store: Store, name: str, file: int = -1) -> None:
        self._rank, self.name = rank, name
        self._worker = Worker(f"pycomm-agreement-{rank}")
        self.path = "" if file < 0 else f"/proc/{os.getpid()}/fd/{file}"
        self.store: Store = (
            PrefixStore(f"pycomm/membership/{name}", root_store(store))
            if file < 0
            else FileStore(f"/proc/self/fd/{file}", -1)
        )

    def ask(self, question: Callable[[], T]) -> T:
        """Return the result of ``question``, which reads or writes the store.

        Raises:
            CommError: the store failed, or did not answer.
        """
        start = time.monotonic()
        work = self._worker.submit(question)
        problem = "did not answer"
        if work.ends_within(_ANSWER):
            try:
                answer: T = work.wait()
                return answer
            except RuntimeError as error:  # torch's DistStoreError is one
                problem = f"failed: {error}"
        raise CommError.during(
            "recover",
            f"the store in which the remaining ranks agree {problem}; on several hosts it is the process group's, "
            "which must outlive every rank, as torchrun's does, and rank 0's own does not",
            rank=self._rank,
            elapsed=time.monotonic() - start,
        )

    def close(self) -> None:
        """Stop answering. Idempotent.

        The file stays open until the process ends. torch's store opens its path once more when the last reference to it
        goes, of which C++ holds some: the descriptor must not be something else's by then.
        """
        self._worker.stop(patience=1.0)


def open_agreement_store(communicator: Communicator) -> AgreementStore:
    """Return the store of the ranks of ``communicator``. Collective."""
    name = communicator.channel.all_gather_bytes(secrets.token_hex(8).encode())[0].decode()
    otherwise = "the ranks can agree on who is left only while the process group's own store is there"
    is_local = communicator.transport == "shared_memory"
    file = shared_file(communicator, "pycomm-agreement", otherwise) if is_local else -1
    return AgreementStore(communicator.rank, communicator.place.store, name, file)


def shared_file(communicator: Communicator, name: str, otherwise: str) -> int:
    """Return a descriptor of a file in memory that all ranks have; -1 if they cannot have one. Collective.

    Args:
        communicator: the ranks, all on this host.
        name: name of the file, for people.
        otherwise: what it means that they cannot have one, for the log.
    """
    mine, path, problem = -1, "", ""
    if communicator.rank == 0:
        with contextlib.suppress(OSError):
            mine = os.memfd_create(name, os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{mine}"
    path = communicator.channel.all_gather_bytes(path.encode())[0].decode()
    if communicator.rank != 0:
        try:
            mine = open_file(path)
        except OSError as error:  # /proc may hide other processes
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
    """Return a descriptor of another process's file, whose ``path`` that process told.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    if not _PATH.fullmatch(path):
        raise OSError(f"{path[:80]!r} is no memory of a process")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
