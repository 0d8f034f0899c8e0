"""State of a server as a file holds it: compared with what the server can take before any of it is used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.checkpoint.files import DamagedError, checked
from pycomm.untrusted import ANYTHING, COUNT, INTEGER, ListOf, MapOf, OneOf, PairOf

_NUMBER = OneOf(INTEGER, float)  # sums of weights may have become infinite
_TENSOR = OneOf(None, torch.Tensor)
_SHAPE = {
    "settings": str,
    "shard": {
        "memory": torch.Tensor,
        "updates": COUNT,
        "optimizer": MapOf(ANYTHING, key=ANYTHING),
        "sum": _TENSOR,
        "collected": ListOf(_NUMBER, 4),
        "schedules": ListOf(PairOf(ANYTHING, COUNT)),
    },
    "mode": {
        "collected": COUNT,
        "workers": ListOf(COUNT),
        "clocks?": MapOf(INTEGER, key=COUNT),
        "done?": ListOf(COUNT),
    },
    "compensator": {"then": MapOf(torch.Tensor, key=COUNT), "squares": _TENSOR},
    "staleness": MapOf(COUNT, key=INTEGER),
    "counts": MapOf(COUNT),
    "lives": MapOf(str, key=COUNT),
    "last": MapOf(COUNT, key=COUNT),
    "pulled": MapOf(COUNT, key=COUNT),
}


@dataclass(frozen=True)
class Wanted:
    """What a server can take.

    Attributes:
        settings: what updates depend on.
        size, dtype: of its shard of the parameters.
        groups: number of parameters in each group of its optimizer.
        mode: names of what its mode has to know.
        push_bytes: bytes of what a push brings; ``None`` if that is packed.
    """

    settings: str
    size: int
    dtype: torch.dtype
    groups: tuple[int, ...]
    mode: Collection[str]
    push_bytes: int | None

    def check(self, state: Any, what: str) -> None:
        """Compare ``state``, which ``what`` holds.

        Raises:
            ValueError: it is of another model, optimizer, or of other settings.
            DamagedError: it is no state.
        """
        checked(state, {"settings": str, "shard": {"memory": torch.Tensor}}, what)
        if state["settings"] != self.settings:
            raise ValueError(
                f"{what}: the checkpoint is of a server with {state['settings']}, this one has {self.settings}"
            )
        memory = state["shard"]["memory"]
        if tuple(memory.shape) != (self.size,) or memory.dtype != self.dtype:
            found, here = f"{memory.numel()} elements of {memory.dtype}", f"{self.size} of {self.dtype}"
            raise ValueError(f"{what}: the checkpoint has {found}, and this shard {here}: it is of another model")
        checked(state, _SHAPE, what)
        self._check_groups(state["shard"]["optimizer"], what)
        problem = self._problem(state)
        if problem:
            raise DamagedError(f"{what} is malformed: {problem}")

    def _check_groups(self, optimizer: dict[Any, Any], what: str) -> None:
        """Compare the groups of an optimizer whose state has the form that torch's optimizers give it."""
        groups = optimizer.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(g, dict) and "params" in g for g in groups):
            return
        found = [len(g["params"]) if isinstance(g["params"], list) else -1 for g in groups]
        if found != list(self.groups):
            here = f"this server's has {list(self.groups)}"
            raise ValueError(f"{what}: the checkpoint is of an optimizer with groups of {found} parameters, {here}")

    def _problem(self, state: dict[str, Any]) -> str:
        """Return in what parts of ``state`` contradict each other, or the server; "" if they do not."""
        mode, shard, then = state["mode"], state["shard"], state["compensator"]["then"]
        flat = [shard["sum"], state["compensator"]["squares"], *then.values()]
        if any(each is not None and (tuple(each.shape), each.dtype) != ((self.size,), self.dtype) for each in flat):
            return "it has a tensor that does not fit the shard"
        if not set(self.mode) <= mode.keys():
            return f"its mode has {sorted(mode)}, wanted {sorted(self.mode)}"
        if not set(mode["workers"]) <= mode.get("clocks", dict.fromkeys(mode["workers"])).keys():
            return "a worker has no clock"
        if mode["collected"] > 0 and (shard["sum"] is None or not shard["collected"][0] > 0):
            return "gradients that were collected are missing"
        if state["lives"].keys() != state["last"].keys():
            return "it does not know the last push of every worker"
        return ""
