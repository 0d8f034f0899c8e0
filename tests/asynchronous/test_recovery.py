"""What a server finds in its folder is checked; for a damaged checkpoint the one before is taken."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pycomm.training.asynchronous import server_checkpoint
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint
from pycomm.training.asynchronous.settings import Trace
from pycomm.training.checkpoint.torch_files import load_values
from tests.asynchronous.cores import MODES, SIZE, begun, core_of, files_in, restored


def in_its_place(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


DAMAGES: list[Callable[[Path], Any]] = [
    lambda path: path.write_bytes(path.read_bytes()[:100]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes().replace(b"optimizer", b"optimizes")),
    lambda path: path.unlink(),
    lambda path: in_its_place(path, os.mkfifo),
    lambda path: in_its_place(path, os.mkdir),
    lambda path: in_its_place(path, lambda p: p.symlink_to(p)),
    lambda path: torch.save([], path),
    lambda path: torch.save({**torch.load(path, weights_only=True), "lives": {1: 1}}, path),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES)
def test_a_restarted_server_has_the_last_state(mode: str, tmp_path: Path) -> None:
    states = begun(mode, tmp_path)
    core = restored(mode, tmp_path)
    assert str(core.state()) == states[1]
    assert core.mode.workers == {1, 2}
    assert core.join(1, "life 1", acknowledged=2) == 0
    assert core.join(2, "life 2", acknowledged=5) == 4
    assert core.join(3, "another life", acknowledged=7) == 7
    assert core.counts["lost"] == 11
    core.push(2, 5, 1.0, torch.ones(SIZE, dtype=torch.float64))
    assert core.counts["duplicates"] == 1, "it was acknowledged"
    updates = core.shard.num_updates
    for number in range(8, 11):  # workers go on
        for worker in (1, 2, 3):
            core.pull(worker)
            core.push(worker, number, 1.0, torch.ones(SIZE, dtype=torch.float64))
    assert core.shard.num_updates > updates


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "`... cannot be used: ...`",
    "A file of the server is damaged; it loads the previous checkpoint.",
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES)
def test_the_checkpoint_before_is_taken(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, _ = begun(mode, tmp_path / "whole")
    assert files_in(tmp_path / "whole") == ["checkpoint-1.pt", "checkpoint-2.pt"]
    for damage in DAMAGES:
        caplog.clear()
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "checkpoint-2.pt")
        was_removed = "checkpoint-2.pt" not in files_in(folder)
        core = core_of(mode)
        checkpoint = ServerCheckpoint(folder, core.state_spec())
        checkpoint.load(core)
        assert str(core.state()) == before
        assert was_removed or f"{folder / 'checkpoint-2.pt'} cannot be used" in caplog.text
        checkpoint.write(core)  # keeps what it was made of
        last = f"checkpoint-{2 if was_removed else 3}.pt"
        assert {"checkpoint-1.pt", last} <= set(files_in(folder))
        assert str(restored(mode, folder).state()) == before
        shutil.rmtree(folder)


@pytest.mark.timeout(60)
def test_without_a_usable_checkpoint_it_does_not_begin(tmp_path: Path) -> None:
    begun("async", tmp_path)
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}.pt").write_bytes(b"")
    with pytest.raises(
        ValueError, match=f"no checkpoint in {tmp_path} can be used: .*checkpoint-2.pt.*checkpoint-1.pt"
    ):
        restored("async", tmp_path)


@pytest.mark.timeout(60)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    core = core_of("ssp", "mode=ssp")
    ServerCheckpoint(tmp_path, core.state_spec()).write(core)
    with pytest.raises(ValueError, match="of a server with mode=ssp, this one has mode=sync"):
        ServerCheckpoint(tmp_path, core_of("sync", "mode=sync").state_spec())
    ServerCheckpoint(tmp_path, core.state_spec()).load(core)


@pytest.mark.timeout(60)
def test_stray_files_are_left_alone(tmp_path: Path) -> None:
    _, last = begun("async", tmp_path)
    strays = ["checkpoint-old.pt", "checkpoint-02.pt", "checkpoint-3.pt.bak", "checkpoint-.pt", "notes"]
    for name in strays:
        (tmp_path / name).write_bytes(b"x")
    core = core_of("async")
    checkpoint = ServerCheckpoint(tmp_path, core.state_spec())
    checkpoint.load(core)
    assert str(core.state()) == last
    for _ in range(3):
        checkpoint.write(core)
    assert set(files_in(tmp_path)) == {*strays, "checkpoint-4.pt", "checkpoint-5.pt"}


@pytest.mark.timeout(60)
def test_a_checkpoint_is_due_after_a_while_and_when_workers_come_or_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of("async")
    checkpoint = ServerCheckpoint(tmp_path, core.state_spec())
    checkpoint.write(core)
    assert not checkpoint.is_due(core)
    core.join(1, "a")
    assert checkpoint.is_due(core)
    checkpoint.write(core)
    core.pull(1)
    core.push(1, 1, 1.0, torch.ones(SIZE, dtype=torch.float64))
    assert not checkpoint.is_due(core)
    monkeypatch.setattr(server_checkpoint, "_EVERY", 0.1)
    time.sleep(0.1)
    assert checkpoint.is_due(core)
    checkpoint.write(core)
    core.leave(1)
    assert checkpoint.is_due(core)


STATES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: state.pop("last"), "it has no 'last'"),
    (lambda state: state.update(last=[1]), "last is a list, wanted an object"),
    (lambda state: state.update(last={1: "1"}), 'last\\[1\\] is "1", wanted an integer'),
    (lambda state: state.update(last={7: 1}), "does not know the last push"),
    (lambda state: state.update(pulled={"1": 1}), 'a key of pulled is "1", wanted an integer'),
    (lambda state: state["mode"].pop("clocks"), "its mode has"),
    (lambda state: state["mode"].update(clocks={}), "a worker has no clock"),
    (lambda state: state["mode"].update(collected=3), "gradients that were collected are missing"),
    (lambda state: state["shard"].update(sum=torch.ones(3)), "a tensor that does not fit the shard"),
    (lambda state: state["shard"].update(collected=[1]), "a list of 1, wanted one of 4"),
    (lambda state: state["shard"].update(updates=-1), "updates is -1"),
    (lambda state: state["compensator"].update(then={1: 5}), "wanted Tensor"),
]


@pytest.mark.timeout(60)
def test_states_that_nobody_has_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, _ = begun("ssp", tmp_path)
    path = tmp_path / "checkpoint-2.pt"
    whole = path.read_bytes()
    for change, says in STATES:
        path.write_bytes(whole)
        state = load_values(path)
        change(state)
        with pytest.raises(ValueError, match=f"the state.*{says}"):
            core_of("ssp").load_state(state)
        torch.save(state, path)
        caplog.clear()
        assert str(restored("ssp", tmp_path).state()) == before
        assert re.search(f"{path} cannot be used: .*{says}", caplog.text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda shard: shard.update(memory=torch.zeros(9, dtype=torch.float64)),
            "9 elements of torch.float64",
        ),
        (lambda shard: shard.update(memory=torch.zeros(SIZE)), "8 elements of torch.float32, and this shard 8 of"),
        (lambda shard: shard["optimizer"]["param_groups"][0].update(params=[0]), r"groups of \[1\] parameters, this"),
        (lambda shard: shard["schedules"].append([{}, 1]), "has 1 schedules, this server 0"),
        (lambda shard: shard["optimizer"].update(state=5), "the optimizer rejects the saved state"),
    ],
)
def test_another_model_is_not_taken_for_damage(change: Callable[[Any], Any], says: str, tmp_path: Path) -> None:
    begun("async", tmp_path)
    path = tmp_path / "checkpoint-2.pt"
    state = load_values(path)
    change(state["shard"])
    torch.save(state, path)
    with pytest.raises(ValueError, match=f"{path}: .*{says}"):
        restored("async", tmp_path)


@pytest.mark.timeout(60)
def test_nothing_is_waited_for(tmp_path: Path) -> None:
    begun("async", tmp_path)
    os.mkfifo(tmp_path / "unfinished")
    restored("async", tmp_path)
    for number in (1, 2):
        in_its_place(tmp_path / f"checkpoint-{number}.pt", os.mkfifo)
    with pytest.raises(ValueError, match="checkpoint-1.pt is a FIFO, wanted a regular file"):
        restored("async", tmp_path)
    os.mkfifo(tmp_path / "trace.0")
    with pytest.raises((OSError, ValueError), match="trace.0"):
        Trace(tmp_path / "trace.0")


@pytest.mark.timeout(60)
def test_a_trace_stays_until_the_server_serves(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("of an earlier run")
    trace = Trace(path)
    assert path.read_text() == "of an earlier run"
    trace.begin()
    trace.write({"event": "leave", "worker": 1, "samples": 2})
    trace.close()
    assert path.read_text() == '{"event": "leave", "worker": 1}\n'
