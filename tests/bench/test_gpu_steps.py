"""The commands of bench.gpu, and what it reads of them; with stand-ins for what would need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import plan
from bench.gpu.outcomes import VARIABLE, read_outcomes
from bench.gpu.plan import gpu_tests
from bench.gpu.running import run_command
from bench.gpu.toolkit import architecture_here, find_tool
from tests.bench.stand_ins import HOUR, executable, python

ROOT = Path(__file__).parents[2]


COLLECTOR = """
import json, pathlib, sys, pytest

class Plugin:
    def pytest_collection_finish(self, session):
        rows = [[i.nodeid, [m.name for m in i.iter_markers()], list(i.fixturenames)] for i in session.items]
        pathlib.Path(sys.argv[1]).write_text(json.dumps(rows))

sys.exit(pytest.main(["--collect-only", "-qq", "tests"], plugins=[Plugin()]))
"""


@pytest.mark.slow
def test_no_gpu_test_is_left_out(tmp_path: Path) -> None:
    """What is marked is in the files that `check` runs, and nothing that takes a GPU lacks a mark."""
    out = tmp_path / "items.json"
    done = subprocess.run([*python(COLLECTOR), str(out)], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    items: list[tuple[str, set[str], set[str]]] = [
        (nodeid, set(marks), set(fixtures)) for nodeid, marks, fixtures in json.loads(out.read_text())
    ]
    marked = {nodeid.partition("::")[0] for nodeid, marks, _ in items if marks & set(plan.MARKERS)}
    assert marked == set(gpu_tests())
    assert len(marked) >= 12
    takes_gpu = {"gpu", "large_team", "sharing"}
    assert not [nodeid for nodeid, marks, fixtures in items if fixtures & takes_gpu and not marks & set(plan.MARKERS)]


def test_sanitized_tests_are_gpu_tests() -> None:
    assert set(plan.SANITIZED) <= set(gpu_tests())


def test_kernels_with_barriers_are_sanitized() -> None:
    """Where the emulator takes barriers away: there a GPU may do what the emulator cannot."""
    assert list(plan.SANITIZERS) == ["memcheck", "racecheck", "synccheck", "initcheck"]
    for kernel in ("topk", "sparsify", "entries", "norms", "accumulate"):
        assert any(f"/test_{kernel}" in path for path in plan.SANITIZED)
    for kernel in ("step", "on_gpu", "quantize", "signs", "chunks"):  # pack is in test_on_gpu.py
        assert any(f"/test_{kernel}" in path for path in plan.MEMORY_CHECKED)
    for path in (*plan.SANITIZED, *plan.MEMORY_CHECKED, *plan.SMOKE):
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("says", "wanted"), [("9.0\\n9.0", "90-real"), ("10.3", "103-real"), ("No devices", "native"), (None, "native")]
)
def test_the_architecture_of_the_first_gpu(
    says: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if says is not None:
        executable(tmp_path / "nvidia-smi", f"#!/bin/sh\nprintf '{says}'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert architecture_here() == wanted


def test_plan_of_commands(tmp_path: Path) -> None:
    build = plan.build(tmp_path / "site", tmp_path / "objects", "90")
    for word in (
        "--no-index",
        "--no-cache-dir",
        "--no-build-isolation",
        "--no-deps",
        f"build-dir={tmp_path / 'objects'}",
        str(ROOT),
    ):
        assert word in build.command
    assert "cmake.define.CMAKE_CUDA_ARCHITECTURES=90;75-virtual" in build.command
    assert "cmake.define.CMAKE_CUDA_ARCHITECTURES=native" in plan.build(tmp_path, tmp_path, "native").command
    assert "cmake.define.CMAKE_CUDA_FLAGS=-lineinfo" in build.command
    memcheck = plan.sanitizer("memcheck", "/x/compute-sanitizer", tmp_path / "m.jsonl")
    assert memcheck.command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"]
    assert memcheck.variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    steps = [
        build,
        plan.environment(tmp_path, "cuda:0"),
        plan.smoke(tmp_path),
        plan.tests(tmp_path),
        plan.ptx(tmp_path),
    ]
    steps += [plan.sanitizer(tool, "/x/compute-sanitizer", tmp_path / "s.jsonl") for tool in plan.SANITIZERS]
    assert sum(step.seconds for step in steps) < 1.3 * plan.ALL_SECONDS  # none has to wait for more than its share
    assert plan.measuring(tmp_path, 5, 330.0, with_pycomm=False).command[-2:] == ["--phases", "bandwidth"]
    assert "300" in plan.measuring(tmp_path, 5, 330.0, with_pycomm=True).command


@pytest.mark.parametrize("status", [0, 99])
def test_the_command_of_a_sanitizer(status: int, tmp_path: Path) -> None:
    """With a tool that finds nothing, or something, and runs what it is given."""
    options = "--tool racecheck --target-processes all --error-exitcode 99 --log-file"
    tool = executable(
        tmp_path / "compute-sanitizer",
        f'#!/bin/sh\n[ "$1 $2 $3 $4 $5 $6 $7" = "{options}" ] || exit 50\n'
        f"echo '========= RACECHECK SUMMARY: {status} hazards' > $8\nshift 8\n"
        f'"$@" || exit $?\nexit {status}\n',
    )
    step = plan.sanitizer("racecheck", str(tool), tmp_path / "out.jsonl")
    ended = run_command(step.command, 100, step.variables)
    assert ended.status == status, ended.output
    assert 99 not in step.told  # what was found is an error of the run
    (row,) = step.read()["sanitizers"]
    assert (row["tool"], row["summary"]) == ("racecheck", f"RACECHECK SUMMARY: {status} hazards")
    assert row["tests"]["finished"]
    assert row["tests"]["selected"] >= 70


def test_tools_are_found_beside_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("bench.gpu.toolkit._USUAL", (str(tmp_path / "usual"),))
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        monkeypatch.delenv(name, raising=False)
    assert find_tool("compute-sanitizer") is None
    usual = executable(tmp_path / "usual" / "compute-sanitizer" / "compute-sanitizer", "")
    assert find_tool("compute-sanitizer") == str(usual)
    named = executable(tmp_path / "named" / "bin" / "compute-sanitizer", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert find_tool("compute-sanitizer") == str(named)
    first = executable(tmp_path / "nothing" / "compute-sanitizer", "")
    assert find_tool("compute-sanitizer") == str(first)


class TestCommands:
    def test_they_end_in_time(self, capsys: pytest.CaptureFixture[str]) -> None:
        ended = run_command(python(HOUR), 2)
        assert not ended.in_time
        assert ended.status != 0
        assert ended.output.startswith("here")
        assert ended.output.endswith("stopped after 2 s")
        assert capsys.readouterr().out.startswith("here\n")

    def test_their_status(self) -> None:
        ended = run_command(python("raise SystemExit(7)"), 60)
        assert (ended.status, ended.in_time, ended.output) == (7, True, "")

    def test_they_are_looked_at_meanwhile(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown: list[str] = []

        def look() -> None:
            shown.append(capsys.readouterr().out)

        code = "import time\nfor i in range(3): print('line', i, flush=True); time.sleep(0.7)"
        ended = run_command(python(code), 60, {"SOME": "variable"}, look)
        assert "".join(shown) == "line 0\nline 1\nline 2\n"
        first = next(filter(None, shown))  # a busy machine may take longer to start a process than a look takes
        assert "line 0" in first
        assert "line 2" not in first
        assert ended.output == "line 0\nline 1\nline 2"

    def test_what_they_started_ends_with_them(self, tmp_path: Path) -> None:
        """Also if the command itself has ended."""
        grandchild = tmp_path / "pid"
        code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {HOUR!r}]); "
        run_command(python(f"{code}open({str(grandchild)!r}, 'w').write(str(p.pid))"), 60)
        pid = int(grandchild.read_text())
        for _ in range(100):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.05)
        raise AssertionError("it goes on")


SESSION = """
import pytest

@pytest.fixture
def broken():
    raise KeyError("fixture")

def test_good(): pass
def test_bad(): assert 1 == 2
def test_broken(broken): pass
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_endless():
    import time
    time.sleep(3600)
"""


def outcomes_of(session: str, tmp_path: Path, seconds: float, *options: str) -> dict[str, Any]:
    """Run pytest as `check` does on one file."""
    (tmp_path / "test_it.py").write_text(session)
    words = [*python(plan._PYTEST), str(ROOT), "-q", "--rootdir", str(tmp_path), "-c", os.devnull, *options]
    run_command([*words, str(tmp_path / "test_it.py")], seconds, {VARIABLE: str(tmp_path / "out.jsonl")})
    return read_outcomes(tmp_path / "out.jsonl")


def test_outcomes_of_a_session_that_is_cut_off(tmp_path: Path) -> None:
    """By a kill, with no chance to sum up, and while it writes a line."""
    killed = SESSION.replace("time.sleep(3600)", "import os; os.kill(os.getpid(), 9)")
    found = outcomes_of(killed, tmp_path, 60)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"test": "test_it.py::test_end')
    assert read_outcomes(tmp_path / "out.jsonl") == found
    assert found.pop("seconds") >= 0.0
    assert found == {
        "selected": 5,
        "finished": False,
        "passed": 1,
        "failed": 1,
        "errors": 1,
        "skipped": 1,
        "failures": [
            {"test": "test_it.py::test_bad", "message": "assert 1 == 2"},
            {"test": "test_it.py::test_broken", "message": "KeyError: 'fixture'"},
        ],
        "skips": {"not here": 1},
    }


def test_outcomes_of_whole_sessions(tmp_path: Path) -> None:
    assert read_outcomes(tmp_path / "none") == {}
    found = outcomes_of(SESSION, tmp_path, 60, "-k", "good or skipped")
    assert (found["selected"], found["finished"], found["passed"], found["skipped"]) == (2, True, 1, 1)
    (tmp_path / "out.jsonl").unlink()
    found = outcomes_of("import not_there", tmp_path, 60)
    assert found["errors"] == 1
    assert "not_there" in found["failures"][0]["message"]
