"""How the ranks of one host find each other and exchange their shared memory.

Every rank opens a listening socket in the abstract namespace (no file, gone with its process) and
publishes its address through the process group's store. Rank ``r`` connects to every rank below it
and accepts every rank above. A connection is believed only if the process at its other end runs as
the same user (``SO_PEERCRED``) and knows the token that rank 0 put into the store. Over it each side
passes the descriptor of its memory (``SCM_RIGHTS``); afterwards it stays open, silent: its end of
file is how the death of a peer is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field

from torch._C._distributed_c10d import PrefixStore, Store

from pycomm import _native
from pycomm.errors import CommError

_HELLO = struct.Struct("=32si")
_ROOM_FOR_STRANGERS = 64
_SLOWEST_POLL = 0.2  # seconds
_SLOWEST_HELLO = 2.0  # seconds; a stranger that connects and stays silent must not hold up the rest


def host_identity() -> str:
    """Equal for processes that can share memory and abstract sockets: same boot, same network namespace, same user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.geteuid()}"


@dataclass
class Peers:
    """Descriptors by rank: ``memory[rank]`` is this rank's own, ``sockets[rank]`` is -1."""

    memory: list[int]
    sockets: list[int]
    file_bytes: int

    def close(self) -> None:
        for descriptor in self.memory + self.sockets:
            if descriptor >= 0:
                os.close(descriptor)


@dataclass
class Meeting:
    """One attempt to bring ``size`` ranks together through ``store``, until ``deadline``.

    Attributes:
        name: of this attempt, unlike all others that the group's store has seen.
    """

    store: Store
    rank: int
    size: int
    deadline: float
    name: str
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, store: Store, rank: int, size: int, timeout: float) -> Meeting:
        # Each rank counts its communicators; as all ranks make them in one order, equal counts belong together.
        generation = store.add(f"pycomm/generation/{rank}", 1)
        deadline = time.monotonic() + timeout
        name = f"pycomm/{generation}"
        return cls(PrefixStore(name, store), rank, size, deadline, name)

    def left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def failed(self, peer: int | None, what: str) -> CommError:
        elapsed = time.monotonic() - self.started
        return CommError(
            f"rank {self.rank}: rendezvous: {what} after {elapsed:.2f} s",
            rank=self.rank,
            peer=peer,
            operation="rendezvous",
            elapsed=elapsed,
        )

    def publish(self, key: str, value: str) -> None:
        self.store.set(f"{key}/{self.rank}", value)

    def read(self, key: str, rank: int) -> str:
        """What ``rank`` published, once it has."""
        name = f"{key}/{rank}"
        # Asked for again and again: the store's own wait lets no signal through until it is over.
        began = time.monotonic()
        try:
            while not self.store.check([name]):
                now = time.monotonic()
                if now >= self.deadline:
                    raise self.failed(rank, f"rank {rank} did not arrive")
                time.sleep(min(_SLOWEST_POLL, 0.001 + (now - began) / 20))
            value: bytes = self.store.get(name)
        except RuntimeError as error:  # DistStoreError is one, and so is CommError
            if isinstance(error, CommError):
                raise
            raise self.failed(rank, f"the process group's store failed while rank {rank} was awaited") from error
        return value.decode()

    def wait_for_all(self) -> None:
        """Return once every rank has come to this point."""
        self.publish("here", "")
        for rank in range(self.size):
            self.read("here", rank)

    def forget(self, *keys: str) -> None:
        """Take what this rank published out of the store; stores that cannot delete keep it."""
        for key in keys:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self.store.delete_key(f"{key}/{self.rank}")


def meet(meeting: Meeting) -> Peers | None:
    """Connect all ranks; ``None`` (on every rank) if they are not all on one host.

    Raises:
        CommError: a rank did not come in time. ValueError: ranks run different versions of pycomm.
        OSError, MemoryError: this machine refused sockets or memory.
    """
    rank, size = meeting.rank, meeting.size
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0pycomm-{secrets.token_hex(16)}")
        listener.listen(size + _ROOM_FOR_STRANGERS)
        address = bytes(listener.getsockname()).hex()
        version = _native.build_info()["version"]
        hello = {"host": host_identity(), "address": address, "version": version}
        meeting.publish("hello", json.dumps(hello))
        if rank == 0:
            meeting.publish("token", secrets.token_hex(32))
        hellos = [json.loads(meeting.read("hello", p)) for p in range(size)]
        for p, other in enumerate(hellos):
            if other["version"] != hellos[0]["version"]:
                raise ValueError(f"rank {p} runs pycomm {other['version']}, rank 0 {hellos[0]['version']}")
        if any(other["host"] != hellos[0]["host"] for other in hellos):
            return None
        token = bytes.fromhex(meeting.read("token", 0))
        file_bytes = _native.shared_file_bytes(size)
        peers = Peers([-1] * size, [-1] * size, file_bytes)
        try:
            peers.memory[rank] = _anonymous_memory(file_bytes)
            for p in range(rank):
                _connect(meeting, peers, p, bytes.fromhex(hellos[p]["address"]), token)
            while any(peers.sockets[p] < 0 for p in range(rank + 1, size)):
                _accept(meeting, peers, listener, token)
        except BaseException:
            peers.close()
            raise
        return peers


def _anonymous_memory(num_bytes: int) -> int:
    descriptor = os.memfd_create("pycomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        # Nobody may take pages away under a peer's mapping: that would be a SIGBUS there.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _runs_as_same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", raw)
    return bool(uid == os.geteuid())


def _receive_hello(connection: socket.socket, token: bytes) -> tuple[int, int] | None:
    """``(rank, descriptor)`` of the other side, ``None`` if it is not one of us."""
    data, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC)
    believed = len(data) == _HELLO.size and len(descriptors) == 1
    if believed:
        their_token, their_rank = _HELLO.unpack(data)
        believed = hmac.compare_digest(their_token, token) and _runs_as_same_user(connection)
    if not believed:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return their_rank, descriptors[0]


def _connect(meeting: Meeting, peers: Peers, p: int, address: bytes, token: bytes) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(meeting.left())
        _knock(connection, address, meeting)
        socket.send_fds(connection, [_HELLO.pack(token, meeting.rank)], [peers.memory[meeting.rank]])
        answer = _receive_hello(connection, token)
        if answer is None or answer[0] != p:
            raise meeting.failed(p, f"rank {p} did not answer as itself")
        peers.memory[p] = answer[1]
        connection.settimeout(None)
        peers.sockets[p] = connection.detach()
    except OSError as error:
        raise meeting.failed(p, f"connecting to rank {p} failed ({error})") from error
    finally:
        connection.close()


def _knock(connection: socket.socket, address: bytes, meeting: Meeting) -> None:
    """Connect; while the listener's queue is full, which the kernel says at once, again and again."""
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > meeting.deadline:
                raise
            time.sleep(0.01)


def _accept(meeting: Meeting, peers: Peers, listener: socket.socket, token: bytes) -> None:
    """Take one connection; one that is not from an expected peer is dropped."""
    missing = [p for p in range(meeting.rank + 1, meeting.size) if peers.sockets[p] < 0]
    listener.settimeout(meeting.left())
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        raise meeting.failed(missing[0], f"rank {missing[0]} did not connect") from error
    with connection:
        connection.settimeout(min(_SLOWEST_HELLO, meeting.left()))
        try:
            hello = _receive_hello(connection, token)
            if hello is None:
                return
            p, descriptor = hello
            if p not in missing:
                os.close(descriptor)
                return
            peers.memory[p] = descriptor
            socket.send_fds(connection, [_HELLO.pack(token, meeting.rank)], [peers.memory[meeting.rank]])
        except OSError:
            return
        connection.settimeout(None)
        peers.sockets[p] = connection.detach()
