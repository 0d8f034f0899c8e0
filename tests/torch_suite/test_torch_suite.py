"""torch's own tests on "pycomm": all that can run on CPUs, but for the exceptions that are listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch_suite import page
from tests.torch_suite.expected import COUNTS, EXCEPTIONS, LEFT_OUT
from tests.torch_suite.faults import FAULTS, SHOWN
from tests.torch_suite.ranks import FAILED, PASSED, SKIPPED, Report

ROOT = Path(__file__).parents[2]
RELEASE = ".".join(torch.__version__.split(".")[:2])


def run(*arguments: str, limit: float, transport: str = "auto") -> subprocess.CompletedProcess[str]:
    """Run the suite's command in a process of its own, which forks, and has nothing else in it."""
    command = [sys.executable, "-m", "tests.torch_suite", *arguments]
    env = os.environ | {"PYCOMM_TRANSPORT": transport}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Report]:
    """What each test of torch's comes to on "pycomm", with ranks on one host, and each on a host of its own."""
    file = tmp_path_factory.mktemp("torch_suite") / "reports.json"
    done = run("--backend", "pycomm", "--json", str(file), limit=580.0, transport=request.param)
    assert file.exists(), done.stderr
    print(done.stdout)  # pytest shows it with what fails
    return {report["name"]: Report(**report) for report in json.loads(file.read_text())}


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestOnPycomm:
    def test_no_other_fails_than_the_excepted(self, reports: dict[str, Report]) -> None:
        failed = {name for name, report in reports.items() if report.outcome == FAILED}
        assert not {name: reports[name].text for name in failed - EXCEPTIONS.keys()}
        assert not EXCEPTIONS.keys() - failed, "these pass, and are no exceptions any more"

    def test_as_many_pass_as_the_documentation_says(self, reports: dict[str, Report]) -> None:
        assert RELEASE in COUNTS, f"nothing is said of torch {RELEASE}: run the suite, and say what passes"
        assert len(reports) == COUNTS[RELEASE].tests
        assert sum(report.outcome == PASSED for report in reports.values()) == COUNTS[RELEASE].passed

    def test_what_is_left_out_has_a_known_reason(self, reports: dict[str, Report]) -> None:
        skipped = {name: report.text for name, report in reports.items() if report.outcome == SKIPPED}
        assert not {
            name: text for name, text in skipped.items() if not any(re.search(pattern, text) for pattern in LEFT_OUT)
        }


def test_every_twentieth(tmp_path: Path) -> None:
    """Nothing that the class above does not tell, but that one is slow."""
    file = tmp_path / "reports.json"
    done = run("--backend", "pycomm", "--every", "20", "--json", str(file), limit=100.0)
    reports = [Report(**report) for report in json.loads(file.read_text())]
    failed = {report.name: report.text for report in reports if report.outcome == FAILED}
    assert not {name: failed[name] for name in failed.keys() - EXCEPTIONS.keys()}
    assert sum(report.outcome == PASSED for report in reports) > 2, done.stderr


@pytest.mark.slow
def test_faults_are_found(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    run("--backend", "gloo", "--faults", "--patience", "10", "--json", str(file), limit=100.0)
    reports = {report["fault"]: Report(**report) for report in json.loads(file.read_text())}
    assert reports.pop(None).outcome == PASSED
    assert reports.keys() == FAULTS.keys() == SHOWN.keys()
    for fault, report in reports.items():
        assert (report.outcome, SHOWN[fault] in report.text) == (FAILED, True), f"{fault}: {report.text}"


def test_the_page_is_not_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--check"]) == 0, capsys.readouterr().err
