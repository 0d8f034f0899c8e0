"""Tests of Plan: what it refuses, and that it survives its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pycomm.parallel import Plan

FULL = Plan(
    mesh={"pp": 2, "dp": 2, "tp": 2},
    split={"blocks.*.up": "columns", "blocks.*.down": "rows"},
    stages=(("embedding", "blocks.0"), ("blocks.1", "head")),
    schedule="zero_bubble_h1",
    microbatches=8,
    recompute=True,
    compression="fp16",
)


@pytest.mark.parametrize("plan", [Plan(), FULL], ids=["empty", "full"])
def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert Plan.load(path) == plan
    assert FULL.devices == 8


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mesh": {"dq": 2}}, "'dq'"),
        ({"mesh": {"dp": 0}}, "dp = 0"),
        ({"mesh": {"dp": True}}, "dp = True"),
        ({"mesh": [2]}, "mesh is"),
        ({"split": {"up": "diagonals"}}, "'diagonals'"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"stages": [["a"], []]}, "stage 1"),
        ({"stages": [["a"], ["a"]]}, "'a' is in two stages"),
        ({"stages": "a"}, "stages is 'a'"),
        ({"speed": 11}, "'speed'"),
    ],
)
def test_a_wrong_plan_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this plan is"):
        Plan.from_json(text)
