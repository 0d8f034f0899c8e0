"""What a Reducer hands out to the rest of pycomm, which looks at nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression import Compression
from pycomm.compression.saved_state import select_state
from pycomm.reducer.engine import Engine


@dataclass(frozen=True)
class AttachedTraining:
    """Training that a Reducer is attached to, for what saves, loads and looks after it: see ``Reducer.attached``."""

    _engine: Engine

    @property
    def communicator(self) -> Communicator:
        """Communicator of the ranks that take part."""
        return self._engine.communicator

    @property
    def method(self) -> Compression:
        """Compression method."""
        return self._engine.settings.compression

    @property
    def loss_scaler(self) -> Any:
        """Loss scaler that ``attach`` was given, or ``None``."""
        return self._engine.settings.loss_scaler

    @property
    def survives(self) -> bool:
        """Whether the ranks that are left go on without those that are lost."""
        return self._engine.settings.survive is not None

    @property
    def has_own_values(self) -> bool:
        """Whether a rank may have parameters, or optimizer state, that other ranks do not have."""
        table = self._engine.table
        return bool(table.ignored or table.rank_local) or self._engine.settings.tuning.optimizer_state == "keep"

    @property
    def is_window_open(self) -> bool:
        """Whether gradients of an accumulation window have yet to be averaged."""
        return self._engine.window.is_open

    def name_of_ignored(self, param: torch.Tensor) -> str | None:
        """Return the name of ``param`` if it is this rank's own, as ``ignore`` says."""
        return self._engine.table.ignored.name_of(param)

    def stand_down(self) -> None:
        """Let collectives of the main thread come before the next step."""
        self._engine.policy.stand_down()

    def compare_replicas(self) -> None:
        """Raise an error on every rank if the ranks' parameters differ. Collective."""
        self._engine.comparison.replicas.compare(self._engine.progress.num_reductions)

    def check_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError if ``Reducer.load_state_dict`` would not take these ``states`` of all ranks."""
        labels = self._engine.table.labels()
        select_state(list(states), self._engine.state(), self.method, self.communicator, True, labels)
