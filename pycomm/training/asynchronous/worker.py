"""A worker's links to servers, over which it pulls parameters and pushes gradients."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Sequence

import torch

from pycomm import kernels
from pycomm.collectives.transport import rendezvous
from pycomm.collectives.transport.authentication import with_scope_of
from pycomm.errors import CommError
from pycomm.training.asynchronous.core import Piece, flat_parts, shard_dtype
from pycomm.training.asynchronous.packing import Packer
from pycomm.training.asynchronous.server_meeting import ServerMeeting, ServerPlace
from pycomm.training.asynchronous.wire import (
    Connection,
    Message,
    SharedMemory,
    connect,
    connect_here,
    receive,
    receive_array,
    send,
    send_array,
)
from pycomm.untrusted import COUNT, OneOf

Gradients = Sequence[torch.Tensor | None]


class Outbox:
    """Buffer for the next push to one server.

    Args:
        pieces: the server's shard.
        dtype: dtype of the gradients.
        packer: compresses them; ``None`` without compression.

    Attributes:
        num_bytes: bytes of the last push that was loaded.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, packer: Packer | None) -> None:
        self._pieces, self._packer = list(pieces), packer
        size = 0 if packer is not None else sum(piece.size for piece in pieces)
        # Packed pushes go over the connection; then the memory only shows a server that it is on this host.
        self._memory = SharedMemory(max(1, size) * dtype.itemsize)
        self._slot = self._memory.tensor(dtype)[:size]
        self._message = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0

    @property
    def path(self) -> str:
        return self._memory.path

    @torch.no_grad()
    def load(self, gradients: Gradients, number: int) -> bool:
        """Prepare push ``number`` of all parameters' ``gradients``; return whether they are finite.

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
        """Drop the push that was loaded."""
        if self._packer is not None:
            self._packer.finish(sent=False)

    def commit(self) -> None:
        """Keep the residuals of the push for the next one."""
        if self._packer is not None:
            self._packer.finish(sent=True)

    def send(self, connection: Connection, is_shared: bool) -> None:
        """Send the push that was loaded, unless the memory ``is_shared`` with the server."""
        if self._packer is not None:
            send_array(connection, self._message)
        elif not is_shared:
            send_array(connection, self._slot)

    def close(self) -> None:
        self._memory.close()


def _part(gradient: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    assert gradient is not None
    return gradient.reshape(-1)[piece.begin : piece.end]


_RETRY = 0.05  # seconds
_LOST = (EOFError, OSError, ValueError)
_GREETED = {"memory": OneOf(None, str)}
_ANSWERS = {
    "version": {"version": COUNT},
    "pushed": {"pushed": COUNT},
    "updates": {"updates": COUNT},
}
"""Answers of a server to a pull, a push, and a request for its counters."""


class ServerLink:
    """Link of a worker to one server, which reconnects if the server is restarted.

    Args:
        server: number of the server.
        meeting: has the server's address, and this worker's credentials for other hosts.
        pieces: the server's shard.
        params: all parameters, in the optimizer's order.
        timeout: limit of every wait, in seconds.
        checkpoints: folder of the server's checkpoints; "" if the server has none and cannot be restarted.
        packer: compresses gradients; ``None`` without compression.
        buffers: the model's at the beginning, flat, if they travel with each push and pull.

    Attributes:
        buffers: as of the last pull.
        version: number of updates that the parameters here include.
        bytes_sent: bytes of gradients that were sent.
        seconds: time for which this worker has waited.
    """

    def __init__(
        self,
        server: int,
        meeting: ServerMeeting,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        timeout: float,
        checkpoints: str = "",
        packer: Packer | None = None,
        buffers: torch.Tensor | None = None,
    ) -> None:
        self.buffers, self._own_buffers = None if buffers is None else buffers.clone(), buffers
        self._server, self._meeting, self._host = server, meeting, rendezvous.host_identity()
        self._timeout, self._checkpoints, self._life = timeout, checkpoints, secrets.token_hex(8)
        self._pieces, self._params = pieces, params
        count = sum(piece.size for piece in pieces)
        self._count, self._dtype = count, params[0].dtype
        self._outbox = Outbox(pieces, self._dtype, packer)
        self._there: SharedMemory | None = None
        self._values = torch.empty(0, dtype=self._dtype)
        self._connection: Connection | None = None
        self._pushed = self._acknowledged = self._pulls = 0
        self._samples = 1.0
        self._unanswered: Message | None = None
        self.version = -1
        self.bytes_sent, self.seconds = 0, 0.0

    def fileno(self) -> int:
        """Return the descriptor of the connection, which is readable when the server has answered."""
        return self._require().fileno()

    def ask_to_pull(self) -> None:
        """Request the parameters, after the last push is acknowledged; :meth:`pull` receives them."""
        self.settle()
        self._pulls += 1
        self._ask({"ask": "pull", "number": self._pulls})

    @torch.no_grad()
    def pull(self) -> None:
        """Overwrite the parameters with the server's, when it answers."""
        while True:
            answer = self._await("version")
            try:
                self._read()
                break
            except _LOST as error:
                self._reconnect(error)
        self.version, self._unanswered = answer["version"], None

    def _read(self) -> None:
        """Copy the parameters. Raise OSError or EOFError if the copy may be torn, so that it must be repeated."""
        connection = self._require()
        if self._there is None:
            receive_array(connection, self._values)
        if self.buffers is not None:
            receive_array(connection, self.buffers)
        with flat_parts(self._params, self._pieces) as targets:
            if targets:
                kernels.unpack(self._values, targets)
        if self._there is not None:
            send(connection, ask="read")
            if connection.poll(0):  # the server sends nothing now, so it has closed the connection
                raise EOFError("the server did not wait for this worker to read")

    def load(self, gradients: Gradients) -> bool:
        """Prepare the push of all parameters' ``gradients``; return whether they are finite.

        Waits until the previous push is acknowledged. :meth:`push` or :meth:`unload` must follow.
        """
        self.settle()
        return self._outbox.load(gradients, self._pushed + 1)

    def unload(self) -> None:
        """Drop the push that was loaded."""
        self._outbox.unload()

    def push(self, samples: float, buffers: torch.Tensor | None) -> None:
        """Send the push that was loaded, and ``buffers`` if they travel."""
        self._own_buffers = buffers
        self._outbox.commit()
        self._pushed += 1
        self._samples = samples
        self.bytes_sent += self._outbox.num_bytes
        self._ask(self._push_message())

    def _push_message(self) -> Message:
        return {"ask": "push", "number": self._pushed, "samples": self._samples}

    def settle(self) -> None:
        """Wait until the last push is acknowledged."""
        if self._acknowledged < self._pushed:
            self._acknowledged = int(self._await("pushed")["pushed"])
            self._unanswered = None

    def stats(self) -> Message:
        """Return the server's counters."""
        self.settle()
        self._ask({"ask": "stats"})
        answer = self._await("updates")
        self._unanswered = None
        return answer

    def close(self) -> None:
        """Tell the server that this worker has ended. Idempotent."""
        if self._connection is None:
            return
        try:
            self.settle()
            with contextlib.suppress(*_LOST):  # all pushes were acknowledged
                self._send({"ask": "close"})
                if self._require().poll(self._timeout):
                    receive(self._require())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the connection and the shared memory at once. Idempotent."""
        self._drop()
        self._outbox.close()

    # The connection.

    def open(self) -> None:
        """Connect to the server."""
        self._reconnect(None)

    def _require(self) -> Connection:
        if self._connection is None:
            raise self._error("the link was closed after an earlier error", time.monotonic())
        return self._connection

    def _ask(self, message: Message) -> None:
        self._unanswered = message
        try:
            self._send(message)
        except _LOST as error:
            self._reconnect(error)

    def _send(self, message: Message) -> None:
        connection = self._require()
        send(connection, **message)
        if message["ask"] == "push":
            self._outbox.send(connection, is_shared=self._there is not None)
            if self._own_buffers is not None:
                send_array(connection, self._own_buffers)

    def _await(self, what: str) -> Message:
        """Return the server's answer that has ``what``."""
        start, answer = time.monotonic(), Message()
        try:
            while not answer:
                try:
                    if not self._require().poll(max(0.0, start + self._timeout - time.monotonic())):
                        self._drop()  # otherwise a late answer would be taken for the next one
                        raise self._error(f"it has not answered for {self._timeout:g} s", start)
                    answer = receive(self._require(), _ANSWERS[what])
                except _LOST as error:
                    self._reconnect(error)
        finally:
            self.seconds += time.monotonic() - start
        return answer

    def _reconnect(self, error: Exception | None) -> None:
        """Connect, after an ``error`` to the restarted server, and repeat the unanswered request."""
        start, last = time.monotonic(), self._drop()
        while True:
            place = self._meeting.address_of(self._server)
            if place is not None and (error is None or self._checkpoints):
                try:
                    self._handshake(self._connected(place))
                    return
                except _LOST as another:
                    last = str(another) or type(another).__name__
                    self._drop()
            if error is not None and not self._checkpoints:
                what = f"it has ended ({error or type(error).__name__}), and there is no checkpoint to restart it from"
                raise self._error(what, start) from None
            if time.monotonic() - start > self._timeout:
                where = f"; its last checkpoint is in {self._checkpoints}" if self._checkpoints else ""
                raise self._error(f"it cannot be reached ({last}){where}", start) from None
            time.sleep(_RETRY)

    def _connected(self, place: ServerPlace) -> Connection:
        """Return a connection to the server at ``place``. Raise OSError if there is none."""
        if place.host == self._host:
            return connect_here(bytes.fromhex(place.name))
        access = self._meeting.access
        if access.key is None or not place.address:
            raise OSError("it is on another host, and there is no secret: see PYCOMM_SECRET")
        address = with_scope_of(place.address, self._meeting.own_address()) if "%" in place.address else place.address
        return connect((address, place.port), access.key, access.context(server=False))

    def _handshake(self, connection: Connection) -> None:
        self._connection = connection
        me = {"worker": self._meeting.worker, "life": self._life, "host": self._host, "process": os.getpid()}
        send(connection, ask="hello", memory=self._outbox.path, acknowledged=self._acknowledged, **me)
        if not connection.poll(self._timeout):
            raise OSError("it does not answer hello")
        answer = receive(connection, _GREETED)
        if answer["memory"] is not None:
            there = shard_dtype(self._dtype)
            self._there = SharedMemory(max(1, self._count) * there.itemsize, answer["memory"])
            self._there.close()
            self._values = self._there.tensor(there)[: self._count]
        else:
            self._there, self._values = None, torch.empty(self._count, dtype=self._dtype)
        if self._unanswered is None:
            return
        if self._unanswered["ask"] == "push" or self._acknowledged < self._pushed:
            self._send(self._push_message())
        if self._unanswered["ask"] != "push":
            self._send(self._unanswered)

    def _drop(self) -> str:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        return "it is not there"

    def _error(self, what: str, start: float) -> CommError:
        elapsed = time.monotonic() - start
        return CommError.during(
            "use a server",
            f"server {self._server}: {what}",
            rank=self._meeting.worker,
            peer=self._server,
            elapsed=elapsed,
        )
