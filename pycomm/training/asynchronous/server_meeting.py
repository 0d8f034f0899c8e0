"""Agreement of a parameter server's ranks through the store of their process group, without the group itself.

The store keeps the agreed settings, for processes that start later or replace one that has died.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm import checks
from pycomm.agreement import Words, exchanged, require_same, results_in
from pycomm.collectives.transport import rendezvous
from pycomm.collectives.transport.authentication import SECRET, SECRET_FILE, Access, address_towards, loopback
from pycomm.collectives.transport.board import Board, StoreError
from pycomm.collectives.transport.own_group import timeout_seconds
from pycomm.errors import CommError, text_of
from pycomm.torch_internals import PrefixStore, Store, root_store, store_of
from pycomm.training.asynchronous.wire import WorkerListener
from pycomm.training.reductions.record import Record
from pycomm.untrusted import ListOf, Number, OneOf, escaped, parse, require

_POLL = 0.01  # seconds
_ANSWER = 10.0  # seconds for the store to answer
_PATIENCE = 5.0  # seconds for others to read an error
_numbers = itertools.count()
"""Numbers of this process's parameter servers: the n-th call of one rank meets the n-th of the others."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_LAST_PORT = 65535
_PLACE = {"host": str, "name": str, "address": str, "port": Number(0, _LAST_PORT, whole=True)}
_FAILURE = {"failure": str}
_REPORT = {"lines": ListOf(str), "record": str, "host": str, "secret": str}
_WORDS = Words(
    failed="rank {rank}: {problem}", differ="the ranks disagree: {here!r} on rank {rank}, {there!r} on rank 0"
)
_WORDS_OF_LATE = Words(differ="the ranks disagree: {here!r} on this process, {there!r} on rank 0")


_T = TypeVar("_T")


@dataclass(frozen=True)
class ServerPlace:
    """Address of a server.

    Attributes:
        host: identity of its host.
        name: name of its Unix socket, in hexadecimal digits.
        address, port: its TCP address for other hosts; "" and 0 if it has none.
    """

    host: str
    name: str
    address: str
    port: int


class _WrongTypeError(TypeError, ValueError):
    """TypeError of this rank, which the other ranks get as a ValueError."""


class ServerMeeting:
    """Meeting of the ranks of a parameter server.

    Args:
        timeout: limit of every wait for a rank; seconds or ``timedelta``, ``None`` for the process group's own.

    Attributes:
        rank, size: of the process group, or of torchrun's environment variables.
        worker: number of this process as a worker: its rank, or a new number if it has none.
        is_late: whether the others met before this process started.
        timeout: limit of every wait for a rank, in seconds.
        access: credentials for connections between hosts.
    """

    def __init__(self, timeout: timedelta | float | None) -> None:
        number, self.timeout, self.access = next(_numbers), timeout_seconds(None), Access()
        self._hosts: set[str] = set()  # of the ranks
        self._problem: Exception | None = None  # of the timeout or the secret, raised by compare()
        try:
            self.timeout, self.access = timeout_seconds(timeout), Access.read()
        except (TypeError, ValueError, OSError) as error:
            self._problem = error
        if dist.is_initialized():
            group = dist.group.WORLD
            assert group is not None
            store, self.rank, self.size = root_store(store_of(group)), dist.get_rank(), dist.get_world_size()
        else:
            store, self.rank, self.size = _from_environment(self.timeout)
        self._host = str(getattr(store, "host", "")) or loopback()
        self._store: Store = PrefixStore(f"pycomm/server/{number}", store)
        self.is_late = self._ask(lambda store: store.check(["begun"]))
        if 0 <= self.rank < self.size:
            self.worker = self.rank
        else:
            self.worker = self.size + self._ask(lambda store: store.add("newcomers", 1)) - 1

    def compare(self, lines: Sequence[str], record: Record, problem: Exception | None = None) -> None:
        """Compare the ranks' ``lines``, records and secrets. A late process compares itself with rank 0.

        Raises:
            ValueError: on all ranks: lines, records or secrets differ, or a rank has a ``problem``, the cause there.
            CommError: a rank did not come.
        """
        outcome: list[str] | Exception = list(lines)
        problem = self._problem or problem
        if problem is not None:
            outcome = (_WrongTypeError if isinstance(problem, TypeError) else ValueError)(text_of(problem))
            outcome.__cause__ = problem
        if self.is_late:
            if isinstance(outcome, Exception):
                raise outcome
            self._compare_with_first(outcome, record)
            return
        try:
            reports = self._checked(exchanged(self._gather, outcome, "meet", partial(self._report, record), _WORDS))
            require_same([{"": report["lines"]} for report in reports], "meet", _WORDS)
            record.explain(record.parsed({rank: report["record"] for rank, report in enumerate(reports)}))
            for rank, report in enumerate(reports):
                _require_safe(report, reports[0], rank)
        except CommError:
            raise
        except (RuntimeError, ValueError):
            if self.rank == 0:
                self._await("read", self.size)
            raise

    def _compare_with_first(self, lines: list[str], record: Record) -> None:
        first = self._checked(results_in(self._messages(), "meet", _WORDS))[0]
        wanted, mine = ([line for line in each if not line.startswith("values")] for each in (first["lines"], lines))
        require_same([{"": wanted}, {"": mine}], "meet", _WORDS_OF_LATE)
        report = self._report(record, mine)
        record.explain(record.parsed({0: first["record"], self.worker: report["record"]}))
        _require_safe(report, first, self.worker)

    def _report(self, record: Record, lines: list[str]) -> dict[str, Any]:
        """Return what ranks compare; by host and fingerprint of the secret they decide whether they can connect."""
        return {
            "lines": lines,
            "record": record.details(record.read()).decode(),
            "host": rendezvous.host_identity(),
            "secret": str(self.access),
        }

    def _gather(self, mine: bytes) -> list[bytes]:
        self._ask(lambda store: store.set(f"lines/{self.rank}", mine.decode()))
        messages = self._messages()
        self._ask(lambda store: store.set("begun", ""))
        self._ask(lambda store: store.add("read", 1))
        return messages

    def _messages(self) -> list[bytes]:
        return [self._get(f"lines/{rank}", rank) for rank in range(self.size)]

    def _checked(self, reports: list[Any]) -> list[dict[str, Any]]:
        """Return the reports of all ranks, and note their hosts. Raise ValueError if one is malformed."""
        for rank, report in enumerate(reports):
            require(report, _REPORT, f"the report of rank {rank}")
        self._hosts = {report["host"] for report in reports} | {rendezvous.host_identity()}
        return reports

    def open_listener(self) -> WorkerListener:
        """Return a listener for workers: of other hosts, too, if there is a secret and they can reach this one."""
        key, address = self.access.key, self.own_address()
        is_reached = len(self._hosts) > 1 or not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if key is None or not is_reached:
            return WorkerListener()
        return WorkerListener(address, key, self.access.context(server=True))

    def publish_address(self, server: int, listener: WorkerListener) -> None:
        """Write the address of ``server`` to the store."""
        place = ServerPlace(rendezvous.host_identity(), listener.name.hex(), *listener.address)
        self._ask(lambda store: store.set(f"server/{server}", json.dumps(asdict(place))))

    @contextlib.contextmanager
    def reporting(
        self, server: int, num_workers: int, what: str = "could not begin", disconnect: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Report that ``server`` failed in ``what``, with an error inside the block, to its ``num_workers`` workers.

        They look for the report when their connections end: ``disconnect`` is called once it can be read.
        """
        try:
            yield
        except Exception as error:
            if not self.is_late:  # otherwise they wait for another process in its place
                failure = json.dumps({"failure": f"{what}: {text_of(error)}"})
                self._ask(lambda store: store.set(f"server/{server}", failure))
                if disconnect is not None:
                    disconnect()
                self._await(f"read_failure/{server}", num_workers)
            raise

    def _await(self, key: str, count: int) -> None:
        """Wait until ``key`` is ``count``, as the store may end with this process before others have read an error."""
        start = time.monotonic()
        with contextlib.suppress(StoreError):  # it has ended
            while self._ask(lambda store: store.add(key, 0)) < count and time.monotonic() - start < _PATIENCE:
                time.sleep(_POLL)

    def address_of(self, server: int) -> ServerPlace | None:
        """Return the last address of ``server``; ``None`` if there is none yet."""
        try:
            if not self._ask(lambda store: store.check([f"server/{server}"])):
                return None
            text = self._ask(lambda store: store.get(f"server/{server}"))
            found = parse(text, OneOf(_PLACE, _FAILURE), f"the address of server {server}")
            if "failure" in found:
                self._ask(lambda store: store.add(f"read_failure/{server}", 1))
                what = f"server {server} {escaped(found['failure'])}"
                raise CommError.during("find a server", what, rank=self.worker, peer=server)
        except StoreError as error:
            what = f"the store with the servers' addresses cannot be reached: it {error}"
            raise CommError.during("find a server", what, rank=self.worker, peer=server) from None
        return ServerPlace(**{name: found[name] for name in _PLACE})

    def own_address(self) -> str:
        """Return the address from which this host reaches the store; others reach the host there."""
        return address_towards(self._host)

    def _get(self, key: str, rank: int) -> bytes:
        start = time.monotonic()
        while not self._ask(lambda store: store.check([key])):
            if time.monotonic() - start > self.timeout:
                what = f"rank {rank} has not called parameter_server()"
                raise CommError.during("meet", what, rank=self.rank, peer=rank, elapsed=self.timeout)
            time.sleep(_POLL)
        return bytes(self._ask(lambda store: store.get(key)))

    def _ask(self, question: Callable[[Store], _T]) -> _T:
        """Return the result of ``question``. Raises StoreError. The thread ends with the answer."""
        with Board("pycomm-server-store") as board:
            return board.ask(lambda: question(self._store), _ANSWER)


def _from_environment(timeout: float) -> tuple[Store, int, int]:
    missing = [name for name in _VARIABLES if name not in os.environ and name != "RANK"]
    if missing:
        raise RuntimeError(
            "torch.distributed is not initialized, and the environment does not name the other ranks' address: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        )
    port, size = checks.environment_count("MASTER_PORT"), checks.environment_count("WORLD_SIZE")
    rank = checks.environment_count("RANK") if "RANK" in os.environ else -1
    host = os.environ["MASTER_ADDR"]
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return store, rank, size


def _require_safe(report: dict[str, Any], first: dict[str, Any], rank: int) -> None:
    """Raise ValueError if ``rank`` and rank 0 cannot authenticate each other."""
    if report["secret"] != first["secret"]:
        raise ValueError(
            f"the ranks disagree about {SECRET} or certificates: {report['secret']} on rank {rank}, "
            f"{first['secret']} on rank 0"
        )
    if report["host"] != first["host"] and report["secret"] == str(Access()):
        raise ValueError(
            f"rank {rank} and rank 0 are on different hosts, or belong to different users or containers, and have no "
            f"secret to authenticate with: without one, servers listen on their own host only. Set {SECRET} or "
            f"{SECRET_FILE} on all ranks"
        )
