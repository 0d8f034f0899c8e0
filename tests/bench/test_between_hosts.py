"""bench.between_hosts: one small run of it between namespaces, where root may make them, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.between_hosts.command import Measured, main
from bench.between_hosts.floor import WAYS, CompilerError, compile_floor
from bench.harness.timing import Samples
from bench.slow_network.namespaces import available

ROOT = Path(__file__).parents[2]


@pytest.fixture
def namespaces_work() -> None:
    """Skips where they cannot be made, which takes trying."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("namespaces_work")
@pytest.mark.timeout(180)
def test_a_small_run(tmp_path: Path) -> None:
    try:
        compile_floor(tmp_path)
    except CompilerError as error:
        pytest.skip(str(error))
    report = tmp_path / "report.json"
    words = ["--hosts", "2", "--sizes", "1K,64K", "--repeats", "2", "--timeout", "130", "--output", str(report)]
    command = [sys.executable, "-m", "bench.between_hosts", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=150)
    finally:
        process.terminate()  # in order, if it is still there
        process.communicate(timeout=15)
    assert process.returncode == 0, output + errors
    assert "2 hosts, unlimited, 2 turns" in output
    assert "congestion control: reno; sums verified" in output
    for size in ("1 KB", "64 KB"):
        assert all(f"{size:<8}{name}" in output for name in ("pycomm", "gloo", "torch", "floor, "))
    assert not list(Path("/run/netns").glob(f"pycomm-{process.pid}-*"))
    found = json.loads(report.read_text())
    assert found["bench"] == "between_hosts"
    assert found["conditions"]["kernel"] == os.uname().release
    (cell,) = found["results"]
    assert (cell["hosts"], cell["link_gbit"], cell["congestion_control"]) == (2, None, "reno")
    assert [row["bytes"] for row in cell["all_reduce"]] == [1024, 65536]
    for row in cell["all_reduce"]:
        assert set(row["seconds_per_call"]) == {"pycomm", "gloo", "torch", *(way.label for way in WAYS)}
        assert set(row["ratios"]) == {"pycomm/floor", "gloo/pycomm", "torch/pycomm"}
        for seconds in row["seconds_per_call"].values():
            assert len(seconds["samples"]) == 2
            assert min(seconds["samples"]) > 0


class TestMeasured:
    def test_floor_is_the_fastest_way(self) -> None:
        seconds = {"pycomm": [6.0, 6.0], WAYS[0].label: [3.0, 3.0], WAYS[1].label: [1.0, 3.0]}
        measured = Measured(1024, 1, {name: Samples.of(each) for name, each in seconds.items()})
        assert measured.floor == WAYS[1].label
        assert measured.ratio("pycomm", measured.floor) == 3.0
        assert measured.as_json()["ratios"] == {"pycomm/floor": 3.0}

    def test_without_a_floor(self) -> None:
        measured = Measured(1024, 1, {"pycomm": Samples.of([2.0]), "gloo": Samples.of([5.0])})
        assert measured.floor is None
        assert measured.ratio("pycomm", measured.floor) is None
        assert measured.as_json()["ratios"] == {"gloo/pycomm": 2.5}


class TestCompiler:
    def test_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(CompilerError, match="needs a C.. compiler"):
            compile_floor(tmp_path)

    @pytest.mark.parametrize(("compiler", "says"), [("false", r"^false -std"), ("no/such", "No such file")])
    def test_it_fails(self, compiler: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(CompilerError, match=says):
            compile_floor(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "1"], "1, wanted 2 to 16 hosts"),
        (["--links", "-1"], "-1, wanted 0.0001 to 1000 Gbit/s, or 0"),
        (["--links", "nan"], "nan, wanted 0.0001 to 1000 Gbit/s, or 0"),
        (["--peers", "nccl"], "no peer 'nccl', wanted any of floor, gloo, torch"),
        (["--repeats", "0"], "0, wanted at least 1"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err
