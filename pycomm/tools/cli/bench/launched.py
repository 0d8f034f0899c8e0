"""Workers in the processes that a launcher such as torchrun has started. Each runs the bench, and rank 0 speaks."""

from __future__ import annotations

import json
import traceback
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from pycomm.tools.launching import RankError

_PATIENCE = timedelta(minutes=20)  # for one turn: a rank that dies is noticed by the launcher


class LaunchedWorkers:
    """All ranks, as a :class:`pycomm.tools.cli.bench.workers.WorkerGroup` of a process that is one of them.

    What they return travels as JSON through the launcher's store, which others may reach: nothing is unpickled.

    Raises:
        ValueError: the launcher has not said where they meet (MASTER_ADDR, MASTER_PORT).
    """

    def __init__(self) -> None:
        found, self.rank, self.size = next(rendezvous("env://"))
        found.set_timeout(_PATIENCE)
        self.store = PrefixStore("pycomm bench", found)
        self._answers = PrefixStore("answers", self.store)
        self.worker: Any = None  # every rank sets its own
        self._calls = 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call this rank's worker's ``method``; returns what each rank's returned, in rank order. Collective.

        Raises:
            RankError: it raised on one.
        """
        try:
            mine = {"value": getattr(self.worker, method)(*arguments)}
        except Exception:
            mine = {"error": traceback.format_exc()}
        answers = self._exchange(mine)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(f"rank {rank} failed:\n{answer['error']}")
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        """Wait until rank 0 has said everything, and have it wait, since it may keep the store. Collective."""
        self._exchange({})
        if self.rank > 0:
            self._answers.set(f"gone {self.rank}", "")
        else:
            for rank in range(1, self.size):
                self._answers.get(f"gone {rank}")

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank what each of them gives: rank 0 puts it together."""
        number, self._calls = self._calls, self._calls + 1
        if self.rank > 0:
            self._answers.set(f"{number} {self.rank}", json.dumps(mine))
            together: list[dict[str, Any]] = json.loads(self._answers.get(f"{number}"))
            return together
        theirs = [f"{number} {rank}" for rank in range(1, self.size)]
        text = json.dumps([mine, *(json.loads(self._answers.get(key)) for key in theirs)])
        self._answers.set(f"{number}", text)
        for key in (*theirs, *([f"{number - 1}"] if number else [])):  # all have read what came before
            self._answers.delete_key(key)
        return json.loads(text)  # type: ignore[no-any-return]  # as the others have it: without tuples
