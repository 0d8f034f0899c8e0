"""Stories: events of two workers that happen to a core, and are written to a journal before."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pycomm.asynchronous.compensation import Compensator
from pycomm.asynchronous.core import Core
from pycomm.asynchronous.journal import Journal, happen
from pycomm.asynchronous.memory import SharedMemory
from pycomm.asynchronous.modes import mode_of
from pycomm.asynchronous.serving import Serving
from pycomm.asynchronous.shards import cut
from pycomm.asynchronous.updates import ShardOptimizer
from pycomm.asynchronous.wire import WorkerListener

SIZE = 8


def core_of(mode: str, settings: str = "") -> Core:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    pieces = cut([6, 2], 1, anywhere=True)[0]
    shard = ShardOptimizer(torch.optim.Adam(model.parameters(), 0.01), pieces, torch.zeros(SIZE, dtype=torch.float64))
    return Core(shard, mode_of(mode, 1, 2, 0), Compensator(None), torch.float64, settings=settings)


class Story:
    """Events of two workers that happen to a core, and are written down before."""

    def __init__(self, mode: str, folder: Path, workers: Collection[int] = (1, 2)) -> None:
        self.core = core_of(mode)
        listener, memory = WorkerListener(), SharedMemory(SIZE * 8)
        self.journal = Journal(folder, self.core)
        Serving(self.core, memory, listener, "host", set(workers), 1.0, 0, journal=self.journal)
        memory.close()
        listener.close()
        self.past = [self.core.shard.memory.clone()]

    def tell(self, **event: Any) -> None:
        gradient = torch.randn(SIZE, dtype=torch.float64) if event["event"] == "push" else torch.empty(0)
        self.journal.write(event, gradient if event["event"] == "push" else None)
        happen(self.core, event, gradient)
        if not torch.equal(self.past[-1], self.core.shard.memory):
            self.past.append(self.core.shard.memory.clone())

    def tell_all(self) -> None:
        self.tell(event="join", worker=1, life="a")
        self.tell(event="pull", worker=1, number=1)
        self.tell(event="push", worker=1, number=1, samples=1.0)  # while the other one has not come yet
        self.tell(event="join", worker=2, life="b")
        for number in (2, 3):
            for event in ("pull", "push"):
                for worker in (1, 2):
                    self.tell(event=event, worker=worker, number=number - (worker == 2), samples=2.0)


def begun(mode: str, folder: Path) -> Story:
    """Return a story of three checkpoints, between which everything is told."""
    story = Story(mode, folder)
    for number in range(2):
        story.tell(event="join", worker=1, life="a")
        story.tell(event="join", worker=2, life="b")
        for event in ("pull", "push"):
            for worker in (1, 2):
                story.tell(event=event, worker=worker, number=number + 1, samples=1.0 + number)
        if number == 0:
            story.journal.checkpoint()
    story.journal.close()
    return story


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
