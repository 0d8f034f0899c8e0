"""``pycomm.load``: the last complete checkpoint is read and checked before anything is restored."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pycomm.optim.step_override import stepper_of
from pycomm.torch_internals import renamed
from pycomm.training.checkpoint import contents
from pycomm.training.checkpoint.files import DamagedError
from pycomm.training.checkpoint.folder import PLAIN, STATEFUL, Checkpoint, Saved, numbers_in, whole
from pycomm.training.checkpoint.saving import exchanged, settle, together
from pycomm.training.reducer import Reducer
from pycomm.untrusted import one_line, path_of

_LOG = logging.getLogger("pycomm")

_BARE = KeyError, IndexError, AttributeError, TypeError, AssertionError, RecursionError
"""Errors that foreign objects raise for unexpected input."""

Undo = list[Callable[[], Any]]


def load(path: str | os.PathLike[str], reducer: Reducer, /, **more: Any) -> dict[str, Any]:
    """Load the last complete checkpoint that :func:`pycomm.save` has written to ``path``. Collective.

    Every file is first compared with its checksum. A checkpoint with missing or damaged files is skipped in favor of
    the one before, with a warning in the log that names the damage. Nothing changes on any rank unless the whole
    checkpoint fits. Nothing is unpickled.

    The number of ranks may have changed. Residuals and velocities are then redistributed so that their sums are kept.
    Of other values that differ between ranks, each old rank gets its own, and new ranks get rank 0's; the random
    generators of new ranks keep their state.

    Args:
        path: directory.
        reducer: from :func:`pycomm.attach`, with the same model, optimizer and compression.
        more: exactly the objects with state that were saved, by name; they are restored in place.

    Returns:
        The plain values that were saved on this rank, by name; tensors in CPU memory.

    Raises:
        FileNotFoundError: there is no checkpoint in ``path``, not even a damaged one.
        ValueError: every checkpoint is damaged (with the first damage of each); or the last complete one belongs to
            another model, optimizer, compression or format, or has other names than ``more``, which are named.
        TypeError: a value of ``more`` has no state to restore, or a parameter is a DTensor.
        RuntimeError: an accumulation window is open, or the reducer is detached. All of these on every rank.
    """
    training = reducer.attached
    communicator = training.communicator
    settle(reducer)
    folder = together(communicator, "load a checkpoint", lambda: _checked_folder(path, reducer, more))
    # Gathered once: it is collective, and what follows may fail on one rank alone.
    here = together(communicator, "load a checkpoint", lambda: contents.optimizer_state(reducer))
    found, plan = _last_whole(folder, reducer, here, more)
    undo: Undo = []
    try:
        together(communicator, f"load {found}", lambda: plan.restore(undo))
        together(communicator, f"load {found}", lambda: plan.restore_optimizer(undo))
    except Exception:
        for step in reversed(undo):
            try:
                step()
            except Exception as error:  # a foreign object may raise anything; the others are still undone
                what = f"{type(error).__name__}: {error}"
                _LOG.warning("what was loaded before the error could not be taken back: %s", what)
        raise
    plan.finish()
    return plan.plain


@contextmanager
def _of(path: Path) -> Iterator[None]:
    """Add the checkpoint's path to a ValueError that does not name it."""
    try:
        yield
    except DamagedError:
        raise
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}").with_traceback(error.__traceback__) from error.__cause__


def _checked_folder(path: str | os.PathLike[str], reducer: Reducer, more: Mapping[str, Any]) -> Path:
    """Return the directory. Raise TypeError or RuntimeError if ``more`` is wrong, or nothing can be loaded now."""
    if reducer.attached.is_window_open:
        raise RuntimeError("load inside an accumulation window: call flush() and step first")
    contents.refuse_parts(contents.parameters_of(reducer) | contents.buffers_of(reducer))
    for name, value in more.items():
        if not contents.is_stateful(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}, wanted an object with state_dict() and load_state_dict(): "
                "plain values are returned"
            )
    return path_of(path)


def _last_whole(folder: Path, reducer: Reducer, here: dict[str, Any], more: Mapping[str, Any]) -> tuple[Path, _Plan]:
    """Return the last checkpoint that all ranks find complete, and this rank's plan for it. Collective.

    Args:
        here: result of :func:`contents.optimizer_state`, to compare with.
    """
    communicator = reducer.attached.communicator
    listed = exchanged(communicator, "load a checkpoint", lambda: [one_line(str(folder)), numbers_in(folder)])
    for rank, (where, numbers) in enumerate(listed):
        if not numbers:
            finder = f" on rank {rank}" if any(found for _, found in listed) else ""
            raise FileNotFoundError(f"there is no checkpoint in {where}{finder}")
    numbers = listed[0][1]
    damages = []
    for number in reversed(numbers):
        path, found = whole(folder, number), list[_Plan]()
        look = functools.partial(_damage, path, reducer, here, more, found)
        everyones = exchanged(communicator, f"load {path}", look)
        damage = next((each for each in everyones if each), None)
        if damage is None:
            return path, found[0]
        damages.append(damage)
        if communicator.rank == 0:
            _LOG.warning("checkpoint %d in %s is skipped: %s", number, folder, one_line(damage))
    raise ValueError(f"no checkpoint in {folder} is whole: {'; '.join(damages)}")


def _damage(path: Path, reducer: Reducer, here: dict[str, Any], more: Mapping[str, Any], found: list[_Plan]) -> str:
    """Return the damage of a checkpoint, or "" after appending this rank's plan for it to ``found``."""
    communicator = reducer.attached.communicator
    try:
        checkpoint = Checkpoint(path)
        old, rank = checkpoint.world_size, communicator.rank
        checkpoint.check({rank} if old == communicator.size else set(range(old)))
        with _of(path):
            found.append(_Plan(checkpoint, reducer, here, more))
    except DamagedError as error:
        return str(error) if str(path) in str(error) else f"{path}: {error}"
    except MemoryError:
        return f"{path} takes more memory than there is"
    return ""


class _Plan:
    """Values of a checkpoint for this rank, read into memory and checked."""

    def __init__(self, checkpoint: Checkpoint, reducer: Reducer, here: dict[str, Any], more: Mapping[str, Any]) -> None:
        self._reducer, self._more, self._path = reducer, more, checkpoint.path
        communicator = reducer.attached.communicator
        saved = Saved(checkpoint, communicator.rank, communicator.size)
        self._check_names(saved.names(STATEFUL), bool(saved.names("loss_scaler")))
        self._parameters = contents.parameters_of(reducer)
        self._buffers = contents.buffers_of(reducer)
        self._modules = contents.extra_states(reducer)
        self._scaler = contents.loss_scaler_of(reducer)
        self._model = renamed(saved.value("model"), self._parameters)
        _check_tensors("parameter", self._model, self._parameters)
        self._saved_buffers = renamed(saved.value("buffers"), self._buffers)
        _check_tensors("buffer", self._saved_buffers, self._buffers)
        self._extra = renamed(saved.value("extra"), self._modules)
        _check_keys("module with extra state", self._extra.keys(), self._modules.keys())
        optimizer = saved.value("optimizer", here)
        contents.check_optimizer(optimizer, here, stepper_of(reducer.optimizer).has_masters)
        self._optimizer, self._old = optimizer["state_dict"], here["state_dict"]
        self._compression = saved.of_all("compression")
        with _named(f"{checkpoint.path}: compression", DamagedError):
            reducer.attached.check_state(self._compression)
        self._generators = saved.value("generators") if saved.has_own else None
        if self._generators is not None:
            contents.check_generators(self._generators)
        self._scaler_state = saved.value("loss_scaler") if self._scaler is not None else None
        self._states = {name: saved.value(STATEFUL + name) for name in more}
        self.plain = {name: saved.value(PLAIN + name) for name in saved.names(PLAIN)}

    def _check_names(self, stateful: list[str], had: bool) -> None:
        _check_keys("object with state", stateful, self._more.keys())
        has = contents.loss_scaler_of(self._reducer) is not None
        if has != had:
            there, here = ("with a", "none") if had else ("without", "one")
            raise ValueError(f"it was saved {there} loss_scaler, and attach was given {here}")

    def restore(self, undo: Undo) -> None:
        """Restore what is the user's and may fail; append functions that undo it to ``undo``."""
        own = [(name, self._more[name], state) for name, state in self._states.items()]
        if self._scaler is not None:
            own.append(("loss_scaler", self._scaler, self._scaler_state))
        with _of(self._path):
            for name, value, state in own:
                undo.append(functools.partial(contents.restore, value, copy.deepcopy(contents.state_of(value))))
                with _named(name):
                    contents.restore(value, state)
            for name, module in self._modules.items():
                undo.append(functools.partial(module.set_extra_state, copy.deepcopy(module.get_extra_state())))
                with _named(f"module {name!r}"):
                    module.set_extra_state(self._extra[name])

    def restore_optimizer(self, undo: Undo) -> None:
        """Restore the optimizer, likewise; after all others, as ranks compare what they have loaded into it."""
        with _of(self._path), _named("the optimizer"):
            undone = contents.restore_optimizer(self._reducer.optimizer, self._optimizer, self._old)
        if undone is not None:
            undo.append(undone)

    @torch.no_grad()
    def finish(self) -> None:
        """Restore the rest, which has been checked."""
        for saved, here in ((self._model, self._parameters), (self._saved_buffers, self._buffers)):
            for name, tensor in saved.items():
                here[name].copy_(tensor)
        self._reducer.load_state_dict(self._compression)
        if self._generators is not None:
            contents.restore_generators(self._generators, contents.device_of(self._reducer))


@contextmanager
def _named(what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Replace a bare error of a foreign object by an error of ``kind`` that names ``what``."""
    try:
        yield
    except _BARE as error:
        raise kind(f"{what} rejects the saved state: {type(error).__name__}: {error}") from error


def _check_tensors(what: str, saved: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless names, shapes and dtypes are the same."""
    _check_keys(what, saved.keys(), here.keys())
    for name, tensor in saved.items():
        if (tensor.shape, tensor.dtype) != (here[name].shape, here[name].dtype):
            raise ValueError(
                f"{what} {name!r} was {list(tensor.shape)} {tensor.dtype}, and is {list(here[name].shape)} "
                f"{here[name].dtype} here: it is of another model"
            )


def _check_keys(what: str, saved: Any, here: Any) -> None:
    """Raise ValueError unless both have the same names."""
    missing, unknown = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing:
        raise ValueError(f"the checkpoint has no {what} {missing[0]!r}")
    if unknown:
        raise ValueError(f"the checkpoint has the {what} {unknown[0]!r}, which is not here")
