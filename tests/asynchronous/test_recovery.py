"""What a server finds in its folder is checked before it happens; for a damaged checkpoint the one before is taken."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pycomm.training.asynchronous.journal import Journal
from pycomm.training.asynchronous.settings import Replay, Trace
from pycomm.training.checkpoint.torch_files import load_values
from tests.asynchronous.stories import MODES, SIZE, Story, begun, core_of, files_in


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
def test_the_checkpoint_before_leads_to_the_same_state(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story = begun(mode, tmp_path / "whole")
    assert files_in(tmp_path / "whole") == ["checkpoint-1.pt", "checkpoint-2.pt", "journal-1", "journal-2"]
    for damage in DAMAGES:
        caplog.clear()
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "checkpoint-2.pt")
        core = core_of(mode)
        journal = Journal(folder, core)
        assert str(core.state()) == str(story.core.state())
        assert f"{folder / 'checkpoint-2.pt'} cannot be used" in caplog.text or not files_in(folder).count(
            "checkpoint-2.pt"
        )
        journal.checkpoint()  # keeps what it was made of
        journal.close()
        assert {"checkpoint-1.pt", "journal-1", "journal-2", "checkpoint-3.pt", "journal-3"} <= set(files_in(folder))
        core = core_of(mode)
        Journal(folder, core)
        assert str(core.state()) == str(story.core.state())
        shutil.rmtree(folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", MODES)
def test_also_where_a_server_has_begun_again(mode: str, tmp_path: Path) -> None:
    """With other workers, and after a journal that was cut short."""
    first = begun(mode, tmp_path)
    with open(tmp_path / "journal-2", "ab") as file:
        file.write(b"what was written when it died")
    again = Story(mode, tmp_path, workers={2, 5})
    assert again.core.shard.num_updates >= first.core.shard.num_updates
    assert again.core.mode.workers == {2, 5}
    again.add(event="join", worker=5, life="c")
    again.add(event="pull", worker=5, number=1)
    again.add(event="push", worker=5, number=1, samples=1.0)
    again.journal.close()
    assert files_in(tmp_path) == ["checkpoint-2.pt", "checkpoint-3.pt", "journal-2", "journal-3"]
    (tmp_path / "checkpoint-3.pt").write_bytes(b"")
    core = core_of(mode)
    Journal(tmp_path, core)
    assert str(core.state()) == str(again.core.state())


@pytest.mark.timeout(60)
def test_what_does_not_follow_is_refused(tmp_path: Path) -> None:
    begun("async", tmp_path / "whole")

    def refused(message: str, *damages: Callable[[Path], Any]) -> None:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        for damage in damages:
            damage(folder)
        with pytest.raises(ValueError, match=message) as caught:
            Journal(folder, core_of("async"))
        assert str(folder) in str(caught.value)
        shutil.rmtree(folder)

    def empty(name: str) -> Callable[[Path], Any]:
        return lambda folder: (folder / name).write_bytes(b"")

    def gone(name: str) -> Callable[[Path], Any]:
        return lambda folder: (folder / name).unlink()

    def cut(name: str) -> Callable[[Path], Any]:
        return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)

    last = empty("checkpoint-2.pt")
    refused("no checkpoint in .* can be used: .*checkpoint-2.pt.*checkpoint-1.pt", last, empty("checkpoint-1.pt"))
    refused("journal-2 goes on from a checkpoint that cannot be used", last, gone("journal-1"))
    refused("journal-2 at byte 0 does not go on where .*journal-1 ends, at byte .*checkpoint-2", last, cut("journal-1"))
    refused("journal-2 is damaged where it begins", last, empty("journal-2"))
    refused(
        "journal-1 goes on from a checkpoint .*checkpoint-1.pt is missing",
        gone("checkpoint-1.pt"),
        gone("checkpoint-2.pt"),
    )


@pytest.mark.timeout(60)
def test_stray_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    story = begun("async", tmp_path)
    strays = ["checkpoint-old.pt", "checkpoint-02.pt", "checkpoint-3.pt.bak", "checkpoint-.pt", "journal-x", "notes"]
    for name in strays:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "checkpoint-9.pt").write_bytes(b"x")  # has no journal, so that no server has made it
    (tmp_path / "journal-3").write_bytes(b"")  # of a server that died before it had made the checkpoint
    core = core_of("async")
    journal = Journal(tmp_path, core)
    assert str(core.state()) == str(story.core.state())
    assert "checkpoint-9.pt cannot be used" in caplog.text
    for _ in range(3):
        journal.checkpoint()
    journal.close()
    assert set(files_in(tmp_path)) == {
        *strays,
        "checkpoint-9.pt",
        *(f"checkpoint-{number}.pt" for number in (4, 5)),
        *(f"journal-{number}" for number in (4, 5)),
    }


def event(content: Any, data: bytes = b"", text: bytes = b"") -> bytes:
    text = text or json.dumps(content).encode()
    head = len(text).to_bytes(4, "little") + zlib.crc32(data, zlib.crc32(text)).to_bytes(4, "little")
    return head + len(data).to_bytes(8, "little") + text + data


PUSH = {"event": "push", "worker": 1, "number": 9, "samples": 1.0}
GRADIENT = bytes(SIZE * 8)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("written", "says"),
    [
        (event(None, text=b"[" * 50_000), "is nested too deeply"),
        (event([]), "it is a list, wanted an object"),
        (event({"event": "stop"}), 'event is "stop", wanted'),
        (event({**PUSH, "samples": None}, GRADIENT), "samples is null, wanted a finite number"),
        (event({**PUSH, "samples": -1}, GRADIENT), "samples is -1, wanted a finite number"),
        (event({"event": "push", "worker": 1, "number": 1}, GRADIENT), "it has no 'samples'"),
        (event({**PUSH, "worker": "1"}, GRADIENT), 'worker is "1", wanted an integer'),
        (event(PUSH, GRADIENT[1:]), "'push' with 63 bytes, wanted 64"),
        (event({"event": "pull", "worker": 1}, GRADIENT), "'pull' with 64 bytes, wanted 0"),
        (event({**PUSH, "worker": 7}, GRADIENT), "worker 7 has not joined"),
        (event({"event": "join", "worker": 1, "life": 5}), "life is 5, wanted a string"),
        (event({"event": "begin", "journal": 1, "bytes": 1, "left": [], "joined": []}), "a journal begins there"),
        (
            event({"event": "leave", "worker": 1}) + event(PUSH, GRADIENT),
            "this cannot have happened: KeyError",
        ),
    ],
)
def test_events_that_cannot_have_happened(written: bytes, says: str, tmp_path: Path) -> None:
    begun("ssp", tmp_path)
    size = (tmp_path / "journal-2").stat().st_size
    with open(tmp_path / "journal-2", "ab") as file:
        file.write(written)
    with pytest.raises(ValueError, match=f"{tmp_path}/journal-2 at byte [0-9]+.*{says}") as caught:
        Journal(tmp_path, core_of("ssp"))
    assert f"at byte {size}" in str(caught.value) or "KeyError" in says


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "written",
    [
        (5).to_bytes(4, "little") + bytes(4) + (1 << 62).to_bytes(8, "little") + b"hello",
        (1 << 31).to_bytes(4, "little") + bytes(12),
        event(PUSH, GRADIENT)[:-1] + b"x",
        bytes(100),
    ],
)
def test_what_the_checksum_refuses_is_the_end(written: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    story = begun("async", tmp_path)
    size = (tmp_path / "journal-2").stat().st_size
    with open(tmp_path / "journal-2", "ab") as file:
        file.write(written)
    core = core_of("async")
    Journal(tmp_path, core)
    assert str(core.state()) == str(story.core.state())
    assert f"journal-2 ends at byte {size} of {size + len(written)}" in caplog.text


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
    story = begun("ssp", tmp_path)
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
        core = core_of("ssp")
        Journal(tmp_path, core)
        assert str(core.state()) == str(story.core.state())
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
        (lambda shard: shard["optimizer"].update(state=5), "the optimizer does not take what was saved"),
    ],
)
def test_another_model_is_not_taken_for_damage(change: Callable[[Any], Any], says: str, tmp_path: Path) -> None:
    begun("async", tmp_path)
    path = tmp_path / "checkpoint-2.pt"
    state = load_values(path)
    change(state["shard"])
    torch.save(state, path)
    with pytest.raises(ValueError, match=f"{path}: .*{says}"):
        Journal(tmp_path, core_of("async"))


@pytest.mark.timeout(60)
def test_nothing_is_waited_for(tmp_path: Path) -> None:
    begun("async", tmp_path)
    os.mkfifo(tmp_path / "unfinished")
    journal = Journal(tmp_path, core_of("async"))
    journal.checkpoint()
    journal.close()
    (tmp_path / "journal-3").unlink()
    os.mkfifo(tmp_path / "journal-3")
    with pytest.raises(ValueError, match="journal-3 is a FIFO, wanted a regular file"):
        Journal(tmp_path, core_of("async"))
    os.mkfifo(tmp_path / "trace.0")
    with pytest.raises((OSError, ValueError), match="trace.0"):
        Trace(tmp_path / "trace.0")
    with pytest.raises(ValueError, match="trace.0"):
        Replay(tmp_path / "trace.0")


@pytest.mark.timeout(60)
def test_traces_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for line, says in (
        ("[" * 50_000, "line 2 is nested too deeply"),
        ("{}", "line 2 is malformed: it has no 'event'"),
        ('{"event": "join", "worker": 1}', 'line 2 is malformed: event is "join"'),
        ('{"event": "pull", "worker": -1}', "line 2 is malformed: worker is -1"),
    ):
        path.write_text(f'{{"event": "pull", "worker": 1, "number": 1}}\n{line}\n')
        with pytest.raises(ValueError, match=f"replay='{path}' is no trace: {says}"):
            Replay(path)
    path.write_text('{"event": "pull", "worker": 1, "number": 1, "more": []}\n')
    assert Replay(path).is_next({"event": "pull", "worker": 1, "number": 1, "samples": 3})


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
