"""Journal of a server: checkpoints, and everything that has happened since the last one, before it is acknowledged.

A server that was killed begins again with its last checkpoint and lets the rest happen once more, in the same order
and so with the same bits. What was written survives the process, as the operating system has it; a machine that
loses power may lose the last seconds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.events import BEGIN, happen, packed
from pycomm.asynchronous.recovery import Recovery, checkpoint_of, earlier, journal_of
from pycomm.asynchronous.wire import bytes_of
from pycomm.untrusted import create_file

__all__ = ["Journal", "happen"]

_LOG = logging.getLogger("pycomm")
_LEAST_BYTES = 64 << 20
_TIMES_SHARD = 8
"""A checkpoint is due when the journal is that many times as large as the shard, and so large at least."""


class Journal:
    """Journal of one server in ``folder``, which is made. Nothing can be written before the first checkpoint.

    Args:
        folder: of this server alone.
        core: what happens to; everything that the folder tells happens to it first.
        recovery: what the folder tells, if that is known.

    Raises:
        ValueError, OSError: as from :class:`Recovery`; or the optimizer does not take what was saved of it.
    """

    def __init__(self, folder: Path, core: Core, recovery: Recovery | None = None) -> None:
        recovery = recovery or Recovery(folder, core.wanted())
        recovery.happen_to(core)
        self._folder, self._core = folder, core
        self._file: BinaryIO | None = None
        self._base, self._number, self._end = recovery.base, recovery.last, recovery.end
        self._workers = set(core.mode.workers)

    def write(self, event: dict[str, Any], sent: torch.Tensor | None = None) -> None:
        """Write what is about to happen, with what a push has brought."""
        assert self._file is not None
        for part in packed(event, memoryview(b"") if sent is None else bytes_of(sent)):
            self._file.write(part)
        self._file.flush()

    def is_long(self) -> bool:
        """Return whether it is time for a checkpoint."""
        assert self._file is not None
        return self._file.tell() > max(_LEAST_BYTES, _TIMES_SHARD * self._core.shard.memory.nbytes)

    def checkpoint(self) -> None:
        """Write a checkpoint, and begin the journal anew. The checkpoint before stays, in case this one is damaged."""
        begin = self._beginning()
        self.close()
        number, unfinished = self._number + 1, self._folder / "unfinished"
        with create_file(unfinished) as file:
            torch.save(self._core.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self._file = create_file(journal_of(self._folder, number))  # before the checkpoint that it belongs to
        self.write(begin)
        unfinished.replace(checkpoint_of(self._folder, number))
        for path in earlier(self._folder, self._base):
            try:
                path.unlink()
            except OSError as error:
                _LOG.warning("an old file could not be removed: %s", error)
        self._base = self._number = number

    def _beginning(self) -> dict[str, Any]:
        """Return how the next checkpoint follows from the journal so far.

        Workers leave and join without an event where a server begins again.
        """
        end, before, now = self._end, self._workers, self._core.mode.workers
        if self._file is not None:
            end, before = self._file.tell(), now
        changes = {"left": sorted(before - now), "joined": sorted(now - before)}
        return {"event": BEGIN, "journal": self._number, "bytes": end, **changes}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
