"""Older forms of ``pycomm plan`` go on working; no form replaces a file that is named, unless it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycomm.tools.cli.main import main
from pycomm.tools.cli.plan.command import modernized

LAYERS = ["--devices", "2", "--memory", "10GB"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--ranks 8 --no-plot", "ranks --ranks 8"),
        ("--ranks 8", "ranks --plot pycomm_plan.png --force --ranks 8"),
        ("--ranks 8 --plot x.png --bytes 1MB", "ranks --plot x.png --ranks 8 --bytes 1MB"),
        ("--compression --ranks 4 --network x.json", "compression --ranks 4 --network x.json"),
        ("--ranks 4 --comp --bytes 1MB", "compression --ranks 4 --bytes 1MB"),
        ("--calibrate --ranks 2 --output x.json", "calibrate --ranks 2 --output x.json"),
        ("--layers 1GB,2GB --devices 2", "layers --devices 2 -- 1GB,2GB"),
        ("--devices 2 --layers=1GB", "layers --devices 2 -- 1GB"),
        ("--model net.py:make --batch 4", "model --batch 4 -- net.py:make"),
        ("--scaling --step 5ms --no-plot", "scaling --step 5ms"),
        ("--scaling --points 1:9,2:17", "scaling --plot pycomm_plan.png --force --points 1:9,2:17"),
        ("--layers 1GB --plot x.png", "layers -- 1GB"),  # which drew nothing
        ("layers 1GB --devices 2", "layers 1GB --devices 2"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_what_was_an_option_is_a_command(old: str, new: str) -> None:
    assert modernized(old.split()) == new.split()


def test_both_forms_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "layers", "16GB,2GB", *LAYERS]) == 0
    today = capsys.readouterr().out
    assert main(["plan", "--layers", "16GB,2GB", *LAYERS]) == 0
    assert capsys.readouterr().out == today
    assert today.startswith("chosen: ")


def test_a_picture_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "pycomm_plan.png"
    picture.write_text("mine")
    for command in (["--ranks", "2", "--plot", picture.name], ["ranks", "--ranks", "2", "--plot", picture.name]):
        assert main(["plan", *command]) == 1
        out, err = capsys.readouterr()
        assert "fastest, by size" in out
        assert err == (
            "pycomm plan: no plot: pycomm_plan.png is there already: "
            "give another name with --plot, or --force to replace it\n"
        )
        assert picture.read_text() == "mine"
    assert main(["plan", "ranks", "--ranks", "2", "--plot", picture.name, "--force"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.write_text("drawn by the same command before")
    assert main(["plan", "--ranks", "2"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "ranks", "--ranks", "2"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [picture.name]


def test_a_plan_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "plan.json"
    written.write_text("mine")
    arguments = ["no_such_file.py:make", "--batch", "4", *LAYERS, "--write", str(written)]
    assert main(["plan", "model", *arguments]) == 2  # before anything is made
    assert "plan.json is there already: give another name with --write, or --force" in capsys.readouterr().err
    assert main(["plan", "model", *arguments, "--force"]) == 2
    assert "no_such_file.py, which is not there" in capsys.readouterr().err
    assert written.read_text() == "mine"


def test_an_option_without_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model", "x.py:f", "--batch", "4", *LAYERS, "--memory-bandwidth", "900G"]) == 2
    assert "--memory-bandwidth requires --flops" in capsys.readouterr().err
