"""``pycomm bench``, read as others read nccl-tests, on processes of its own and on those of a launcher."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench.running import COMMAND, TORCHRUN, bench
from tests.cli.bench.third_party import read_report, read_table
from tests.cli.processes import left_behind, ranks_of_session

pytestmark = pytest.mark.timeout(120)


def check_figures(rows: list[dict[str, Any]], factor: float) -> None:
    for row in rows:
        for place in (row, row["in_place"]):
            algbw = int(row["size"]) / float(place["time"]) / 1e3
            assert float(place["algbw"]) == pytest.approx(algbw, abs=0.006, rel=0.01)
            assert float(place["busbw"]) == pytest.approx(algbw * factor, abs=0.006, rel=0.01)
            assert place["#wrong"] == "0"


def test_table_and_report_of_an_all_reduce(tmp_path: Path) -> None:
    report_file = tmp_path / "out.json"
    sizes = ["-b", "1K", "-e", "100K", "-f", "8"]
    more = ["--backend", "gloo", "--peers", "communicator", "--ranks", "2", "-J", str(report_file)]
    code, printed, errors = bench("all_reduce", *sizes, *more, cwd=tmp_path)
    assert code == 0, errors
    rows = read_table(printed)
    assert [row["size"] for row in rows] == ["1024", "8192", "65536"]
    assert all((row["count"], row["type"]) == (str(int(row["size"]) // 4), "float") for row in rows)
    assert all((row["redop"], row["root"]) == ("sum", "-1") for row in rows)
    check_figures(rows, 1.0)
    busbw = [float(place["busbw"]) for row in rows for place in (row, row["in_place"])]
    (average,) = [line.split()[5] for line in printed.splitlines() if "Avg bus bandwidth" in line]  # as by awk
    assert float(average) == pytest.approx(sum(busbw) / len(busbw), abs=0.01)

    report = read_report(report_file)
    assert os.listdir(tmp_path) == ["out.json"]
    assert [str(line["size"]) for line in report["results"]] == [row["size"] for row in rows]
    for line, row in zip(report["results"], rows, strict=True):
        assert float(row["time"]) == pytest.approx(line["out_of_place"]["time"], rel=0.01)
        assert float(row["in_place"]["time"]) == pytest.approx(line["in_place"]["time"], rel=0.01)
        for place in ("out_of_place", "in_place"):
            check_comparison(line[place])
    assert report["config"]["step_factor"] == 8
    assert report["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert report["average_bus_bandwidth"]["okay"] == "unchecked"


def check_comparison(place: dict[str, Any]) -> None:
    """What nccl-tests does not have fits together."""
    peer = place["peers"]["communicator"]
    assert len(place["samples"]) == len(peer["samples"]) == 5
    assert place["p10"] <= place["time"] <= place["p90"]
    assert peer["times_longer"] == pytest.approx(peer["time"] / place["time"])
    assert place["fraction_of_floor"] == pytest.approx(place["floor"] / place["time"])
    assert place["floor"] > 0
    assert peer["nwrong"] == place["nwrong"] == 0


@pytest.mark.slow
def test_under_torchrun_it_starts_nothing(tmp_path: Path) -> None:
    arguments = ["all_reduce", "-b", "4K", "--peers", "gloo,communicator", "-J", "x.json"]
    code, printed, errors = bench(*arguments, cwd=tmp_path, launcher=TORCHRUN)
    assert code == 0, errors
    check_figures(read_table(printed), 1.0)  # printed once
    report = read_report(tmp_path / "x.json")
    assert report["config"]["ranks"] == 2
    assert len({device["pid"] for device in report["config"]["devices"]}) == 2
    assert set(report["results"][0]["in_place"]["peers"]) == {"gloo", "communicator"}
    assert report["config"]["backend"] == "pycomm"


WRONG = """
import torch.distributed as dist
right = dist.all_reduce
def all_reduce(tensor, *arguments, **options):
    right(tensor, *arguments, **options)
    if dist.get_rank() == 1 and tensor.numel() > 100:
        tensor[:3] += 1
dist.all_reduce = all_reduce
"""


def test_wrong_results_are_counted_and_end_in_7(tmp_path: Path) -> None:
    """torch's all_reduce is made wrong on one rank, before anybody imports it from there."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WRONG)
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    arguments, variables = ["all_reduce", "-b", "256", "-e", "1K", "-f", "4"], {"PYTHONPATH": search}
    peer = ["--backend", "communicator", "--peers", "gloo"]
    code, printed, errors = bench(*arguments, *peer, cwd=tmp_path, variables=variables)
    assert (code, printed.count(" us (3 wrong)") + printed.count(" ms (3 wrong)")) == (0, 2), errors
    code, printed, errors = bench(*arguments, "--backend", "gloo", "-J", "x.json", cwd=tmp_path, variables=variables)
    assert code == 7, errors
    small, large = read_table(printed)
    assert (small["#wrong"], small["in_place"]["#wrong"]) == ("0", "0")
    assert (large["#wrong"], large["in_place"]["#wrong"]) == ("3", "3")
    assert "# Out of bounds values : 2 FAILED" in printed
    assert read_report(tmp_path / "x.json")["out_of_bounds"] == {"count": 2, "okay": "false"}


@contextlib.contextmanager
def measuring(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a long bench and wait for its table. Nothing may be left of it afterwards."""
    command = [*COMMAND, "all_reduce", "-b", "1M", "-e", "64M", "-d", "all", *arguments]
    process = subprocess.Popen(command, cwd=cwd, stdout=-1, stderr=-1, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        while "#wrong" not in process.stdout.readline():
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        left = left_behind(process.pid, 30.0)
    assert left == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with measuring("--backend", "gloo", "-J", "x.json", cwd=tmp_path) as process:
        assert len(ranks_of_session(process.pid)) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the ranks get it, too
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "pycomm: interrupted\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error(tmp_path: Path) -> None:
    with measuring("--backend", "communicator", cwd=tmp_path) as process:
        os.kill(ranks_of_session(process.pid)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.match("pycomm bench: rank 1 was killed by SIGKILL", errors, re.DOTALL), errors
