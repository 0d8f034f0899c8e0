"""bench.gpu without a GPU: everything but the figures."""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import environment, report, targets
from bench.gpu.cases import Plan, make_plans
from bench.gpu.measure import Measurement
from bench.gpu.models import GPT, TINY_WORKLOADS, WORKLOADS, resnet
from bench.gpu.ranks import DDP_BF16, WAYS, WAYS_BESIDE_DDP
from bench.gpu.run import Run, merged
from bench.gpu.timing import Turn, num_copies
from bench.kernels.resnet50 import parameter_shapes
from pycomm import kernels
from tests.bench.stand_ins import executable

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PLANS = make_plans((2_000,), 30_000, parameter_shapes()[:9])


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", *command]
    return subprocess.run(line, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}, {plan.elements}")
def test_cases_are_right(plan: Plan) -> None:
    for case in plan.make(CPU, 2):
        case.verify()
        case.ours()
        case.peer()
        case.verify()  # calls leave nothing behind that the next verification would fall over
    assert plan.case.floor_bytes > 0


@pytest.mark.parametrize(
    ("kernel", "cases"),
    [
        ("pack", ["pack fp32 -> fp32", "pack fp32 -> fp16, scale, finite", "pack fp32 -> fp16, finite of"]),
        ("unpack", ["unpack fp32 -> fp32", "unpack fp16 -> fp32, scale"]),
        ("reduce", ["reduce, 4 arrays"]),
        ("topk", ["topk, 0.1 %", "topk, 1 %", "topk, 0.1 %, warm", "topk, 1 %, warm"]),
        ("scatter_add", ["scatter_add, 0.1 %", "scatter_add, 1 %"]),
        ("absmax", ["absmax"]),
        ("hashes", ["hashes of replicas"]),
        ("accumulate", ["accumulate, finite"]),
        ("sparsify", ["DGC step 0.1 %, cold of", "DGC step 0.1 %, warm of"]),
        ("quantize", ["int8 encode, remainder", "int4 encode, remainder", "e4m3 encode, remainder"]),
        ("dequantize", ["int8 decode of 4 ranks", "int4 decode of 4 ranks", "e4m3 decode of 4 ranks"]),
        ("requantize", ["e4m3 requantize of 4 ranks"]),
        ("pack_signs", ["sign pack, remainder"]),
        ("pack_chunks", ["top-k of chunks, 64 of 4096, remainder"]),
        ("unpack_chunks", ["chunks unpack of 4 ranks"]),
        ("unpack_indices", ["bits to indices, 0.1 %"]),
        ("squared_norms", ["squared norms of"]),
        ("momentum_step", ["SGD, momentum, copies in fp16 of", "LARS, copies in fp16 of"]),
        ("adam_step", ["Adam, copies in fp16 of"]),
    ],
)
def test_wrong_kernels_are_noticed(kernel: str, cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cases:
        plans = [
            plan for plan in PLANS if plan.name == name or (plan.name.startswith(f"{name} ") and name[-2:] == "of")
        ]
        assert plans, name
        for made in [made for plan in plans for made in plan.make(CPU, 2)]:
            with monkeypatch.context() as patched:
                patched.setattr(kernels, kernel, lambda *_, **__: torch.tensor(True))
                with pytest.raises(AssertionError):
                    made.verify()


def test_the_slowest_comes_last() -> None:
    assert PLANS[-1].name == "DGC step 0.1 %, cold of one gradient"
    assert len({(plan.name, plan.elements) for plan in PLANS}) == len(PLANS)


@pytest.mark.parametrize(("seconds", "rounds"), [(30.0, 7), (0.5, 5), (0.0, 3)])
def test_rounds_that_fit(seconds: float, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes 0.1 s by a clock that only the turn moves."""
    now = [0.0]

    def call() -> None:
        now[0] += 0.1 / 4

    monkeypatch.setattr("bench.gpu.measure.time.monotonic", lambda: now[0])
    arguments = argparse.Namespace(device="cpu", seconds=100.0, rounds=7, out=tmp_path / "out.json")
    assert Measurement(arguments)._rounds_in(seconds, {"turn": Turn([call], CPU)}) == rounds


@pytest.mark.parametrize(
    ("version", "variable"),
    [
        (None, None),
        ("2.29.7", "NCCL_SOCKET_IFNAME"),
        ("2.30.1", "NCCL_MULTI_RANK_GPU_ENABLE"),
        ("3.0.0", "NCCL_MULTI_RANK_GPU_ENABLE"),
    ],
)
def test_two_ranks_on_one_gpu(
    version: str | None, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get what their NCCL requires, or the report says why there are none."""
    found = None if version is None else (version, "/x/libnccl.so.2")
    monkeypatch.setattr("pycomm.collectives.transport.nccl.nccl_version", lambda: found)
    arguments = argparse.Namespace(device="cuda:0", seconds=100.0, rounds=7, out=tmp_path / "out.json")
    measurement = Measurement(arguments)
    attached: list[tuple[int, dict[str, str]]] = []
    monkeypatch.setattr(measurement, "_attach_in", lambda *given: attached.append(given[:2]))
    measurement._two_ranks()
    assert [row["why"] for row in measurement.report["skipped"]] == ([] if found else ["no NCCL"])
    assert [(size, set(variables)) for size, variables in attached] == [(2, {variable, "NCCL_MAX_CTAS"})] * bool(found)


def test_workloads_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as much as the others of what is left, DDP only where nothing is captured; what is missing is told."""
    now = [0.0]
    monkeypatch.setattr("bench.gpu.measure.time.monotonic", lambda: now[0])
    arguments = argparse.Namespace(device="cuda:0", seconds=60.0, rounds=7, out=tmp_path / "out.json")
    measurement, taken = Measurement(arguments), []

    def attach(size: int, _: Any, workload: Any, ways: Any, end: float) -> None:
        assert (size, workload.captured) == (1, ways == WAYS)
        taken.append(end - now[0])
        now[0] = 30.0 if len(taken) == 1 else 50.0 if len(taken) == 2 else 61.0

    monkeypatch.setattr(measurement, "_attach_in", attach)
    measurement._attach()
    assert taken == [60.0 / 6, 30.0 / 5, 10.0 / 4]
    assert [row["what"] for row in measurement.report["skipped"]] == [
        f"training step: {w.title}" for w in WORKLOADS[3:]
    ]


def test_every_target_is_somewhere() -> None:
    wanted = {t for t in vars(targets).values() if isinstance(t, targets.Target)} - {targets.OVERHEAD, targets.PEAK}
    assert {plan.target for plan in PLANS} == {*wanted, None}


@pytest.mark.parametrize(("target", "value", "reached"), [
    (targets.COPY, 0.85, True),
    (targets.COPY, 0.849, False),
    (targets.WARM_READS, 1.4, True),
    (targets.WARM_READS, 1.41, False),
    (targets.OVERHEAD, -0.01, True),
    (targets.PEAK, 25 << 20, True),
    (targets.PEAK, (25 << 20) + 1, False),
    (targets.BUCKET_COPY, 0.6, True),
    (targets.OVERHEAD, 0.021, False),
])  # fmt: skip
def test_targets_are_judged(target: targets.Target, value: float, reached: bool) -> None:
    row = targets.judged({"name": "x", target.figure: value}, target)
    assert row["reached"] is reached
    assert row["target"] == target.text
    assert targets.judged({"name": "x"}, None) == {"name": "x", "target": None, "reached": None}


@pytest.mark.parametrize("num_bytes", [1, 10**5, 10**7, 6 * 10**7, 6 * 10**8])
def test_copies_outgrow_the_cache(num_bytes: int) -> None:
    for l2_bytes in (0, 4 << 20, 50 << 20):
        copies = num_copies(l2_bytes, num_bytes)
        assert copies >= 2
        assert (copies - 1) * num_bytes >= 2 * l2_bytes
        assert copies == 2 or (copies - 2) * num_bytes < 2 * l2_bytes  # and no more than needed


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("1980, 2619, 45, 310.25", {"sm_mhz": 1980.0, "memory_mhz": 2619.0, "celsius": 45.0, "watts": 310.25}),
        ("1980, 2619, 45, [N/A]", None),
        ("1980", None),
        (None, None),
    ],
)
def test_the_state_of_the_gpu(
    said: str | None, state: dict[str, float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi tells it of this very GPU, if there is one."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: argparse.Namespace(uuid="12-34"))
    if said is not None:
        executable(tmp_path / "nvidia-smi", f'#!/bin/sh\n[ "$3" = --id=GPU-12-34 ] && echo "{said}"\n')
    assert environment.gpu_state(torch.device("cuda", 0)) == state
    assert environment.gpu_state(CPU) is None


def test_a_turn_takes_all_copies_alike() -> None:
    calls = [0, 0, 0]

    def call(index: int) -> None:
        calls[index] += 1

    turn = Turn([partial(call, i) for i in range(3)], CPU)
    turn.warm_up()
    assert turn() > 0.0
    assert turn.host_seconds > 0.0
    assert calls[0] > 0
    assert len(set(calls)) == 1


class FakeEvent:
    """Of a GPU on which a call takes a millisecond; it gets to them when the host has enqueued all."""

    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self._at = 0.0

    def record(self) -> None:
        self._at = FakeEvent.done

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end._at - self._at


def test_a_turn_on_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    leads: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", leads.append)

    def call() -> None:
        FakeEvent.done += 1.0

    turn = Turn([call, call], torch.device("cuda", 0))
    turn.warm_up()
    assert turn() == pytest.approx(1e-3)
    assert leads[0] == 0.02 * 2e9
    assert 1e-4 * 2e9 <= leads[-1] < leads[0]  # what the host needed the last time, and something to spare


def test_the_model_is_resnet50() -> None:
    assert [tuple(p.shape) for p in resnet().parameters()] == parameter_shapes()


def test_the_gpt_has_354_million_parameters() -> None:
    (blocks, length), *_ = ((workload.blocks, workload.length) for workload in WORKLOADS if workload.gpt)
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(blocks, length).parameters()) == 354_871_296


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the measuring process writes, here on the CPU, and the parent makes of it."""
    out = tmp_path_factory.mktemp("measured") / "measured.json"
    done = run("bench.gpu.measure", "--device", "cpu", "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    whole = Run(["measure"], out.with_name("report.json"), out.parent).report
    assert "attach: " in done.stdout
    return {**merged(whole, json.loads(out.read_text())), "tests": TESTS, "seconds": 1.0}


TESTS = {
    "selected": 9,
    "finished": False,
    "passed": 5,
    "failed": 1,
    "errors": 1,
    "skipped": 2,
    "seconds": 3.5,
    "failures": [{"test": "tests/a.py::test_bad[1]", "message": "assert 1 == 2"}],
    "skips": {"needs NCCL": 2},
}


def test_everything_is_measured(measured: dict[str, Any]) -> None:
    assert measured["errors"] == []
    assert [(row["name"], row["elements"]) for row in measured["cases"]] == [(p.name, p.elements) for p in PLANS]
    ways = [way for way in WAYS_BESIDE_DDP if way != DDP_BF16]  # torch has its hook for GPUs only
    steps = measured["attach"]
    assert [(row["model"], row["name"]) for row in steps] == [(w.title, way) for w in TINY_WORKLOADS for way in ways]
    assert [row["active"] for row in steps] == [False, False, True, True, True]  # hooks with one rank too
    assert [row["reached"] is None for row in steps] == [True, True, False, True, True]
    assert all(row["host_seconds"] > 0 and row["exposed_seconds"] > 0 for row in steps)
    assert [row["miss_rate"] is None for row in steps] == [True, True, True, True, False]
    assert {skipped["what"] for skipped in measured["skipped"]} == {"NCCL", "attach, two ranks on one GPU"}
    assert measured["bandwidth"]["copy_bytes_per_second"] > 0
    assert measured["environment"]["device"] == "cpu"


def with_everything(measured: dict[str, Any]) -> dict[str, Any]:
    """Add to a report what only a GPU has, and what goes wrong."""
    content = copy.deepcopy(measured)
    content["cases"][0] |= {"target": ">= 85 % of copy", "reached": False}
    content["cases"][1] |= {"target": ">= 4x torch", "reached": True}
    side = {"seconds": content["cases"][0]["seconds"], "host_seconds": 1e-5, "bytes": 4096, "name": "all_reduce"}
    side["gpu"] = None
    for number, row in enumerate(content["attach"]):
        row["gpu"] = {"sm_mhz": 1980.0 - number, "celsius": 40.0}
    content["attach"][0] |= {"kernels": 1234, "peak_bytes": 3 << 30}
    content["nccl"] = [
        {**side, "peer": None},
        {**side, "peer": "nccl", "peer_seconds": side["seconds"], "peer_host_seconds": 1e-5},
    ]
    passing = {**TESTS, "failed": 0}
    content["sanitizers"] = [
        {"tool": "memcheck", "tests": passing, "summary": "ERROR SUMMARY: 0 errors", "log": "not shown"},
        {"tool": "racecheck", "tests": passing, "summary": None, "log": "===== where\n"},
    ]
    content["steps"] = [{"name": "tests", "seconds": 12.0, "status": 1}]
    content["errors"] = [{"where": "kernels", "error": "Traceback\n  boom\n"}]
    return content


def test_report(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "gpu_x.json"
    path.write_text(json.dumps(with_everything(measured)))
    # Neither torch nor pycomm: the report is read where neither is installed.
    for module in ("torch", "pycomm"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not wanted')")
    done = run("bench.gpu.report", str(path), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"== {path}"
    assert any(line.startswith(PLANS[0].name) and line.endswith(">= 85 % of copy      FAIL") for line in lines)
    assert any(line.startswith(PLANS[1].name) and line.endswith("pass") for line in lines)
    assert any(line.startswith(PLANS[2].name) and line.endswith("measured") for line in lines)
    for text in (
        "5 passed, 1 failed, 1 errors, 2 skipped, of 9, in 4 s, not finished",
        "test_bad[1]: assert 1 == 2",
        "2 skipped: needs NCCL",
        "skipped: NCCL: no GPU",
        "memcheck  5 passed",
        "  ERROR SUMMARY: 0 errors\nracecheck 5 passed",
        "  no summary\n    ===== where",
        "step tests: 12 s, status 1",
        "LARS, copies in fp16 of 9 parameters of ResNet-50: torch multiplies gradients",
        f"training step: {TINY_WORKLOADS[0].title}\n",
        "  1234         0  3.00 GiB       -",
        "\nsm_mhz 1976 - 1980, celsius 40 - 40\n",
        "one rank: alone it would install hooks for top-k only",
    ):
        assert text in done.stdout, text
    assert "not shown" not in done.stdout
    assert "error in kernels:\n    Traceback\n      boom" in done.stdout


def test_reports_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report"])
    assert report.main() == 0
    assert "not yet measured on a GPU" in capsys.readouterr().out
    other = tmp_path / "cpu.json"
    other.write_text('{"bench": "kernels"}')
    for path in (other, tmp_path / "none.json"):
        monkeypatch.setattr(sys, "argv", ["report", str(path)])
        assert report.main() == 1
        assert str(path) in capsys.readouterr().err
