"""Door: where processes that come later ask to be let in, in the store of the process group.

A newcomer writes what it is: its processes, its version, and the lines by which ranks compare their settings and
parameters. The first of the ranks looks now and then, on a thread of its own. If the newcomer fits, its number goes
through the next commit of a step to all ranks, which open before their next step: they, and the newcomer, meet as
a new world.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store, root_store
from pycomm.transport.addresses import split_address
from pycomm.worker import Work, Worker

_INTERVAL = 0.1  # seconds between two looks
_POLL = 0.01  # seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """Request of a newcomer.

    Attributes:
        number: its number among all requests, from 1.
        process: its process, see :class:`Vitals`.
    """

    number: int
    process: dict[str, Any]


def _door(store: Store, index: int | str) -> PrefixStore:
    return PrefixStore(f"pycomm/door/{index}", root_store(store))


class Door:
    """The ranks' side of the door.

    Args:
        store: the process group's store.
        index: tells what newcomers join: the number of this attach among those of this process, for example.
        lines: what a newcomer must match: kind and text.
        host: identity of the only host whose processes can come in; empty if those of all can.
    """

    def __init__(self, store: Store, index: int | str, lines: Sequence[tuple[str, str]], host: str) -> None:
        self._store, self._index = _door(store, index), index
        self._lines, self._host = lines, host
        self._worker = Worker("pycomm-door")
        self._next = 1
        self._look: Work | None = None
        self._looked = time.monotonic()

    def open(self, lines: Sequence[tuple[str, str]]) -> None:
        """Compare newcomers with ``lines`` from now on."""
        self._lines = lines

    def waiting(self) -> Request | None:
        """Return the request of a newcomer that fits, if the last look has found one. Does not wait for the store."""
        look = self._look
        if look is not None and look.is_completed():
            self._look = None
            try:
                found: Request | None = look.wait()
                return found
            except RuntimeError:  # the store has gone: nobody can come any more
                self._looked = float("inf")
        elif look is None and time.monotonic() - self._looked > _INTERVAL:
            self._looked = time.monotonic()
            self._look = self._worker.submit(self._read)
        return None

    def read(self, number: int) -> Request:
        """Return the request with that number."""
        text = self._ask(lambda store: store.get(f"request/{number}"))
        return Request(number, json.loads(text)["process"])

    def answer(self, number: int, content: dict[str, Any]) -> None:
        """Answer the request with that number."""
        self._ask(lambda store: store.set(f"answer/{number}", json.dumps(content)))

    def pass_by(self, number: int) -> None:
        """Look for later requests only."""
        self._next = max(self._next, number + 1)

    def close(self) -> None:
        """Stop looking."""
        self._worker.stop(patience=0.0)

    def _read(self) -> Request | None:
        """Return the next request if it fits; answer it if it does not."""
        number = self._next
        if not self._ask(lambda store: store.check([f"request/{number}"])):
            return None
        wanted = json.loads(self._ask(lambda store: store.get(f"request/{number}")))
        problem = self._problem(wanted)
        if not problem:
            return Request(number, wanted["process"])
        self._next += 1
        self.answer(number, {"refused": problem})
        return None

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Return what the store answers, over a new connection if the one that there was has broken."""
        try:
            return question(self._store)
        except RuntimeError:  # torch's DistNetworkError is one
            old = root_store(self._store)
            if not isinstance(old, TCPStore):
                raise
        new = TCPStore(old.host, old.port, is_master=False, wait_for_workers=False)
        self._store = _door(new, self._index)
        return question(self._store)

    def _problem(self, wanted: dict[str, Any]) -> str:
        if self._host and wanted["process"]["host"] != self._host:
            return "the ranks agree in memory of their host, and this process is not on it, or may not share it"
        theirs = [tuple(line) for line in wanted["lines"]]
        for i in range(max(len(theirs), len(self._lines))):
            here, there = (lines[i] if i < len(lines) else ("", "nothing") for lines in (self._lines, theirs))
            if there[0] and there[0] != here[0]:  # one more of a kind
                here = there[0], "nothing"
            if here != there:
                return f"{here[0]} is {there[1]!r} here, {here[1]!r} on the ranks"
        return ""


class Guest:
    """The newcomer's side of the door: asks at the store that listens at ``address``.

    Args:
        address: "host:port" of the store; "[::1]:29500" for an address of IPv6.
        index: see :class:`Door`.
        timeout: limit of the whole, in seconds.
    """

    def __init__(self, address: str, index: int | str, timeout: float) -> None:
        host, port = split_address(address, "join", "the process group's store")
        self._deadline = time.monotonic() + timeout
        self._address, self.index = address, index
        try:
            self.store: Store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:  # torch's DistNetworkError is one
            raise self._failed(f"no store listens at {address}: {error}") from error
        self._door = _door(self.store, index)

    def ask(self, process: dict[str, Any], lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the ranks' answer, with the number of the request under "request".

        Raises:
            ValueError: they refuse.
            CommError: they do not answer.
        """
        number = self._door.add("requests", 1)
        self._door.set(f"request/{number}", json.dumps({"process": process, "lines": list(lines)}))
        while not self._door.check([f"answer/{number}"]):
            if time.monotonic() > self._deadline:
                raise self._failed(f"the ranks that meet at {self._address} did not answer")
            time.sleep(_POLL)
        answer: dict[str, Any] = json.loads(self._door.get(f"answer/{number}"))
        if "refused" in answer:
            raise ValueError(f"the ranks that meet at {self._address} refused this process: {answer['refused']}")
        return {**answer, "request": number}

    def is_late(self) -> bool:
        """Return whether the time for coming in has passed."""
        return time.monotonic() > self._deadline

    def _failed(self, what: str) -> CommError:
        return CommError.during("join", what, rank=-1)
