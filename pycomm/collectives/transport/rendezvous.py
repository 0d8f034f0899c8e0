"""Exchange of shared memory between the ranks of one host; which ranks are on one, according to their greetings.

Every rank opens a listening socket in the abstract namespace (which needs no file, and disappears with its process) and
sends its address and process id in its greeting (``transport.meeting``). Rank ``r`` connects to every lower rank and
accepts connections from every higher one. Before any data is exchanged, the kernel identifies the peer process
(``SO_PEERCRED``): it must belong to the same user and have the process id of the greeting. Each side then passes the
descriptor of its memory (``SCM_RIGHTS``). The connection stays open and idle; its end of file means that a peer died.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm.collectives.transport.meeting import Meeting

_HELLO = struct.Struct("=i")  # the sender's rank
_ROOM_FOR_STRANGERS = 64
_SLICE = 0.2  # seconds between checks for failures that other ranks report
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def host_identity() -> str:
    """Return a text that is equal for processes that can share memory: same boot, same user, same namespaces.

    The namespaces are network (for abstract sockets), pid (for ids of peer processes) and user (for user ids).
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    return "/".join([boot, *namespaces, str(os.geteuid())])


@dataclass
class Peers:
    """File descriptors by rank: ``memory[rank]`` is this rank's own, ``sockets[rank]`` is -1."""

    memory: list[int]
    sockets: list[int]
    file_bytes: int

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.memory + self.sockets:
            if descriptor >= 0:
                os.close(descriptor)


def listen(size: int) -> socket.socket:
    """Return a listening socket for ``size`` ranks. Its address is valid only in this network namespace."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0pycomm-{secrets.token_hex(16)}")
        listener.listen(size + _ROOM_FOR_STRANGERS)
    except BaseException:
        listener.close()
        raise
    return listener


def introduction(listener: socket.socket) -> dict[str, Any]:
    """Return the part of the greeting that identifies this rank; "no_memory": why it is denied shared memory."""
    mine = {"host": host_identity(), "pid": os.getpid(), "address": bytes(listener.getsockname()).hex()}
    try:
        os.close(anonymous_memory(mmap.PAGESIZE))
    except OSError as error:  # sandboxes forbid the call
        mine["no_memory"] = str(error)
    return mine


def exchange_memory(
    meeting: Meeting,
    listener: socket.socket,
    greetings: Sequence[Mapping[str, Any]],
    ranks: Sequence[int] | None = None,
) -> Peers:
    """Connect to the other ranks of this host, by their :func:`introduction`, and exchange memory with them.

    Args:
        meeting: where the ranks have met.
        listener: this rank's.
        greetings: greetings of all ranks.
        ranks: those on this host, in rising order; all if ``None``. The result numbers them from 0.
    """
    rank, size = meeting.rank, meeting.size
    ranks = range(size) if ranks is None else ranks
    file_bytes = _native.shared_file_bytes(len(ranks))
    pids = {p: greetings[p]["pid"] for p in ranks}
    peers = Peers([-1] * size, [-1] * size, file_bytes)
    try:
        peers.memory[rank] = anonymous_memory(file_bytes)
        for p in ranks:
            if p < rank:
                _connect(meeting, peers, p, greetings[p]["address"], pids[p])
        while missing := [p for p in ranks if p > rank and peers.sockets[p] < 0]:
            _accept(meeting, peers, listener, {p: pids[p] for p in missing})
    except BaseException as error:
        meeting.report(error)  # before the other ranks see a connection end
        peers.close()
        raise
    return Peers([peers.memory[p] for p in ranks], [peers.sockets[p] for p in ranks], file_bytes)


def anonymous_memory(num_bytes: int) -> int:
    """Return the descriptor of new memory, sealed at its size. Raises OSError if the machine refuses it."""
    descriptor = os.memfd_create("pycomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        # Sealed, so that no process can truncate it under a peer's mapping, which would get a SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed_memory(descriptor: int, num_bytes: int) -> bool:
    """Return whether ``descriptor`` is memory of this size, which nobody can change."""
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memory file
        return False
    return sealed and os.fstat(descriptor).st_size == num_bytes


def _receive(connection: socket.socket, num_bytes: int) -> tuple[int, int] | None:
    """Return ``(rank, memory)`` of the other side; ``None`` if the message is malformed."""
    data, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC)
    if len(data) == _HELLO.size and len(descriptors) == 1 and is_sealed_memory(descriptors[0], num_bytes):
        return _HELLO.unpack(data)[0], descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _connect(meeting: Meeting, peers: Peers, p: int, address: str, pid: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            _connect_with_retry(connection, bytes.fromhex(address), meeting, p)
            if process_behind(connection) != pid:
                raise meeting.failed(p, f"another process has the place of rank {p}")
            socket.send_fds(connection, [_HELLO.pack(meeting.rank)], [peers.memory[meeting.rank]])
            answer = _await_answer(connection, meeting, peers.file_bytes, p)
        except (OSError, ValueError) as error:  # a ValueError: it is no address
            meeting.check(late=True)
            raise meeting.failed(p, f"connecting to rank {p} failed ({error})") from None
        if answer is None or answer[0] != p:
            if answer is not None:
                os.close(answer[1])
            meeting.check(late=True)
            raise meeting.failed(p, f"rank {p} did not identify itself correctly")
        peers.memory[p] = answer[1]
        connection.settimeout(None)
        peers.sockets[p] = connection.detach()


def _connect_with_retry(connection: socket.socket, address: bytes, meeting: Meeting, p: int) -> None:
    """Connect; retry while the listener's queue is full, which the kernel reports at once."""
    connection.settimeout(_SLICE)
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            meeting.back_off(p)


def _await_answer(connection: socket.socket, meeting: Meeting, num_bytes: int, p: int) -> tuple[int, int] | None:
    while True:
        try:
            return _receive(connection, num_bytes)
        except TimeoutError:
            meeting.back_off(p)


def _accept(meeting: Meeting, peers: Peers, listener: socket.socket, missing: Mapping[int, int]) -> None:
    """Accept one connection; drop it if it is not from a rank that is missing. ``missing`` has their process ids."""
    listener.settimeout(_SLICE)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        meeting.back_off(min(missing))
        return
    with connection:
        process = process_behind(connection)
        expected = next((p for p, pid in missing.items() if pid == process), None)
        if expected is None:
            return
        connection.settimeout(_SLICE)
        try:
            hello = _await_answer(connection, meeting, peers.file_bytes, expected)
            if hello is None:
                return
            p, memory = hello
            if p not in missing or missing[p] != process:
                os.close(memory)
                return
            peers.memory[p] = memory
            socket.send_fds(connection, [_HELLO.pack(meeting.rank)], [peers.memory[meeting.rank]])
        except OSError:
            return
        connection.settimeout(None)
        peers.sockets[p] = connection.detach()


_LOG = logging.getLogger("pycomm")
_NAMESPACES = ("network namespace", "process namespace", "user namespace", "user")


@dataclass(frozen=True)
class Hosts:
    """Ranks of a group by host, as rank ``rank`` sees them.

    Attributes:
        rank: this rank.
        ranks: ranks of each host, in rising order; hosts in the order of their first ranks.
        host: index of this rank's host.
    """

    rank: int
    ranks: tuple[tuple[int, ...], ...]
    host: int

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self.ranks[self.host]

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its host."""
        return self.members.index(self.rank)

    @property
    def are_one(self) -> bool:
        """Whether all ranks are on one host."""
        return len(self.ranks) == 1

    @property
    def are_shared(self) -> bool:
        """Whether there are several hosts, and one of them has several ranks."""
        return len(self.ranks) > 1 and any(len(members) > 1 for members in self.ranks)


def order_of(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks in the order in which their parts should lie: by index on their host, then by host."""
    return [p for row in itertools.zip_longest(*hosts) for p in row if p is not None]


def hosts_of(rank: int, greetings: Sequence[Mapping[str, Any]]) -> Hosts:
    """Return the hosts of ranks, given their greetings (``rendezvous.introduction``)."""
    by_host: dict[str, list[int]] = {}
    # If one rank is denied shared memory, all ranks use messages.
    denied = any("no_memory" in greeting for greeting in greetings)
    for p, greeting in enumerate(greetings):
        by_host.setdefault(f"{greeting['host']}, rank {p}" if denied else greeting["host"], []).append(p)
    ranks = tuple(tuple(members) for members in by_host.values())
    return Hosts(rank, ranks, next(host for host, members in enumerate(ranks) if rank in members))


def log_isolation(rank: int, greetings: Sequence[Mapping[str, Any]], transport: str) -> None:
    """Log, on the first rank of a machine, why its ranks cannot share memory and use ``transport``."""
    for p, greeting in enumerate(greetings):
        if "no_memory" in greeting:
            if rank == 0:
                why = greeting["no_memory"]
                text = "rank %d is denied memory that processes share (%s): transport %r is used"
                _LOG.warning(text, p, why, transport)
            return
    hosts = [str(greeting["host"]).split("/") for greeting in greetings]
    mine = hosts[rank]
    there = [p for p, theirs in enumerate(hosts) if len(theirs) == len(mine) and theirs[0] == mine[0]]
    other = next((p for p in there if hosts[p] != mine), None)
    if other is None or there[0] != rank:
        return
    walls = [wall for wall, a, b in zip(_NAMESPACES, mine[1:], hosts[other][1:], strict=False) if a != b]
    _LOG.warning(
        "ranks %d and %d are on one machine but share no memory, as they differ in %s: transport %r is used; "
        "start containers with the same network, pid and user namespaces and user to share memory",
        *(rank, other, " and ".join(walls), transport),
    )


def process_behind(connection: socket.socket) -> int | None:
    """Return the id of the process at the other end of a Unix socket; ``None`` if it belongs to another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid if uid == os.geteuid() and pid > 0 else None
