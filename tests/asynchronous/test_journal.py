"""What a server that begins again makes of its journal is what has happened, up to where it was cut short."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycomm.asynchronous.compensation import Compensator
from pycomm.asynchronous.core import Core
from pycomm.asynchronous.journal import Journal, happen
from pycomm.asynchronous.memory import SharedMemory
from pycomm.asynchronous.modes import MODES, mode_of
from pycomm.asynchronous.serving import Serving
from pycomm.asynchronous.shards import cut
from pycomm.asynchronous.updates import ShardOptimizer
from pycomm.asynchronous.wire import Door

SIZE = 8


def core_of(mode: str, settings: str = "") -> Core:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    pieces = cut([6, 2], 1, anywhere=True)[0]
    shard = ShardOptimizer(torch.optim.Adam(model.parameters(), 0.01), pieces, torch.zeros(SIZE, dtype=torch.float64))
    return Core(shard, mode_of(mode, 1, 2, 0), Compensator(None), torch.float64, settings=settings)


class Story:
    """Events of two workers that happen to a core, and are written down before."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.core = core_of(mode)
        door, memory = Door(), SharedMemory(SIZE * 8)
        self.journal = Journal(folder, self.core)
        Serving(self.core, memory, door, "host", {1, 2}, 1.0, 0, journal=self.journal)
        memory.close()
        door.close()
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


@pytest.mark.parametrize("mode", MODES)
def test_a_journal_that_was_cut_anywhere_is_a_beginning(tmp_path: Path, mode: str) -> None:
    story = Story(mode, tmp_path / "whole")
    story.tell_all()
    story.journal.close()
    (path,) = (tmp_path / "whole").glob("journal-*")
    content, reached = path.read_bytes(), 0
    for end in range(0, len(content) + 1, 3):
        folder = tmp_path / "cut"
        shutil.copytree(tmp_path / "whole", folder)
        (folder / path.name).write_bytes(content[:end])
        core = core_of(mode)
        Journal(folder, core)
        here = next(i for i, then in enumerate(story.past) if torch.equal(then, core.shard.memory))
        assert reached <= here <= reached + 1
        reached = here
        shutil.rmtree(folder)
    (tmp_path / "whole" / path.name).write_bytes(content + bytes(64))  # as a machine that lost power may leave it
    core = core_of(mode)
    Journal(tmp_path / "whole", core)
    assert torch.equal(core.shard.memory, story.core.shard.memory)
    assert str(core.state()) == str(story.core.state())


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_knows_the_workers(tmp_path: Path, mode: str) -> None:
    story = Story(mode, tmp_path)
    story.tell_all()
    story.journal.checkpoint()
    story.journal.close()
    core = core_of(mode)
    Journal(tmp_path, core)
    assert core.mode.workers == {1, 2}
    assert str(core.state()) == str(story.core.state())


def test_a_journal_of_other_settings_is_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path, core_of("ssp", "mode=ssp"))
    first.checkpoint()
    first.close()
    with pytest.raises(ValueError, match="of a server with mode=ssp, this one has mode=sync"):
        Journal(tmp_path, core_of("sync", "mode=sync"))
    Journal(tmp_path, core_of("ssp", "mode=ssp")).close()
