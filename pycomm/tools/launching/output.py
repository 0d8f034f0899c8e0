"""Output of ranks, passed on: line by line with the rank's number, or one rank's unchanged."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable

from pycomm.tools.launching.processes import Pipe

_PIECE_BYTES = 1 << 16
_KEPT = 4000  # last characters, for the error if the rank dies


class Stream:
    """Standard output or standard error of one rank.

    Args:
        pipe: read end of the stream.
        show: called with text as it arrives; ``None``: nothing is shown.
        whole: show whole lines only.
    """

    def __init__(self, pipe: Pipe, show: Callable[[str], None] | None, whole: bool) -> None:
        self.pipe = pipe
        self.last = ""
        self._show, self._whole = show, whole
        self._begun = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Pass on text that has arrived; return False at the end of the stream."""
        try:
            piece = os.read(self.pipe.fileno(), _PIECE_BYTES)
        except OSError:  # closed meanwhile
            piece = b""
        self._pass_on(self._decoder.decode(piece, final=not piece))
        if not piece and self._begun:
            self._pass_on("\n")
        return bool(piece)

    def finish(self) -> None:
        """Pass on the rest after the rank has ended, even if its children hold the stream open."""
        while self.pipe.poll(0) and self.read():
            pass
        if self._begun:
            self._pass_on("\n")

    def _pass_on(self, text: str) -> None:
        self.last = (self.last + text)[-_KEPT:]
        if self._show is None or not text:
            return
        if self._whole:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            text = lines + end
        if text:
            self._show(text)


def streams_of(rank: int, pipes: tuple[Pipe, Pipe], chosen: str | int | None) -> list[Stream]:
    """Return the two streams of a rank.

    Args:
        chosen: "all": lines of all ranks, each with its rank's number; a rank: its output, unchanged; ``None``:
            nothing is shown.
    """
    shown = chosen in ("all", rank)
    prefix = f"[rank {rank}] " if chosen == "all" else ""
    shows = (_writer(1, prefix), _writer(2, prefix)) if shown else (None, None)
    return [Stream(pipe, show, whole=chosen == "all") for pipe, show in zip(pipes, shows, strict=True)]


def _writer(descriptor: int, prefix: str) -> Callable[[str], None]:
    def write(text: str) -> None:
        # Looked up each time, since notebooks and progress bars replace these streams.
        stream = sys.stdout if descriptor == 1 else sys.stderr
        if prefix:
            text = "".join(f"{prefix}{line}\n" for line in _lines_of(text))
        stream.write(text)
        stream.flush()

    return write


def _lines_of(text: str) -> list[str]:
    """Return lines without their ends; of a progress bar that overwrites itself, only the last state."""
    # Not by splitlines(), which splits at further characters.
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")[:-1]]
