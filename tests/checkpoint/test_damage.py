"""A checkpoint that is not whole is never loaded: the one before is, or an error says what is wrong."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.checkpoint.files import write_sealed
from tests.checkpoint.training import Training, training
from tests.on_ranks import on_ranks


@pytest.fixture
def run(one_rank_group: None) -> Iterator[Training]:
    with training("adamw", "topk") as made:
        yield made


@pytest.fixture
def two(run: Training, tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        run.step()
        pycomm.save(tmp_path, run.reducer, step=step, weight=run.model.head.weight.detach().clone(), **run.more).wait()
    return tmp_path


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoint-00000002").rglob("*") if path.is_file())


def load_step(folder: Path, run: Training) -> int:
    found = pycomm.load(folder, run.reducer, **run.more)
    assert torch.equal(found["weight"], run.model.head.weight)
    return int(found["step"])


def test_any_file_cut_short_or_missing(two: Path, run: Training, caplog: pytest.LogCaptureFixture) -> None:
    names = files_of(two)
    assert len(names) == 4
    for path in names:
        content = path.read_bytes()
        for length in (0, 1, len(content) // 3, len(content) - 1, None):
            caplog.clear()
            if length is None:
                path.unlink()
            else:
                path.write_bytes(content[:length])
            assert load_step(two, run) == 1, (path, length)
            (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
            assert "checkpoint 2 " in record.getMessage()
            assert str(path) in record.getMessage()
        path.write_bytes(content + b"\0")
        assert load_step(two, run) == 1, path
        path.write_bytes(content)
    assert load_step(two, run) == 2


@pytest.mark.slow
def test_any_byte_flipped(two: Path, run: Training) -> None:
    for path in files_of(two):
        content = path.read_bytes()
        positions = {0, len(content) - 1, *range(7, len(content), max(1, len(content) // 23))}
        for position in positions:
            for bit in (1, 128):
                damaged = bytearray(content)
                damaged[position] ^= bit
                path.write_bytes(damaged)
                assert load_step(two, run) == 1, (path, position, bit)
        path.write_bytes(content)
    assert load_step(two, run) == 2


def test_an_empty_directory_of_its_name(two: Path, run: Training) -> None:
    (two / "checkpoint-00000009").mkdir()
    assert load_step(two, run) == 2
    pycomm.save(two, run.reducer, keep=1, step=10, weight=run.model.head.weight.detach(), **run.more).wait()
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint-00000010"]


def test_all_are_damaged(two: Path, run: Training) -> None:
    for path in two.rglob("part.json"):
        path.write_bytes(b"{}")
    before = run.digest()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*2/rank-0/part.json .*1/rank-0/part.json"):
        load_step(two, run)
    assert run.digest() == before


def test_nothing_there(run: Training, tmp_path: Path) -> None:
    (tmp_path / ".writing-0123").mkdir()
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
            pycomm.load(folder, run.reducer)


def test_another_format(two: Path, run: Training) -> None:
    path = two / "checkpoint-00000002" / "manifest.json"
    content = json.loads(path.read_bytes())["content"]
    write_sealed(path, {**content, "format": 99})
    with pytest.raises(ValueError, match="has format 99, this pycomm reads 1"):
        load_step(two, run)


def test_old_ones_are_removed_only_if_newer_ones_are_whole(two: Path, run: Training) -> None:
    (two / "checkpoint-00000002" / "rank-0" / "part.json").write_bytes(b"")
    pycomm.save(two, run.reducer, keep=2, **run.more).wait()
    assert sorted(path.name[-1] for path in two.iterdir()) == ["1", "2", "3"]
    pycomm.save(two, run.reducer, keep=2, **run.more).wait()
    assert sorted(path.name[-1] for path in two.iterdir()) == ["3", "4"]


@on_ranks(2)
def test_every_rank_leaves_it_aside(tmp_path: Path) -> None:
    """Even if only one of them needs the damaged file."""
    with training("sgd", "topk") as run:
        for step in (1, 2):
            run.step()
            path = pycomm.save(tmp_path, run.reducer, step=step, **run.more).wait()
        (own,) = (path / "rank-1" / "own").iterdir()
        if dist.get_rank() == 1:
            content = bytearray(own.read_bytes())
            content[len(content) // 2] ^= 4
            own.write_bytes(content)
        dist.barrier()
        assert pycomm.load(tmp_path, run.reducer, **run.more) == {"step": 1}


def test_a_copy_of_the_folder_is_as_good(two: Path, run: Training, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("copy") / "of it"
    shutil.copytree(two, elsewhere)
    shutil.rmtree(two)
    assert load_step(elsewhere, run) == 2
