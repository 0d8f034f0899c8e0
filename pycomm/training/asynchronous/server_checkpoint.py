"""Checkpoints of one server, in a folder of its own, from which it restarts.

::

    checkpoint-7.pt   the one before
    checkpoint-8.pt   the last one

If the server is killed, what came after the last checkpoint is lost. If that file is damaged, the one before is loaded.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

from pycomm.training.asynchronous.core import Core, StateSpec
from pycomm.training.checkpoint.files import DamagedError, save_values
from pycomm.training.checkpoint.torch_files import load_values
from pycomm.untrusted import create_file, one_line

_LOG = logging.getLogger("pycomm")
_EVERY = 60.0  # seconds
_NAME = re.compile(r"checkpoint-([1-9][0-9]{0,17})\.pt")


class ServerCheckpoint:
    """Checkpoints in ``folder``, the last usable one of which is read and checked.

    Args:
        folder: folder of this server alone; created if it does not exist.
        wanted: form of state that the server accepts.
    """

    def __init__(self, folder: Path, wanted: StateSpec) -> None:
        self._folder, self._wanted = folder, wanted
        folder.mkdir(parents=True, exist_ok=True)
        _require_writable(folder)
        self._last = max(self._files(), default=0)
        self._state: dict[str, Any] | None = None
        self._base = self._find()  # number of the last usable checkpoint; 0 if there are none
        self._at, self._workers = 0.0, set[int]()  # of the last one that was written

    def _files(self) -> dict[int, Path]:
        """Return the checkpoints by number."""
        found = [(path, _NAME.fullmatch(path.name)) for path in self._folder.iterdir()]
        return {int(name[1]): path for path, name in found if name is not None}

    def _find(self) -> int:
        """Load the last usable checkpoint, and return its number; 0 if there are no checkpoints."""
        damages: list[str] = []
        for number, path in sorted(self._files().items(), reverse=True):
            try:
                state = load_values(path)
                self._wanted.check(state, str(path))
            except (OSError, DamagedError) as error:
                damages.append(str(error))
                _LOG.warning("%s cannot be used: %s", path, one_line(str(error)))
                continue
            self._state = state
            return number
        if damages:
            raise ValueError(f"no checkpoint in {self._folder} can be used: {'; '.join(damages)}")
        return 0

    def load(self, core: Core) -> None:
        """Load the checkpoint into ``core``, and release it. Do nothing if there was none."""
        if self._state is None:
            return
        state, self._state = self._state, None
        try:
            core.load_state(state)
        except ValueError as error:
            named = ValueError(f"{self._path(self._base)}: {error}")
            raise named.with_traceback(error.__traceback__) from error.__cause__

    def is_due(self, core: Core) -> bool:
        """Return whether to write a checkpoint: after a minute, or when workers have come or gone.

        A restarted server waits for the workers of its checkpoint.
        """
        return core.mode.workers != self._workers or time.monotonic() - self._at >= _EVERY

    def write(self, core: Core) -> None:
        """Write a checkpoint. The previous one stays, in case this one is damaged."""
        unfinished = self._folder / "unfinished"
        save_values(unfinished, core.state())
        self._last += 1
        unfinished.replace(self._path(self._last))
        for path in [path for number, path in self._files().items() if number < self._base]:
            try:
                path.unlink()
            except OSError as error:
                _LOG.warning("an old file could not be removed: %s", error)
        self._base, self._at, self._workers = self._last, time.monotonic(), set(core.mode.workers)

    def _path(self, number: int) -> Path:
        return self._folder / f"checkpoint-{number}.pt"


def _require_writable(folder: Path) -> None:
    probe = folder / "unfinished"
    create_file(probe).close()
    probe.unlink()
