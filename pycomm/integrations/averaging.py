"""Averaging of gradients on behalf of a trainer, and its state beside the trainer's checkpoints."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression
from pycomm.ddp import HookHandle, register
from pycomm.descriptions import name_ranks
from pycomm.optim.parameters import unwrapped
from pycomm.torch_internals import uncompiled
from pycomm.training.checkpoint.files import save_values
from pycomm.training.checkpoint.saving import exchanged, together
from pycomm.training.checkpoint.torch_files import load_values
from pycomm.training.reducer import Reducer, Tuning, attach
from pycomm.training.reductions.requests import StopRequest
from pycomm.untrusted import path_of

_LOG = logging.getLogger("pycomm")

_MOST_NAMED = 8  # missing files in an error
_FILE = re.compile(r"(?P<prefix>.*)-(?P<rank>\d+)-of-(?P<size>\d+)\.pt")

_NOTHING: Mapping[str, Any] = {
    "bytes_sent": 0,
    "steps": 0,
    "wait_seconds": 0.0,
    "nonfinite_steps": 0,
    "last_nonfinite": None,
    "num_buckets": 0,
    "transport": None,
}
"""Counters where there is nothing to average."""


def library(*names: str, whose: str) -> Any:
    """Return the first installed one of the modules ``names``; raise ImportError, for module ``whose``, if none is."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is installed, and lacks something itself
    packages = " or ".join(dict.fromkeys(name.split(".")[0] for name in names))
    raise ImportError(f"{whose} requires {packages}: pip install 'pycomm-torch[frameworks]'")


def options_of(function: Callable[..., Any], but: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of keyword-only arguments of ``function``, leaving some out."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) - frozenset(but)


TRAINERS_OWN = ("process_group", "accumulate", "loss_scaler")
"""Arguments of ``attach`` that a trainer answers itself."""

REGISTER_OPTIONS = options_of(register, but=("loss_scaler", "optimizer"))
"""Arguments of ``pycomm.ddp.register`` that integrations pass on, if a DistributedDataParallel is around the model."""

_OF_BOTH = REGISTER_OPTIONS & {field.name for field in fields(Tuning)}
"""Options that are fields of ``attach``'s ``tuning``: a trainer's caller need not know which are."""

ATTACH_OPTIONS = options_of(attach, but=TRAINERS_OWN) | _OF_BOTH
"""Arguments that integrations pass on to ``attach``, if no DistributedDataParallel is around the model."""


def check_options(options: Mapping[str, Any], allowed: Iterable[str], whose: str, why: str = "") -> None:
    """Raise TypeError if ``options`` has a name that is not among those ``allowed``.

    Args:
        whose: the function that was called, for the message.
        why: reason for the refusal, if another function of pycomm's would accept the name.
    """
    known = sorted(allowed)
    for name in options:
        if name not in known:
            reason = why if why and name in ATTACH_OPTIONS | set(TRAINERS_OWN) else f"wanted among {', '.join(known)}"
            raise TypeError(f"{whose} got an argument {name!r}: {reason}")


def for_attach(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``attach`` for ``options``, of which some belong to ``tuning`` there."""
    both = {name: options[name] for name in _OF_BOTH if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in _OF_BOTH}
    return {**rest, "tuning": replace(options.get("tuning") or Tuning(), **both)} if both else rest


class Averaging:
    """Averaging of a model's gradients while a trainer trains it.

    Args:
        optimizer: whose steps take the gradients, where ``inner`` is ``None``.

    Attributes:
        inner: the :class:`pycomm.Reducer`, where nothing is around the model; the :class:`pycomm.ddp.HookHandle`, where
            the trainer has put a DistributedDataParallel around it; ``None`` if there is one process without a process
            group, whose gradients are averages as they are.
        on_detach: called once by :meth:`detach`.
    """

    def __init__(self, inner: Reducer | HookHandle | None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.inner = inner
        self._training = inner.attached if isinstance(inner, Reducer) else inner
        self._stop = StopRequest()
        self.on_detach: list[Callable[[], None]] = []
        self._is_detached = False
        self._optimizer = None if optimizer is None else unwrapped(optimizer)

    def stats(self) -> dict[str, Any]:
        """Return the counters of :attr:`inner`, as ``Reducer.stats`` or ``HookHandle.stats``.

        Without one, the counters that both have: nothing was averaged, and nothing sent.
        """
        return dict(_NOTHING) if self.inner is None else self.inner.stats()

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to end the training together; see :meth:`pycomm.Reducer.request_stop`."""
        if self.inner is not None:
            self.inner.request_stop(reason)
        elif not self._stop:
            self._stop = StopRequest(0, reason)

    @property
    def stop_requested(self) -> StopRequest:
        """Request to stop that all ranks have received; see :attr:`pycomm.Reducer.stop_requested`."""
        return self._stop if self.inner is None else self.inner.stop_requested

    def state_dict(self) -> dict[str, Any]:
        """Return the state that compression carries on this rank, as ``Reducer.state_dict``; empty without one."""
        return {} if self.inner is None else self.inner.state_dict()

    def load_state_dict(self, state: Any, *, strict: bool = True) -> None:
        """Load state that :meth:`state_dict` returned, as ``Reducer.load_state_dict`` does."""
        if self.inner is not None:
            self.inner.load_state_dict(state, strict=strict)

    def detach(self) -> None:
        """Stop averaging, and leave checkpoints alone. Idempotent; on all ranks between the same steps."""
        self._is_detached = True
        while self.on_detach:
            self.on_detach.pop()()
        if isinstance(self.inner, Reducer):
            self.inner.detach()
        elif self.inner is not None:
            self.inner.remove()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose gradients a Reducer averages, or would; ``None`` for a hook, which knows of none."""
        return self.inner.optimizer if isinstance(self.inner, Reducer) else self._optimizer

    @property
    def carries_state(self) -> bool:
        """Whether there is anything to keep beside a checkpoint: a method that carries state from step to step."""
        method = None if self._is_detached else self._method
        return method is not None and method.transactional

    def save(self, folder: str | os.PathLike[str], prefix: str = "pycomm") -> None:
        """Save the state of this rank in ``folder``, which need not be shared, in a file of its own.

        Collective where there is state to save. Where there is none, nothing is written. Files that another number of
        ranks, or a method that is no longer in use, left there are removed by rank 0.

        Args:
            prefix: beginning of the file's name, followed by the numbers of this rank and of all ranks.
        """
        if self.carries_state:
            together(self._communicator, "save pycomm's state", lambda: self._save(path_of(folder), prefix))
        elif self.inner is not None and not self._is_detached and self._communicator.rank == 0:
            self._remove_others(Path(folder), prefix)

    def remove(self, folder: str | os.PathLike[str], prefix: str = "pycomm") -> None:
        """Remove what :meth:`save` has put into ``folder`` on this rank; on rank 0, of all ranks."""
        if self.inner is not None:
            rank, size = self._communicator.rank, self._communicator.size
            for path, file in _files(Path(folder), prefix):
                if rank == 0 or (int(file["rank"]), int(file["size"])) == (rank, size):
                    path.unlink(missing_ok=True)

    def load(self, folder: str | os.PathLike[str], prefix: str = "pycomm") -> bool:
        """Load the state that :meth:`save` wrote to ``folder``, even by another number of ranks. Collective.

        Returns:
            Whether there was any. If not, a warning in the log says that compression begins without state.

        Raises:
            ValueError: files are missing or damaged, are there for some ranks only, or do not fit the model or the
                method; on every rank.
        """
        if self.inner is None or self._is_detached:
            return False
        communicator = self._communicator
        rank, size = communicator.rank, communicator.size

        def look() -> int:
            """Return the number of ranks of the saved state here: ``size`` if there are such files; 0 if none."""
            found = {int(file["size"]) for _, file in _files(path_of(folder), prefix)}
            return size if size in found else max(found, default=0)

        sizes = exchanged(communicator, "look for pycomm's state", look)
        _refuse_parted(sizes, folder)
        if sizes[0] == 0:
            if rank == 0 and self.carries_state:
                _LOG.warning("%s was saved without pycomm: compression begins without residuals", folder)
            return False
        chosen = [rank] if sizes[0] == size else range(sizes[0])
        paths = (_path(Path(folder), prefix, number, sizes[0]) for number in chosen)
        states = together(communicator, "load pycomm's state", lambda: _loaded(paths))
        together(communicator, "load pycomm's state", lambda: self._take(states, folder))
        return True

    def _take(self, states: list[dict[str, Any]], folder: str | os.PathLike[str]) -> None:
        try:
            self.load_state_dict(states)
        except ValueError as error:
            raise ValueError(f"{os.fspath(folder)} has pycomm's state of something else: {error}") from None

    @property
    def _method(self) -> Compression | None:
        return None if self._training is None else self._training.method

    @property
    def _communicator(self) -> Communicator:
        assert self._training is not None
        return self._training.communicator

    def _save(self, folder: Path, prefix: str) -> None:
        rank, size = self._communicator.rank, self._communicator.size
        if rank == 0:
            self._remove_others(folder, prefix)
        folder.mkdir(parents=True, exist_ok=True)
        path = _path(folder, prefix, rank, size)
        partial = path.with_suffix(".partial")
        save_values(partial, self.state_dict())
        os.replace(partial, path)

    def _remove_others(self, folder: Path, prefix: str) -> None:
        """Remove the files of other numbers of ranks, or all if there is no state now."""
        for path, file in _files(folder, prefix):
            if int(file["size"]) != self._communicator.size or not self.carries_state:
                path.unlink(missing_ok=True)


def _files(folder: Path, prefix: str) -> list[tuple[Path, re.Match[str]]]:
    """Return the files of state in ``folder``, with the parts of their names."""
    names = ((path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("*-of-*.pt")))
    return [(path, match) for path, match in names if match is not None and match["prefix"] == prefix]


def _path(folder: Path, prefix: str, rank: int, size: int) -> Path:
    return folder / f"{prefix}-{rank}-of-{size}.pt"


def _refuse_parted(sizes: list[int], folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if ranks found state of different numbers of ranks, as if a host lost its files."""
    if len(set(sizes)) == 1:
        return
    found = (
        f"of {size or 'none'} on {name_ranks([rank for rank, its in enumerate(sizes) if its == size])}"
        for size in dict.fromkeys(sizes)
    )
    raise ValueError(
        f"{os.fspath(folder)} has pycomm's state {', '.join(found)}: in a folder that is not shared every host needs "
        "the files of its ranks; copy them there, or remove them everywhere to begin without residuals"
    )


def _loaded(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the states in ``paths``, of which none may be missing or damaged."""
    found: list[Path] = []
    missing: list[Path] = []
    for path in paths:  # a name may speak of more ranks than there ever were
        (found if path.is_file() else missing).append(path)
        if len(missing) == _MOST_NAMED:
            break
    if missing:
        names = ", ".join(path.name for path in missing)
        raise ValueError(f"{missing[0].parent} has pycomm's state of some ranks only: {names} is missing")
    return [_read(path) for path in found]


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = load_values(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return state


def averaging_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    is_last: Callable[[], bool] | int,
    loss_scaler: Any,
    options: Mapping[str, Any],
    whose: str,
) -> Averaging:
    """Average the gradients of ``model`` by a DDP hook or a Reducer, depending on the trainer's setup. Collective.

    Args:
        model: the outermost module that the trainer has made of it.
        is_last: function that tells whether a pass is the last one of its step, where the trainer accumulates.
        options: arguments for ``attach`` or ``pycomm.ddp.register``.
        whose: the function that was called, for messages.
    """
    wrapper = uncompiled(model)  # with the names of the module that was compiled
    if isinstance(wrapper, DistributedDataParallel):
        check_options(options, REGISTER_OPTIONS, whose, "it is for models without DistributedDataParallel")
        return Averaging(register(wrapper, loss_scaler=loss_scaler, optimizer=optimizer, **options))
    check_options(options, ATTACH_OPTIONS, whose)
    if not dist.is_initialized():
        return Averaging(None, optimizer)
    return Averaging(attach(optimizer, wrapper, accumulate=is_last, loss_scaler=loss_scaler, **for_attach(options)))
