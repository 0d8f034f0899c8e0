"""Outbox of a worker: the gradients that it is about to push, in shared memory or packed into a message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from pycomm import kernels
from pycomm.asynchronous.memory import SharedMemory
from pycomm.asynchronous.packing import Packer
from pycomm.asynchronous.shards import Piece
from pycomm.asynchronous.wire import Connection, send_array

Gradients = Sequence[torch.Tensor | None]


class Outbox:
    """Outbox for one server.

    Args:
        pieces: the server's shard.
        dtype: of the gradients.
        packer: packs them into messages, if they do not travel as they are.

    Attributes:
        num_bytes: of the push that was loaded last.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, packer: Packer | None) -> None:
        self._pieces, self._packer = list(pieces), packer
        size = 0 if packer is not None else sum(piece.size for piece in pieces)
        # What is packed goes over the connection; then this memory only tells a server that it is on this host.
        self._memory = SharedMemory(max(1, size) * dtype.itemsize)
        self._slot = self._memory.tensor(dtype)[:size]
        self._message = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0

    @property
    def path(self) -> str:
        """Path of the memory."""
        return self._memory.path

    @torch.no_grad()
    def load(self, gradients: Gradients, number: int) -> bool:
        """Prepare push ``number``, of ``gradients`` of all parameters; return whether they are finite.

        :meth:`commit` or :meth:`unload` must follow.
        """
        if self._packer is not None:
            message = self._packer.pack([gradients[piece.index] for piece in self._pieces], number)
            if message is not None:
                self._message, self.num_bytes = message, len(message)
            return message is not None
        self.num_bytes = self._slot.nbytes
        return self._copy(gradients)

    def _copy(self, gradients: Gradients) -> bool:
        finite, begin = True, 0
        for is_none, run in itertools.groupby(self._pieces, lambda piece: gradients[piece.index] is None):
            pieces = list(run)
            target = self._slot[begin : begin + sum(piece.size for piece in pieces)]
            begin += len(target)
            if is_none:
                target.zero_()
            else:
                finite &= bool(kernels.pack([_part(gradients[piece.index], piece) for piece in pieces], target))
        return finite

    def unload(self) -> None:
        """Forget what was loaded."""
        if self._packer is not None:
            self._packer.finish(sent=False)

    def commit(self) -> None:
        """Keep what the push has left over, for the next one."""
        if self._packer is not None:
            self._packer.finish(sent=True)

    def send(self, connection: Connection, is_shared: bool) -> None:
        """Send what was loaded, unless the server has it because the memory ``is_shared``."""
        if self._packer is not None:
            send_array(connection, self._message)
        elif not is_shared:
            send_array(connection, self._slot)

    def close(self) -> None:
        """Let go of the memory's path. Idempotent."""
        self._memory.close()


def _part(gradient: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    """Return what ``piece`` has of a gradient."""
    assert gradient is not None
    return gradient.reshape(-1)[piece.begin : piece.end]
