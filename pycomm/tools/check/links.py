"""Links between hosts: whether each host reaches each other one, how fast, and with which packets."""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from pycomm.collectives.transport.authentication import family_of, join_address, socket_address, with_scope_of
from pycomm.collectives.transport.connections import STREAMS
from pycomm.tools.check.board import NoticeBoard
from pycomm.tools.check.facts import Facts, Finding, hosts_of
from pycomm.tools.cli.timing import rate_text

_SECONDS = 3.0  # to connect, and for each answer
_PINGS = 20
_MOST_ROUNDS = 8  # in which every host measures its link with another one
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
_ROUND_SECONDS = 0.15  # of sending, in each direction
_PIECE = 1 << 18
_IP_MTU = 14  # option of a connected socket: the MTU of its path
_SLOW = 0.5  # of the median rate, below which a link is worth a word
_STREAMS = (2, 4, 8)  # connections that send together
_WORTH_STREAMS = 1.5  # times the rate of one connection, from which several are worth a word
_PING, _TAKE, _GIVE = b"p", b"t", b"g"


@dataclass
class HostLink:
    """What a host found out about its link to another one.

    Attributes:
        error: why it cannot connect; "" if it can.
        latency: seconds of a round trip.
        sent, received: bytes per second, of one connection.
        together: bytes per second that are sent over several connections, by their number.
        mtu: of the path, ``None`` where the kernel does not tell.
    """

    host: str
    peer: str
    error: str = ""
    latency: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    together: dict[int, float] = field(default_factory=dict)
    mtu: int | None = None


class _Listener:
    """Listens for the other hosts of this check, which know its token, until it is closed."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(16)
        self._server = socket.create_server(
            socket_address(address, 0, family_of(address))[:2], family=family_of(address), backlog=256
        )
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._run, name="pycomm-check", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="pycomm-check", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_SECONDS)
                if _take(connection, len(self.token)) != self.token.encode():
                    return
                connection.sendall(self.token.encode())
                while command := connection.recv(1):
                    count = int.from_bytes(_take(connection, 8), "big")
                    if command == _TAKE:
                        _drop(connection, count)
                    elif command == _GIVE:
                        _pour(connection, count)
                    connection.sendall(command)
            except (OSError, EOFError):
                return


def _take(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _drop(connection: socket.socket, count: int) -> None:
    buffer = bytearray(_PIECE)
    while count > 0:
        received = connection.recv_into(buffer, min(count, _PIECE))
        if received == 0:
            raise EOFError
        count -= received


def _pour(connection: socket.socket, count: int) -> None:
    piece = bytes(_PIECE)
    for begin in range(0, count, _PIECE):
        connection.sendall(memoryview(piece)[: min(_PIECE, count - begin)])


def _ask(connection: socket.socket, command: bytes, count: int = 0) -> float:
    """Have one command served; return its seconds."""
    begin = time.perf_counter()
    connection.sendall(command + count.to_bytes(8, "big"))
    if command == _TAKE:
        _pour(connection, count)
    elif command == _GIVE:
        _drop(connection, count)
    if _take(connection, 1) != command:
        raise OSError("something other than this check answers")
    return time.perf_counter() - begin


@contextmanager
def _connected(mine: Facts, peer: Facts, door: dict[str, Any]) -> Iterator[socket.socket]:
    address = with_scope_of(peer["address"], mine["address"])
    connection = socket.socket(family_of(address), socket.SOCK_STREAM)
    with connection:
        connection.settimeout(_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(socket_address(address, door["port"], family_of(address)))
        connection.sendall(door["token"].encode())
        if _take(connection, len(door["token"])) != door["token"].encode():
            raise OSError("something other than this check answers")
        yield connection


def _tried(link: HostLink, job: Callable[[], None]) -> None:
    """Run ``job``; if it fails, note in ``link`` why."""
    try:
        job()
    except (OSError, EOFError) as error:
        link.error = str(getattr(error, "strerror", None) or error or "the connection was closed")


def _reach(link: HostLink, mine: Facts, peer: Facts, door: dict[str, Any]) -> None:
    def job() -> None:
        with _connected(mine, peer, door) as connection:
            if connection.family == socket.AF_INET:
                link.mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)

    _tried(link, job)


def _measure(link: HostLink, mine: Facts, peer: Facts, door: dict[str, Any]) -> None:
    def rate(connection: socket.socket, command: bytes) -> float:
        seconds = _ask(connection, command, _FIRST_BYTES)
        count = min(_MOST_BYTES, max(_FIRST_BYTES, int(_FIRST_BYTES / seconds * _ROUND_SECONDS)))
        return count / _ask(connection, command, count)

    def job() -> None:
        with _connected(mine, peer, door) as connection:
            link.latency = statistics.median(_ask(connection, _PING) for _ in range(_PINGS))
            link.sent, link.received = rate(connection, _TAKE), rate(connection, _GIVE)
        for number in _STREAMS:
            link.together[number] = _rate_of_several(number, link.sent, mine, peer, door)

    _tried(link, job)


def _rate_of_several(number: int, rate_of_one: float, mine: Facts, peer: Facts, door: dict[str, Any]) -> float:
    """Return the bytes per second that ``number`` connections send together."""
    count = min(_MOST_BYTES, max(_FIRST_BYTES, int(rate_of_one * _ROUND_SECONDS)))
    with ExitStack() as made, ThreadPoolExecutor(number) as pool:
        connections = [made.enter_context(_connected(mine, peer, door)) for _ in range(number)]
        for connection in connections:
            _ask(connection, _PING)
        begin = time.perf_counter()
        list(pool.map(lambda each: _ask(each, _TAKE, count), connections))
        return number * count / (time.perf_counter() - begin)


def rounds_of(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs among ``count``: every pair is in one round, and nobody in two pairs of a round."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def links_of(board: NoticeBoard, everyones: Sequence[Facts]) -> list[HostLink]:
    """Try out and measure the links between the first ranks of all hosts; return what all of them found. Collective.

    Every host tries to reach every other one. Then they measure in pairs, each host one link at a time; with more than
    nine hosts, the first eight of its links.
    """
    leaders = [ranks[0] for ranks in hosts_of(everyones)]
    ranks = [facts["rank"] for facts in leaders]
    if len(leaders) == 1:
        return []
    if board.rank not in ranks:
        return _read(board.exchange("links between hosts", None))
    me = ranks.index(board.rank)
    mine, others = leaders[me], [number for number in range(len(leaders)) if number != me]
    listener = _Listener(mine["address"])
    try:
        doors = board.exchange("ports", {"port": listener.port, "token": listener.token}, ranks)
        links = {number: HostLink(mine["host"], leaders[number]["host"]) for number in others}
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i: _reach(links[i], mine, leaders[i], doors[i]), others))
        for link, number in zip(links.values(), others, strict=True):
            if link.error:
                link.error += f" ({join_address(leaders[number]['address'], doors[number]['port'])})"
        for number, pairs in zip(range(_MOST_ROUNDS), rounds_of(len(leaders)), strict=False):
            board.exchange(f"round {number + 1} of measurements", None, ranks)
            peer = next((b for a, b in pairs if a == me), None)
            if peer is not None and not links[peer].error:
                _measure(links[peer], mine, leaders[peer], doors[peer])
        found = board.exchange("links between hosts", [asdict(link) for link in links.values()])
    finally:
        listener.close()
    return _read(found)


def _read(everyones: Sequence[Any]) -> list[HostLink]:
    found = [HostLink(**link) for links in everyones for link in links or ()]
    for link in found:
        link.together = {int(number): rate for number, rate in link.together.items()}  # JSON's keys are texts
    return found


def findings_of_links(links: Sequence[HostLink]) -> list[Finding]:
    """Return what is wrong with the links."""
    found = []
    for link in links:
        if link.error:
            remedy = (
                "Open TCP between the hosts, on all ports, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an "
                "interface of a network that both have."
            )
            found.append(Finding(True, f"{link.host} cannot connect to {link.peer}: {link.error}", remedy))
    mtus = {link.mtu for link in links if link.mtu is not None}
    if len(mtus) > 1:
        remedy = "Set the MTU of all interfaces to the least of them."
        found.append(Finding(False, f"paths between hosts have MTUs from {min(mtus)} to {max(mtus)}", remedy))
    rates = {(link.host, link.peer): min(link.sent, link.received) for link in links if link.sent > 0}
    median = statistics.median(rates.values()) if rates else 0.0
    for (host, peer), rate in rates.items():
        if rate < _SLOW * median:
            what = f"the link of {host} and {peer} has {rate_text(rate)}, the median of all is {rate_text(median)}"
            found.append(Finding(False, what, "A collective is as fast as its slowest link: look at it first."))
    return [*found, *_findings_of_streams(links)]


def _findings_of_streams(links: Sequence[HostLink]) -> list[Finding]:
    """Return whether the network limits each connection, so that several are faster."""
    gains = {n: [link.together[n] / link.sent for link in links if n in link.together] for n in _STREAMS}
    medians = {n: statistics.median(each) for n, each in gains.items() if each}
    best = max(medians, key=medians.__getitem__, default=0)
    if not best or medians[best] < _WORTH_STREAMS:
        return []
    # The fewest that come near it: each costs time of the processors.
    best = min(n for n in medians if medians[n] > 0.9 * medians[best])
    what = f"{best} connections between two hosts together send {medians[best]:.1f} times as fast as one"
    return [Finding(False, what, f"Set {STREAMS}={best} on all ranks.")]
