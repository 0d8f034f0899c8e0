"""bench.asynchronous.experiment: its arithmetic, and that its page is what its figures say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.asynchronous.experiment.methods import METHODS, Run
from bench.asynchronous.experiment.report import (
    PAGE,
    PLOT,
    common_samples,
    curve_of,
    loss_at,
    scenario_table,
    write_docs,
)

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "bench" / "results" / "asynchronous.json"


def run(method: str, seed: int, last: float, steps: int, **changes: Any) -> dict[str, Any]:
    points = [[0.0, 0, 5.0], [1.0, steps // 2, 4.0], [2.0, steps, last]]
    found = {"method": method, "scenario": "slow", "seed": seed, "lr": 1e-3, "points": points, "steps": steps}
    return {**found, "bytes": 2_000_000, "tunes": False, **changes}


def content() -> dict[str, Any]:
    runs = [run("sync", 0, 3.0, 40), run("sync", 1, 3.2, 40), run("async", 0, 2.0, 100), run("async", 1, 2.0, 120)]
    runs.append(run("async", 0, 1.0, 9, tunes=True))
    settings = {"seconds": 2.0, "pace": 0.1, "seeds": 2, "rates": [1e-3], "workers": 4, "methods": list(METHODS)}
    return {"runs": runs, "settings": settings, "headline": "a machine"}


def test_losses_lie_on_straight_lines() -> None:
    curve = [(0.0, 5.0), (10.0, 4.0), (20.0, 2.0)]
    assert [loss_at(curve, x) for x in (0, 5, 10, 15, 20)] == [5.0, 4.5, 4.0, 3.0, 2.0]
    assert math.isnan(loss_at(curve, 21))
    assert curve_of(run("sync", 0, 3.0, 40), "samples") == [(0, 5.0), (160, 4.0), (320, 3.0)]


def test_runs_that_tune_do_not_count_and_samples_are_those_that_all_have() -> None:
    assert common_samples(content(), "slow") == 320
    header, rows = scenario_table(content(), "slow")
    assert header[4] == "loss at 320 samples"
    assert [row[0] for row in rows] == ["synchronous", "asynchronous"]
    assert rows[0][2] == "3.100 ± 0.141"
    assert rows[0][4] == rows[0][2]
    assert rows[1][2:4] == ["2.000 ± 0.000", "880"]
    # 40 of 100 and of 120 steps: 5 - 40 / 50 and 5 - 40 / 60.
    assert rows[1][4].startswith("4.267")
    assert rows[1][5] == "2 MB"


def test_steps_of_those_that_make_equally_many() -> None:
    runs = {scenario: Run("sync", scenario, 1e-3, 0, 24.0, 0.06) for scenario in ("alike", "slow", "away")}
    assert {scenario: each.steps_in_step() for scenario, each in runs.items()} == {
        "alike": 400,
        "slow": 40,
        "away": 266,
    }


def test_the_page_is_that_of_the_report(tmp_path: Path) -> None:
    figures = json.loads(REPORT.read_text())
    write_docs(tmp_path, figures)
    assert (tmp_path / PAGE).read_text() == (ROOT / "docs" / PAGE).read_text()
    assert (tmp_path / PLOT).stat().st_size > 0
    assert (ROOT / "docs" / PLOT).exists()
    assert {each["method"] for each in figures["runs"]} == set(METHODS)
