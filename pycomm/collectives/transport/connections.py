"""TCP connections between the ranks of a group, each proved in both directions before it is used.

Rank ``r`` connects to every lower rank, and accepts connections of every higher one. All do so at once: one thread and
one poll drive all connections, so a silent one delays no other. See
:mod:`pycomm.collectives.transport.handshake` for the proof.

A connection that the kernel calls connected may wait in a queue forever, or belong to another program. So it counts
after the proof only, and is closed and tried again if that does not come soon.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pycomm.collectives.transport.authentication import (
    EXHAUSTED,
    SECRET,
    Access,
    Signer,
    Step,
    family_of,
    join_address,
    secret,
    socket_address,
    split_address,
    with_scope_of,
)
from pycomm.collectives.transport.handshake import CLOSED, NONCE, Handshake
from pycomm.collectives.transport.interfaces import (
    ADVERTISE,
    INTERFACE,
    LONGEST_ADDRESS,
    MOST_ADDRESSES,
    PORTS,
    Listener,
    require_descriptors,
)
from pycomm.errors import CommError, reworded
from pycomm.untrusted import COUNT, ListOf, one_line

STREAMS = "PYCOMM_STREAMS"
"""Environment variable with the number of connections between two ranks that carry the data of operations."""
MOST_STREAMS = 8
SEGMENT = "PYCOMM_TCP_MSS"
"""Environment variable with the most bytes of a TCP segment, where the path loses larger packets without a word."""
_SEGMENTS = range(88, 65496)  # on Linux, over IPv4

GREETING = {"tcp": ListOf(str, least=1), "key": str, "secret": str, "streams": COUNT}
"""Shape of the part of a greeting that :func:`introduction` returns."""

_LOG = logging.getLogger("pycomm")
_PATIENCE, _MOST_PATIENCE = 2.0, 8.0  # seconds that an address gets to answer: at first, and after many rounds
_LAST_WORDS = 0.3  # seconds of silence for a program that answers whole lines only
_PROOF_LIMIT = 10.0  # seconds that who connects gets for its proof
_MOST_UNPROVEN = 64
_YOUNG = 0.5  # seconds that an unproven connection is safe from newer ones
_TICK = 0.05  # seconds between looks at the time
_SLICE = 0.2  # seconds between checks for failures that other ranks report
_PAUSE = 0.1  # seconds until accepting goes on after an error
_NAMED_AFTER = 10.0  # seconds until the ranks that are missing are named in the log
_TOLD_EARLIER = 1.0  # seconds before the deadline at which the side that knows why gives up
_IDLE = 60  # seconds after which the kernel asks whether the other host is there
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM}


class Gathering(Protocol):
    """Part of :class:`pycomm.collectives.transport.meeting.Meeting` that is used here."""

    rank: int
    size: int
    name: str

    def left(self) -> float: ...
    def failed(self, peer: int | None, what: str) -> CommError: ...
    def check(self, late: bool = False) -> None: ...
    def back_off(self, rank: int) -> None: ...
    def report(self, error: BaseException) -> None: ...


@dataclass
class Connections:
    """Connected sockets: ``sockets[kind][rank]`` is a descriptor, -1 for this rank. ``addresses[rank]`` names them."""

    sockets: list[list[int]]
    addresses: list[str]

    def close(self) -> None:
        """Close all descriptors."""
        for row in self.sockets:
            for p, descriptor in enumerate(row):
                row[p] = -1
                if descriptor >= 0:
                    os.close(descriptor)


def introduction(listener: Listener) -> dict[str, Any]:
    """Return the part of the greeting by which others connect to this rank.

    Raises:
        ValueError: a variable is wrong.
    """
    found = secret(shortest=1)
    fingerprint = "" if found is None else str(Access(found))
    key = secrets.token_hex(NONCE)
    segment_bytes()  # raises if it is wrong
    return {"tcp": listener.addresses, "key": key, "secret": fingerprint, "streams": _num_streams()}


def segment_bytes() -> int | None:
    """Return the most bytes of a segment, or ``None``: the kernel chooses.

    Raises:
        ValueError: the variable is wrong.
    """
    text = os.environ.get(SEGMENT)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) in _SEGMENTS):
        wanted = f"wanted a number from {_SEGMENTS.start} to {_SEGMENTS.stop - 1}"
        raise ValueError(f"the environment variable {SEGMENT} is {text!r}, {wanted}")
    return int(text)


def _num_streams() -> int:
    text = os.environ.get(STREAMS, "1")
    if text not in map(str, range(1, MOST_STREAMS + 1)):
        raise ValueError(f"the environment variable {STREAMS} is {text!r}, wanted a number from 1 to {MOST_STREAMS}")
    return int(text)


def streams_of(greetings: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of connections for data between two ranks.

    Raises:
        ValueError: it is not the same on all ranks.
    """
    first = greetings[0]["streams"]
    for p, greeting in enumerate(greetings):
        if greeting["streams"] != first:
            raise ValueError(f"the ranks disagree: {STREAMS} is {greeting['streams']} on rank {p}, {first} on rank 0")
    return int(first)


def key_of(greetings: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the key of the proofs, derived from the job's secret and from what all ranks have put into the store.

    So a secret that could be guessed is no worse than none. Raises ValueError if the ranks do not have the same secret.
    """
    first = greetings[0]["secret"]
    for p, greeting in enumerate(greetings):
        theirs = greeting["secret"]
        if theirs == first:
            continue
        if theirs and first:
            both = f"{one_line(theirs)} and {one_line(first)}"
            raise ValueError(f"the {SECRET} of rank {p} differs from rank 0's: {both}")
        without, other = (0, p) if theirs else (p, 0)
        raise ValueError(f"rank {without} has no {SECRET}, rank {other} has one")
    signer = Signer(secret(shortest=1) or b"tcp")
    return bytes.fromhex(signer.sign("key", *(greeting["key"] for greeting in greetings)))


def exchange_connections(
    meeting: Gathering, listener: Listener, greetings: Sequence[Mapping[str, Any]], key: bytes, kinds: int
) -> Connections:
    """Connect to all other ranks, and prove in both directions who they are.

    Args:
        meeting: where the ranks have met.
        listener: this rank's; the caller closes it.
        greetings: greetings of all ranks; "tcp" has their addresses.
        key: what only the ranks know, see :func:`key_of`.
        kinds: number of connections to each rank.

    Raises:
        CommError: a rank cannot be reached, or another rank has failed. The others hear of it.
        OSError: there are too few descriptors.
    """
    exchange = _Exchange(meeting, listener, key, kinds)
    try:
        require_descriptors(kinds * (meeting.size - 1))
        exchange.run([_targets(meeting, p, greetings[p]["tcp"], listener) for p in range(meeting.rank)])
        return exchange.detached()
    except BaseException as error:
        meeting.report(error)  # before the other ranks see a connection end
        raise
    finally:
        exchange.close()


class _Target:
    """Address of another rank: ``text`` as that rank has given it."""

    def __init__(self, text: str, host: str, port: int) -> None:
        self.text = text
        self._host, self._port = host, port
        self._found: list[Any] = []
        self._problem: OSError | None = None
        self._lookup: threading.Thread | None = None
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            self._found = [(family_of(host), socket_address(host, port, family_of(host)))]

    def address(self) -> tuple[socket.AddressFamily, Any] | None:
        """Return family and address to try; ``None`` while a name is being looked up. Raises OSError if it has none."""
        if self._found:
            found: tuple[socket.AddressFamily, Any] = random.choice(self._found)
            return found
        if self._problem is not None:
            problem, self._problem, self._lookup = self._problem, None, None
            raise problem
        if self._lookup is None:  # in a thread, as the answer may take minutes
            self._lookup = threading.Thread(target=self._look_up, name="pycomm-lookup", daemon=True)
            self._lookup.start()
        return None

    def _look_up(self) -> None:
        try:
            answers = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._found = [(family, address) for family, _, _, _, address in answers]
        except (OSError, UnicodeError) as error:  # no name has such characters
            self._problem = OSError(f"the name is unknown here: {getattr(error, 'strerror', None) or error}")


def _targets(meeting: Gathering, p: int, texts: Sequence[str], listener: Listener) -> list[_Target]:
    """Return the addresses of rank ``p``; a link-local one on each of this rank's links."""
    links = [host for host, _ in (split_address(text, "it", "a rank") for text in listener.addresses) if "%" in host]
    found: list[_Target] = []
    try:
        if not 0 < len(texts) <= MOST_ADDRESSES or any(len(text) > LONGEST_ADDRESS for text in texts):
            raise ValueError(f"its addresses are not 1 to {MOST_ADDRESSES} of at most {LONGEST_ADDRESS} characters")
        for text in texts:
            host, port = split_address(text, "an address", f"rank {p}")
            for one in dict.fromkeys(with_scope_of(host, link) for link in links) if "%" in host and links else [host]:
                with contextlib.suppress(socket.gaierror):  # the interface is another host's
                    found.append(_Target(one_line(join_address(one, port)), one, port))
    except ValueError as error:
        raise meeting.failed(p, f"what the store holds for rank {p} is malformed ({error})") from None
    if not found:
        raise meeting.failed(p, f"no address of rank {p} can be reached from here ({', '.join(map(one_line, texts))})")
    return found


@dataclass(eq=False)
class _Dial:
    """Attempts to reach one rank with one kind of connection."""

    peer: int
    kind: int
    targets: list[_Target]
    tries: int = 0
    due: float = 0.0

    @property
    def target(self) -> _Target:
        return self.targets[self.tries % len(self.targets)]

    @property
    def patience(self) -> float:
        """Seconds for this attempt: more in later rounds, as hosts that are overloaded answer late."""
        return min(_MOST_PATIENCE, _PATIENCE * 1.5 ** (self.tries // len(self.targets)))


@dataclass(eq=False)
class _Attempt:
    """One connection on its way to a proof; ``dial`` is ``None`` if it was accepted."""

    handshake: Handshake
    step: Step
    began: float
    until: float
    dial: _Dial | None = None
    is_probed: bool = False

    def waits_for(self) -> str:
        """Return what has not come."""
        if not self.handshake.is_connected:
            return "no answer: is the port filtered?"
        if not self.handshake.heard:
            return "it accepts connections, but no rank answers there: it is stopped, or another program"
        return "its proof does not come"


@dataclass(eq=False)
class _Exchange:
    """Connections of one rank while they are established."""

    meeting: Gathering
    listener: Listener
    key: bytes = field(repr=False)
    kinds: int
    _poll: select.poll = field(default_factory=select.poll)
    _attempts: dict[int, _Attempt] = field(default_factory=dict)  # by descriptor, the oldest first
    _taken: dict[tuple[int, int], socket.socket] = field(default_factory=dict)  # by rank and kind
    _dials: list[_Dial] = field(default_factory=list)  # those that wait for their next attempt
    _reasons: dict[int, dict[str, str]] = field(default_factory=dict)  # by rank and address
    _refused: str = ""
    _is_listening: bool = False
    _listens_from: float = 0.0

    def run(self, targets: Sequence[list[_Target]]) -> None:
        """Return once there are connections of all kinds to all ranks; ``targets`` has the addresses of lower ranks."""
        rank, size = self.meeting.rank, self.meeting.size
        began = next_tick = time.monotonic()
        deadline = began + self.meeting.left()
        earlier = min(_TOLD_EARLIER, (deadline - began) / 5)
        self._dials = [_Dial(p, kind, targets[p]) for p in range(rank) for kind in range(self.kinds)]
        missing = [(p, kind) for kind in range(self.kinds) for p in range(size) if p != rank]
        next_check, named_at = began + _SLICE, began + _NAMED_AFTER
        self._listen_again(began)
        while missing := [one for one in missing if one not in self._taken]:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK
                self._expire(now)
                self._begin_due(now)
                lowest = min(missing)[0]
                if now >= deadline - (earlier if lowest < rank else _TICK):
                    self._give_up(lowest)
                if now >= named_at:
                    named_at = float("inf")
                    _LOG.warning("rank %d: %s", rank, self._text(lowest))
                if now >= next_check:
                    self._check(lowest)
                    next_check = time.monotonic() + _SLICE
            for descriptor, _ in self._poll.poll(max(0.0, next_tick - time.monotonic()) * 1e3):
                self._advance(descriptor)
            self._listen_again(time.monotonic())

    def detached(self) -> Connections:
        """Return the connections; from now on the caller owns them."""
        size = self.meeting.size
        result = Connections([[-1] * size for _ in range(self.kinds)], [""] * size)
        try:
            for (p, kind), one in list(self._taken.items()):
                one.setblocking(True)
                if kind == 0:
                    result.addresses[p] = _peer_of(one)
                result.sockets[kind][p] = self._taken.pop((p, kind)).detach()
        except BaseException:
            result.close()
            raise
        return result

    def close(self) -> None:
        """Close all connections that were not handed over."""
        for one in [attempt.handshake.socket for attempt in self._attempts.values()] + list(self._taken.values()):
            one.close()

    def _advance(self, descriptor: int) -> None:
        attempt = self._attempts.get(descriptor)
        if attempt is not None:
            self._step(attempt)
            return
        for server in self.listener.sockets:
            if server.fileno() == descriptor and self._is_listening:
                self._accept(server)

    def _start(self, attempt: _Attempt) -> None:
        self._attempts[attempt.handshake.socket.fileno()] = attempt
        self._step(attempt)

    def _step(self, attempt: _Attempt) -> None:
        try:
            event = next(attempt.step)
        except StopIteration:
            self._take(attempt)
        except OSError as error:
            self._drop(attempt, _reason(error))
        else:
            self._poll.register(attempt.handshake.socket, event)

    def _forget(self, attempt: _Attempt) -> socket.socket:
        one = attempt.handshake.socket
        del self._attempts[one.fileno()]
        with contextlib.suppress(KeyError):  # it ended before it had to wait
            self._poll.unregister(one)
        return one

    def _take(self, attempt: _Attempt) -> None:
        """Count a connection that both sides have. A later one of the same rank and kind is a retry: it replaces it."""
        assert attempt.handshake.is_proven
        one = self._forget(attempt)
        who = (attempt.dial.peer, attempt.dial.kind) if attempt.dial is not None else attempt.handshake.who
        earlier, self._taken[who] = self._taken.get(who), one
        if earlier is not None:
            earlier.close()

    def _drop(self, attempt: _Attempt, why: str) -> None:
        dial = attempt.dial
        if dial is None:
            peer = _peer_of(attempt.handshake.socket)
            if attempt.handshake.heard:
                self._refused = f"{peer}: {why}"
        self._forget(attempt).close()
        if dial is not None:
            self._try_next(dial, why)

    def _try_next(self, dial: _Dial, why: str) -> None:
        self._reasons.setdefault(dial.peer, {})[dial.target.text] = why
        dial.tries += 1
        # At once to an address that was not tried yet; else all ranks of a big group would knock at the same moments.
        is_new_round = dial.tries % len(dial.targets) == 0
        dial.due = time.monotonic() + (random.uniform(0.1, 0.3) if is_new_round else 0.0)
        self._dials.append(dial)

    def _begin_due(self, now: float) -> None:
        waiting, self._dials = self._dials, []
        for dial in waiting:
            if dial.due > now:
                self._dials.append(dial)
            else:
                self._begin(dial, now)

    def _begin(self, dial: _Dial, now: float) -> None:
        try:
            found = dial.target.address()
            if found is None:
                self._dials.append(dial)
                return
            family, address = found
            handshake = Handshake(
                _tuned(socket.socket(family, socket.SOCK_STREAM)), self.key, self.meeting.rank, self.meeting.name
            )
        except OSError as error:
            self._try_next(dial, _reason(error))
            return
        step = handshake.as_client(address, dial.peer, dial.kind)
        self._start(_Attempt(handshake, step, now, now + dial.patience, dial))

    def _accept(self, server: socket.socket) -> None:
        now = time.monotonic()
        for _ in range(_MOST_UNPROVEN):
            if not self._has_room(now):
                self._pause_listening(now)
                return
            try:
                one, _address = server.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                # Errors in EXHAUSTED are temporary, and so are errors of one connection, which the kernel reports here.
                self._pause_listening(now + _PAUSE)
                if error.errno in EXHAUSTED:
                    self._refused = f"accepting fails: {error.strerror}"
                return
            try:
                handshake = self._handshake_over(one)
            except OSError:  # it has ended
                continue
            step = handshake.as_server(self._is_expected)
            self._start(_Attempt(handshake, step, now, now + _PROOF_LIMIT))

    def _handshake_over(self, one: socket.socket) -> Handshake:
        return Handshake(_tuned(one), self.key, self.meeting.rank, self.meeting.name)

    def _is_expected(self, p: int, kind: int) -> bool:
        return self.meeting.rank < p < self.meeting.size and kind < self.kinds

    def _has_room(self, now: float) -> bool:
        """Return whether another connection may be accepted; close the oldest without a proof if it had its time."""
        unproven = [one for one in self._attempts.values() if one.dial is None and not one.handshake.is_proven]
        if len(unproven) < _MOST_UNPROVEN:
            return True
        if now - unproven[0].began < _YOUNG:
            return False
        self._drop(unproven[0], "its proof does not come")
        return True

    def _pause_listening(self, until: float) -> None:
        self._listens_from, self._is_listening = until, False
        for server in self.listener.sockets:
            self._poll.unregister(server)

    def _listen_again(self, now: float) -> None:
        if not self._is_listening and now >= self._listens_from and self._has_room(now):
            self._is_listening = True
            for server in self.listener.sockets:
                self._poll.register(server, select.POLLIN)

    def _expire(self, now: float) -> None:
        """End the attempts whose time is over. A connection that was accepted has none once it is proven."""
        for attempt in [one for one in self._attempts.values() if one.until <= now]:
            handshake = attempt.handshake
            if attempt.dial is None and handshake.is_proven:
                continue
            is_silent = attempt.dial is not None and handshake.is_connected and not handshake.heard
            if is_silent and not attempt.is_probed:
                attempt.is_probed, attempt.until = True, now + _LAST_WORDS
                attempt.step = handshake.any_words()
                self._step(attempt)
            else:
                self._drop(attempt, attempt.waits_for())

    def _check(self, p: int) -> None:
        """Raise the failure that another rank reports, with what this rank knows of it."""
        try:
            self.meeting.back_off(p)
        except CommError as error:
            if error.peer is None or not self._reasons_of(error.peer):
                raise
            text = f"{error}. From rank {self.meeting.rank}: {self._text(error.peer)}"
            raise reworded(error, text, CommError) from None

    def _give_up(self, p: int) -> None:
        if p > self.meeting.rank:
            self.meeting.check(late=True)  # the side that connects knows more
        raise self.meeting.failed(p, self._text(p))

    def _reasons_of(self, p: int) -> dict[str, str]:
        """Return why the addresses of a lower rank have failed."""
        reasons = dict(self._reasons.get(p, {}))
        for attempt in self._attempts.values():
            if attempt.dial is not None and attempt.dial.peer == p:
                reasons.setdefault(attempt.dial.target.text, attempt.waits_for())
        return reasons

    def _text(self, p: int) -> str:
        variables = f"see {INTERFACE}, {PORTS} and {ADVERTISE}"
        if p < self.meeting.rank:
            reasons = "; ".join(f"{address}: {why}" for address, why in self._reasons_of(p).items())
            return f"connecting to rank {p} failed ({reasons or 'it was not tried yet'}; {variables} of rank {p})"
        seen = f"; the last one refused was {self._refused}" if self._refused else ""
        return f"rank {p} did not connect to {', '.join(self.listener.addresses)} ({variables} of this rank{seen})"


def _reason(error: OSError) -> str:
    """Return why an attempt has failed."""
    if error.errno == errno.ECONNREFUSED:
        return "refused: nothing listens there, or a firewall refuses"
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return CLOSED
    if error.errno in _NO_ROUTE:
        return f"prohibited: no route, or a firewall ({error.strerror})"
    if error.errno == errno.ETIMEDOUT:
        return "no answer: is the port filtered?"
    return error.strerror or str(error)


def _tuned(one: socket.socket) -> socket.socket:
    """Return a socket that sends at once, and asks after an idle peer, where the sandbox knows that option."""
    try:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (most := segment_bytes()) is not None:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most)
    except BaseException:
        one.close()
        raise
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE)  # between probes, answered ones too
    return one


def _peer_of(one: socket.socket) -> str:
    """Return the address of the other side of a socket as text."""
    try:
        host, port, *rest = one.getpeername()
    except OSError:  # it has gone
        return "an unknown address"
    scope = rest[1] if len(rest) > 1 else 0
    with contextlib.suppress(OSError):
        host = f"{host}%{socket.if_indextoname(scope)}" if scope and "%" not in host else host
    return join_address(host, port)
