"""Files of a server, which are opened before anybody is told that it serves: what is wrong with them is found first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.journal import Journal
from pycomm.asynchronous.recovery import Recovery
from pycomm.asynchronous.settings import Settings
from pycomm.asynchronous.shards import Piece, cut, shard_dtype
from pycomm.asynchronous.states import Wanted
from pycomm.asynchronous.trace import Replay, Trace
from pycomm.asynchronous.updates import group_sizes, is_elementwise


class ServerFiles:
    """Files of one server. Making it reads what is there, compares it with what the server can take, and changes none.

    Args:
        settings: which files there are.
        server: number of the server.
        wanted: what it can take.

    Attributes:
        trace: order of what happens, if it is to be written.
        replay: order in which it shall happen.

    Raises:
        ValueError: a file is damaged, or of another model or other settings. It is named.
        OSError: one cannot be read or written.
    """

    def __init__(self, settings: Settings, server: int, wanted: Wanted) -> None:
        self._folder: Path | None = None
        self._recovery: Recovery | None = None
        self.trace: Trace | None = None
        self.replay: Replay | None = None
        with contextlib.ExitStack() as opened:
            if settings.checkpoint is not None:
                self._folder = settings.checkpoint / f"server-{server}"
                self._recovery = Recovery(self._folder, wanted)
            if settings.replay is not None:
                self.replay = Replay(_numbered(settings.replay, server))
            if settings.trace is not None:
                self.trace = Trace(_numbered(settings.trace, server))
                opened.callback(self.trace.close)
            self._opened = opened.pop_all()

    def begin(self, core: Core) -> Journal | None:
        """Let happen to ``core`` what the folder tells; return the journal that goes on, if there is to be one.

        Raises as :class:`Journal`.
        """
        if self.trace is not None:
            self.trace.begin()
        if self._folder is None:
            return None
        journal = Journal(self._folder, core, self._recovery)
        self._opened.callback(journal.close)
        return journal

    def close(self) -> None:
        """Close them."""
        self._opened.close()


def _numbered(path: Path, server: int) -> Path:
    return path.with_name(f"{path.name}.{server}")


def shards_of(
    settings: Settings, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> list[list[Piece]]:
    """Return the pieces of the parameters that each server holds."""
    anywhere = is_elementwise(optimizer) and settings.compression is None  # whose methods look at shapes
    return cut([p.numel() for p in params], settings.servers, anywhere=anywhere)


def wanted_by(
    settings: Settings, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], dtype: torch.dtype
) -> Wanted:
    """Return what the server of ``pieces`` of the optimizer's parameters, of ``dtype``, will be able to take."""
    size = sum(piece.size for piece in pieces)
    push_bytes = None if settings.compression is not None else size * dtype.itemsize
    groups = group_sizes(optimizer, pieces)
    return Wanted(
        settings.of_updates(), size, shard_dtype(dtype), groups, settings.mode.rules().state().keys(), push_bytes
    )
