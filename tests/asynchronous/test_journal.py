"""What a server that begins again makes of its journal is what has happened, up to where it was cut short."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pycomm.training.asynchronous.journal import Journal
from tests.asynchronous.stories import MODES, Story, core_of


@pytest.mark.parametrize("mode", MODES)
def test_a_journal_that_was_cut_anywhere_is_a_beginning(tmp_path: Path, mode: str) -> None:
    story = Story(mode, tmp_path / "whole")
    story.add_all()
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
    story.add_all()
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
