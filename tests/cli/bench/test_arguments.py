"""Wrong arguments of ``pycomm bench``: what came and what was wanted, before a rank is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycomm.tools.cli.bench import table
from pycomm.tools.cli.bench.operations import Case
from pycomm.tools.cli.bench.settings import BenchSettings, UsageError, settings_of
from pycomm.tools.cli.bench.table import PLACES, TableLine, Timed
from pycomm.tools.cli.bench.timing import Samples
from pycomm.tools.cli.main import build_parser, main
from pycomm.tools.launching import RankError


def parsed(*arguments: str, launched: int | None = None) -> BenchSettings:
    return settings_of(build_parser().parse_args(["bench", *arguments, "--backend", "communicator"]), launched)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["all_reduce", "-b", "0"], "-b/--minbytes: '0', wanted a size such as 4, 64K, 1.5M or 2G, at least 1"),
        (["all_reduce", "-b", "big"], "-b/--minbytes: 'big', wanted a size"),
        (["all_reduce", "-b", "1M", "-e", "1K"], "-e: 1024 bytes, which is less than the 1048576 of -b"),
        (["all_reduce", "-f", "1"], "-f/--stepfactor: 1, wanted at least 2"),
        (["all_reduce", "-f", "2", "-i", "1K"], "-i and -f are both given, wanted one of them"),
        (["all_reduce", "-n", "0"], "-n/--iters: 0, wanted at least 1"),
        (["all_reduce", "-w", "-1"], "-w/--warmup_iters: -1, wanted at least 0"),
        (["all_reduce", "-c", "yes"], "-c/--check: invalid integer value: 'yes'"),
        (["all_reduce", "-d", "float128"], "-d/--datatype: invalid choice: 'float128'"),
        (["all_reduce", "-o", "mulsum"], "-o/--op: invalid choice: 'mulsum'"),
        (["all_reduce", "-r", "0"], "unrecognized arguments: -r 0"),
        (["all_gather", "-o", "sum"], "unrecognized arguments: -o sum"),
        (["barrier", "-b", "4"], "unrecognized arguments: -b 4"),
        (["broadcast", "-r", "2"], "-r: 2, wanted a rank below 2, or all"),
        (["broadcast", "-r", "some"], "-r/--root: invalid"),
        (["all_reduce", "-R", "2"], "-R/--local_register: 2, wanted at most 1"),
        (["all_reduce", "-R", "1", "--backend", "gloo"], "-R 1: only communicator has memory of its own"),
        (["all_reduce", "-T", "0"], "-T/--timeout: 0, wanted seconds above 0"),
        (["all_reduce", "-T", "nan"], "-T/--timeout: nan, wanted seconds above 0"),
        (["all_reduce", "--min-busbw", "-1"], "--min-busbw: -1, wanted GB/s above 0"),
        (["all_reduce", "--ranks", "0"], "--ranks: 0, wanted at least 1"),
        (["all_reduce", "--backend", "carrier_pigeon"], "--backend: 'carrier_pigeon', wanted communicator, or a"),
        (["all_reduce", "--peers", "gloo,smoke"], "--peers: 'smoke', wanted communicator, or a"),
        (["all_reduce", "--peers", "gloo,"], "--peers: 'gloo,', wanted names separated by commas"),
        (["all_reduce", "--peers", "gloo,gloo"], "--peers: gloo,gloo names one twice"),
        (["all_reduce", "--peers", "gloo", "--backend", "gloo"], "--peers: gloo is what is measured (--backend)"),
        (["all_reduce", "-J", "nowhere/x.json"], "-J: nowhere/x.json cannot be written"),
        (["all_reduce", "-e", "900000G", "-f", "2"], "-e: 3 arrays of "),
        (["all_scatter"], "invalid choice: 'all_scatter'"),
        (["all_reduce", "--rounds", "0"], "--rounds: 0, wanted at least 1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "NCCL_TESTS_MIN_BW"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sizes() -> None:
    assert parsed("all_reduce", "-b", "1K", "-e", "100k", "-f", "4").sizes == (1024, 4096, 16384, 65536)
    assert parsed("all_reduce", "-b", "1.5M", "-e", "3MiB", "-i", "512K").sizes == (3 << 19, 4 << 19, 5 << 19, 6 << 19)
    assert parsed("all_reduce", "-b", "4").sizes == (4,)
    assert parsed("all_reduce").sizes == (32 << 20,)


def test_calls_go_by_the_size() -> None:
    found = parsed("all_reduce", "-b", "1K")
    counts = (1 << 8, 1 << 20, 1 << 24, 1 << 28)
    cases = [Case("all_reduce", count, "float", "sum", -1, 2) for count in counts]
    assert [(found.calls_of(case), found.warmups_of(case)) for case in cases] == [(20, 5), (20, 5), (4, 1), (2, 1)]
    given = parsed("all_reduce", "-n", "7", "-w", "0")
    assert [(given.calls_of(case), given.warmups_of(case)) for case in given.cases] == [(7, 0)]


def test_roots_and_dtypes_of_a_group() -> None:
    found = parsed("reduce", "-r", "all", "-d", "all", "-o", "max", "-b", "64", launched=3)
    assert found.ranks == 3
    assert len(list(found.cases)) == 3 * 8
    with pytest.raises(UsageError, match="--ranks: 2, but the launcher has started 3"):
        parsed("reduce", "--ranks", "2", launched=3)


def test_libraries_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycomm.kernels.cuda_devices", lambda: (0, "no driver"))
    with pytest.raises(UsageError, match="--peers: nccl requires GPUs: no driver"):
        parsed("all_reduce", "--peers", "nccl")


def test_the_variable_of_nccl_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "3.5")
    assert parsed("all_reduce").min_busbw == 3.5
    assert parsed("all_reduce", "--min-busbw", "2").min_busbw == 2.0
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "much")
    with pytest.raises(UsageError, match="NCCL_TESTS_MIN_BW is 'much', wanted a bandwidth in GB/s"):
        parsed("all_reduce")


def test_many_ranks_and_times_that_scatter_are_told_of_the_limit() -> None:
    few, many = (parsed("all_reduce", "-b", "4K", "--ranks", ranks) for ranks in ("1", "2000"))
    assert "-T" not in table.preamble(few, [])
    assert re.search(r"^# 2000 ranks on \d+ cores take turns: .* raise -T \(120 s\)$", table.preamble(many, []), re.M)

    def line(*seconds: float) -> TableLine:
        timed = Timed(0, Samples.of(seconds))
        return TableLine(
            Case("all_reduce", 1024, "float", "sum", -1, 2), 20, dict.fromkeys(PLACES, timed), {}, timed.samples
        )

    assert not list(table.scatter(few, [line(1.0, 1.1, 1.2, 1.3)]))
    (said,) = table.scatter(few, [line(1.0, 1.1, 1.2, 5.0), line(1.0, 1.0, 1.0, 1.0)])
    assert said.startswith("times scatter (p90 over 2 times p10) at 4096 bytes: ")
    assert said.endswith("raise -T (120 s)")


@pytest.mark.parametrize(("what", "hinted"), [("timed out waiting for rank 3 after 120 s", True), ("it died", False)])
def test_a_wait_that_timed_out_names_the_option(
    what: str, hinted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise RankError(f"rank 1 failed:\nrank 1: all_reduce: {what}")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pycomm.tools.cli.bench.measure._among_own", fail)
    assert main(["bench", "all_reduce", "-b", "4", "--backend", "communicator"]) == 1
    error = capsys.readouterr().err
    assert what in error
    assert ("-T is 120 s; raise it where ranks outnumber cores" in error) == hinted


def test_a_launcher_that_says_nonsense(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(SystemExit):
        main(["bench", "all_reduce", "-b", "4"])
    assert "WORLD_SIZE is 'many', wanted a number of ranks" in capsys.readouterr().err
