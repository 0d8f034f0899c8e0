"""The ranks' side: work until the fault, then say what was noticed of it, or be its victim."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import pycomm
from tests.chaos.faults import Fault
from tests.chaos.workloads import Workload, make_workload

_LONGEST_LIFE = 180  # seconds; the judge ends a rank long before
_PATIENCE = 5.0  # seconds, for what other threads close
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seen:
    """An exception, without what it keeps alive.

    Attributes:
        at: when it was caught, on the clock that all processes of a machine share.
        took: seconds, of the operation that raised it.
        where: the innermost line of pycomm's.
    """

    kind: str
    text: str
    is_comm_error: bool
    rank: int | None = None
    peer: int | None = None
    at: float = 0.0
    took: float = 0.0
    where: str = ""

    @classmethod
    def of(cls, error: BaseException, since: float) -> Seen:
        now = time.monotonic()
        known = isinstance(error, pycomm.CommError)
        rank, peer = (error.rank, error.peer) if isinstance(error, pycomm.CommError) else (None, None)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/pycomm/" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        traceback.print_exception(error)
        return cls(type(error).__name__, str(error), known, rank, peer, now, now - since, where)

    def __str__(self) -> str:
        text = self.text if len(self.text) < 250 else self.text[:200] + " ..."
        return f"{self.kind} at {self.where}: {text}"


@dataclass(frozen=True)
class Holdings:
    """Everything that a process has open."""

    descriptors: frozenset[str]
    mappings: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        descriptors = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                descriptors.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        return cls(frozenset(descriptors), sum("memfd:pycomm" in line for line in maps))

    def beyond(self, before: Holdings) -> str:
        """Return what there is more of than ``before``, as text; empty for nothing.

        Less may be there: the connections of the user's own group with the rank that died.
        """
        added = sorted(self.descriptors - before.descriptors)
        mappings = self.mappings - before.mappings
        return ", ".join(added + ([f"{mappings} mappings of pycomm's memory"] if mappings > 0 else []))


@dataclass
class Report:
    """Account that a survivor gives."""

    rank: int
    first: Seen
    later: Seen | None
    digests: list[int] = field(default_factory=list)
    leaked: str = ""


def serve(fault: Fault, rank: int, port: int, pipe: Connection, log: str) -> NoReturn:
    """Be a rank of ``fault``'s group. Tells the judge "running"; a survivor's :class:`Report` follows.

    The victim of what happens inside a process hears "go" first.
    """
    code = 1
    try:
        _prepare(log)
        _join(fault, rank, port)
        code = _work(fault, rank, pipe)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # A process of multiprocessing's ends without the exit handlers of a script's and without the interpreter's end.
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("the interpreter has ended")


def _prepare(log: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the process that starts ranks, also stopped
    signal.alarm(_LONGEST_LIFE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)


def _join(fault: Fault, rank: int, port: int) -> None:
    patience = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.size, timeout=patience)


def _work(fault: Fault, rank: int, pipe: Connection) -> int:
    # What a process opens once and keeps is open before anything is counted.
    rehearsal = make_workload(fault)
    for _ in range(3):
        rehearsal.advance()
    rehearsal.close()
    del rehearsal
    if rank == fault.victim:
        _suffer(fault, pipe)
    before = Holdings.now()
    report = _survive(fault, rank, pipe)
    patience = time.monotonic() + _PATIENCE
    while (leaked := Holdings.now().beyond(before)) and time.monotonic() < patience:
        time.sleep(0.02)
    report.leaked = leaked
    pipe.send(report)
    return 0


def _survive(fault: Fault, rank: int, pipe: Connection) -> Report:
    workload = make_workload(fault)
    first = _until_it_fails(workload, pipe)
    later = None
    since = time.monotonic()
    try:
        workload.again()
    except Exception as error:
        later = Seen.of(error, since)
    report = Report(rank, first, later, workload.digests)
    workload.close()
    return report


def _until_it_fails(workload: Workload, pipe: Connection) -> Seen:
    since = time.monotonic()
    try:
        workload.advance()
        pipe.send("running")
        while True:
            since = time.monotonic()
            workload.advance()
    except Exception as error:
        return Seen.of(error, since)


def _suffer(fault: Fault, pipe: Connection) -> NoReturn:
    workload = make_workload(fault)
    due = threading.Event()
    if fault.kind == "term":
        signal.signal(signal.SIGTERM, lambda *_: _leave(workload))
    workload.advance()
    threading.Thread(target=_fate, args=(fault, pipe, due), daemon=True).start()
    pipe.send("running")
    # With a rank that raises its communicator is closed on the way; with one that exits, by nobody.
    with workload.closing() if fault.kind == "raise" else contextlib.nullcontext():
        while not due.is_set():
            workload.advance()
        if fault.kind == "raise":
            raise ArithmeticError("in a rank's own code")
        sys.exit(5)


def _leave(workload: Workload) -> NoReturn:
    workload.close()
    sys.exit(3)


def _fate(fault: Fault, pipe: Connection, due: threading.Event) -> None:
    """Let happen to this process, from inside, what was drawn for it, at the moment that was drawn."""
    pipe.recv()
    time.sleep(fault.delay)
    if fault.kind == "os_exit":
        os._exit(7)
    if fault.kind == "abort":
        os.abort() if fault.variant % 2 == 0 else os.kill(os.getpid(), signal.SIGSEGV)
    due.set()
