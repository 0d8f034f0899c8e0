"""Steps of ``bench.gpu``: commands, each in a process of its own, with a limit and a file that it writes as it goes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.gpu.outcomes import VARIABLE, read_outcomes

Found = Mapping[str, Any]

ALL_SECONDS = 570.0
SANITIZERS = {"memcheck": 80.0, "racecheck": 50.0, "synccheck": 40.0, "initcheck": 50.0}
"""Tools of compute-sanitizer, with the limit of each in seconds."""
SANITIZED = (
    "tests/kernels/test_topk_on_gpu.py",
    *(f"tests/kernels/test_{name}.py" for name in ("sparsify", "entries", "norms", "accumulate")),
)
"""Tests of kernels whose threads exchange results."""
MEMORY_CHECKED = (
    "tests/kernels/test_on_gpu.py",
    *(f"tests/kernels/test_{name}.py" for name in ("step", "quantize", "signs", "chunks")),
)
"""Those of the others, which memcheck alone looks at, after the former."""
SMOKE = ("tests/integrations/test_smoke.py", "tests/reducer/test_order_on_gpu.py")
PTX = "75-virtual"
TRACE = "step.trace.json.gz"
"""File of a measurement beside its report: the profiler's trace of a step under attach."""
MARKERS = ("requires_gpu", "requires_cuda")
_BUILD_SECONDS = 200.0
_ENVIRONMENT_SECONDS = 60.0
_TESTS_SECONDS = 130.0
_SMOKE_SECONDS = 50.0
_PTX_SECONDS = 40.0
_SANITIZER_FOUND = 99  # exit status of a sanitizer that found something; pytest has 0 to 5

_MARKED = re.compile(rf"""(?<!["'\w])({"|".join(MARKERS)})(?!["'\w])""")  # used, not only talked about
_SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)

# `python -m pytest` would put the source tree, which has no compiled extension, before the build.
_PYTEST = (
    "import sys; sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "import pytest; sys.exit(pytest.main(['-p', 'bench.gpu.outcomes', *sys.argv[1:]]))"
)


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        seconds: its limit.
        variables: variables of its environment in addition to this process's.
        read: returns its part of the report, as far as it is written.
        told: exit statuses, in addition to 0, that the report's part explains.
    """

    name: str
    command: list[str]
    seconds: float
    variables: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[], Found] = field(default=dict)
    told: tuple[int, ...] = ()


def gpu_tests(root: Path = ROOT) -> list[str]:
    """Return the files with tests for a GPU: all that use one of the markers."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in files if _MARKED.search(path.read_text())]


def build(site: Path, objects: Path, architecture: str) -> Step:
    """Describe pip, without the network, which installs into ``site`` what it has built in ``objects``, with PTX.

    Without its cache, too: it keeps the wheel of a folder whose name has a dash, and would take that next time.
    """
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir", "--no-index"]
    settings = [
        "cmake.define.PYCOMM_CUDA=ON",
        f"cmake.define.CMAKE_CUDA_ARCHITECTURES={architecture}{'' if architecture == 'native' else f';{PTX}'}",
        "cmake.define.CMAKE_CUDA_FLAGS=-lineinfo",  # sanitizers and profilers name lines; the code is the same
        f"build-dir={objects}",
    ]
    options = [word for setting in settings for word in ("-C", setting)]
    command = [*pip, "--no-build-isolation", "--no-deps", "--upgrade", "--target", str(site), *options, str(ROOT)]
    return Step("build", command, _BUILD_SECONDS)


def environment(out: Path, device: str) -> Step:
    """Describe the step that looks at ``device`` and the libraries with the pycomm that was built."""
    command = [sys.executable, "-m", "bench.gpu.measure", "--out", str(out), "--phases", "environment"]
    command += ["--device", device]
    return Step("environment", command, _ENVIRONMENT_SECONDS, read=partial(_environment, out))


def collection(out: Path) -> Step:
    """Describe the step that only finds the tests for a GPU, which needs none."""
    command = [*_pytest(gpu_tests()), "--collect-only", "-qq"]
    return Step("collecting", command, _TESTS_SECONDS, {VARIABLE: str(out)}, partial(_tests, out))


def tests(out: Path) -> Step:
    """Describe the run of all tests for a GPU."""
    variables = {VARIABLE: str(out)}
    return Step("tests", _pytest(gpu_tests()), _TESTS_SECONDS, variables, partial(_tests, out), told=(1,))


def smoke(out: Path) -> Step:
    """Describe the run of what scripts use in addition to attach, and of delays on all streams."""
    return Step(
        "smoke", _pytest(list(SMOKE)), _SMOKE_SECONDS, {VARIABLE: str(out)}, partial(_named, "smoke", out), (1,)
    )


def ptx(out: Path) -> Step:
    """Describe the run of some kernels that the driver has compiled of the build's PTX, as on a newer GPU."""
    command = [*_pytest(["tests/kernels/test_on_gpu.py"]), "-k", "pack and torch"]
    variables = {VARIABLE: str(out), "CUDA_FORCE_PTX_JIT": "1"}
    return Step("ptx", command, _PTX_SECONDS, variables, partial(_named, "ptx", out), (1,))


def sanitizer(tool: str, executable: str, out: Path) -> Step:
    """Describe a run under one of compute-sanitizer's tools."""
    log = out.with_suffix(".log")
    wrapper = [executable, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(_SANITIZER_FOUND)]
    chosen = ["-k", "not cupy", "--timeout=0"]  # the same kernels; and the tool, not the test, takes the time
    files = [*SANITIZED, *(MEMORY_CHECKED if tool == "memcheck" else ())]
    command = [*wrapper, "--log-file", str(log), *_pytest(files), *chosen]
    # Without torch's allocator, an access beyond an array is one beyond an allocation.
    variables = {VARIABLE: str(out), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, command, SANITIZERS[tool], variables, partial(_sanitized, tool, out, log), told=(1,))


def measuring(out: Path, rounds: int, seconds: float, with_pycomm: bool) -> Step:
    """Describe all measurements; without pycomm, those that it has no part in."""
    command = [sys.executable, "-m", "bench.gpu.measure", "--out", str(out), "--rounds", str(rounds)]
    command += ["--seconds", f"{seconds - 30:.0f}", *([] if with_pycomm else ["--phases", "bandwidth"])]
    return Step("measuring", command, seconds, read=partial(_json, out))


def _pytest(files: list[str]) -> list[str]:
    return [
        sys.executable,
        "-c",
        _PYTEST,
        str(ROOT),
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        " or ".join(MARKERS),
        *files,
    ]


def _json(path: Path) -> Found:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _environment(out: Path) -> Found:
    found = _json(out)
    return {key: found[key] for key in ("environment", "errors") if key in found}


def _tests(out: Path) -> Found:
    found = read_outcomes(out)
    return {"tests": {"files": gpu_tests(), **found}} if found else {}


def _named(name: str, out: Path) -> Found:
    found = read_outcomes(out)
    return {"runs": [{"name": name, **found}]} if found else {}


def _sanitized(tool: str, out: Path, log: Path) -> Found:
    """Read the outcomes, and from the log the summary and what was found first."""
    said = log.read_text(errors="replace") if log.exists() else ""
    summaries = _SUMMARY.findall(said)
    row = {"tool": tool, "tests": read_outcomes(out), "summary": summaries[-1] if summaries else None}
    return {"sanitizers": [{**row, "log": said[:2000]}]}
