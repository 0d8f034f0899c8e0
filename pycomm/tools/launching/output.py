"""What ranks write, passed on: line by line under the rank's number, or one rank's as it is."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable

from pycomm.tools.launching.processes import Pipe

_PIECE_BYTES = 1 << 16
_KEPT = 4000  # characters of the standard error, for the rank that ends without a word


class Stream:
    """Standard output or standard error of one rank.

    Args:
        pipe: where it is read.
        show: called with pieces of text, which end where a line does unless ``whole`` is False.
        whole: wait for the ends of lines.
    """

    def __init__(self, pipe: Pipe, show: Callable[[str], None] | None, whole: bool) -> None:
        self.pipe = pipe
        self.last = ""
        self._show, self._whole = show, whole
        self._begun = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Pass on what has come, where something has; return False at the end."""
        try:
            piece = os.read(self.pipe.fileno(), _PIECE_BYTES)
        except OSError:  # closed meanwhile
            piece = b""
        self._pass_on(self._decoder.decode(piece, final=not piece))
        if not piece and self._begun:
            self._pass_on("\n")
        return bool(piece)

    def finish(self) -> None:
        """Pass on what is left after the rank has ended, whoever else could still write."""
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
        chosen: "all": lines of all ranks, each behind its rank; a rank: what this one writes, unchanged; ``None``:
            nothing is shown.
    """
    shown = chosen in ("all", rank)
    prefix = f"[rank {rank}] " if chosen == "all" else ""
    shows = (_writer(1, prefix), _writer(2, prefix)) if shown else (None, None)
    return [Stream(pipe, show, whole=chosen == "all") for pipe, show in zip(pipes, shows, strict=True)]


def _writer(descriptor: int, prefix: str) -> Callable[[str], None]:
    def write(text: str) -> None:
        # Looked up each time: in notebooks, and while a bar is drawn, they are not what they were.
        stream = sys.stdout if descriptor == 1 else sys.stderr
        if prefix:
            text = "".join(f"{prefix}{line}\n" for line in _lines_of(text))
        stream.write(text)
        stream.flush()

    return write


def _lines_of(text: str) -> list[str]:
    """Return lines, without their ends; of what a progress bar writes over itself the last is left."""
    # By split, as splitlines ends lines at many a character more.
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")[:-1]]
