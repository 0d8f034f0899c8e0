"""A checkpoint that is not whole is never loaded: the one before is, or an error says what is wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.training.checkpoint.contents import check_generators, generators_state
from pycomm.training.checkpoint.files import DamagedError, sum_of, write_json, write_sealed
from tests.checkpoint.training import Training, training
from tests.hosts import on_hosts
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


@pytest.mark.behavior(
    "Checkpoints",
    "`checkpoint ... in ... is skipped: ...`",
    "Files are cut, changed or missing; the previous checkpoint is loaded.",
)
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


@pytest.mark.parametrize("name", ["manifest.json", "rank-0/part.json"])
def test_json_that_takes_more_memory_than_there_is(two: Path, run: Training, name: str) -> None:
    """A wide manifest, and a part that Python's objects make twenty times as large."""
    path = two / "checkpoint-00000002" / name
    path.write_bytes(b'{"checksum": "x", "content": {"a": [' + b"[]," * (8 << 20) + b"[]]}}")
    if name != "manifest.json":
        wide = path.read_bytes()
        write_sealed(two / "checkpoint-00000002" / "manifest.json", {"format": 1, "parts": [sum_of(wide)]})
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (160 << 20), before[1]))
    try:
        assert load_step(two, run) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_empty_directory_of_its_name(two: Path, run: Training) -> None:
    (two / "checkpoint-00000009").mkdir()
    assert load_step(two, run) == 2
    pycomm.save(two, run.reducer, keep=1, step=10, weight=run.model.head.weight.detach(), **run.more).wait()
    assert sorted(path.name for path in two.iterdir()) == ["checkpoint-00000010"]


@pytest.mark.behavior(
    "Checkpoints",
    "`no checkpoint in ... is whole: ...`",
    "A copy was incomplete, or a disk is bad. The text names each damage.",
)
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


@pytest.mark.parametrize(("method", "shard"), [("topk", None), ("dense", "optimizer")])
@on_ranks(2)
def test_every_rank_leaves_it_aside(method: str, shard: str | None, tmp_path: Path) -> None:
    """Even if only one of them needs the damaged file; also where the state is by parts, and gathered meanwhile."""
    with on_hosts("ab"), training("adamw", method, shard=shard) as run:
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
        run.step()


def test_a_copy_of_the_folder_is_as_good(two: Path, run: Training, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("copy") / "of it"
    shutil.copytree(two, elsewhere)
    shutil.rmtree(two)
    assert load_step(elsewhere, run) == 2


def with_part(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what checkpoint 2 says of its rank, with checksums as if that had been written."""
    place = folder / "checkpoint-00000002"
    part = json.loads((place / "rank-0" / "part.json").read_bytes())
    change(part)
    wanted = write_json(place / "rank-0" / "part.json", part)
    manifest = json.loads((place / "manifest.json").read_bytes())["content"]
    write_sealed(place / "manifest.json", {**manifest, "parts": [wanted]})


def entry(part: dict[str, Any]) -> dict[str, Any]:
    """Return the place of some tensor that is read."""
    found: dict[str, Any] = part["indexes"]["shared"]["tensors"]["model/0"]
    return found


PARTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda part: part.update(own=[]), "part.json is malformed: own is a list, wanted an object"),
    (lambda part: part["indexes"].pop("own"), "part.json is malformed: it has no 'indexes.own'"),
    (
        lambda part: part["indexes"]["own"]["files"].update(x={"bytes": -1, "crc32": 0}),
        "bytes is -1, wanted an integer",
    ),
    (lambda part: part["indexes"]["own"]["files"].update({"../x": {"bytes": 1, "crc32": 0}}), "outside of itself"),
    (lambda part: part["indexes"]["own"]["files"].update({"a\0": {"bytes": 1, "crc32": 0}}), "cannot be read"),
    (lambda part: part["indexes"]["own"]["files"].update({"": {"bytes": 4096, "crc32": 0}}), "is a folder"),
    (lambda part: part["shared"].update(model=["dict", [["a"]]]), "model is malformed"),
    (lambda part: part["shared"].update(model=["dict", [[[], ["value", 1]]]]), "model is malformed"),
    (lambda part: part["shared"].update(model=["nothing", 1]), "is no value"),
    (lambda part: part["shared"].update(model=["value", 1]), "is malformed: it is 1, wanted an object"),
    (lambda part: part["shared"].update(model=["tensor", 5]), "its tensors are not numbered"),
    (lambda part: part["shared"].update(buffers=["bytes", "!"]), "buffers is malformed: .*base64"),
    (lambda part: part["shared"].update(buffers=["array", 0, "O", [1]]), "no place of buffers/0|has dtype 'O'"),
    (lambda part: part["shared"].pop("model"), "rank-0 has no model"),
    (lambda part: part["shared"].update(optimizer=["dict", []]), "it has no 'class'"),
    (lambda part: part["own"].update(compression=["value", None]), "it is null, wanted an object"),
    (lambda part: part["own"].update(generators=["list", []]), "generators is malformed"),
    (lambda part: part["indexes"]["shared"]["tensors"].pop("model/0"), "no place of model/0"),
    (lambda part: entry(part).update(length=2**62), "bytes of tensors in"),
    (
        lambda part: part["indexes"]["shared"]["tensors"].update({str(i): entry(part) for i in range(99)}),
        "of tensors in",
    ),
    (lambda part: entry(part).update(offset=2**62), "beyond the file's end"),
    (lambda part: entry(part).update(length=10), "is damaged, or holds more"),
    (lambda part: entry(part).update(shape=[2**40]), "not of the shape and dtype"),
    (lambda part: entry(part).update(dtype="float64"), "not of the shape and dtype"),
    (lambda part: entry(part).update(file="elsewhere"), "no checksum of the file"),
]


@pytest.mark.timeout(120)
def test_a_part_that_says_something_else(two: Path, run: Training, caplog: pytest.LogCaptureFixture) -> None:
    """Its checksum is right: whoever made it up has made that, too."""
    shutil.copytree(two / "checkpoint-00000002", two / "kept")
    for change, says in PARTS:
        caplog.clear()
        with_part(two, change)
        assert load_step(two, run) == 1, says
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert re.search(says, record.getMessage()), record.getMessage()
        assert str(two / "checkpoint-00000002") in record.getMessage()
        shutil.rmtree(two / "checkpoint-00000002")
        shutil.copytree(two / "kept", two / "checkpoint-00000002")
    assert load_step(two, run) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        {"parts": []},
        {"format": 1, "parts": 5},
        {"format": 1, "parts": []},
        {"format": 1, "parts": [{"bytes": 1}]},
        {"format": 1, "parts": [{"bytes": "1", "blake2b": ""}]},
        {"format": [1], "parts": []},
        {"format": True, "parts": []},
    ],
)
def test_a_manifest_that_says_something_else(content: dict[str, Any], two: Path, run: Training) -> None:
    write_sealed(two / "checkpoint-00000002" / "manifest.json", content)
    assert load_step(two, run) == 1


@pytest.mark.timeout(60)
def test_what_is_no_file(two: Path, run: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in files_of(two):
        content = path.read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to(p)):
            caplog.clear()
            path.unlink()
            make(path)
            assert load_step(two, run) == 1, path
            assert str(path) in caplog.text
            os.rmdir(path) if path.is_dir() else path.unlink()
            path.write_bytes(content)
    pycomm.save(two, run.reducer, keep=9, **run.more).wait()
    os.replace(two / "checkpoint-00000003", two / "kept")
    os.mkfifo(two / "checkpoint-00000003")
    assert load_step(two, run) == 2


@pytest.mark.timeout(60)
def test_what_is_no_directory_is_removed_as_it_is(two: Path, run: Training, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    for name in (".writing-1", ".removing-1", "checkpoint-00000000"):
        (two / name).symlink_to(elsewhere)
    os.mkfifo(two / ".writing-2")
    pycomm.save(two, run.reducer, keep=1, **run.more).wait(30)
    assert [path.name for path in two.iterdir()] == ["checkpoint-00000003"]
    assert (elsewhere / "file").exists()


@pytest.mark.timeout(60)
def test_old_ones_are_removed_although_one_is_no_checkpoint(two: Path, run: Training) -> None:
    """What looks through them is the thread that writes."""
    manifest = two / "checkpoint-00000002" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    pycomm.save(two, run.reducer, keep=2, **run.more).wait(30)
    assert sorted(path.name[-1] for path in two.iterdir()) == ["1", "2", "3"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state["state"].update(pos=10**6), "numpy's generator is at"),
        (lambda state: state["state"].update(pos="1"), "numpy's generator is at"),
        (lambda state: state["state"].update(key=np.zeros(3, np.uint32)), "malformed"),
        (lambda state: state["state"].pop("key"), "malformed"),
    ],
)
def test_generators_that_would_read_beyond_their_memory(change: Callable[[Any], Any], says: str) -> None:
    state = generators_state(torch.device("cpu"))
    check_generators(state)
    change(state["numpy"])
    with pytest.raises(DamagedError, match=says):
        check_generators(state)


class Plain:
    """Object whose state is taken as it comes."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.a = state["b"]


@pytest.mark.behavior(
    "Checkpoints",
    "`what was loaded before the error could not be taken back: ...`",
    "Create the objects again before you continue.",
)
@pytest.mark.timeout(60)
def test_an_object_that_does_not_take_its_state_is_named(
    one_rank_group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training("sgd", "dense") as run:
        pycomm.save(tmp_path, run.reducer, mine=Plain()).wait()
        before = run.digest()
        with pytest.raises(ValueError, match="mine rejects the saved state: KeyError: 'b'"):
            pycomm.load(tmp_path, run.reducer, mine=Plain())
        assert run.digest() == before
        assert "could not be taken back: KeyError" in caplog.text  # as it does not take its own state either
