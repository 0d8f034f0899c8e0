"""The processes that a launcher such as torchrun has started: rank 0 is the driver, and a rank itself."""

from __future__ import annotations

import json
import traceback
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from pycomm.launching import RankError

_PATIENCE = timedelta(minutes=20)  # for one turn: a rank that dies is noticed by the launcher


class Surrounding:
    """All ranks, as :class:`pycomm.cli.bench.ranks.Ranks` are to a driver of its own; they talk through the store.

    Raises:
        ValueError: the launcher has not said where they meet (MASTER_ADDR, MASTER_PORT).
    """

    def __init__(self) -> None:
        found, self.rank, self.size = next(rendezvous("env://"))
        found.set_timeout(_PATIENCE)
        self.store = PrefixStore("pycomm bench", found)
        self._commands = PrefixStore("commands", self.store)
        self._worker: Any = None
        self._calls = 0

    def use(self, worker: Any) -> None:
        """Have ``worker``, of which every rank makes one, do what is called."""
        self._worker = worker

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the workers' ``method`` on all ranks at once; returns what each returned, in rank order.

        For rank 0.

        Raises:
            RankError: it raised on one.
        """
        self._commands.set(f"call {self._calls}", json.dumps([method, arguments]))
        answers = [_answer(self._worker, method, arguments)]
        answers += [json.loads(self._take(f"answer {self._calls} {rank}")) for rank in range(1, self.size)]
        self._commands.delete_key(f"call {self._calls}")
        self._calls += 1
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(f"rank {rank} failed:\n{answer['error']}")
        return [answer["value"] for answer in answers]

    def serve(self) -> int:
        """Do as rank 0 says until it ends; returns its exit code. For all other ranks."""
        while True:
            method, arguments = json.loads(self._commands.get(f"call {self._calls}"))
            answer = {"value": None} if method is None else _answer(self._worker, method, arguments)
            self._commands.set(f"answer {self._calls} {self.rank}", json.dumps(answer))
            self._calls += 1
            if method is None:
                return int(arguments)

    def end(self, code: int) -> None:
        """Tell the others to end with ``code``, and wait until they have heard it. For rank 0."""
        self._commands.set(f"call {self._calls}", json.dumps([None, code]))
        for rank in range(1, self.size):
            self._take(f"answer {self._calls} {rank}")

    def _take(self, key: str) -> bytes:
        value: bytes = self._commands.get(key)
        self._commands.delete_key(key)
        return value


def _answer(worker: Any, method: str, arguments: Any) -> dict[str, Any]:
    try:
        return {"value": getattr(worker, method)(*arguments)}
    except Exception:
        return {"error": traceback.format_exc()}
