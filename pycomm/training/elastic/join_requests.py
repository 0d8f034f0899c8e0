"""Requests to join a group of ranks, written to the store of its process group.

Anyone who can reach the store can write a request. So if the job has a secret, requests and answers are signed with it;
without one, only processes of the same user on the first rank's host are admitted.

A newcomer writes its process, and the lines by which ranks compare their versions, settings and parameters. A thread of
the first rank polls for requests. If the newcomer fits, the next commit of a step sends the request's number to all
ranks, which meet with the newcomer before their next step.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.collectives.transport import processes, rendezvous
from pycomm.collectives.transport.authentication import SECRET, Signer, secret, split_address
from pycomm.collectives.transport.board import Board, StoreError
from pycomm.errors import CommError
from pycomm.torch_internals import PrefixStore, Store, root_store
from pycomm.training.elastic.liveness import PROCESS
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, PairOf, escaped, parse, require
from pycomm.worker import Work

_INTERVAL = 0.1  # seconds between two looks
_POLL = 0.01  # seconds
_PATIENCE = 10.0  # seconds for the store to answer

_REQUEST = {"process": PROCESS, "lines": ListOf(ListOf(str, length=2)), "nonce": str, "proof": str}
_INVITATION = {
    "name": str,
    "backends": str,
    "agreement": ListOf(str, length=2),
    "world": ListOf(COUNT, least=1),
    "round": COUNT,
    "epoch": COUNT,
    "numbers": COUNT,
    "processes": ListOf(PairOf(COUNT, PROCESS)),
}
_ANSWER = {"content": MapOf(ANYTHING), "proof": str}

T = TypeVar("T")


@dataclass(frozen=True)
class JoinRequest:
    """Request of a newcomer.

    Attributes:
        number: its number among all requests, from 1.
        process: its process, as in :mod:`pycomm.training.elastic.liveness`.
    """

    number: int
    process: dict[str, Any]


def _requests_in(store: Store, index: int | str) -> PrefixStore:
    return PrefixStore(f"pycomm/join/{index}", root_store(store))


class JoinListener:
    """The ranks' side: polls for requests, and answers them.

    Args:
        store: the process group's store.
        index: identifies what newcomers join, such as the number of this ``attach`` in this process.
        lines: kinds and texts that a newcomer must match.
        host: identity of the only host whose processes can join; empty for any host.
    """

    def __init__(self, store: Store, index: int | str, lines: Sequence[tuple[str, str]], host: str) -> None:
        self._store, self._index = _requests_in(store, index), index
        self._lines, self._host, self._signer = lines, host, Signer(secret())
        self._nonces: dict[int, str] = {}  # of requests, by their numbers
        self._checked: JoinRequest | None = None  # the last one that fits
        self._board = Board("pycomm-join-listener")
        self._next = 1
        self._look: Work | None = None
        self._looked = time.monotonic()

    def waiting(self) -> JoinRequest | None:
        """Return the request of a newcomer that fits, if the last poll has found one. Does not wait for the store."""
        look = self._look
        if look is not None and look.is_completed():
            self._look = None
            try:
                found: JoinRequest | None = look.wait()
                return found
            except RuntimeError:  # without the store no newcomer can join
                self._looked = float("inf")
        elif look is None and time.monotonic() - self._looked > _INTERVAL:
            self._looked = time.monotonic()
            self._look = self._board.submit(self._read)
        return None

    def process_of(self, number: int) -> dict[str, Any] | None:
        """Return the process of request ``number``, as it was checked; ``None`` if this rank has not checked it."""
        checked = self._checked  # not read again: whoever reaches the store may have overwritten it since
        return checked.process if checked is not None and checked.number == number else None

    def answer(self, number: int, content: dict[str, Any]) -> None:
        """Answer request ``number``. Raises StoreError if the store does not take it."""
        self._board.ask(lambda: self._answer(number, content), _PATIENCE)

    def _answer(self, number: int, content: dict[str, Any]) -> None:
        proof = self._signer.sign("answer", *_bound(self._index, number, self._nonces.pop(number, ""), content))
        text = json.dumps({"content": content, "proof": proof})
        self._ask(lambda store: store.set(f"answer/{number}", text))

    def skip_to(self, number: int) -> None:
        """Poll only for requests after ``number``."""
        self._next = max(self._next, number + 1)

    def close(self) -> None:
        """Stop polling."""
        self._board.close()

    def _read(self) -> JoinRequest | None:
        """Return the next request if it fits; answer it if it does not. On the board's thread."""
        number = self._next
        if self.process_of(number) is not None:
            return self._checked
        if not self._ask(lambda store: store.check([f"request/{number}"])):
            return None
        try:
            request = parse(self._ask(lambda store: store.get(f"request/{number}")), _REQUEST, "the request")
            problem = self._distrust(number, request) or self._problem(request)
        except ValueError as error:
            problem = str(error)
        if not problem:
            self._checked = JoinRequest(number, request["process"])
            return self._checked
        self._next += 1
        self._answer(number, {"refused": problem})
        return None

    def _distrust(self, number: int, request: dict[str, Any]) -> str:
        """Return why the sender of a request is not trusted; "" if it is."""
        self._nonces[number] = request["nonce"]
        process = request["process"]
        if self._signer.key is not None:
            parts = _bound(self._index, number, request["nonce"], [process, request["lines"]])
            return "" if self._signer.is_signed(request["proof"], "request", *parts) else f"it does not know {SECRET}"
        if process["host"] != rendezvous.host_identity():
            return (
                f"it is not on the host of the first rank, or is of another user or container; set {SECRET} on all "
                "ranks, by which processes of other hosts are known"
            )
        is_own = processes.start_of(process["pid"]) == process["start"] and _user_of(process["pid"]) == os.geteuid()
        return "" if is_own else "it has ended, or belongs to another user"

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Return what ``question`` reads from the store, over a new connection if the old one has broken."""
        try:
            return question(self._store)
        except RuntimeError:  # torch's DistNetworkError is one
            old = root_store(self._store)
            if not isinstance(old, TCPStore):
                raise
        new = TCPStore(old.host, old.port, is_master=False, wait_for_workers=False)
        self._store = _requests_in(new, self._index)
        return question(self._store)

    def _problem(self, request: dict[str, Any]) -> str:
        if self._host and request["process"]["host"] != self._host:
            return "the ranks agree in memory of their host, and this process is not on it, or may not share it"
        theirs = [(kind, text) for kind, text in request["lines"]]
        for i in range(max(len(theirs), len(self._lines))):
            here, there = (lines[i] if i < len(lines) else ("", "nothing") for lines in (self._lines, theirs))
            if there[0] and there[0] != here[0]:  # an additional line of its kind
                here = there[0], "nothing"
            if here != there:
                return f"{here[0]} is {there[1]!r} here, {here[1]!r} on the ranks"
        return ""


def _bound(index: int | str, number: int, nonce: str, content: Any) -> list[str]:
    """Return the texts to sign: ``content`` and the request that it belongs to."""
    return [str(index), str(number), nonce, json.dumps(content, sort_keys=True)]


def _user_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


class JoinClient:
    """The newcomer's side: writes requests to the store at ``address``.

    Args:
        address: "host:port" of the store; "[::1]:29500" for IPv6.
        index: see :class:`JoinListener`.
        timeout: seconds for joining as a whole.
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
            raise self._failed(f"no store listens at {address}: {error}") from None
        self._requests, self._signer = _requests_in(self.store, index), Signer(secret())

    def ask(self, process: dict[str, Any], lines: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return the ranks' answer, with the number of the request under "request"."""
        nonce, content = secrets.token_hex(16), [process, [list(line) for line in lines]]
        with Board("pycomm-join") as board:
            number = self._ask(board, lambda: self._requests.add("requests", 1))
            proof = self._signer.sign("request", *_bound(self.index, number, nonce, content))
            request = json.dumps({"process": content[0], "lines": content[1], "nonce": nonce, "proof": proof})
            self._ask(board, lambda: self._requests.set(f"request/{number}", request))
            while not self._ask(board, lambda: self._requests.check([f"answer/{number}"])):
                if time.monotonic() > self._deadline:
                    raise self._failed(f"the ranks that meet at {self._address} did not answer")
                time.sleep(_POLL)
            text = self._ask(board, lambda: self._requests.get(f"answer/{number}"))
        what = f"the answer of the ranks that meet at {self._address}"
        told = parse(text, _ANSWER, what)
        answer: dict[str, Any] = told["content"]
        require(answer, {"refused": str} if "refused" in answer else _INVITATION, what, "content")
        refused = escaped(answer.get("refused", ""))
        parts = _bound(self.index, number, nonce, answer)
        if self._signer.key is not None and not self._signer.is_signed(told["proof"], "answer", *parts):
            raise ValueError(f"whoever answers at {self._address} does not know {SECRET}: {refused or 'refused'}")
        if "refused" in answer:
            raise ValueError(f"the ranks that meet at {self._address} refused this process: {refused}")
        return {**answer, "request": number}

    def _ask(self, board: Board, question: Callable[[], T]) -> T:
        try:
            return board.ask(question, max(_PATIENCE, self._deadline - time.monotonic()))
        except StoreError as error:
            what = f"the job at {self._address} has ended, or its store can no longer be reached: it {error}"
            raise self._failed(what) from None

    def is_late(self) -> bool:
        """Return whether the time limit has passed."""
        return time.monotonic() > self._deadline

    def _failed(self, what: str) -> CommError:
        return CommError.during("join", what, rank=-1)
