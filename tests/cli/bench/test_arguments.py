"""Wrong arguments of ``pycomm bench``: what came and what was wanted, before a rank is started."""

from __future__ import annotations

import re

import pytest

from pycomm.tools.cli.bench import measure
from pycomm.tools.cli.bench.command import settings_of
from pycomm.tools.cli.bench.operations import BenchSettings, Case
from pycomm.tools.cli.main import build_parser, main
from pycomm.tools.launching import RankError

WRONG = [
    (["all_reduce", "-b", "big"], "-b/--minbytes: 'big', wanted a size"),
    (["all_reduce", "-n", "7"], "unrecognized arguments: -n 7"),
    (["all_reduce", "-o", "mulsum"], "-o/--op: invalid choice: 'mulsum'"),
    (["all_reduce", "-r", "0"], "unrecognized arguments: -r 0"),
    (["all_gather", "-o", "sum"], "unrecognized arguments: -o sum"),
    (["broadcast", "-r", "some"], "-r/--root: invalid"),
    (["all_reduce", "--backend", "carrier_pigeon"], "--backend: 'carrier_pigeon', wanted communicator, or a"),
    (["all_reduce", "--peers", "gloo,smoke"], "--peers: 'smoke', wanted communicator, or a"),
    (["all_reduce", "--peers", "gloo,gloo"], "--peers: gloo,gloo names one twice"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def parsed(*arguments: str) -> BenchSettings:
    return settings_of(build_parser().parse_args(["bench", *arguments, "--backend", "communicator"]))


def check_refused(says: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), WRONG)
def test_wrong_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """More are in ``tests/cli/test_without_torch.py``: the others that need no torch to be found."""
    check_refused(says, arguments, capsys)


def test_sizes() -> None:
    assert parsed("all_reduce", "-b", "1K", "-e", "100k", "-f", "4").sizes == (1024, 4096, 16384, 65536)
    assert parsed("all_reduce", "-b", "1.5M", "-e", "6MiB").sizes == (3 << 19, 3 << 20, 3 << 21)
    assert parsed("all_reduce", "-b", "4").sizes == (4,)
    assert parsed("all_reduce").sizes == (32 << 20,)


def test_calls_go_by_the_size() -> None:
    sizes = (0, 1 << 10, 1 << 22, 1 << 26, 1 << 30)
    counts = [Case("all_reduce", size, "uint8", "sum", -1, 2).calls() for size in sizes]
    assert counts == [(5, 20), (5, 20), (5, 20), (1, 4), (1, 2)]


def test_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = parsed("reduce", "-r", "all", "-d", "all", "-o", "max", "-b", "64")
    assert (found.ranks, len(found.cases)) == (3, 3 * 8)
    check_refused("--ranks: 2, but the launcher has started 3", ["reduce", "--ranks", "2"], capsys)
    monkeypatch.setenv("WORLD_SIZE", "many")
    check_refused("--ranks: invalid integer value: 'many'", ["all_reduce"], capsys)


def test_libraries_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pycomm.kernels.cuda_devices", lambda: (0, "no driver"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_refused("--peers: nccl requires GPUs: no driver", ["all_reduce", "--peers", "nccl"], capsys)


def test_many_ranks_are_told_of() -> None:
    few, many = (parsed("all_reduce", "-b", "4K", "--ranks", ranks) for ranks in ("1", "2000"))
    assert "take turns" not in measure.preamble(few, [])
    assert re.search(r"^# 2000 ranks on \d+ cores take turns: ", measure.preamble(many, []), re.MULTILINE)


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankError("rank 1 failed:\nrank 1: all_reduce: it died")

    monkeypatch.setattr("pycomm.tools.cli.bench.measure.RankPool", fail)
    assert main(["bench", "all_reduce", "-b", "4", "--backend", "communicator"]) == 1
    assert capsys.readouterr().err == "pycomm bench: rank 1 failed:\nrank 1: all_reduce: it died\n"
