"""The transports between hosts: connections of all ranks over TCP, and shared memory within a host."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pycomm.collectives.transport import connections, interfaces
from pycomm.collectives.transport.base import Transport
from pycomm.collectives.transport.hierarchical import HierarchicalTransport
from pycomm.collectives.transport.meeting import Meeting
from pycomm.collectives.transport.rendezvous import Hosts, exchange_memory
from pycomm.collectives.transport.shared_memory import SharedMemoryTransport
from pycomm.collectives.transport.tcp import TcpTransport
from pycomm.torch_internals import Store, root_store
from pycomm.untrusted import escaped

_INTRODUCTION = {"no_tcp?": str, "problem?": str, **{f"{name}?": kind for name, kind in connections.GREETING.items()}}
_LONGEST_REASON = 2000  # characters
_LOG = logging.getLogger("pycomm")


def make_between_hosts(
    kind: str,
    store: Store,
    meeting: Meeting,
    memory_listener: socket.socket,
    greetings: Sequence[Mapping[str, Any]],
    hosts: Hosts,
    *,
    must: bool,
) -> Transport | None:
    """Return the transport ``kind``, "tcp" or "hierarchical"; ``None`` if a rank cannot listen. Collective.

    Args:
        kind: "tcp" or "hierarchical".
        store: the process group's; a listening socket has the address of the route to its server.
        meeting: where the ranks have met.
        memory_listener: this rank's listening socket for ranks of its host.
        greetings: greetings of all ranks.
        hosts: which ranks are on which host.
        must: whether to raise an error where a rank cannot listen.

    Raises:
        ValueError: a variable is wrong, ranks have different secrets, or a rank cannot listen.
        CommError: two ranks could not connect.
    """
    with contextlib.ExitStack() as until_made, contextlib.ExitStack() as while_connecting:
        mine: dict[str, Any]
        wrong: ValueError | None = None
        try:
            tcp_listener = while_connecting.enter_context(interfaces.listen(_host_of(store)))
            mine = connections.introduction(tcp_listener)
        except OSError as error:
            if os.environ.get(interfaces.PORTS):
                raise  # the user says which ports, and none is free
            mine = {"no_tcp": str(error)[:_LONGEST_REASON]}
        except ValueError as error:  # a variable
            mine, wrong = {"problem": str(error)[:_LONGEST_REASON]}, error
        introductions = meeting.share("tcp", mine, _INTRODUCTION)
        if wrong is not None:
            raise wrong
        for p, other in enumerate(introductions):
            if "problem" in other:
                raise ValueError(f"rank {p} could not take part: {escaped(other['problem'])}")
        for p, other in enumerate(introductions):
            if "no_tcp" in other:
                why = f"rank {p} cannot listen: {escaped(other['no_tcp'])}"
                if must:
                    raise ValueError(f"transport is {kind!r}, but {why}")
                _LOG.warning("%s: transport 'torch' is used between hosts", why)
                return None
        key, num_streams = connections.key_of(introductions), connections.streams_of(introductions)
        local: SharedMemoryTransport | None = None
        if kind == "hierarchical":
            peers = exchange_memory(meeting, memory_listener, greetings, hosts.members)
            local = SharedMemoryTransport(hosts.local_rank, peers, hosts.members)
            until_made.callback(local.close, "it could not meet the others")
        made = connections.exchange_connections(meeting, tcp_listener, introductions, key, kinds=num_streams + 1)
        try:
            flat = TcpTransport(meeting.rank, meeting.name, made)
        except BaseException:
            made.close()
            raise
        until_made.pop_all()
        return flat if local is None else HierarchicalTransport(flat, local, hosts)


def _host_of(store: Store) -> str | None:
    """Return the host of the server of ``store``; ``None`` if it has none, as a file."""
    return getattr(root_store(store), "host", None)
