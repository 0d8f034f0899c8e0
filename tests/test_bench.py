"""The benches run, verify and write what they measured; what they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "arguments",
    [
        ["kernels", "--rounds", "1"],
        ["collectives", "--peers", "gloo", "--ranks", "2", "--sizes", "1K,64K", "--rounds", "1"],
        ["training", "--rounds", "1", "--steps", "1", "--widths", "784,512,10"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.timeout(180)
def test_bench(arguments: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", f"bench.{arguments[0]}", *arguments[1:], "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout or arguments[0] != "kernels"
    assert json.loads(report.read_text())
