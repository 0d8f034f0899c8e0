"""``bench.collectives.nccl_tests``: the table of ``pycomm bench`` with MPI beside it, and what cannot be had."""

from __future__ import annotations

import sys

import pytest

from bench import ROOT
from bench.collectives.nccl_tests import checked, make_parser
from bench.harness import installed
from tests.cli.bench.running import bench
from tests.cli.bench.third_party import read_table

NCCL_TESTS = [sys.executable, "-m", "bench.collectives.nccl_tests"]


def check_refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    with pytest.raises(SystemExit):
        checked(make_parser().parse_args([*arguments, "--backend", "communicator"]))
    assert message in capsys.readouterr().err


def test_mpi_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda _: None)
    message = "--peers: mpich is not installed: pip install mpi4py mpich, or 'pycomm-torch[bench]'"
    check_refused(capsys, message, "all_reduce", "--peers", "mpich")
    check_refused(capsys, "--peers: 'smoke', wanted communicator, or a backend", "all_reduce", "--peers", "smoke")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_refused(capsys, "--peers: openmpi starts its ranks itself", "all_reduce", "--peers", "openmpi")


def test_mpi_has_no_arrays_on_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bench.collectives.nccl_tests._why_not", lambda *_: None)
    message = "nccl requires arrays on GPUs, and MPI is called with arrays in CPU memory"
    check_refused(capsys, message, "all_reduce", "--peers", "nccl,mpich")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operation"),
    [("mpich", "all_reduce"), ("openmpi", "reduce_scatter"), ("openmpi", "scatter"), ("mpich", "sendrecv")],
)
def test_mpi_beside_gloo(name: str, operation: str) -> None:
    """Out of place and in place, with right results."""
    pytest.importorskip("mpi4py")
    arguments = [operation, "-b", "4K", "--backend", "gloo", "--peers", name]
    code, printed, errors = bench(*arguments, cwd=ROOT, command=NCCL_TESTS)
    assert code == 0, errors
    (row,) = read_table(printed)
    assert (row["#wrong"], row["in_place"]["#wrong"]) == ("0", "0")
    assert name in printed
    assert "wrong)" not in printed
