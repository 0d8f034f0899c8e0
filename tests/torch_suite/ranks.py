"""Ranks for one of torch's tests each: forked, which takes a twentieth of the time that starting them anew does."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torch_suite import faults, suite

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_FORK = multiprocessing.get_context("fork")


@dataclass
class Report:
    """What a test came to: on all ranks together, or, in a pipe, on one."""

    name: str
    outcome: str
    text: str = ""
    seconds: float = 0.0
    fault: str | None = None


@dataclass(frozen=True)
class Settings:
    """How tests are run: on which backend, how many seconds one may take, and which fault is put in."""

    backend: str
    patience: float = 60.0
    fault: str | None = None


@dataclass
class _Running:
    """One test that is running, its ranks, and what they have said."""

    name: str
    settings: Settings
    folder: Path
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    said: dict[int, Report] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


def run(tests: Sequence[tuple[str, Settings]], at_once: int = 1) -> Iterator[Report]:
    """Run tests by name, ``at_once`` of them side by side, and yield what each came to."""
    torch.set_num_threads(1)  # before the fork, which does not take OpenMP's threads along
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, all that it shares with this process
    waiting, running = list(tests), list[_Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_start(*waiting.pop(0)))
        wait([process.sentinel for test in running for process in test.processes if process.is_alive()], 0.2)
        for test in [test for test in running if _listen(test)]:
            running.remove(test)
            yield _finish(test)


def _start(name: str, settings: Settings) -> _Running:
    test = _Running(name, settings, Path(tempfile.mkdtemp(prefix="torch-suite-")))
    for folder in ("barrier", "test_dir"):  # as the suite wants them
        (test.folder / folder).mkdir()
    for rank in range(suite.RANKS):
        parent, child = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_rank, args=(test, rank, child))
        process.start()
        child.close()
        test.processes.append(process)
        test.pipes.append(parent)
    return test


def _listen(test: _Running) -> bool:
    """Take what ranks have said; return whether the test is over: all have ended, one has failed, or time is up."""
    for rank, pipe in enumerate(test.pipes):
        if rank not in test.said and pipe.poll():
            try:
                test.said[rank] = pipe.recv()
            except EOFError:
                test.said[rank] = Report(test.name, FAILED, "died without a word")
    overdue = time.monotonic() > test.started + test.settings.patience
    failed = any(report.outcome == FAILED for report in test.said.values())
    return overdue or failed or not any(process.is_alive() for process in test.processes)


def _finish(test: _Running) -> Report:
    """End the ranks and sum up: a test has passed if each rank has called its body, which returned."""
    seconds = time.monotonic() - test.started
    grace = time.monotonic() + 2.0  # for the others' view of a failure
    while any(process.is_alive() for process in test.processes) and time.monotonic() < grace:
        time.sleep(0.05)
    _listen(test)  # before the rest is ended, whose complaints about that would be no news
    for process in test.processes:
        process.kill()
        process.join()
    for pipe in test.pipes:
        pipe.close()
    missing = Report(test.name, FAILED, f"no end within {test.settings.patience:g} s")
    reports = [test.said.get(rank, missing) for rank in range(suite.RANKS)]
    outcomes = {report.outcome for report in reports}
    outcome = outcomes.pop() if len(outcomes) == 1 else FAILED
    text = reports[0].text if outcome != FAILED else _failures(test, reports)
    shutil.rmtree(test.folder)
    return Report(test.name, outcome, text, seconds, test.settings.fault)


def _failures(test: _Running, reports: list[Report]) -> str:
    parts = []
    for rank, report in enumerate(reports):
        printed = (test.folder / f"rank{rank}.log").read_text(errors="replace")[-3000:]
        parts.append(f"--- rank {rank}: {report.outcome}\n{report.text}\n{printed}".rstrip())
    return "\n".join(parts)


def _rank(test: _Running, rank: int, pipe: Connection) -> None:
    """Be one rank of a test, and tell what came of it."""
    log = os.open(test.folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(TEMP_DIR=str(test.folder), INIT_METHOD=f"file://{test.folder}/again", RANK=str(rank))
    try:
        pipe.send(_outcome(test, rank))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the parent has set up to run at its own end is not for this process


def _outcome(test: _Running, rank: int) -> Report:
    try:
        _call(test, rank)
    except unittest.SkipTest as skip:
        return Report(test.name, SKIPPED, str(skip))
    except SystemExit as end:
        reasons = suite.exit_codes()
        if end.code not in reasons:
            return Report(test.name, FAILED, f"exited with {end.code}")
        return Report(test.name, SKIPPED, reasons[end.code])
    except BaseException:
        return Report(test.name, FAILED, traceback.format_exc())
    return Report(test.name, PASSED)


def _call(running: _Running, rank: int) -> None:
    """Do what torch's own runner does in a rank's process, with a group on the backend under test."""
    settings = running.settings
    suite.name_backend(settings.backend)
    called = suite.note_calls(running.name)
    test: Any = suite.test_class()(running.name)
    test.rank, test.file_name = rank, str(running.folder / "meeting")
    dist.init_process_group(
        settings.backend,
        init_method=test.init_method,
        world_size=suite.RANKS,
        rank=rank,
        timeout=suite.timeout_of(running.name),
    )
    test._barrier()
    torch.manual_seed(1234)
    if settings.fault is not None:
        faults.FAULTS[settings.fault](test)
    getattr(test, running.name)()
    assert called, "its body has not been called"
    test._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
