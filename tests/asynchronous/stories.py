"""Stories: events of two workers that are written to a journal, and then applied to a core."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pycomm.training.asynchronous.core import Core, ShardOptimizer, cut
from pycomm.training.asynchronous.journal import Journal, apply
from pycomm.training.asynchronous.modes import Compensator, SoftSync, StaleSynchronous, checked_mode
from pycomm.training.asynchronous.serving import Serving
from pycomm.training.asynchronous.wire import SharedMemory, WorkerListener

SIZE = 8


MODES = {"async": "async", "ssp": StaleSynchronous(1), "softsync": SoftSync(2), "sync": "sync"}


def core_of(mode: str, settings: str = "", size: int = SIZE) -> Core:
    torch.manual_seed(0)
    model = nn.Linear(size // 2 - 1, 2).double()
    pieces = cut([size - 2, 2], 1, anywhere=True)[0]
    shard = ShardOptimizer(torch.optim.Adam(model.parameters(), 0.01), pieces, torch.zeros(size, dtype=torch.float64))
    return Core(shard, checked_mode(MODES[mode]).rules(), Compensator(None), torch.float64, settings=settings)


class Story:
    """Events of two workers that are written down, and then applied to a core."""

    def __init__(self, mode: str, folder: Path, workers: Collection[int] = (1, 2)) -> None:
        self.core = core_of(mode)
        listener, memory = WorkerListener(), SharedMemory(SIZE * 8)
        self.journal = Journal(folder, self.core)
        Serving(self.core, memory, listener, "host", set(workers), 1.0, 0, journal=self.journal)
        memory.close()
        listener.close()
        self.past = [self.core.shard.memory.clone()]

    def add(self, **event: Any) -> None:
        gradient = torch.randn(SIZE, dtype=torch.float64) if event["event"] == "push" else torch.empty(0)
        self.journal.write(event, gradient if event["event"] == "push" else None)
        apply(self.core, event, gradient)
        if not torch.equal(self.past[-1], self.core.shard.memory):
            self.past.append(self.core.shard.memory.clone())

    def add_all(self) -> None:
        self.add(event="join", worker=1, life="a")
        self.add(event="pull", worker=1, number=1)
        self.add(event="push", worker=1, number=1, samples=1.0)  # while the other one has not come yet
        self.add(event="join", worker=2, life="b")
        for number in (2, 3):
            for event in ("pull", "push"):
                for worker in (1, 2):
                    self.add(event=event, worker=worker, number=number - (worker == 2), samples=2.0)


def begun(mode: str, folder: Path) -> Story:
    """Return a story of three checkpoints, between which events are added."""
    story = Story(mode, folder)
    for number in range(2):
        story.add(event="join", worker=1, life="a")
        story.add(event="join", worker=2, life="b")
        for event in ("pull", "push"):
            for worker in (1, 2):
                story.add(event=event, worker=worker, number=number + 1, samples=1.0 + number)
        if number == 0:
            story.journal.checkpoint()
    story.journal.close()
    return story


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
