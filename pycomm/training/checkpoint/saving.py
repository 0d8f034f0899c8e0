"""``pycomm.save``: the training state is copied now, and written to disk by a background thread.

The background threads of the ranks communicate by files only. A collective would mix with training's, and could
not be interrupted when a rank is lost. So each rank writes its part, and signals that by a file. Once all parts are
there, rank 0 writes the manifest and renames the directory. Files that were created in advance report errors. Ranks
also watch whether the processes that they wait for are alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from pycomm import agreement, checks
from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError, attempt
from pycomm.training.checkpoint import files
from pycomm.training.checkpoint.contents import Kind, Section, collect, copy_of
from pycomm.training.checkpoint.folder import (
    FORMAT,
    MOST_NUMBER,
    OWN,
    SHARED,
    numbers_in,
    part_of,
    prune,
    remove_unfinished,
    unfinished,
    whole,
)
from pycomm.training.checkpoint.torch_files import write_tensors
from pycomm.training.elastic.liveness import ProcessWatch
from pycomm.training.reducer import Reducer
from pycomm.untrusted import path_of

T = TypeVar("T")

_LOG = logging.getLogger("pycomm")
_WORDS = agreement.Words(keeps_kind=True)

_PATIENCE = 10.0  # seconds until a directory made by another host must be visible here

_pending: weakref.WeakKeyDictionary[Reducer, PendingSave] = weakref.WeakKeyDictionary()


def save(path: str | os.PathLike[str], reducer: Reducer, /, *, keep: int = 2, **more: Any) -> PendingSave:
    """Save the complete training state to the directory ``path``: copied now, written in the background. Collective.

    This includes the model's parameters and buffers, the optimizer's state (with master weights), the compression
    state of every rank, the loss scaler that ``attach`` was given, the random generators of every rank (Python's,
    numpy's, torch's, and its GPU's), and ``more``. After :func:`pycomm.load` on the same number of ranks, training
    continues bit for bit as if it had not been interrupted.

    Each call adds a checkpoint to ``path``, which must be the same directory for all ranks. The checkpoint is renamed
    into place once all ranks' parts are on disk, so a process that dies at any time leaves either a complete checkpoint
    or none. Old ones are removed only then. Each rank writes a share of the parameters and of the optimizer's state,
    which all ranks have. Writing sends nothing over the network. Call it between ``optimizer.step()`` and the next
    ``backward()``. The next call, :func:`pycomm.load` and the interpreter's exit wait until it is written.

    Args:
        path: directory, created if needed. No other training run may save there.
        reducer: from :func:`pycomm.attach`.
        keep: number of latest checkpoints to keep, at least 1.
        more: further values by name: objects with ``state_dict`` and ``load_state_dict`` (schedulers, samplers, an
            average of the model), ``torch.Generator`` objects, or plain values: numbers, strings, bytes, tensors,
            arrays, and lists, tuples and dicts of them. They may differ between ranks; each rank gets its own back. An
            int ``step`` (rank 0's) also numbers the checkpoint, unless ``path`` has one of that number or a later one.

    Returns:
        A :class:`PendingSave`, whose ``wait()`` returns once the checkpoint is complete. With
        ``attach(..., survive=pycomm.Survive())``, the loss of a rank before that is logged, and raised by ``wait()``
        only; the next call saves with the remaining ranks.

    Raises:
        TypeError: a value cannot be saved (a DTensor, a value of ``more``); it is named.
        ValueError: ranks differ in what they save, or ``keep`` is less than 1.
        OSError: ``path`` cannot be written, or is not the same directory on all ranks; or writing the previous
            checkpoint failed, and no ``wait()`` has raised that error.
        RuntimeError: an accumulation window is open, the reducer is detached, or the ranks' parameters differ
            (``pycomm.Tuning(check_replicas=...)``).
        CommError: a rank was lost. All of these on every rank.
    """
    survives = reducer.attached.survives
    previous = _pending.get(reducer)
    error = None if previous is None else previous.unreported()
    if survives and isinstance(error, CommError):
        error = None  # logged; the world has changed since
    try:
        pending = PendingSave().start(_prepare(path, reducer, keep, more, error))
    except CommError as lost:
        if not survives:
            raise
        pending = PendingSave().fail(lost)  # the next backward() continues with the remaining ranks
    _pending[reducer] = pending
    return pending


def settle(reducer: Reducer) -> None:
    """Wait until no checkpoint of ``reducer`` is being written."""
    previous = _pending.get(reducer)
    if previous is not None:
        previous.settle()


def exchanged(communicator: Communicator, what: str, job: Callable[[], Any]) -> list[Any]:
    """Run ``job`` on all ranks; return all results, sent as JSON, in rank order. Collective.

    Args:
        what: verb for the message that another rank "could not" do it.
    """
    return agreement.exchanged(communicator.channel.all_gather_bytes, attempt(job), what, words=_WORDS)


def together(communicator: Communicator, what: str, job: Callable[[], T]) -> T:
    """Run ``job`` on all ranks; return this rank's result. Errors as in :func:`exchanged`. Collective."""
    return agreement.agreed(communicator.channel.all_gather_bytes, attempt(job), what, words=_WORDS)


def _prepare(
    path: str | os.PathLike[str], reducer: Reducer, keep: int, more: Mapping[str, Any], error: BaseException | None
) -> WriteJob:
    """Return the job that writes this rank's part. Collective."""
    training = reducer.attached
    communicator = training.communicator
    folder, sections, shared = _agree(path, reducer, keep, more, error)
    if not training.survives:  # otherwise the next reductions compare them
        training.compare_replicas()
    job = _open(folder, reducer, communicator, keep, more.get("step"))
    job.part = {
        "own": {s.name: s.node for s in sections if s.name not in shared},
        "shared": {s.name: s.node for s in sections if s.name in shared} if job.rank == 0 else {},
    }
    try:
        together(communicator, "write its part", lambda: _enter(job))
        together(communicator, "copy what it saves", lambda: _copy(job, sections, shared))
        job.watch.meet(communicator, range(job.size))
    except BaseException as failure:
        job.fail(failure)  # others may not see this error, and have begun to write
        raise
    return job


def _agree(
    path: str | os.PathLike[str], reducer: Reducer, keep: int, more: Mapping[str, Any], error: BaseException | None
) -> tuple[Path, list[Section], set[str]]:
    """Return the directory, this rank's sections, and the names of sections that are equal on all ranks. Collective."""
    training, sections = reducer.attached, list[Section]()

    def check() -> Path:
        if error is not None:
            raise error
        folder = path_of(path)
        checks.count("keep", keep, 1)
        if training.is_window_open:
            raise RuntimeError("save inside an accumulation window: call flush() and step first, or save later")
        return folder

    def look() -> dict[str, Any]:
        sections.extend(collect(reducer, more))
        layout = "\n".join(_lines(sections))
        return {
            "layout": hashlib.blake2b(layout.encode(), digest_size=16).hexdigest(),
            "digests": {s.name: s.digest() for s in sections if s.kind is Kind.COMPARED},
        }

    communicator = training.communicator
    folder = together(communicator, "save a checkpoint", check)  # before the state is gathered, which is collective
    everyones = exchanged(communicator, "save a checkpoint", look)
    mine = everyones[communicator.rank]
    if any(other["layout"] != mine["layout"] for other in everyones):
        agreement.check_same_lines(communicator.channel.all_gather_bytes, _lines(sections), "value")
    shared = {s.name for s in sections if s.kind is Kind.EQUAL}
    for name, digest in mine["digests"].items():
        if all(other["digests"][name] == digest for other in everyones):
            shared.add(name)
    return folder, sections, shared


def _lines(sections: list[Section]) -> list[str]:
    """Return the lines that must be equal on all ranks."""
    return [line for s in sections for line in (s.lines() if s.kind is Kind.EQUAL else [s.name])]


def _open(folder: Path, reducer: Reducer, communicator: Communicator, keep: int, step: Any) -> WriteJob:
    """Create the directory of a new checkpoint, named after ``step`` if that is a number. Collective."""

    def make() -> tuple[int, str] | None:
        if communicator.rank != 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        before, name = max(numbers_in(folder), default=-1), secrets.token_hex(4)
        number = max(1, before + 1)
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MOST_NUMBER:
            number = max(step, before + 1)  # the latest has the largest number
            if number != step:
                what = "the checkpoint of step %d is number %d, as %s has number %d"
                _LOG.warning(what, step, number, folder, before)
        unfinished(folder, name).mkdir()
        return number, name

    number, name = exchanged(communicator, "make a checkpoint", make)[0]
    return WriteJob(
        folder=folder,
        number=number,
        name=name,
        rank=communicator.rank,
        size=communicator.size,
        world=reducer.world,
        keep=keep,
        patience=communicator.channel.timeout,
        reducer=weakref.ref(reducer),
    )


def _enter(job: WriteJob) -> None:
    """Wait for the directory that rank 0 has created, and create this rank's in it."""
    start = time.monotonic()
    while not job.place.exists():
        if time.monotonic() - start > _PATIENCE:
            raise FileNotFoundError(f"{job.place}, created by rank 0, is not there: path must be the same on all ranks")
        time.sleep(0.05)
    job.make_directory()


def _copy(job: WriteJob, sections: list[Section], shared: set[str]) -> None:
    """Copy the tensors that this rank writes: its own, and its share of those that are equal on all ranks."""
    common = [
        (f"{s.name}/{i}", tensor, s.kind) for s in sections if s.name in shared for i, tensor in enumerate(s.tensors)
    ]
    for (name, tensor, kind), rank in zip(common, _shares([t for _, t, _ in common], job.size), strict=True):
        if rank == job.rank:
            job.shared[name] = copy_of(tensor) if kind is Kind.EQUAL else tensor
    for section in sections:
        if section.name not in shared:
            job.own.update({f"{section.name}/{i}": tensor for i, tensor in enumerate(section.tensors)})


def _shares(tensors: list[torch.Tensor], size: int) -> list[int]:
    """Return which of ``size`` ranks writes each tensor: largest first, each to the rank with the fewest bytes."""
    loads, owners = [0] * size, [0] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        owners[i] = min(range(size), key=loads.__getitem__)
        loads[owners[i]] += tensors[i].nbytes
    return owners


_POLL = (0.01, 0.5)  # seconds between two looks: shortest and longest
_PATIENCE_FOR_OTHERS = 5.0  # seconds for other ranks to read the error


@dataclass
class WriteJob:
    """Input of the thread that writes one checkpoint.

    Attributes:
        name: unique name of its directory while it is written, unknown to ranks that were excluded meanwhile.
        part: content of ``part.json``, without the indexes of tensors.
        own, shared: copies of the tensors that this rank writes.
        patience: seconds without progress after which another rank counts as lost.
        reducer: asked which ranks still belong to the world.
    """

    folder: Path
    number: int
    name: str
    rank: int
    size: int
    world: tuple[int, ...]
    keep: int
    patience: float
    reducer: weakref.ref[Reducer]
    watch: ProcessWatch = field(default_factory=ProcessWatch)
    part: dict[str, Any] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    reserves: list[files.Reserve] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Directory of the checkpoint while it is written."""
        return unfinished(self.folder, self.name)

    def make_directory(self) -> None:
        """Create this rank's directory, with the files that report errors later."""
        mine = part_of(self.place, self.rank)
        mine.mkdir()
        self.reserves = [files.Reserve(mine / "writing")]
        (mine / "watching").touch()
        if self.rank == 0:
            self.reserves.append(files.Reserve(self.place / "verdict"))

    def fail(self, error: BaseException) -> None:
        """Report to the others that this rank will not write its part."""
        with contextlib.suppress(OSError):  # the others notice by a timeout
            for reserve in self.reserves[:1]:
                reserve.report(_kind(error), str(error) or repr(error), "failed")
            (part_of(self.place, self.rank) / "watching").unlink(missing_ok=True)


class PendingSave:
    """Checkpoint that is being written. Returned by :func:`pycomm.save`.

    The interpreter's exit waits for it. An error is logged, and raised by :meth:`wait` or, if that was not called, by
    the next :func:`pycomm.save`.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def is_completed(self) -> bool:
        """Return whether writing has ended or failed, so that :meth:`wait` would not block."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the checkpoint is complete and on disk; return its directory. Not collective.

        Args:
            timeout: seconds after which to stop waiting; writing continues.

        Raises:
            OSError: a file could not be written, by this rank or another, which is named.
            CommError: another rank was lost. TimeoutError: ``timeout`` has passed.
            RuntimeError: this is a forked child of the process that saves.
        """
        if not self._done.wait(timeout if self._lives() else 0.0):
            if not self._lives():
                raise RuntimeError("the thread that writes the checkpoint is not in this process: it was forked")
            raise TimeoutError(f"the checkpoint was not written within {timeout} s")
        if self._error is not None:
            self._is_reported = True
            raise self._error
        assert self._path is not None
        return self._path

    def settle(self) -> None:
        """Wait until writing has ended or failed."""
        if self._lives():
            self._done.wait()

    def unreported(self) -> BaseException | None:
        """Wait for the end; return the error if it has not been reported yet, and count it as reported."""
        self.settle()
        error, self._is_reported = (None if self._is_reported else self._error), True
        return error

    def start(self, job: WriteJob) -> PendingSave:
        """Start the thread. It is not a daemon, so that the interpreter's exit waits for it."""
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"pycomm-save-{job.rank}")
        self._thread.start()
        return self

    def fail(self, error: BaseException) -> PendingSave:
        """Fail with ``error`` without starting a thread."""
        _LOG.warning("checkpoint: %s", error)
        self._error = error
        self._done.set()
        return self

    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, job: WriteJob) -> None:
        try:
            self._path = _write(job)
        except BaseException as error:  # raised by wait(), or by the next save
            _LOG.error("checkpoint %d in %s was not saved: %s", job.number, job.folder, error)
            self._error = error.with_traceback(None)  # a traceback would keep the copies alive
        finally:
            self._done.set()


def _write(job: WriteJob) -> Path:
    """Write this rank's part; return the checkpoint's directory once it is complete."""
    mine = part_of(job.place, job.rank)
    try:
        indexes = {OWN: _index(job, mine, OWN, job.own), SHARED: _index(job, mine, SHARED, job.shared)}
        files.write_json(mine / "part.json", {**job.part, "indexes": indexes})
        job.reserves[0].remove()  # which rank 0 waits for before it renames the directory
    except BaseException as error:
        job.fail(error)
        if job.rank == 0:
            _give_up(job, error)
        raise
    if job.rank != 0:
        try:
            return _await_verdict(job)
        finally:
            (mine / "watching").unlink(missing_ok=True)
    try:
        _await_parts(job)
        return _publish(job)
    except BaseException as error:
        _give_up(job, error)
        raise


def _index(job: WriteJob, mine: Path, kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write ``tensors`` and free them; return their index."""
    if not tensors:
        return {"files": {}, "tensors": {}}
    index = write_tensors(mine / kind, tensors)
    tensors.clear()
    return index


def _await_parts(job: WriteJob) -> None:
    """Return once all parts are there; raise the error of a rank that cannot write its own."""
    missing = set(range(job.size))
    for _ in _looks(job, lambda: {rank: _num_bytes(job, rank) for rank in missing}):
        job.reserves[1].touch()  # tells the others that this rank is alive and waiting
        for rank in sorted(missing):
            place = part_of(job.place, rank)
            lost = _fate(job, rank)
            if (place / "part.json").exists() and not (place / "writing").exists():
                missing.discard(rank)
            elif (report := files.read_report(place / "failed")) is not None:
                raise _error(job, rank, *report)
            elif lost is not None:
                raise _lost(job, rank, lost)
        if not missing:
            return
    raise _lost(job, min(missing), f"has not written its part within {job.patience:g} s")


def _await_verdict(job: WriteJob) -> Path:
    """Return the checkpoint's directory once rank 0 has renamed it; raise its error if it failed."""
    done = whole(job.folder, job.number)
    for _ in _looks(job, lambda: (_num_bytes(job, 0), _time_of(job.place / "verdict"))):
        lost, is_there = _fate(job, 0), job.place.exists()
        report = files.read_report(job.place / "failed")
        if done.exists():
            return done
        if report is not None:
            raise _error(job, 0, *report)
        if lost is not None or not is_there:
            raise _lost(job, 0, lost or "gave it up")
    raise _lost(job, 0, f"has not completed it within {job.patience:g} s")


def _num_bytes(job: WriteJob, rank: int) -> int:
    """Return how much ``rank`` has written so far."""
    with contextlib.suppress(OSError):  # renamed meanwhile
        return sum(path.stat().st_size for path in part_of(job.place, rank).rglob("*"))
    return 0


def _time_of(path: Path) -> int:
    with contextlib.suppress(OSError):  # renamed meanwhile
        return path.stat().st_mtime_ns
    return 0


def _looks(job: WriteJob, progress: Callable[[], Any]) -> Iterator[None]:
    """Yield repeatedly until ``progress()`` has not changed for longer than the job's patience."""
    pause, (start, last) = _POLL[0], (time.monotonic(), progress())
    while time.monotonic() - start < job.patience:
        yield None
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL[1])
        if (now := progress()) != last:
            start, last = time.monotonic(), now


def _fate(job: WriteJob, rank: int) -> str | None:
    """Return why ``rank`` will not write any more; ``None`` if it may."""
    fate = job.watch.fate_of(rank)
    reducer = job.reducer()
    if fate is None and reducer is not None and job.world[rank] not in reducer.world:
        return "was left behind"
    return fate


def _publish(job: WriteJob) -> Path:
    """Complete the checkpoint, and remove old ones; return its directory."""
    parts = [files.sum_of(files.read_part(part_of(job.place, rank) / "part.json")) for rank in range(job.size)]
    for rank in range(job.size):
        (part_of(job.place, rank) / "watching").unlink(missing_ok=True)
    files.write_sealed(job.place / "manifest.json", {"format": FORMAT, "torch": torch.__version__, "parts": parts})
    job.reserves[1].remove()
    files.sync_directory(job.place)
    done = whole(job.folder, job.number)
    job.place.rename(done)
    files.sync_directory(job.folder)
    try:
        prune(job.folder, job.keep)
    except OSError as error:
        _LOG.warning("old checkpoints in %s could not be removed: %s", job.folder, error)
    return done


def _give_up(job: WriteJob, error: BaseException) -> None:
    """Report the error to the others; remove the checkpoint once they have read it."""
    with contextlib.suppress(OSError):
        if job.reserves[1].path.exists():
            job.reserves[1].report(_kind(error), str(error) or repr(error), "failed")
    start = time.monotonic()
    others = list(range(1, job.size))
    while time.monotonic() - start < _PATIENCE_FOR_OTHERS:
        others = [r for r in others if (part_of(job.place, r) / "watching").exists() and _fate(job, r) is None]
        if not others:
            break
        time.sleep(_POLL[0])
    shutil.rmtree(job.place, ignore_errors=True)


def _kind(error: BaseException) -> str:
    return "CommError" if isinstance(error, CommError) else "OSError" if isinstance(error, OSError) else "RuntimeError"


def _error(job: WriteJob, rank: int, kind: str, text: str) -> Exception:
    if kind == "CommError":
        return _lost(job, rank, f"gave it up: {text}")
    what = f"rank {rank} could not save: {text}"
    return OSError(what) if kind == "OSError" else RuntimeError(what)


def _lost(job: WriteJob, rank: int, fate: str) -> CommError:
    return CommError.during("save", f"rank {rank} {fate}", rank=job.rank, peer=rank)
