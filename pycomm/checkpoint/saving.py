"""``pycomm.save``: a copy of the state of training is taken now, and written to disk meanwhile."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from pycomm import agreement, checks
from pycomm.checkpoint.contents import Kind, Section, collect, copy_of
from pycomm.checkpoint.folder import numbers_in, remove_unfinished, unfinished
from pycomm.checkpoint.writing import PendingSave, WriteJob
from pycomm.communicator import Communicator
from pycomm.errors import CommError, attempt
from pycomm.reducer import Reducer

T = TypeVar("T")

_LOG = logging.getLogger("pycomm")
_WORDS = agreement.Words(keeps_kind=True)

_PATIENCE = 10.0  # seconds for a directory that another host has made to be seen here

_pending: weakref.WeakKeyDictionary[Reducer, PendingSave] = weakref.WeakKeyDictionary()


def save(path: str | os.PathLike[str], reducer: Reducer, /, *, keep: int = 2, **more: Any) -> PendingSave:
    """Save the whole state of training to the directory ``path``: a copy now, to disk in the background. Collective.

    That is the model's parameters and buffers, the optimizer's state (with master weights), the state of
    compression on every rank, the loss scaler that ``attach`` was given, the random generators of every rank
    (Python's, numpy's, torch's, and its GPU's), and ``more``. Training goes on to the bit as if it had not been
    interrupted, after :func:`pycomm.load` on as many ranks.

    Each call adds a checkpoint to ``path``, which must be one directory for all ranks. It gets its name by one
    renaming, once all ranks' parts are on disk: a process that dies at any time leaves either all of it or
    none. Only then are old ones removed. Parameters and the optimizer's state, which all ranks have, are written
    by all of them, a share each. Nothing is sent meanwhile. Call it between ``optimizer.step()`` and the next
    ``backward()``. The next call waits for this one's end, and so do :func:`pycomm.load` and the interpreter's end.

    Args:
        path: directory, made if need be. No other training may save there.
        reducer: from :func:`pycomm.attach`.
        keep: number of checkpoints that stay, the latest ones; at least 1.
        more: by name: what has ``state_dict`` and ``load_state_dict`` (schedulers, samplers, an average of the
            model), a ``torch.Generator``, or a plain value: numbers, strings, bytes, tensors, arrays, and
            lists, tuples and dicts of them. May differ between ranks; each gets its own back.

    Returns:
        A :class:`pycomm.checkpoint.PendingSave`, whose ``wait()`` returns once the checkpoint is whole. With
        ``attach(..., survive=pycomm.Survive())``, if a rank is lost during this call or before the end, that is
        logged and raised by ``wait()`` only; the next call saves with the ranks that are left.

    Raises:
        TypeError: something cannot be saved (a DTensor, a value of ``more``); it is named.
        ValueError: ranks differ in what they save, or ``keep`` is less than 1.
        OSError: ``path`` cannot be written, or is not the same directory on all ranks; or the previous checkpoint
            could not be written, and no ``wait()`` has raised that.
        RuntimeError: an accumulation window is open, the reducer is detached, or the ranks' parameters differ
            (``pycomm.Tuning(check_replicas=...)``).
        CommError: a rank is gone. All of these on every rank.
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
        pending = PendingSave().fail(lost)  # the next backward() goes on with those that are left
    _pending[reducer] = pending
    return pending


def settle(reducer: Reducer) -> None:
    """Wait until the last checkpoint of ``reducer`` is written, if one is being written."""
    previous = _pending.get(reducer)
    if previous is not None:
        previous.settle()


def exchanged(communicator: Communicator, what: str, job: Callable[[], Any]) -> list[Any]:
    """Run ``job`` on all ranks; return the results of all, in rank order, which travel as JSON. Collective.

    Args:
        communicator: the ranks.
        what: verb for the message about another rank, which "could not" do it.
        job: what to run.

    Raises:
        Exception: ``job`` has raised it on this rank, or on another, which is quoted: an error of the same kind.
    """
    return agreement.exchanged(communicator.channel.all_gather_bytes, attempt(job), what, words=_WORDS)


def together(communicator: Communicator, what: str, job: Callable[[], T]) -> T:
    """Run ``job`` on all ranks; return its result on this one. As :func:`exchanged`, but nothing else travels."""
    return agreement.agreed(communicator.channel.all_gather_bytes, attempt(job), what, words=_WORDS)


def _prepare(
    path: str | os.PathLike[str], reducer: Reducer, keep: int, more: Mapping[str, Any], error: BaseException | None
) -> WriteJob:
    """Return all that is to be written by this rank. Collective."""
    training = reducer.attached
    training.stand_down()
    communicator = training.communicator
    folder, sections, shared = _agree(path, reducer, keep, more, error)
    if not training.survives:  # else the next reductions find whose differ, and go on without them
        training.compare_replicas()
    job = _open(folder, reducer, communicator, keep)
    job.part = {
        "own": {s.name: s.node for s in sections if s.name not in shared},
        "shared": {s.name: s.node for s in sections if s.name in shared} if job.rank == 0 else {},
    }
    try:
        together(communicator, "write its part", lambda: _enter(job))
        together(communicator, "copy what it saves", lambda: _copy(job, sections, shared))
        job.watch.meet(communicator, range(job.size))
    except BaseException as failure:
        job.fail(failure)  # others may not see what this rank sees, and have begun to write
        raise
    return job


def _agree(
    path: str | os.PathLike[str], reducer: Reducer, keep: int, more: Mapping[str, Any], error: BaseException | None
) -> tuple[Path, list[Section], set[str]]:
    """Return the directory, the sections of this rank, and the names of those that are the same on all. Collective."""
    training, sections, folders = reducer.attached, list[Section](), list[Path]()

    def look() -> dict[str, Any]:
        if error is not None:
            raise error
        folders.append(Path(path))
        checks.count("keep", keep, 1)
        if training.is_window_open:
            raise RuntimeError("save inside an accumulation window: call flush() and step first, or save later")
        sections.extend(collect(reducer, more))
        layout = "\n".join(_lines(sections))
        return {
            "layout": hashlib.blake2b(layout.encode(), digest_size=16).hexdigest(),
            "digests": {s.name: s.digest() for s in sections if s.kind is Kind.COMPARED},
        }

    communicator = training.communicator
    everyones = exchanged(communicator, "save a checkpoint", look)
    mine = everyones[communicator.rank]
    if any(other["layout"] != mine["layout"] for other in everyones):
        agreement.check_same_lines(communicator.channel.all_gather_bytes, _lines(sections), "value")
    shared = {s.name for s in sections if s.kind is Kind.EQUAL}
    for name, digest in mine["digests"].items():
        if all(other["digests"][name] == digest for other in everyones):
            shared.add(name)
    return folders[0], sections, shared


def _lines(sections: list[Section]) -> list[str]:
    """Return what must be equal on all ranks."""
    return [line for s in sections for line in (s.lines() if s.kind is Kind.EQUAL else [s.name])]


def _open(folder: Path, reducer: Reducer, communicator: Communicator, keep: int) -> WriteJob:
    """Make the directory of a new checkpoint. Collective."""

    def make() -> tuple[int, str] | None:
        if communicator.rank != 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        number, name = max(numbers_in(folder), default=0) + 1, secrets.token_hex(4)
        unfinished(folder, name).mkdir()
        return number, name

    number, name = exchanged(communicator, "make a checkpoint", make)[0]
    # Imported here, by this thread, as it takes torch half a second.
    from pycomm.checkpoint.storage import write_tensors

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
        write_tensors=write_tensors,
    )


def _enter(job: WriteJob) -> None:
    start = time.monotonic()
    while not job.place.exists():
        if time.monotonic() - start > _PATIENCE:
            raise FileNotFoundError(f"{job.place}, which rank 0 has made, is not there: path must be one for all ranks")
        time.sleep(0.05)
    job.make_directory()


def _copy(job: WriteJob, sections: list[Section], shared: set[str]) -> None:
    """Copy the tensors that this rank writes: its own, and its share of the others."""
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
    """Return which of ``size`` ranks writes each of ``tensors``: the largest first, to whoever has least."""
    loads, owners = [0] * size, [0] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].nbytes):
        owners[i] = min(range(size), key=loads.__getitem__)
        loads[owners[i]] += tensors[i].nbytes
    return owners
