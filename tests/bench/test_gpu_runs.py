"""Runs of bench.gpu and their reports, with stand-ins for what would need a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import command, plan, run
from bench.gpu.plan import Step
from bench.gpu.run import Run, commit_of, merged, slug
from tests.bench.stand_ins import HOUR, executable, python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command with these arguments, as if nothing were missing, and leaves the process's signals alone."""
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: True)  # type: ignore[attr-defined]
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench.gpu", *arguments])
        return command.main()

    return call


def test_merged() -> None:
    report = {"environment": {"commit": "a", "device": None}, "errors": [1], "tests": {}}
    found = {"environment": {"device": "x", "torch": "2"}, "errors": [2], "tests": {"passed": 1}, "settings": {"n": 3}}
    assert merged(report, found) == {
        "environment": {"commit": "a", "device": None, "torch": "2"},
        "errors": [1, 2],
        "tests": {"passed": 1},
        "settings": {"n": 3},
    }
    assert report["errors"] == [1]


class TestRuns:
    """With steps that are quick, instead of building, testing and measuring."""

    @pytest.fixture(autouse=True)
    def _stand_ins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = tmp_path / "new" / "report.json"
        self.scratch = tmp_path / "scratch"
        self.scratch.mkdir()
        self.monkeypatch = monkeypatch
        good = "import os; print(os.environ.get('PYTHONPATH', ''))"
        self.build(good)
        self.stand_in("environment", python(good), {"environment": {"device": "a GPU"}})
        self.stand_in("tests", python(good), {"tests": self.counted(passed=3)})
        for name in ("smoke", "ptx"):
            self.stand_in(name, python(good), {"runs": [{"name": name, **self.counted(passed=1)}]})
        sanitizer = executable(tmp_path / "bin" / "compute-sanitizer", "#!/bin/sh\nexit 0\n")
        monkeypatch.setattr(run, "find_tool", lambda _: str(sanitizer))
        self.sanitizers({})

    @staticmethod
    def counted(**counts: int) -> dict[str, Any]:
        zero = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)
        return {"selected": 3, "finished": True, "seconds": 1.0, "failures": [], "skips": {}, **zero, **counts}

    def build(self, code: str) -> None:
        self.monkeypatch.setattr(plan, "build", lambda *_: Step("build", python(code), 60))

    def stand_in(self, name: str, words: list[str], found: Mapping[str, Any], seconds: float = 60) -> None:
        told = (1,) if name == "tests" else ()
        step = Step(name, words, seconds, read=lambda: found, told=told)
        self.monkeypatch.setattr(plan, name, lambda *_, **__: step)

    def sanitizers(self, statuses: Mapping[str, int]) -> None:
        def make(tool: str, path: str, out: Path) -> Step:
            row = {"tool": tool, "tests": self.counted(passed=1), "summary": "ERROR SUMMARY: 0 errors", "log": ""}
            command = [*python(f"raise SystemExit({statuses.get(tool, 0)})"), path]
            return Step(tool, command, 60, read=lambda: {"sanitizers": [row]}, told=(1,))

        self.monkeypatch.setattr(plan, "sanitizer", make)

    def run(self, *what: str) -> tuple[int, dict[str, Any]]:
        this_run = Run(what or ("check",), self.output, self.scratch)
        this_run.everything(True, "told", 1)
        status = this_run.finish()
        return status, json.loads(self.output.read_text())

    def test_a_check(self) -> None:
        status, report = self.run()
        assert status == 0
        assert report["bench"] == "gpu_check"
        names = [step["name"] for step in report["steps"]]
        assert names == ["build", "environment", "smoke", "tests", "ptx", *plan.SANITIZERS]
        assert [row["name"] for row in report["runs"]] == ["smoke", "ptx"]
        assert report["environment"]["device"] == "a GPU"
        assert "commit" in report["environment"]
        assert report["tests"]["passed"] == 3
        assert [row["tool"] for row in report["sanitizers"]] == list(plan.SANITIZERS)
        assert report["errors"] == report["skipped"] == []
        assert list(self.output.parent.iterdir()) == [self.output]

    def test_steps_use_what_was_built(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.run()
        assert str(self.scratch / "site") in capfd.readouterr().out

    def test_failures_are_told_by_the_status(self) -> None:
        self.stand_in("tests", python("raise SystemExit(1)"), {"tests": self.counted(passed=2, failed=1)})
        status, report = self.run()
        assert (status, report["errors"]) == (1, [])
        self.stand_in("tests", python("raise SystemExit(0)"), {"tests": self.counted(passed=1)})
        self.sanitizers({"racecheck": 99})
        status, report = self.run()
        assert (status, [error["where"] for error in report["errors"]]) == (1, ["racecheck"])

    def test_tests_that_do_not_end(self) -> None:
        self.stand_in("tests", python(HOUR), {"tests": self.counted(passed=2)}, seconds=1)
        status, report = self.run()
        assert status == 1
        assert report["tests"]["passed"] == 2
        assert report["errors"][0]["where"] == "tests"
        assert report["errors"][0]["error"].endswith("stopped after 1 s")
        assert [row["tool"] for row in report["sanitizers"]] == list(plan.SANITIZERS)  # the others have their turn

    def test_a_build_that_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.build("raise SystemExit('no nvcc')")
        status, report = self.run()
        assert status == 1
        assert [error["where"] for error in report["errors"]] == ["build"]
        assert "no nvcc" in report["errors"][0]["error"]
        assert report["skipped"] == [{"what": "tests and sanitizers", "why": "the build failed"}]
        assert "no nvcc" in capsys.readouterr().out

    def test_a_build_that_fails_before_measuring(self) -> None:
        with_pycomm = []

        def measuring(*_: Any, **__: Any) -> Step:
            with_pycomm.append(_[-1])
            return Step("measuring", python("pass"), 60, read=lambda: {"bandwidth": {"ways": []}})

        self.build("raise SystemExit('no nvcc')")
        self.monkeypatch.setattr(plan, "measuring", measuring)
        status, report = self.run("measure")
        assert (status, with_pycomm, report["bench"]) == (1, [False], "gpu")
        assert report["bandwidth"] == {"ways": []}

    def test_both_in_one_run(self) -> None:
        """Built once; the check leaves half of the time, sanitizers come last, and the report is the measurement's."""
        seconds = []

        def measuring(*given: Any) -> Step:
            seconds.append(given[2])
            return Step("measuring", python("pass"), 60, read=lambda: {"settings": {"rounds": 1}})

        self.monkeypatch.setattr(plan, "measuring", measuring)
        self.monkeypatch.setattr(plan, "ALL_SECONDS", 200.0)
        self.stand_in("tests", python(HOUR), {"tests": self.counted(passed=1)}, seconds=2)
        status, report = self.run("check", "measure")
        assert (status, report["bench"], report["tests"]["passed"], report["settings"]) == (1, "gpu", 1, {"rounds": 1})
        names = [step["name"] for step in report["steps"]]
        assert names == ["build", "environment", "smoke", "tests", "ptx", "measuring", *plan.SANITIZERS]
        assert 100.0 < seconds[0] < 200.0
        self.monkeypatch.setattr(plan, "ALL_SECONDS", 1.5)  # of which the check has less than a step requires
        _, report = self.run("check", "measure")
        assert report["errors"][0]["error"] == "not begun: the 1 s for the check were used up"

    def test_tests_that_were_all_skipped(self) -> None:
        self.stand_in("tests", python("pass"), {"tests": self.counted(skipped=3)})
        status, report = self.run()
        assert (status, report["errors"]) == (1, [{"where": "tests", "error": "none has passed"}])

    def test_no_sanitizer(self) -> None:
        self.monkeypatch.setattr(run, "find_tool", lambda _: None)
        status, report = self.run()
        assert status == 0
        assert [skipped["what"] for skipped in report["skipped"]] == list(plan.SANITIZERS)

    def test_no_time_left(self) -> None:
        self.monkeypatch.setattr(plan, "ALL_SECONDS", 0.5)
        status, report = self.run()
        assert status == 1
        assert report["steps"] == []
        assert report["errors"] == [{"where": "build", "error": "not begun: the 0 s for everything were used up"}]

    def test_the_report_is_there_before_the_end(self) -> None:
        """As it would be left by a kill: what is known of a step that is under way."""
        seen: list[dict[str, Any]] = []

        def found() -> dict[str, Any]:
            seen.append(json.loads(self.output.read_text()))
            return {"tests": self.counted(passed=len(seen))}

        step = Step("tests", python("import time; time.sleep(1.7)"), 60, read=found)
        self.monkeypatch.setattr(plan, "tests", lambda *_: step)
        self.run()
        assert seen[0]["environment"]["device"] == "a GPU"
        assert [report["tests"].get("passed") for report in seen[:3]] == [None, 1, 2]


def test_where_the_report_goes(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the caller says; and an interrupted run is told from one that came to its end."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Run, "everything", interrupted)
    path = tmp_path / "somewhere" / "else.json"
    assert main("check", "--output", str(path), "--skip-build") == 1
    assert json.loads(path.read_text())["errors"] == [{"where": "bench.gpu", "error": "interrupted"}]
    assert f"report written to {path}" in capsys.readouterr().out
    monkeypatch.setattr(command, "_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert main("measure", "--skip-build") == 1
    assert (tmp_path / "gpu_nvidia_h200.json").exists()


def test_a_file_that_cannot_be_written(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "report.json"
    assert main("check", "--output", str(path)) == 2
    assert capsys.readouterr().err.startswith(f"bench.gpu: cannot write to {path}: ")


def test_a_checkout_without_git(tmp_path: Path) -> None:
    """Copied without its .git, also into another repository, and where git is not installed."""
    nothing = {"commit": "abc", "dirty": None}
    assert commit_of(tmp_path, "abc") == nothing
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "copy").mkdir()
    assert commit_of(tmp_path, "abc") == nothing  # has no commit yet
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert commit_of(tmp_path / "copy", "abc") == nothing
    found = commit_of(tmp_path, "abc")
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (tmp_path / "file").touch()
    assert commit_of(tmp_path, None) == {**found, "dirty": True}
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PATH", str(tmp_path))
        assert commit_of(tmp_path, "abc") == nothing


@pytest.mark.slow
def test_a_whole_copy_without_git(tmp_path: Path) -> None:
    """Its rehearsal ends with a report where it was wanted, and without a GPU says so."""
    copy = tmp_path / "copy"
    for folder in ("bench", "tests", "pycomm"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    out = tmp_path / "out" / "report.json"
    words = ["check", "--rehearse", "--skip-build", "--commit", "abc", "--output", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *words],
        cwd=copy,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"{command._NO_GPU}\n"
    report = json.loads(out.read_text())
    assert (report["environment"]["commit"], report["environment"]["dirty"]) == ("abc", None)
    assert report["environment"]["pycomm"]["version"]  # of the build that the other steps would use
    assert report["tests"]["selected"] > 500
    assert report["tests"]["finished"]
    assert not report["errors"]
    assert "== tests, " in done.stdout
    assert not (copy / "build").exists()


def test_without_a_gpu(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what in (["check"], ["measure"], ["check", "measure"]):
        assert main(*what, "--output", str(tmp_path / "report.json")) == 2
        told = capsys.readouterr().err
        assert told.startswith("bench.gpu: torch finds no GPU here; ")
        assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    assert main("check") == 2
    wanted = "bench.gpu: not installed: scikit-build-core, pybind11, pytest, pytest-timeout, hypothesis\n"
    assert capsys.readouterr().err == wanted


def test_names_of_files() -> None:
    assert slug("NVIDIA H200") == "nvidia_h200"
