"""pycomm plan model: the choice first, the table, the plan that is written, and mistakes in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycomm.parallel import Plan
from pycomm.tools.cli.main import main

MODEL = """
import torch
from torch import nn
print("the file speaks")
def make_model():
    print("so does the function")
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
def make_batch(samples):
    return torch.zeros(samples, 512)
def loss(output):
    return output.square().mean()
a_number = 3
def fails(): raise RuntimeError("on purpose")
def no_model(): return 3
"""
SPEED = ("--flops", "1T", "--memory-bandwidth", "100G")
USUAL = ("--batch", "16", "--devices", "4", "--memory", "1GB")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def plan(model: str, *arguments: str) -> int:
    return main(["plan", "model", model, *arguments])


def test_the_choice_comes_first_and_is_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "plan.json"
    arguments = [
        *USUAL,
        "--batch",
        "65536",
        *SPEED,
        "--network",
        "infiniband-400g",
        "--optimizer",
        "sgd",
        "--write",
        str(written),
    ]
    assert plan(f"{file}:make_model", *arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("chosen: dp=4")
    assert "the file speaks" in printed.err
    assert "device: 1000 GFLOP/s, 100 GB/s of memory, as given; network infiniband-400g" in printed.out
    for mesh in ("dp=4", "dp=2, tp=2", "pp=2, dp=2"):
        assert re.search(rf"^  {mesh}.*  \d", printed.out, re.MULTILINE), f"{mesh} is not ranked"
    assert re.search(r"^  pp=4 +1   the model has 3 layers", printed.out, re.MULTILINE)
    assert Plan.load(written).mesh == {"dp": 4}


def test_this_machine_is_measured(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{file}:make_model", "--batch", "2", "--devices", "1", "--memory", "1GB", "--input", "512") == 0
    out = capsys.readouterr().out
    assert out.startswith("chosen: one device\n")
    assert "measured here (give --flops for other devices)" in out


def test_nothing_fits(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "plan.json"
    arguments = ["--batch", "16", "--devices", "2", "--memory", "1MB", *SPEED, "--write", str(written)]
    assert plan(f"{file}:make_model", *arguments) == 1
    out = capsys.readouterr().out
    assert out.startswith("chosen: nothing, as the model does not fit on 2 x 1 MB: ")
    assert re.search(r"^  tp=2 +\d+   does not fit: requires at least [\d.]+ MB per device$", out, re.MULTILINE)
    assert not written.exists()


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("{file}", USUAL, "wanted FILE.py:FUNCTION"),
        ("nowhere.py:make_model", USUAL, "names the file nowhere.py, which is not there"),
        ("{file}:make", USUAL, "model.py has no make\n"),
        ("{file}:a_number", USUAL, "a_number in"),
        ("{file}:fails", USUAL, "make_model() failed: RuntimeError: on purpose"),
        ("{file}:no_model", USUAL, "what make_model() returns is a int, wanted a Module"),
        ("{file}:make_model", (*USUAL, "--input", "3x"), "--input has '3x', wanted the shape of one sample"),
        ("{file}:make_model", (*USUAL, "--input", "3:int1024"), "--input has '3:int1024'"),
        ("{file}:make_model", (*USUAL, "--input", "0x3"), "--input has '0x3', wanted up to 8 sizes from 1"),
        ("{file}:make_model", (*USUAL, "--input", "7"), "the model cannot be traced without values"),
        ("{file}:make_model", (*USUAL, "--optimizer", "magic"), "optimizer is 'magic'"),
        ("{file}:make_model", (*USUAL, "--network", "pigeon"), "network is 'pigeon'"),
        ("{file}:make_model", (*USUAL, "--write", "/nowhere/plan.json"), "/nowhere/plan.json"),
    ],
)
def test_what_is_refused(
    name: str, arguments: tuple[str, ...], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(name.format(file=file), *SPEED, *arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert [line for line in error.splitlines() if line.startswith("pycomm plan: ")] == [error.splitlines()[-1]]


def test_files_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    for content, says in (
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
        ("def make_model(:", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit"),
        ("def make_model(): pass", "has no make_batch(samples), and --input is missing"),
    ):
        path.write_text(content)
        assert plan(f"{path}:make_model", *USUAL, *SPEED) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (USUAL[2:], "required: --batch"),
        (USUAL[:2] + USUAL[4:], "required: --devices"),
        (USUAL[:4], "required: --memory"),
        ((*USUAL, "--flops", "0"), "'0', wanted a number above 0"),
        ((*USUAL, "--flops", "fast"), "'fast', wanted a number above 0"),
        ((*USUAL, "--batch", "0"), "--batch: 0, wanted at least 1"),
        ((*USUAL, "--cores", "0"), "--cores: 0, wanted at least 1"),
        ((*USUAL, "--points", "1:100"), "--points is an option of pycomm plan scaling"),
    ],
)
def test_arguments_that_are_wrong(
    arguments: tuple[str, ...], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(f"{file}:make_model", *arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_times_that_add_up_are_not_subtracted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One device averages nothing: 0 us, and not what subtraction leaves of two times that are nearly equal."""
    arguments = ["--batch", "16", "--devices", "1", "--memory", "1GB", "--flops", "1T", "--memory-bandwidth", "90G"]
    assert plan(f"{file}:make_model", *arguments) == 0
    assert re.search(r"^  averaging  0 us$", capsys.readouterr().out, re.MULTILINE)
