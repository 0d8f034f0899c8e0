"""The judge: starts a group, strikes one of its ranks, and looks at what became of the others."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.chaos.faults import KINDS, Fault
from tests.chaos.leftovers import Leftovers, mark_descendants
from tests.chaos.ranks import Report, serve

_START = 60.0  # seconds that a group has to be at work
_PATIENCE = 10.0  # seconds, for a process that has been killed
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


# Ranks are forked by a process that has only imported what they need, and has no other threads: to import torch takes
# seconds, and these are thousands of processes.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.preload"])


def prepare() -> None:
    """Start what ranks come from. Once, before all faults; it ends with this process."""
    mark_descendants()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # libraries would start threads when they are imported
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    first = _context.Process(target=time.monotonic)
    first.start()
    first.join()


@dataclass
class Verdict:
    """Everything that was wrong, as (kind, description), and how long it took.

    Attributes:
        noticed: seconds from the strike to the survivors' errors.
        logs: what the ranks wrote, by rank.
        strange: ranks whose end was not as it should be, or did not come.
    """

    fault: Fault
    problems: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    noticed: list[float] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    strange: set[int] = field(default_factory=set)

    def add(self, what: str, how: str) -> None:
        self.problems.append((what, how))

    def __str__(self) -> str:
        latest = f"noticed in {max(self.noticed):.2f} s" if self.noticed else ""
        outcome = "ok" if not self.problems else "WRONG: " + ", ".join(sorted({what for what, _ in self.problems}))
        lines = [f"{self.fault}  {self.seconds:5.1f} s  {latest:<18} {outcome}"]
        return "\n".join(lines + [f"        {what}: {how}" for what, how in self.problems])


class Group:
    """The processes of one fault."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault = fault
        self.struck_at = 0.0
        self._logs = [folder / f"rank{rank}.log" for rank in range(fault.size)]
        # Here, not in a rank: it outlives any of them.
        patience = timedelta(seconds=_START)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def start(self) -> None:
        """Start the ranks."""
        for rank in range(self.fault.size):
            ours, theirs = _context.Pipe()
            arguments = (self.fault, rank, self._store.port, theirs, str(self._logs[rank]))
            process = _context.Process(target=serve, args=arguments)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def pids(self) -> list[int]:
        return [int(process.pid) for process in self.processes]

    def await_work(self) -> None:
        """Return when all ranks are at work.

        Raises:
            TimeoutError: they are not, after a long time. RuntimeError: one ended.
        """
        deadline = time.monotonic() + _START
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} is not at work after {_START} s")
            try:
                said = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended before it was at work") from None
            if said != "running":
                raise RuntimeError(f"rank {rank} failed before the fault: {said.first}")

    def strike(self) -> None:
        """Let it happen, at the moment that was drawn."""
        fault = self.fault
        if fault.kind in _SIGNALS:
            time.sleep(fault.delay)
            os.kill(self.processes[fault.victim].pid, _SIGNALS[fault.kind])
            self.struck_at = time.monotonic()
        else:
            self.pipes[fault.victim].send("go")
            self.struck_at = time.monotonic() + fault.delay

    def report_of(self, rank: int) -> Report | None:
        """Return the rank's report, if it comes in time."""
        pipe = self.pipes[rank]
        if not pipe.poll(self._left()):
            return None
        with contextlib.suppress(EOFError, ConnectionError):
            said = pipe.recv()
            return said if isinstance(said, Report) else None
        return None

    def end_of(self, rank: int) -> int | None:
        """The rank's exit code, if it ends by itself in time; where it stands goes to its log otherwise."""
        process = self.processes[rank]
        process.join(self._left())
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return None if process.exitcode is None else int(process.exitcode)

    def _left(self) -> float:
        return max(0.0, self.struck_at + self.fault.bound - time.monotonic())

    def release(self) -> None:
        """End a victim that stands still, which is not to be held against it."""
        self.processes[self.fault.victim].kill()
        self.processes[self.fault.victim].join(_PATIENCE)

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()

    def logs(self) -> list[str]:
        return [log.read_text(errors="replace") if log.exists() else "" for log in self._logs]


@contextlib.contextmanager
def group_of(fault: Fault, verdict: Verdict) -> Iterator[Group]:
    """A group that is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="pycomm-chaos-") as folder:
        group = Group(fault, Path(folder))
        try:
            group.start()
            yield group
        finally:
            group.close()
            verdict.logs = group.logs()


def judge(fault: Fault) -> Verdict:
    """Let ``fault`` happen to a fresh group and say what was wrong."""
    verdict = Verdict(fault)
    started = time.monotonic()
    leftovers = Leftovers()
    with group_of(fault, verdict) as group:
        pids = group.pids()
        try:
            group.await_work()
        except (RuntimeError, TimeoutError) as error:
            verdict.add("start", str(error))
            verdict.strange.update(range(fault.size))
        else:
            group.strike()
            _hear(group, verdict)
    for what in leftovers.found(pids):
        verdict.add("left behind", what)
    verdict.seconds = time.monotonic() - started
    return verdict


def _hear(group: Group, verdict: Verdict) -> None:
    fault = group.fault
    survivors = [rank for rank in range(fault.size) if rank != fault.victim]
    reports = []
    for rank in survivors:
        report = group.report_of(rank)
        _judge_end(rank, group.end_of(rank), (0,), verdict)
        if report is None:
            verdict.add("silent", f"rank {rank} said nothing")
        else:
            reports.append(report)
            verdict.noticed.append(report.first.at - group.struck_at)
            _look_at(report, verdict)
    _compare(reports, verdict)
    if fault.kind == "stop":
        group.release()
    _judge_end(fault.victim, group.end_of(fault.victim), KINDS[fault.kind], verdict)


def _judge_end(rank: int, code: int | None, wanted: tuple[int, ...], verdict: Verdict) -> None:
    who = f"the victim, rank {rank}," if rank == verdict.fault.victim else f"rank {rank}"
    if code is None:
        verdict.add("hang", f"{who} had not ended {verdict.fault.bound:.0f} s after the fault")
    elif code not in wanted:
        verdict.add("end", f"{who} ended with {code}, wanted {' or '.join(map(str, wanted))}")
    if code not in wanted:
        verdict.strange.add(rank)


def _look_at(report: Report, verdict: Verdict) -> None:
    fault, first, later = verdict.fault, report.first, report.later
    me, victim = f"rank {report.rank}", fault.victim
    if first.kind == "WrongResultError":
        verdict.add("value", f"{me}: {first.text}")
        return
    if not first.is_comm_error:
        verdict.add("error", f"{me} got {first}")
    else:
        if first.rank != report.rank:
            verdict.add("rank", f"{me}: error.rank is {first.rank}: {first}")
        if first.peer != victim:
            verdict.add("peer", f"{me}: error.peer is {first.peer}, wanted {victim}: {first}")
    if not _names(victim, first.text):
        verdict.add("unnamed", f"{me}: the message does not name rank {victim}: {first}")
    if first.took > fault.bound:
        verdict.add("slow", f"{me}: the operation that failed took {first.took:.1f} s")
    if later is None:
        verdict.add("later", f"{me}: a later operation raised nothing")
    elif not later.is_comm_error or not _names(victim, later.text):
        verdict.add("later", f"{me}: a later operation raised {later}")
    if later is not None and later.took > fault.bound / 2:
        verdict.add("later", f"{me}: a later operation took {later.took:.1f} s")
    if report.leaked:
        verdict.add("leak", f"{me} still has {report.leaked}")


def _names(victim: int, text: str) -> bool:
    return re.search(rf"\brank {victim}\b", text) is not None


def _compare(reports: list[Report], verdict: Verdict) -> None:
    for other in reports[1:]:
        pairs = zip(reports[0].digests, other.digests, strict=False)  # some got further than others
        if any(mine != theirs for mine, theirs in pairs):
            verdict.add("value", f"ranks {reports[0].rank} and {other.rank} had different gradients")
