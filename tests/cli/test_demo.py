"""``pycomm demo`` as a user runs it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from pycomm.tools.cli.demo import command, network
from pycomm.tools.cli.main import main
from tests.cli.processes import left_behind, ranks_of_session
from tests.cli.test_results import SETTINGS, results

COMMAND = [sys.executable, "-m", "pycomm.tools.cli.main", "demo"]
TINY = ["--width", "64", "--layers", "1", "--context", "16", "--batch", "4", "--seconds", "2"]
SENT = ("DDP", "DDP, fp16 hook", "pycomm dense", "pycomm DGC 1 %")
CORES = len(os.sched_getaffinity(0))
SOON = 8.0  # seconds; on a machine that does other things, too
PATIENCE = 40.0  # ranks that import torch on a busy machine notice late that they are alone


@pytest.mark.timeout(250)
def test_a_short_run_shows_a_table_and_writes_the_picture(tmp_path: Path) -> None:
    """On links between namespaces, where these are allowed. That ports are in use does not matter."""
    with port_in_use(network.PORT):
        done = subprocess.run(
            [*COMMAND, *TINY, "--kill", "--link", "1gbit", "--output", "picture"],
            cwd=tmp_path,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(network.PORT)},
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    check_output(done.stdout)
    assert "Rank 2 of 3 will be killed." in done.stdout
    assert re.search(r"^ rank 2 is killed +[\d.]+ m?s +- +\d", done.stdout, re.MULTILINE)
    assert "rank 2 died: 2 ranks go on at step" in done.stderr
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert os.listdir(tmp_path) == ["picture"]


@contextmanager
def port_in_use(port: int) -> Iterator[None]:
    """Keep a port of this host from everybody else, at all of its addresses."""
    with contextlib.ExitStack() as sockets:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # of others, who keep it as well
                listener = sockets.enter_context(socket.socket(family))
                listener.bind((address, port))
                listener.listen()
        with pytest.raises(OSError, match="in use"), socket.socket() as another:
            another.bind(("127.0.0.1", port))
        yield


def check_output(text: str) -> None:
    """Check table, progress and sentences."""
    first, *_ = text.splitlines()
    assert first == "Training for 2 s: 2 ranks on this host, then over a slow link."
    labels = ("DDP over Gloo", "pycomm.attach", 'attach(shard="optimizer")', *SENT)
    cells = r" +[\d.]+ m?s +[\d.]+x +(?:[\d.]+-[\d.]+)? +(-|[\d.]+ MB) +\d\.\d+$"
    rows = {label: re.search(f"^ {re.escape(label)}{cells}", text, re.MULTILINE) for label in labels}
    sent = {label: row[1] for label, row in rows.items() if row}
    assert set(sent) == set(labels), text
    dense, half, ours, dgc = (float(sent[label].partition(" ")[0]) for label in SENT)
    assert half == pytest.approx(dense / 2, rel=0.3)
    assert ours == pytest.approx(dense, rel=0.3)
    assert dgc < dense / 4
    assert "\n2/2\n" in text  # the progress, where there is no terminal
    write = r"Write: on one host (?:pycomm\.attach|keep DDP)[\s\S]+\.\n$"
    assert re.search(rf"\nGained: [\s\S]+\.\nNot gained: [\s\S]+\.\n{write}", text)


@pytest.mark.behavior(
    "Starting and launching",
    "`No network namespaces (...)`",
    "The demo simulates its slow link. Containers require `--cap-add SYS_ADMIN --cap-add NET_ADMIN`; Ubuntu 24.04, "
    "`sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`.",
)
@pytest.mark.timeout(250)
def test_without_namespaces_the_link_is_simulated_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object) -> NoReturn:
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(network, "become_root", lambda: None)
    monkeypatch.setattr(network, "hosts", denied)
    code = main(["demo", *TINY, "--link", "500mbit", "--output", str(tmp_path / "picture")])
    out, err = capsys.readouterr()
    assert code == 0, err
    check_output(out)
    assert f"Picture: {tmp_path / 'picture'}" in out
    assert "No network namespaces ([Errno 1] unshare: Operation not permitted): pycomm's network model simulates" in out
    assert "\nSimulated link, 500 Mbit/s\n" in out
    assert "simulated link of 500 Mbit/s" in " ".join(out.split())  # wherever it wraps


@pytest.mark.timeout(10)
def test_in_a_folder_that_cannot_be_written_the_table_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there stands for one that is read-only: root may write everywhere else."""
    runs = results()
    settings = replace(SETTINGS, output=tmp_path / "gone" / "picture.png")
    monkeypatch.setattr(command, "_train", lambda _: runs)
    assert command._run_and_report(settings) == 0
    out, _ = capsys.readouterr()
    assert f"The picture was not written: [Errno 2] No such file or directory: '{settings.output}'" in out
    assert "speed vs DDP" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "1"], "--ranks: 1, wanted at least 2"),
        (["--ranks", "two"], "--ranks: invalid integer value: 'two'"),
        (["--ranks", "9000"], f"--ranks: 9000 on {CORES} cores, wanted at most {4 * CORES}; --yes allows more"),
        (["--seconds", "1"], "--seconds: 1, wanted at least 2"),
        (["--link", "fast"], "--link: 'fast', wanted a rate such as 300mbit or 1gbit"),
        (["--link", "300"], "--link: '300', wanted a rate such as 300mbit or 1gbit"),
        (["--link", "1mbit"], "--link: '1mbit', wanted 10mbit to 30gbit"),
        (["--link", "31gbit"], "--link: '31gbit', wanted 10mbit to 30gbit"),
        (["--compression", "topk"], "unrecognized arguments: --compression topk"),
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


@pytest.mark.parametrize("name", ["rich", "matplotlib", "pyroute2"])
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
        [*COMMAND, *TINY, "--seconds", "60"],
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
    assert os.listdir(folder) == []


def wait_for_training(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while "loss of" not in (line := process.stdout.readline()):
        assert line, f"ended before it trained: {process.stderr and process.stderr.read()}"


def without_slow_ranks(errors: str) -> str:
    """Return ``errors`` without warnings of slow ranks, which are right where other tests run at the same time."""
    return "".join(
        line for line in errors.splitlines(True) if not re.match(r"\[pycomm rank \d\] rank \d is slow: ", line)
    )


@pytest.mark.timeout(100)
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
@pytest.mark.timeout(100)
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
