"""Workers in processes of a launcher such as torchrun. Every rank runs the bench; only rank 0 prints."""

from __future__ import annotations

import json
import traceback
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from pycomm.tools.launching import RankError
from pycomm.untrusted import ANYTHING, ListOf, parse

_ANSWER = {"value?": ANYTHING, "error?": str}
_PATIENCE = timedelta(minutes=20)  # for one turn: the launcher notices ranks that die


class LaunchedWorkers:
    """All launched ranks, used like a :class:`pycomm.tools.cli.bench.workers.WorkerGroup` by each of them.

    Results travel as JSON through the launcher's store. Others may reach that store, so nothing is unpickled.
    """

    def __init__(self) -> None:
        found, self.rank, self.size = next(rendezvous("env://"))
        found.set_timeout(_PATIENCE)
        self.store = PrefixStore("pycomm bench", found)
        self._answers = PrefixStore("answers", self.store)
        self.worker: Any = None  # every rank sets its own
        self._calls = 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` of this rank's worker; return all ranks' results in rank order. Collective."""
        try:
            mine = {"value": getattr(self.worker, method)(*arguments)}
        except Exception:
            mine = {"error": traceback.format_exc()}
        answers = self._exchange(mine)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(f"rank {rank} failed:\n{answer['error']}")
        return [answer.get("value") for answer in answers]

    def close(self) -> None:
        """Wait for rank 0 to finish; rank 0 waits for the others, since it may host the store. Collective."""
        self._exchange({})
        if self.rank > 0:
            self._answers.set(f"gone {self.rank}", "")
        else:
            for rank in range(1, self.size):
                self._answers.get(f"gone {rank}")

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather ``mine`` of all ranks on every rank: rank 0 collects and publishes them."""
        number, self._calls = self._calls, self._calls + 1
        if self.rank > 0:
            self._answers.set(f"{number} {self.rank}", json.dumps(mine))
            return self._read(f"{number}", ListOf(_ANSWER, self.size))  # type: ignore[no-any-return]
        theirs = [f"{number} {rank}" for rank in range(1, self.size)]
        text = json.dumps([mine, *(self._read(key, _ANSWER) for key in theirs)])
        self._answers.set(f"{number}", text)
        for key in (*theirs, *([f"{number - 1}"] if number else [])):  # all have read the previous one
            self._answers.delete_key(key)
        return parse(text, ListOf(_ANSWER), "the answers")  # type: ignore[no-any-return]  # without tuples, like there

    def _read(self, key: str, shape: Any) -> Any:
        return parse(self._answers.get(key), shape, f"answer {key!r} in the launcher's store")
