"""The benches run, verify and write what they measured; what they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.kernels import command as kernels_command
from bench.kernels import host
from bench.kernels.case import Arrays, Calls
from bench.kernels.command import make_cases
from bench.kernels.resnet50 import parameter_shapes
from pycomm import kernels
from pycomm.kernels.arrays import PreparedStep

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["kernels", "--rounds", "1", "--shapes", "40"],
        ["kernels.host", "--rounds", "1", "--counts", "3"],
        ["collectives", "--peers", "gloo", "--ranks", "2", "--sizes", "1K,64K", "--rounds", "1"],
        pytest.param(["collectives.scale", "--ranks", "2,3", "--rounds", "1"], marks=pytest.mark.slow),
        pytest.param(
            [
                *("growth", "--ranks", "2,3", "--parameters", "3,9", "--bytes", "1K,4K", "--buckets", "1,2"),
                *("--simulated", "4,8,16", "--rounds", "1", "--steps", "1"),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(["training", "--rounds", "1", "--steps", "1", "--widths", "784,512,10"], marks=pytest.mark.slow),
        pytest.param(["training", "--small", "--rounds", "1"], marks=pytest.mark.slow),
        pytest.param(["memory", "--layers", "2", "--width", "64", "--only", "TopK(0.01)"], marks=pytest.mark.slow),
        pytest.param(
            ["tensor_parallel", "--rounds", "1", "--steps", "1", "--width", "16", "--layers", "1", "--context", "8"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["asynchronous", "--megabytes", "1", "--rounds", "1"], marks=pytest.mark.slow),
        pytest.param(
            ["asynchronous", "--losses", "--ranks", "2", "--steps", "10", "--seeds", "1"], marks=pytest.mark.slow
        ),
        pytest.param(
            [
                *("asynchronous.experiment", "--seconds", "0.5", "--pace", "0.02", "--seeds", "1", "--rates", "1e-3"),
                *("--workers", "2", "--methods", "async,delayed"),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(["sharding", "--millions", "1", "--rounds", "1", "--count", "1"], marks=pytest.mark.slow),
        pytest.param(
            ["matrices", "--ranks", "1,2", "--width", "16", "--layers", "1", "--batch", "1", "--rounds", "1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "matrices.losses",
                "--steps",
                "2",
                "--seeds",
                "1",
                "--methods",
                "AdamW;Muon;Muon, local_sgd every 30 (MuLoCo)",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(["chaos", "--faults", "2", "--ranks", "3", "--methods", "dense"], marks=pytest.mark.slow),
        pytest.param(["horovod", "--sizes", "4K", "--rounds", "1", "--count", "20"], marks=pytest.mark.slow),
        pytest.param(["chaos", "--every", "4", "--faults", "3"], marks=pytest.mark.slow),
        pytest.param(
            ["pipelines", "--ranks", "2", "--rounds", "1", "--microbatches", "2", "--milliseconds", "1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.timeout(180)
def test_bench(arguments: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", f"bench.{arguments[0]}", *arguments[1:], "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout or not arguments[0].startswith("kernels")
    assert json.loads(report.read_text())


def test_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "k.json"
    arguments = ["--only", "absmax", "--shapes", "9", "--rounds", "2", "-J", str(report)]
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *arguments])
    threads = torch.get_num_threads()
    assert kernels_command.main() == 0
    torch.set_num_threads(threads)
    assert "verified: absmax" in capsys.readouterr().out
    (row,) = json.loads(report.read_text())["rows"]
    assert row["kernel"] == "absmax"
    assert row["time_over_floor"] == pytest.approx(row["pycomm"]["median"] / row["floor"]["seconds"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "fft"], "--only: no kernel has 'fft' in its name"),
        (["--rounds", "0"], "--rounds: 0, wanted at least 1"),
        (["-b", "1K"], "unrecognized arguments: -b 1K"),
    ],
)
def test_wrong_arguments_of_kernels(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.kernels", *arguments])
    with pytest.raises(SystemExit) as caught:
        kernels_command.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Calls]]:
    """The cases on a CPU, by name, on the first parameters alone; with one thread, so small they are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arrays = Arrays(parameter_shapes()[:9])
    cases = make_cases(arrays.count)
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.floor_bytes > 0 for case in cases)
    yield {case.name: case.make(arrays) for case in cases}
    torch.set_num_threads(threads)


def test_cases_are_right(calls: dict[str, Calls]) -> None:
    for made in calls.values():
        made.verify()
        for _ in range(2):
            made.prepare()
            made.ours()
            made.peer()
        made.verify()  # calls leave nothing behind that the next verification would fall over


@pytest.mark.parametrize(
    ("kernel", "cases"),
    [
        ("squared_norms", ["squared norms"]),
        ("momentum_step", ["LARS, copies in fp16"]),
        ("adam_step", ["Adam, unscale, copies in fp16"]),
    ],
)
def test_wrong_steps_are_noticed(
    kernel: str, cases: list[str], calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, kernel, lambda tensors, *_, **__: torch.zeros(len(tensors)))
    for name in cases:
        with pytest.raises(AssertionError):
            calls[name].verify()


@pytest.mark.parametrize(
    "name",
    [
        "LARS.step",
        "LAMB.step",
        "Adam.step",
        "Adam.step, unscale",
        "Adam.step, finite check, unscale",
        "Adam.step, unscale, master weights of fp16",
        "AdamW.step",
        "RMSprop.step, momentum",
        "Adagrad.step",
        "SGD.step, momentum",
    ],
)
def test_wrong_optimizers_are_noticed(name: str, calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreparedStep, "step", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        calls[name].verify()


@pytest.mark.parametrize("case", host.make_cases(), ids=lambda case: case.name)
def test_wrong_steps_of_the_host_are_noticed(case: host.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    host.verify(case, 3, 5)
    monkeypatch.setattr(PreparedStep, "step", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        host.verify(case, 3, 5)
