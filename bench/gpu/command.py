"""Everything about one GPU in one command, under ten minutes: build, tests, bandwidth, kernels, attach.

    python -m bench.gpu [--json FILE] [--rounds N] [--skip-build] [--skip-tests] [--commit ID]

Builds the checkout for this GPU into a temporary directory, runs the GPU tests with that build,
then measures with it, and writes one report (by default bench/results/gpu_<device>.json; `python -m
bench.gpu.report` prints it). Every line is verified before it is timed, takes turns with torch's and
with a copy, and has its target beside it. Whatever fails, the report is written with what is known.

Wants nvcc on PATH, torch with CUDA, and what the build and the tests need: scikit-build-core,
pybind11, ninja, cmake, pytest, pytest-timeout, hypothesis. Exit status: 0; 1 if something failed (a
target missed is no failure); 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from bench import ROOT
from bench.common.arguments import make_parser
from bench.common.processes import kill_session
from bench.gpu.report import RESULTS, print_report

TESTS = (
    "tests/kernels/test_on_gpu.py",
    "tests/kernels/test_topk_on_gpu.py",
    "tests/transport/test_nccl_on_gpu.py",
    "tests/optim/test_attach_on_gpu.py",
)
_NO_GPU = "bench.gpu: torch finds no GPU here; this bench needs a CUDA device and a torch that can use it"
_ALL_SECONDS = 570.0
_BUILD_SECONDS = 240.0
_TESTS_SECONDS = 150.0
_KEPT_OUTPUT = 6000  # characters of what a command that failed has said

# `python -m pytest` would put the source tree, which has no compiled extension, before the build.
_PYTEST = "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def main() -> int:
    arguments = _parse()
    if not torch.cuda.is_available():
        print(_NO_GPU, file=sys.stderr)
        return 2
    run = Run(arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        try:
            run.everything(Path(scratch), not arguments.skip_build, not arguments.skip_tests, arguments.commit)
        except KeyboardInterrupt:
            run.fail("bench.gpu", "interrupted")
    return run.finish(arguments.json)


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.gpu", __doc__)
    parser.set_defaults(rounds=15)
    parser.add_argument("--skip-build", action="store_true", help="measure the pycomm that is installed")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--commit", metavar="ID", help="what to note where the checkout is no git repository")
    return parser.parse_args()


class Run:
    """Report in the making, and the steps that fill it, each a process of its own."""

    def __init__(self, rounds: int) -> None:
        self._begin = time.monotonic()
        self._rounds = rounds
        self._variables: dict[str, str] = {}
        self.report: dict[str, Any] = {"bench": "gpu", "environment": {}, "tests": {}, "bandwidth": {}}
        for key in ("cases", "nccl", "attach", "skipped", "errors"):
            self.report[key] = []

    def everything(self, scratch: Path, build: bool, tests: bool, commit: str | None) -> None:
        """Take all steps; without a build, only those that pycomm has no part in."""
        where = commit_of(ROOT, commit)
        self.report["environment"] = where
        built = self._build(scratch) if build else True
        if not build:
            self._skip("build", "--skip-build")
        if tests and built:
            self._guarded("tests", lambda: self._test(scratch / "junit.xml"))
        else:
            self._skip("tests", "the build failed" if tests else "--skip-tests")
        more = [] if built else ["--phases", "bandwidth"]
        self._guarded("measuring", lambda: self._measure(scratch / "measured.json", more))
        self.report["environment"] = {**self.report["environment"], **where}

    def finish(self, path: Path | None) -> int:
        """Write and print the report; returns the exit status."""
        self.report["seconds"] = time.monotonic() - self._begin
        path = path or RESULTS / f"gpu_{slug(self.report['environment'].get('device') or 'unknown')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.report, indent=1) + "\n")
        print_report(self.report)
        print(f"\nreport written to {path}")
        tests = self.report["tests"]
        return 1 if self.report["errors"] or tests.get("failed") or tests.get("errors") else 0

    def fail(self, where: str, error: str) -> None:
        self.report["errors"].append({"where": where, "error": error})

    def _guarded(self, where: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            self.fail(where, traceback.format_exc())

    def _skip(self, what: str, why: str) -> None:
        self.report["skipped"].append({"what": what, "why": why})

    def _left(self) -> float:
        return _ALL_SECONDS - (time.monotonic() - self._begin)

    def _build(self, scratch: Path) -> bool:
        print("building ...", flush=True)
        target = scratch / "site"
        status, output = run_command(build_command(target, scratch / "build"), _BUILD_SECONDS)
        if status != 0:
            self.fail("build", f"status {status}\n{output}")
            return False
        search = [str(target), os.environ.get("PYTHONPATH", "")]
        self._variables["PYTHONPATH"] = os.pathsep.join(entry for entry in search if entry)
        return True

    def _test(self, junit: Path) -> None:
        print("testing ...", flush=True)
        files = [name for name in TESTS if (ROOT / name).exists()]
        for name in TESTS:
            if name not in files:
                self._skip(name, "not there")
        command = [sys.executable, "-c", _PYTEST, "-q", f"--junitxml={junit}", *files]
        status, output = run_command(command, min(_TESTS_SECONDS, self._left()), self._variables)
        if junit.exists():
            self.report["tests"] = {"files": files, **parse_junit(junit.read_text())}
        if status not in (0, 1):  # 1: tests failed, which the report lists
            self.fail("tests", f"status {status}\n{output}")

    def _measure(self, out: Path, more: Sequence[str]) -> None:
        print("measuring ...", flush=True)
        seconds = self._left()
        command = [sys.executable, "-m", "bench.gpu.measure", "--out", str(out), "--rounds", str(self._rounds)]
        command += ["--seconds", f"{seconds - 30:.0f}", *more]
        status, output = run_command(command, seconds, self._variables)
        if out.exists():
            self._take(json.loads(out.read_text()))
        if status != 0:
            self.fail("measuring", f"status {status}\n{output}")

    def _take(self, measured: Mapping[str, Any]) -> None:
        for key, value in measured.items():
            self.report[key] = [*self.report[key], *value] if isinstance(value, list) else value


def build_command(target: Path, build: Path) -> list[str]:
    """Return the command that builds into ``target``: pip, without the network."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    settings = ["cmake.define.PYCOMM_CUDA=ON", "cmake.define.CMAKE_CUDA_ARCHITECTURES=native", f"build-dir={build}"]
    options = [word for setting in settings for word in ("-C", setting)]
    return [*pip, "--no-build-isolation", "--no-deps", "--target", str(target), *options, str(ROOT)]


def run_command(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run ``command``, for ``seconds`` at most; returns its exit status and the end of its output, both streams."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        overtime = ""
        try:
            status = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            overtime = f"\nstopped after {seconds:.0f} s"
            status = _stop(process)
        finally:
            _stop(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return status, text[-_KEPT_OUTPUT:].rstrip() + overtime


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End all that it has started in its session, at first as Ctrl-C does, on which pytest still writes its report."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15.0)
    return kill_session(process)


def parse_junit(text: str) -> dict[str, Any]:
    """Return counts, seconds and failures from pytest's ``--junitxml``."""
    root = ElementTree.fromstring(text)
    suites = [root] if root.tag == "testsuite" else list(root.iter("testsuite"))
    outcomes = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in outcomes}
    failures = []
    for case in root.iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            message = (problem.get("message") or problem.text or "").strip().partition("\n")[0]
            failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "message": message})
    return {
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        "failed": counts["failures"],
        "errors": counts["errors"],
        "skipped": counts["skipped"],
        "seconds": sum(float(suite.get("time", 0.0)) for suite in suites),
        "failures": failures,
    }


def commit_of(root: Path, told: str | None) -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` (whether files differ from it, reports apart); ``told`` where there is no git."""
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        dirty = bool(_git(root, "status", "--porcelain", "--", ".", ":!bench/results").strip())
    except (OSError, subprocess.SubprocessError):
        return {"commit": told, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def slug(device: str) -> str:
    """Turn a device's name into a part of a file's: "NVIDIA H200" into nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
