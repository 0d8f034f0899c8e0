"""Tests of Plan: what it refuses, and that it survives its file."""

from __future__ import annotations

import json
import os
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
        ({"schedule": 5}, "schedule is 5, wanted a string"),
        ({"recompute": 1}, "recompute is 1, wanted true or false"),
        ({"compression": []}, "compression is a list, wanted null or a string"),
        ({"microbatches": 10**30}, "microbatches is an integer beyond 64 bits"),
        ({"\x1b]0;owned\x07": 1}, r"\\x1b\]0;owned\\x07"),
    ],
)
def test_a_wrong_plan_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this plan is"):
        Plan.from_json(text)


@pytest.mark.timeout(20)
def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, told in (
        ("[" * 100_000, "nested too deeply"),
        ('{"mesh": {"dq": 2}}', "'dq'"),
        ("\xff", "no valid|not valid"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path} is .*{told}"):
            Plan.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path} is a FIFO"):
        Plan.load(path)


@pytest.mark.timeout(20)
def test_many_modules_are_compared_at_once() -> None:
    names = [str(number) for number in range(200_000)]
    with pytest.raises(ValueError, match="'7' is in two stages"):
        Plan.from_json(json.dumps({"stages": [names, ["7"]]}))
