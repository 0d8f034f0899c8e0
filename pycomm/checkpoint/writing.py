"""Writing of a checkpoint by a background thread, which talks to the other ranks' by files only.

A collective here would mix with those of training, and could not be interrupted when a rank is lost. So each rank
writes its part, and says so by a file; once all parts are there, rank 0 writes the manifest and renames the directory.
Files that were made in advance say what went wrong. Whoever waits for a rank also watches whether it lives.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pycomm.checkpoint.files import Reserve, read_part, sum_of, sync_directory, told_in, write_json, write_sealed
from pycomm.checkpoint.folder import FORMAT, OWN, SHARED, part_of, prune, unfinished, whole
from pycomm.elastic.liveness import ProcessWatch
from pycomm.errors import CommError
from pycomm.reducer import Reducer

_LOG = logging.getLogger("pycomm")

_POLL = (0.01, 0.5)  # seconds between two looks: at first, and in the end
_PATIENCE_FOR_OTHERS = 5.0  # seconds for other ranks to read that it failed

WriteTensors = Callable[[Path, Mapping[str, torch.Tensor]], dict[str, Any]]


@dataclass
class Job:
    """All that the thread needs of a checkpoint.

    Attributes:
        folder, number: which checkpoint.
        name: of its directory while it is written: not that of a rank which was left behind and goes on later.
        rank, size: this rank's place.
        world: numbers of the ranks; see ``Reducer.world``.
        keep: number of checkpoints to keep.
        part: what this rank writes to its part, without the indexes of tensors.
        own, shared: copies of the tensors that this rank writes.
        watch: the ranks' processes.
        patience: seconds without any progress of another rank after which it is given up.
        reducer: who knows whether ranks have been left behind.
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
    write_tensors: WriteTensors
    watch: ProcessWatch = field(default_factory=ProcessWatch)
    part: dict[str, Any] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    reserves: list[Reserve] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Directory of the checkpoint while it is written."""
        return unfinished(self.folder, self.name)

    def make_directory(self) -> None:
        """Make this rank's directory, with what says later how it went."""
        mine = part_of(self.place, self.rank)
        mine.mkdir()
        self.reserves = [Reserve(mine / "writing")]
        (mine / "watching").touch()
        if self.rank == 0:
            self.reserves.append(Reserve(self.place / "verdict"))

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank will not write its part."""
        with contextlib.suppress(OSError):  # they find out by their own means
            for reserve in self.reserves[:1]:
                reserve.tell(_kind(error), str(error) or repr(error), "failed")
            (part_of(self.place, self.rank) / "watching").unlink(missing_ok=True)


class PendingSave:
    """Checkpoint that is being written, as :func:`pycomm.save` returns it.

    The interpreter's end waits for it. What went wrong is logged, and raised by :meth:`wait` or, if that was not
    called, by the next :func:`pycomm.save`.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not: whether :meth:`wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Block until the checkpoint is whole and on disk; return its directory. Not collective.

        Args:
            timeout: seconds after which to give up waiting; the writing goes on.

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
        """Wait for the end, whatever it is."""
        if self._lives():
            self._done.wait()

    def unreported(self) -> BaseException | None:
        """Wait for the end; return what went wrong, if nobody has been told so far, and count it as told."""
        self.settle()
        error, self._is_reported = (None if self._is_reported else self._error), True
        return error

    def start(self, job: Job) -> PendingSave:
        """Start the thread. It is no daemon: the interpreter's end waits for it."""
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"pycomm-save-{job.rank}")
        self._thread.start()
        return self

    def fail(self, error: BaseException) -> PendingSave:
        """End with ``error``, without a thread."""
        _LOG.warning("checkpoint: %s", error)
        self._error = error
        self._done.set()
        return self

    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, job: Job) -> None:
        try:
            self._path = _write(job)
        except BaseException as error:  # raised by wait(), or by the next save
            _LOG.error("checkpoint %d in %s was not saved: %s", job.number, job.folder, error)
            self._error = error.with_traceback(None)  # which would keep the copies alive
        finally:
            self._done.set()


def _write(job: Job) -> Path:
    """Write this rank's part, then return the directory of the checkpoint once it is whole."""
    mine = part_of(job.place, job.rank)
    try:
        indexes = {OWN: _index(job, mine, OWN, job.own), SHARED: _index(job, mine, SHARED, job.shared)}
        write_json(mine / "part.json", {**job.part, "indexes": indexes})
    except BaseException as error:
        job.fail(error)
        if job.rank == 0:
            _give_up(job, error)
        raise
    job.reserves[0].remove()
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


def _index(job: Job, mine: Path, kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write ``tensors``, and let go of them; return their index."""
    if not tensors:
        return {"files": {}, "tensors": {}}
    index = job.write_tensors(mine / kind, tensors)
    tensors.clear()
    return index


def _await_parts(job: Job) -> None:
    """Return once all parts are there; raise what went wrong if one will never be."""
    missing = set(range(job.size))
    for _ in _looks(job, lambda: {rank: _num_bytes(job, rank) for rank in missing}):
        job.reserves[1].touch()  # so that the others see that this rank still waits for one that writes
        for rank in sorted(missing):
            place = part_of(job.place, rank)
            lost = _fate(job, rank)
            if (place / "part.json").exists():
                missing.discard(rank)
            elif (told := told_in(place / "failed")) is not None:
                raise _error(job, rank, *told)
            elif lost is not None:
                raise _lost(job, rank, lost)
        if not missing:
            return
    raise _lost(job, min(missing), f"has not written its part within {job.patience:g} s")


def _await_verdict(job: Job) -> Path:
    """Return the directory of the checkpoint once rank 0 has renamed it; raise what went wrong otherwise."""
    done = whole(job.folder, job.number)
    for _ in _looks(job, lambda: (_num_bytes(job, 0), _time_of(job.place / "verdict"))):
        lost, is_there = _fate(job, 0), job.place.exists()
        told = told_in(job.place / "failed")
        if done.exists():
            return done
        if told is not None:
            raise _error(job, 0, *told)
        if lost is not None or not is_there:
            raise _lost(job, 0, lost or "gave it up")
    raise _lost(job, 0, f"has not completed it within {job.patience:g} s")


def _num_bytes(job: Job, rank: int) -> int:
    """Return how much ``rank`` has written so far."""
    total = 0
    with contextlib.suppress(OSError):  # renamed meanwhile
        total = sum(path.stat().st_size for path in part_of(job.place, rank).rglob("*"))
    return total


def _time_of(path: Path) -> int:
    with contextlib.suppress(OSError):  # renamed meanwhile
        return path.stat().st_mtime_ns
    return 0


def _looks(job: Job, progress: Callable[[], Any]) -> Iterator[None]:
    """Yield, again and again, until there has been no ``progress`` for longer than the job's patience."""
    pause, (start, last) = _POLL[0], (time.monotonic(), progress())
    while time.monotonic() - start < job.patience:
        yield None
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL[1])
        if (now := progress()) != last:
            start, last = time.monotonic(), now


def _fate(job: Job, rank: int) -> str | None:
    """Return what has become of ``rank``, if it will not write any more."""
    fate = job.watch.fate_of(rank)
    reducer = job.reducer()
    if fate is None and reducer is not None and job.world[rank] not in reducer.world:
        return "was left behind"
    return fate


def _publish(job: Job) -> Path:
    """Make the checkpoint whole, and remove old ones; return its directory."""
    parts = [sum_of(read_part(part_of(job.place, rank) / "part.json")) for rank in range(job.size)]
    for rank in range(job.size):
        (part_of(job.place, rank) / "watching").unlink(missing_ok=True)
    write_sealed(job.place / "manifest.json", {"format": FORMAT, "torch": torch.__version__, "parts": parts})
    job.reserves[1].remove()
    sync_directory(job.place)
    done = whole(job.folder, job.number)
    job.place.rename(done)
    sync_directory(job.folder)
    try:
        prune(job.folder, job.keep)
    except OSError as error:
        _LOG.warning("old checkpoints in %s could not be removed: %s", job.folder, error)
    return done


def _give_up(job: Job, error: BaseException) -> None:
    """Tell the others that the checkpoint will never be whole; remove it once they have seen that."""
    with contextlib.suppress(OSError):
        if job.reserves[1].path.exists():
            job.reserves[1].tell(_kind(error), str(error) or repr(error), "failed")
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


def _error(job: Job, rank: int, kind: str, text: str) -> Exception:
    """Return the error that ``rank`` has told of."""
    if kind == "CommError":
        return _lost(job, rank, f"gave it up: {text}")
    what = f"rank {rank} could not save: {text}"
    return OSError(what) if kind == "OSError" else RuntimeError(what)


def _lost(job: Job, rank: int, fate: str) -> CommError:
    return CommError.during("save", f"rank {rank} {fate}", rank=job.rank, peer=rank)
