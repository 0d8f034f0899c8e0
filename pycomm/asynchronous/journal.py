"""Journal of a server: checkpoints, and everything that has happened since the last one, before it is acknowledged.

A server that was killed begins again with its last checkpoint and lets the rest happen once more, in the same order
and so with the same bits. What was written survives the process, as the operating system has it; a machine that
loses power may lose the last seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.wire import as_array, bytes_of

_HEAD = struct.Struct("<IIQ")  # bytes of the text, checksum of it and of the data, bytes of the data
_LEAST_BYTES = 64 << 20
_TIMES_SHARD = 8
"""A checkpoint is due when the journal is that many times as large as the shard, and so large at least."""


class Journal:
    """Journal of one server in ``folder``, which is made. Nothing can be written before the first checkpoint.

    Args:
        folder: of this server alone.
        core: what happens to; everything that the folder tells happens to it first.

    Raises:
        ValueError: the folder is of another model or optimizer, or of other settings.
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, core: Core) -> None:
        self._folder, self._core = folder, core
        self._file: BinaryIO | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._number = self._recover()

    def _checkpoints(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("checkpoint-")) for path in self._folder.glob("checkpoint-*.pt"))

    def _recover(self) -> int:
        found = self._checkpoints()
        if not found:
            return 0
        number = found[-1]
        self._core.load_state(torch.load(self._path("checkpoint", number), weights_only=True))
        for event, data in _events(self._path("journal", number)):
            happen(self._core, event, as_array(data))
        return number

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number}{'.pt' if kind == 'checkpoint' else ''}"

    def write(self, event: dict[str, Any], sent: torch.Tensor | None = None) -> None:
        """Write what is about to happen, with what a push has brought."""
        assert self._file is not None
        text = json.dumps(event).encode()
        data = memoryview(b"") if sent is None else bytes_of(sent)
        self._file.write(_HEAD.pack(len(text), zlib.crc32(data, zlib.crc32(text)), len(data)))
        self._file.write(text)
        self._file.write(data)
        self._file.flush()

    def is_long(self) -> bool:
        """Return whether it is time for a checkpoint."""
        assert self._file is not None
        return self._file.tell() > max(_LEAST_BYTES, _TIMES_SHARD * self._core.shard.memory.nbytes)

    def checkpoint(self) -> None:
        """Write a checkpoint, and begin the journal anew."""
        self.close()
        self._number += 1
        temporary = self._folder / "unfinished"
        with temporary.open("wb") as file:
            torch.save(self._core.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self._file = self._path("journal", self._number).open("wb")  # before the checkpoint that it belongs to
        temporary.replace(self._path("checkpoint", self._number))
        for number in self._checkpoints()[:-1]:
            for kind in ("checkpoint", "journal"):
                with contextlib.suppress(FileNotFoundError):
                    self._path(kind, number).unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _events(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield what is written in the journal at ``path``, up to where it was cut short."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            num_text, checksum, num_data = _HEAD.unpack(head)
            text, data = file.read(num_text), file.read(num_data)
            is_whole = num_text > 0 and len(data) == num_data  # after a power cut, zeros may be left where it ends
            if not is_whole or zlib.crc32(data, zlib.crc32(text)) != checksum:
                return
            yield json.loads(text), data


def happen(core: Core, event: dict[str, Any], sent: torch.Tensor) -> None:
    """Let ``event`` happen to ``core``; ``sent`` is what a push has brought."""
    worker = event["worker"]
    match event["event"]:
        case "join":
            core.join(worker, event["life"])
        case "leave":
            core.leave(worker)
        case "pull":
            core.pull(worker)
        case "push":
            gradient = core.gradient_of(worker, event["number"], sent)
            core.push(worker, event["number"], event["samples"], gradient)
