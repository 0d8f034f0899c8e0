"""pycomm trace: a picture of one step of a script, and the same for chrome://tracing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pycomm.tools.cli.main import main

pytest.importorskip("matplotlib")
from pycomm.tools.cli.trace import timeline

SCRIPT = """
import sys, torch, torch.distributed as dist, pycomm
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pycomm.attach(optimizer, model)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def trace(*arguments: object) -> int:
    return main(["trace", *map(str, arguments)])


def test_a_script_is_run_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert trace("--ranks", 2, "--step", 3, "-o", tmp_path / "step", script, 4) == 0
    out = capsys.readouterr().out
    assert "rank 0: " in out
    assert "rank 1: " in out
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"forward", "backward", "wait", "unpack", "optimizer.step", "bucket 1"} <= {span["name"] for span in spans}
    assert all(span["dur"] >= 0 for span in spans)


LOADER = """
import time, torch, torch.distributed as dist, pycomm
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
reducer = pycomm.attach(optimizer, model, accumulate=2)
for _ in range(3):
    with torch.no_grad():
        model(torch.randn(4, 64))  # an evaluation
    time.sleep(0.3)
    optimizer.zero_grad()
    for k in range(2):
        time.sleep(0.2 * k)
        model(torch.randn(4, 64)).sum().backward()
    time.sleep(0.1)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_time_between_steps_has_a_name_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    assert trace("--ranks", 2, "--step", 2, "-o", tmp_path / "step", script) == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["cat"] == "training" and event["pid"] == 0]
    names = [event["name"] for event in spans if event["name"] not in ("wait", "unpack")]
    passes = ["between steps", "forward", "backward", "between passes", "forward", "backward"]
    assert names == [*passes, "before step", "optimizer.step"]
    slept = {"between steps": 0.3, "between passes": 0.2, "before step": 0.1}
    for event in spans:
        if event["name"] in slept:
            assert event["dur"] >= 1e6 * slept[event["name"]]
    inside = sum(event["dur"] for event in spans if event["name"] == "forward")
    assert inside < 1e6 * sum(slept.values())  # none of the sleeps is in it; two forwards of a small layer are
    assert set(names) <= set(timeline._COLORS)


def test_a_script_that_ends_too_early_or_badly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{SCRIPT}\nsys.exit(int(sys.argv[2]))")
    assert trace("-o", tmp_path / "step", "--ranks", 1, script, 1, 0) == 1
    assert "no rank reached step 10" in capfd.readouterr().err
    out = tmp_path / "new" / "step"
    assert trace("-o", out, "--ranks", 2, "--step", 2, script, 3, 3) == 1  # after the step
    assert "the script ended with exit code 1" in capfd.readouterr().err
    assert out.with_suffix(".png").exists()
    assert trace("-o", ".", script, 3, 0) == 2  # before it is run
    (tmp_path / "file").touch()
    assert trace("-o", tmp_path / "file" / "step", script, 3, 0) == 2
    assert "cannot write to" in capfd.readouterr().err


def test_every_optimizer_of_a_rank_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = {"lane": "training", "name": "backward", "began": 1.0, "ended": 1.5}
    content = {"rank": 0, "size": 1, "step": 7, "spans": [span]}
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps({**content, "optimizer": 1}))
    (folder / "rank0-2.json").write_text(json.dumps({**content, "optimizer": 2}))
    assert trace("-o", tmp_path / "out", folder) == 0
    assert capsys.readouterr().out.startswith("rank 0: backward 500 ms\nrank 0, optimizer 2: backward 500 ms\n")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 2


def test_files_that_ranks_have_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = {"lane": "training", "name": "backward", "began": 1.0, "ended": 1.5}
    content = {"rank": 0, "size": 2, "step": 7, "spans": [span]}
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank0.json").write_text(json.dumps(content))
    (folder / "rank1.json").write_text(json.dumps({**content, "rank": 1}))
    assert trace("-o", tmp_path / "out", folder) == 0
    assert capsys.readouterr().out.startswith("rank 0: backward 500 ms\nrank 1: backward 500 ms\n")
    for name in ("x.png", "y.json"):
        assert trace("-o", tmp_path / name, folder) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"x.png", "x.json", "y.png", "y.json"}
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".png.png", ".json.json"))]
    (folder / "rank1.json").write_text(json.dumps({**content, "rank": 1, "step": 8}))
    assert trace("-o", tmp_path / "out", folder) == 2
    assert "of different steps: 7, 8" in capsys.readouterr().err
    (folder / "rank1.json").write_text("{}")
    assert trace("-o", tmp_path / "out", folder) == 2
    assert "is not a trace that pycomm has written" in capsys.readouterr().err
    assert trace(tmp_path / "nothing.py") == 2
    assert "there is no" in capsys.readouterr().err


SPAN = {"lane": "training", "name": "backward", "began": 1.0, "ended": 1.5}
CONTENT = {"rank": 0, "size": 1, "step": 7, "spans": [SPAN]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("change", "span", "says"),
    [
        ({"spans": []}, {}, "it has no spans"),
        ({"rank": "0"}, {}, 'rank is "0", wanted an integer'),
        ({"step": 2**40}, {}, "step is 1099511627776, wanted an integer"),
        ({}, {"lane": "elsewhere"}, 'lane is "elsewhere", wanted "training" or'),
        ({}, {"began": None}, "began is null, wanted a finite number"),
        ({}, {"ended": 1e300}, r"ended is 1e\+300, wanted a finite number"),
        ({}, {"ended": 0.5}, "a span ends before it begins"),
    ],
)
def test_traces_with_a_wrong_value(
    change: dict[str, Any], span: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps({**CONTENT, "spans": [{**SPAN, **span}], **change}))
    assert trace("-o", tmp_path / "out", tmp_path) == 2
    assert re.search(f"rank0.json is not a trace that pycomm has written: .*{says}", capsys.readouterr().err)


@pytest.mark.timeout(180)
def test_names_of_spans_are_no_formulas_and_no_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = r"$\frac{$ \U0001f600" + "\x1b]0;owned\x07" + "x" * 100_000
    spans = [{**SPAN, "lane": lane, "name": evil} for lane in ("training", "communication", "wire")]
    (tmp_path / "rank0.json").write_text(json.dumps({**CONTENT, "spans": spans}))
    assert trace("-o", tmp_path / "out", tmp_path) == 0
    assert "\x1b" not in capsys.readouterr().out
    os.mkfifo(tmp_path / "rank1.json")
    assert trace("-o", tmp_path / "out", tmp_path) == 2
    assert "rank1.json is a FIFO" in capsys.readouterr().err
