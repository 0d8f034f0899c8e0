"""Choice of the transport for a process group."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pycomm._native as _native
from pycomm.collectives.recorder.watch import dump_on_signal, watch
from pycomm.collectives.transport import TRANSPORTS
from pycomm.collectives.transport.base import Transport
from pycomm.collectives.transport.meeting import Meeting
from pycomm.collectives.transport.own_group import OWN, Place
from pycomm.collectives.transport.rendezvous import (
    Hosts,
    exchange_memory,
    hosts_of,
    introduction,
    listen,
    log_isolation,
)
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from pycomm.errors import CommError
from pycomm.untrusted import PROCESS_ID

_VARIABLE = "PYCOMM_TRANSPORT"
_LONGEST_PROBLEM = 2000  # characters
_LOG = logging.getLogger("pycomm")
_GREETING = {"wanted": str, "version": str, "host": str, "pid": PROCESS_ID, "address": str}


def version() -> str:
    """Return the version of pycomm, which all ranks must have in common."""
    return str(_native.build_info()["version"])


def choose_transport(place: Place, wanted: str, timeout: float, problem: Exception | None = None) -> Transport:
    """Return the transport ``wanted`` at ``place``. Collective.

    "auto" is shared memory if all ranks are on one host, "hierarchical" if some share one, otherwise "tcp". If a rank
    cannot listen, "auto" is "torch" between hosts. ``PYCOMM_TRANSPORT`` stands in for "auto".

    Args:
        place: where the ranks meet.
        wanted: one of ``TRANSPORTS``.
        timeout: limit of the whole rendezvous, in seconds, unless ``place`` has a shorter one; and of operations.
        problem: error in this rank's arguments, if any; raised once the other ranks know, which get a ValueError.
    """
    if wanted == "auto" and (named := os.environ.get(_VARIABLE)):
        wanted = named
        if named not in TRANSPORTS:
            wanted_one = f"wanted one of {', '.join(TRANSPORTS)}"
            problem = problem or ValueError(f"the environment variable {_VARIABLE} is {named!r}, {wanted_one}")
    patience = min(timeout, place.patience)
    with (
        _turn_of(place, patience),
        Meeting(place.store, place.rank, place.size, patience, place.stranger, place.lost) as meeting,
    ):
        mine: dict[str, Any] = {}
        with contextlib.ExitStack() as open_sockets:
            try:
                listener = open_sockets.enter_context(listen(meeting.size))
                mine = {"wanted": str(wanted), "version": version(), **introduction(listener)}
                if problem is None and wanted == "torch":
                    from pycomm.collectives.transport.torch_group import cpu_backend_of

                    cpu_backend_of(place)  # raises ValueError if the group cannot have another beside it
            except (OSError, ValueError) as error:
                problem = problem or error
            greetings = _exchange_greetings(meeting, mine, problem)
            _require_same_choice(greetings)
            hosts = hosts_of(place.rank, greetings)
            kind = _kind_of(wanted, hosts, greetings)
            if wanted == "auto":
                log_isolation(place.rank, greetings, kind)
            try:
                transport = _make(kind, wanted, place, meeting, listener, greetings, hosts, timeout)
                _wait_until_ready(transport, patience)
            except BaseException as error:
                if isinstance(error, CommError):
                    meeting.check(late=True)  # raises the reason that another rank reports, if one does
                meeting.report(error)
                raise
        meeting.end()
        transport.recorder = watch(transport, f"{place.name}/{meeting.name}", place.ranks)
        transport.recorder.store = place.store
        if place.rank == 0 and transport.name != "shared_memory":
            _LOG.info("transport %r for %d ranks", transport.name, place.size)
        dump_on_signal()
        return transport


def _kind_of(wanted: str, hosts: Hosts, greetings: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the transport to use; raise ValueError if ``wanted`` is not possible."""
    if wanted == "shared_memory" and not hosts.are_one:
        for p, greeting in enumerate(greetings):
            if "no_memory" in greeting:
                raise ValueError(f"transport is 'shared_memory', but rank {p} is denied it: {greeting['no_memory']}")
        raise ValueError("transport is 'shared_memory', but the ranks are not all on one host")
    if wanted == "hierarchical" and not hosts.are_shared:
        why = "all ranks are on one host" if hosts.are_one else "no two ranks share a host"
        raise ValueError(f"transport is 'hierarchical', but {why}")
    if wanted != "auto":
        return wanted
    if hosts.are_one:
        return "shared_memory"
    return "hierarchical" if hosts.are_shared else "tcp"


def _make(
    kind: str,
    wanted: str,
    place: Place,
    meeting: Meeting,
    listener: socket.socket,
    greetings: Sequence[Mapping[str, Any]],
    hosts: Hosts,
    timeout: float,
) -> Transport:
    if kind == "shared_memory":
        return SharedMemoryTransport(place.rank, exchange_memory(meeting, listener, greetings))
    if kind != "torch":
        from pycomm.collectives.transport.between_hosts import make_between_hosts

        made = make_between_hosts(kind, place.store, meeting, listener, greetings, hosts, must=wanted != "auto")
        if made is not None:
            return made
    from pycomm.collectives.transport.torch_distributed import TorchTransport
    from pycomm.collectives.transport.torch_group import own_group

    own = own_group(place, f"{place.name}{OWN}{meeting.name}", timeout)
    return TorchTransport(own)


def _exchange_greetings(meeting: Meeting, mine: dict[str, Any], problem: Exception | None) -> list[dict[str, Any]]:
    """Return the greetings of all ranks; or send ``problem`` to the other ranks, and raise it."""
    if problem is None:
        return meeting.greet(mine, _GREETING)
    with contextlib.suppress(CommError, ValueError):
        meeting.greet({**mine, "problem": (str(problem) or type(problem).__name__)[:_LONGEST_PROBLEM]})
    raise problem


_turns: defaultdict[tuple[int, str, int], threading.RLock] = defaultdict(threading.RLock)


@contextlib.contextmanager
def _turn_of(place: Place, timeout: float) -> Iterator[None]:
    """Serialize the threads that create communicators of one group, as a rank has only one greeting at a time.

    Which threads of two ranks meet is undefined, as always when several threads call collectives.
    """
    turn = _turns[os.getpid(), place.name, place.rank]  # a forked child has locks of its own
    if not turn.acquire(timeout=timeout):
        what = f"another thread was making a communicator for {timeout:.2f} s"
        raise CommError.during("rendezvous", what, rank=place.rank, elapsed=timeout)
    try:
        yield
    finally:
        turn.release()


def _require_same_choice(greetings: Sequence[Mapping[str, Any]]) -> None:
    first = greetings[0]
    for p, other in enumerate(greetings):
        if other["version"] != first["version"]:
            raise ValueError(f"rank {p} runs pycomm {other['version']}, rank 0 {first['version']}")
        if other["wanted"] != first["wanted"]:
            raise ValueError(
                f"the ranks disagree: transport is {other['wanted']!r} on rank {p}, {first['wanted']!r} on rank 0"
            )


def _wait_until_ready(transport: Transport, timeout: float) -> None:
    """Return once all ranks' transports are ready: memory mapped, connections made, the store read."""
    try:
        transport.barrier(timeout)
    except BaseException:
        transport.close("it could not meet the others")
        raise
