"""pycomm plan scaling: the fits, the table, the picture, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pycomm import schedule
from pycomm.tools.cli.main import main

POINTS = "1:100,2:190,4:350"


def plan(*arguments: str) -> int:
    return main(["plan", "scaling", *arguments])


def test_measured_points_are_fitted_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "scaling.png"
    assert plan("--points", POINTS, "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    assert out.startswith("throughput T = S N e")
    assert re.search(r"^  amdahl +99.8 +s = 0.04729, ", out, re.MULTILINE)
    for devices, measured in ((1, "100"), (2, "190"), (4, "350")):
        assert re.search(rf"^  {devices} +{measured} ", out, re.MULTILINE)
    assert re.search(r"^  4096  ", out, re.MULTILINE)
    assert "Beyond 4 devices nothing was measured." in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_points_from_a_file_and_a_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    file.write_text(json.dumps([[1, 100], [2, 190], [3, 270]]))
    arguments = ["--points", str(file), "--network", "ethernet-10g", "--step", "200ms", "--devices", "16"]
    assert plan(*arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  network +\d+.* % exposed", out, re.MULTILINE)
    assert re.search(r"^  16  .* ms$", out, re.MULTILINE)
    assert not re.search(r"^  32  ", out, re.MULTILINE)


def test_a_calibrated_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its measured time decides where it was measured: 50 ms of communication beside 50 ms of computation."""
    link = schedule.Link(alpha=1e-6, beta=1e-9, gamma=0)
    curves = {"native": ((1e6, 0.05),)}
    file = tmp_path / "network.json"
    network = schedule.Network(
        name="here", within_host=link, between_hosts=link, per_host=2, measured=curves, measured_ranks=2
    )
    file.write_text(network.to_json())
    assert plan("--step", "50ms", "--bytes", "1MB", "--network", str(file), "--devices", "4") == 0
    out = capsys.readouterr().out
    assert re.search(r"^  2 +20 +20 +50.0 % +50 ms$", out, re.MULTILINE)


def test_two_points_tell_no_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--points", "1:100,4:300", "--devices", "8") == 0
    assert "Two points cannot tell these forms apart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--points of measured throughputs are missing, or --step"),
        (["--points", "1:100"], "there are 1 points"),
        (["--points", "1:100,2:0"], "throughput of 2 devices is 0"),
        (["--points", "1:100,2:-5"], "throughput of 2 devices is -5"),
        (["--points", "1:100,2:nan"], "throughput of 2 devices is nan"),
        (["--points", "1:100,0:5"], "number of devices is 0"),
        (["--points", "1:100,2:5,2:6"], "2 devices have throughputs 5.0 and 6.0, wanted one"),
        (["--points", "1:100,two:5"], "--points has 'two:5', wanted DEVICES:THROUGHPUT"),
        (["--points", "1:100,"], "--points has '', wanted DEVICES:THROUGHPUT"),
        (["--points", "nowhere.json"], "points file nowhere.json cannot be read"),
        (["--points", POINTS, "--devices", "5000"], "--devices is 5000, wanted at most 4096"),
        (["--points", POINTS, "--network", "pigeon"], "network is 'pigeon'"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--step", "0"], "'0', wanted a time above 0"),
        (["--step=-1ms"], "'-1ms', wanted a time"),
        (["--step", "soon"], "'soon', wanted a time"),
        (["--step", "1", "--overlap", "2"], "'2', wanted a number from 0 to 1"),
        (["--step", "1", "--overlap", "nan"], "'nan', wanted a number from 0 to 1"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
