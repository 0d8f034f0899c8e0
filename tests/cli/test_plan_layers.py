"""pycomm plan layers: what it prints first, why, and what it refuses."""

from __future__ import annotations

import pytest

from pycomm.tools.cli.main import main


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.parametrize(
    ("layers", "first", "why"),
    [
        ("16GB,2GB", "chosen: intra-operator split of layer 1", "nor does layer 1 alone, 16 GB"),
        ("16GB,1GB", "chosen: intra-operator split of layer 1", "nor does layer 1 alone, 16 GB"),
        ("10GB,10GB", "chosen: inter-operator, 2 stages", "but each single layer does"),
        ("4GB,4000MB", "chosen: data parallelism, 2 replicas", "8 GB, fit on one device"),
        ("7GB,7GB,6GB", "chosen: intra-operator split of layers 1 to 3", "not in stages of whole layers"),
    ],
)
def test_the_choice_comes_first(layers: str, first: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("layers", layers, "--devices", "2", "--memory", "10GB") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == first
    assert why in out
    assert f"{first.removeprefix('chosen: ')} " in out.split("all that was considered")[1]


def test_other_layouts_and_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    plan("layers", "10GB,10GB", "--devices", "2", "--memory", "10GB")
    considered = capsys.readouterr().out.split("all that was considered")[1]
    assert "20 GB   does not fit: 10 GB too much" in considered
    assert "10 GB   cuts layers over 2 devices where the choice cuts no layer" in considered


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("layers", "30GB,30GB", "--devices", "2", "--memory", "10GB") == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "chosen: nothing, as 60 GB do not fit on 2 x 10 GB: 40 GB too much"
    assert "Wanted 6 devices of 10 GB, or 2 of 30 GB." in out


def test_every_device_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    plan("layers", "30GB,2GB,2GB", "--devices", "4", "--memory", "10GB")
    out = capsys.readouterr().out
    assert "device 1: 1/4 of layer 1, layer 2 (9.5 GB)" in out
    assert "device 2: 1/4 of layer 1, layer 3 (9.5 GB)" in out
    assert "devices 3, 4: 1/4 of layer 1 (7.5 GB)" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layers", "16GB"], "required: --devices"),
        (["layers", "16GB", "--devices", "2"], "required: --memory"),
        (["layers", "16GB,0", "--devices", "2", "--memory", "10GB"], "'0', wanted a size above 0"),
        (["layers", "", "--devices", "2", "--memory", "10GB"], "'', wanted a size"),
        (["layers", "1GB,,2GB", "--devices", "2", "--memory", "10GB"], "'', wanted a size"),
        (["layers", "--devices", "2", "--memory", "10GB", "--", "-1GB"], "'-1GB', wanted a size"),
        (["layers", "1GB", "--devices", "2", "--memory", "nanGB"], "'nanGB', wanted a size"),
        (["layers", "1GB", "--devices", "0", "--memory", "1GB"], "--devices: 0, wanted at least 1"),
        (["layers", "1GB", "--devices", "two", "--memory", "1GB"], "--devices: invalid integer value: 'two'"),
        (["--layers", "1GB", "--devices", "2", "--memory", "1GB"], "invalid choice: '1GB'"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(*arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("layers", ",".join(["1MB"] * 257), "--devices", "2", "--memory", "1GB") == 2
    assert capsys.readouterr().err == "pycomm plan: there are 257 layers, wanted from 1 to 256\n"
    assert plan("layers", "1MB", "--devices", "1000000", "--memory", "1GB") == 2
    assert "devices is 1000000, wanted an integer from 1 to 65536" in capsys.readouterr().err
