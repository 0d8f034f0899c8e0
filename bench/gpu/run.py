"""Run of ``bench.gpu``: runs the steps, and writes the report whenever it has learned more."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.gpu import plan
from bench.gpu.plan import Step
from bench.gpu.report import print_report
from bench.gpu.running import run_command
from bench.gpu.toolkit import architecture_here, find_tool

_SANITIZERS_SECONDS = 90.0
"""What a measurement leaves of the time for what comes last."""
_LISTS = ("steps", "runs", "sanitizers", "cases", "nccl", "attach", "peaks", "skipped", "errors")


class Run:
    """Report in the making, and the steps that fill it, each a process of its own.

    Args:
        what: "check", "measure" or both.
        output: the report's file.
        scratch: folder for what the steps write.
        folder: where to build; in ``scratch`` if ``None``.
    """

    def __init__(self, what: Collection[str], output: Path, scratch: Path, folder: Path | None = None) -> None:
        self._begin = time.monotonic()
        self._reserve = plan.ALL_SECONDS / 2 if len({*what}) == 2 else 0.0  # of a check, for what follows it
        self._what, self._output, self._scratch = what, output.absolute(), scratch
        folder = (folder or scratch).absolute()
        self._site, self._objects = folder / "site", folder / "build"
        self._variables: dict[str, str] = {}
        bench = "gpu" if "measure" in what else "gpu_check"
        self.report: dict[str, Any] = {"bench": bench, "environment": {}, "tests": {}, "bandwidth": {}}
        for key in _LISTS:
            self.report[key] = []
        self._write()  # before anything else: a file that cannot be written is known at once

    def everything(self, build: bool, commit: str | None, rounds: int) -> None:
        """Run all steps of a check, a measurement, or both; without a build, only those that pycomm has no part in."""
        self.report["environment"] = commit_of(ROOT, commit)
        built = self._built(build, architecture_here())
        if "check" in self._what and built:
            self._take(plan.environment(self._scratch / "environment.json", "cuda:0"))
            self._take(plan.smoke(self._scratch / "smoke.jsonl"))
            self._take(plan.tests(self._scratch / "tests.jsonl"))
            if not self.report["tests"].get("passed"):
                self.fail("tests", "none has passed")
            self._take(plan.ptx(self._scratch / "ptx.jsonl"))
        elif "check" in self._what:
            self._skip("tests and sanitizers", "the build failed")
        self._reserve = _SANITIZERS_SECONDS if "check" in self._what and built else 0.0
        if "measure" in self._what:
            self._take(plan.measuring(self._scratch / "measured.json", rounds, self._left(), built))
        self._reserve = 0.0
        if "check" in self._what and built:
            for step in self._sanitizers():
                self._take(step)

    def rehearse(self, build: bool, commit: str | None, rounds: int) -> None:
        """Run the steps that need no GPU, and print the others."""
        self.report["environment"] = commit_of(ROOT, commit)
        scratch = self._scratch
        if self._built(build, "90"):
            self._take(plan.environment(scratch / "environment.json", "cpu"))
            if "check" in self._what:
                self._take(plan.collection(scratch / "collected.jsonl"))
        steps: list[Step] = []
        if "check" in self._what:
            names = ("smoke", "tests", "ptx")
            steps = [
                make(scratch / f"{name}.jsonl")
                for name, make in zip(names, (plan.smoke, plan.tests, plan.ptx), strict=True)
            ]
        self._reserve = 0.0
        if "measure" in self._what:
            steps.append(plan.measuring(scratch / "measured.json", rounds, self._left(), with_pycomm=True))
        if "check" in self._what:
            steps += self._sanitizers()
        for step in steps:
            self._skip(step.name, "a rehearsal")
            print(f"\n== {step.name}, {step.seconds:.0f} s at most, would be\n{shlex.join(step.command)}", flush=True)

    def finish(self) -> int:
        """Write and print the report; returns the exit status."""
        self._write()
        trace = self._scratch / plan.TRACE
        if trace.exists():
            shutil.copyfile(trace, self._output.with_suffix(".trace.json.gz"))
        print()
        print_report(json.loads(self._output.read_text()))
        print(f"\nreport written to {self._output}")
        tested = [self.report["tests"], *self.report["runs"], *(row["tests"] for row in self.report["sanitizers"])]
        return 1 if self.report["errors"] or any(t.get("failed") or t.get("errors") for t in tested) else 0

    def fail(self, where: str, error: str) -> None:
        self.report["errors"].append({"where": where, "error": error})

    def _built(self, build: bool, architecture: str) -> bool:
        if not build:
            self._skip("build", "--skip-build")
            return True
        if not self._take(plan.build(self._site, self._objects, architecture)):
            return False
        search = [str(self._site), os.environ.get("PYTHONPATH", "")]
        self._variables["PYTHONPATH"] = os.pathsep.join(entry for entry in search if entry)
        return True

    def _sanitizers(self) -> list[Step]:
        executable = find_tool("compute-sanitizer")
        if executable is None:
            for tool in plan.SANITIZERS:
                self._skip(tool, "no compute-sanitizer on PATH or in the CUDA toolkit's folder")
            return []
        return [plan.sanitizer(tool, executable, self._scratch / f"{tool}.jsonl") for tool in plan.SANITIZERS]

    def _take(self, step: Step) -> bool:
        """Run ``step`` and add what it finds to the report, also while it runs; returns whether it did what it was to.

        What it was to do is not only to come to its end: tests that fail, and what a sanitizer finds, are noted.
        """
        limit = min(step.seconds, self._left())
        if limit < 1.0:
            seconds = plan.ALL_SECONDS - self._reserve
            what = "the check" if self._reserve else "everything"
            self.fail(step.name, f"not begun: the {seconds:.0f} s for {what} were used up")
            return False
        print(f"\n== {step.name}, {limit:.0f} s at most", flush=True)
        before, begin = self.report, time.monotonic()

        def look() -> None:
            report = merged(before, step.read())
            if report != self.report:
                self.report = report
                self._write()

        ended = run_command(step.command, limit, {**self._variables, **step.variables}, look)
        self.report["steps"].append({"name": step.name, "seconds": time.monotonic() - begin, "status": ended.status})
        if not ended.in_time or ended.status not in (0, *step.told):
            self.fail(step.name, f"status {ended.status}\n{ended.output}")
        self._write()
        return ended.in_time and ended.status == 0

    def _write(self) -> None:
        """Write the report so that whoever looks finds a whole one, whenever this process ends."""
        report = {**self.report, "seconds": time.monotonic() - self._begin}
        self._output.parent.mkdir(parents=True, exist_ok=True)
        draft = self._output.with_name(f"{self._output.name}.draft")
        draft.write_text(json.dumps(report, indent=1) + "\n")
        draft.replace(self._output)

    def _skip(self, what: str, why: str) -> None:
        self.report["skipped"].append({"what": what, "why": why})

    def _left(self) -> float:
        return plan.ALL_SECONDS - self._reserve - (time.monotonic() - self._begin)


def merged(report: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``report`` with what was ``found``: lists are put together, and of two answers the report's own stays."""
    both = dict(report)
    for key, value in found.items():
        if isinstance(value, list):
            both[key] = [*report.get(key, []), *value]
        else:
            both[key] = {**value, **report[key]} if key == "environment" else value
    return both


def commit_of(root: Path, told: str | None) -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` (whether files differ from it, reports apart); ``told`` where there is no git.

    A repository that ``root`` merely lies in is another's.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            return {"commit": told, "dirty": None}
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
