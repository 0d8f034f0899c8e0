"""Plugin of pytest that writes each test's outcome as soon as it is known, and the reader of that file.

``pytest -p bench.gpu.outcomes`` with the file's path in ``PYCOMM_BENCH_OUTCOMES``: what is killed leaves what it had.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PYCOMM_BENCH_OUTCOMES"


def pytest_collection_finish(session: pytest.Session) -> None:
    _write({"selected": len(session.items)})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "errors", "seconds": 0.0, "why": _last_line(report.longreprtext)})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    row = {"test": report.nodeid, "outcome": outcome, "seconds": report.duration}
    if report.failed:
        row |= {"outcome": "failed" if report.when == "call" else "errors", "why": _last_line(report.longreprtext)}
    elif report.skipped and isinstance(report.longrepr, tuple):
        row["why"] = report.longrepr[2].removeprefix("Skipped: ")
    _write(row)


def pytest_sessionfinish() -> None:
    _write({"finished": True})


def _last_line(text: str) -> str:
    """Return the error itself, if there is one among the lines of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0 if errors else -1]


def _write(row: dict[str, Any]) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_outcomes(path: Path) -> dict[str, Any]:
    """Return what has been written so far: counts, seconds, failures, reasons of skips; empty if there is no file.

    ``finished`` says whether the session came to its end; ``selected`` how many tests it was to run.
    """
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # what follows the last end is a part
    tests = [row for row in rows if "test" in row]
    counts = Counter(row["outcome"] for row in tests)
    return {
        "selected": next((row["selected"] for row in rows if "selected" in row), 0),
        "finished": any("finished" in row for row in rows),
        **{name: counts[name] for name in ("passed", "failed", "errors", "skipped")},
        "seconds": sum(row["seconds"] for row in tests),
        "failures": [
            {"test": row["test"], "message": row["why"]} for row in tests if row["outcome"] in ("failed", "errors")
        ],
        "skips": dict(Counter(row["why"] for row in tests if row["outcome"] == "skipped")),
    }
