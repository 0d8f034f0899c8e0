"""Fixtures of steps."""

from __future__ import annotations

from typing import Any

import pytest

from pycomm.optim import plans


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[plans.StepPlan]:
    """All plans that are made from now on."""
    found: list[plans.StepPlan] = []

    class Counted(plans.StepPlan):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(plans, "StepPlan", Counted)
    return found
