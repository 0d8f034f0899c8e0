"""``pycomm demo`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pycomm.cli.main import main
from tests.cli.processes import left_behind, ranks_of_session

COMMAND = [sys.executable, "-m", "pycomm.cli.main", "demo"]
TINY = ["--width", "64", "--layers", "1", "--context", "32", "--batch", "4"]
SOON = 8.0  # seconds; on a machine that does other things, too
PATIENCE = 40.0  # ranks that import torch on a busy machine notice late that they are alone


@pytest.mark.timeout(90)
def test_a_short_run_shows_a_table_and_writes_the_plot(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps", "20", "--compression", "topk", "bf16", "none", "--ratio", "0.02"]
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, start_new_session=True, timeout=80
    )
    assert done.returncode == 0, done.stderr
    rows = {
        label: re.search(rf"^{label} +(\d\.\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)x$", done.stdout, re.MULTILINE)
        for label in ("DDP over Gloo", "pycomm dense", "pycomm TopK 2 %", "pycomm BF16")
    }
    sent = {label: float(row[4]) for label, row in rows.items() if row}
    assert set(sent) == set(rows), done.stdout
    assert sent["DDP over Gloo"] == pytest.approx(sent["pycomm dense"], abs=0.001)  # and a flag for each parameter
    assert sent["pycomm BF16"] == pytest.approx(sent["pycomm dense"] / 2, abs=0.001)
    assert sent["pycomm TopK 2 %"] < sent["pycomm dense"] / 15
    assert "With the same gradients, pycomm's steps took" in done.stdout
    assert "step 20 of 20: loss DDP over Gloo" in done.stdout  # the progress, where there is no terminal
    assert (tmp_path / "pycomm_demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert os.listdir(tmp_path) == ["pycomm_demo.png"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0"], "--ranks: 0, wanted at least 1"),
        (["--ranks", "two"], "--ranks: invalid integer value: 'two'"),
        (["--ratio", "0"], "--ratio: 0.0, wanted 0 < ratio <= 1"),
        (["--ratio", "1.5"], "--ratio: 1.5, wanted"),
        (["--ratio", "nan"], "--ratio: nan, wanted"),
        (["--ratio", "0.1", "--compression", "fp16"], "--ratio: only --compression topk has one"),
        (["--steps", "3"], "--steps: 3, wanted at least 20"),
        (["--compression", "zip"], "--compression: invalid choice: 'zip'"),
        (["--compression"], "--compression: expected at least one argument"),
        (["--seed", "-1"], "--seed: -1, wanted at least 0"),
        (["--width", "100"], "--width: 100, wanted a positive multiple of 64"),
        (["--context", "100000"], "--context: 100000, wanted at most 4096"),
        (["--output", "no/such/folder/plot.png"], "--output: 'no/such/folder/plot.png', wanted a file"),
        (["--output", "/"], "--output: '/', wanted a file"),
    ],
)
@pytest.mark.timeout(10)
def test_wrong_arguments_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rich", "matplotlib"])
@pytest.mark.timeout(10)
def test_a_missing_extra_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [key for key in sys.modules if key.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == 1
    assert f"{name} is not installed; the demo needs it: pip install 'pycomm-torch[demo]'" in capsys.readouterr().err


@contextmanager
def long_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in a session of its own, in which nothing may be left afterwards."""
    with subprocess.Popen(
        [*COMMAND, *TINY, "--steps", "2000"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            left = left_behind(process.pid, PATIENCE)
    assert left == []


def wait_for_training(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while "loss" not in (line := process.stdout.readline()):
        assert line, f"ended before it trained: {process.stderr and process.stderr.read()}"


def without_slow_ranks(errors: str) -> str:
    """Return ``errors`` without warnings of slow ranks, which are right where other tests run at the same time."""
    return "".join(
        line for line in errors.splitlines(True) if not re.match(r"\[pycomm rank \d\] rank \d is slow: ", line)
    )


@pytest.mark.timeout(60)
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with long_run(tmp_path) as process:
        wait_for_training(process)
        killed_at = time.monotonic()
        os.kill(ranks_of_session(process.pid)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - killed_at < SOON
    assert process.returncode == 1
    assert without_slow_ranks(errors).startswith("pycomm demo: rank 1 was killed by SIGKILL"), errors


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ctrl_c_ends_everything_quietly(tmp_path: Path) -> None:
    with long_run(tmp_path) as process:
        wait_for_training(process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the ranks get it, too
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert without_slow_ranks(errors) == "pycomm: interrupted\n"


@pytest.mark.timeout(100)
def test_ranks_that_still_start_do_not_outlive_the_command(tmp_path: Path) -> None:
    with long_run(tmp_path) as process:
        while len(ranks_of_session(process.pid)) < 2:
            time.sleep(0.02)
        process.kill()  # what is left is counted at the end
