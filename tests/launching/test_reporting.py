"""``progress``: what is passed on, and how it is shown."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from pycomm.tools.launching import progress, reporting
from pycomm.tools.launching.reporting import Bar, Lines, Progress


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    found: list[Progress] = []
    monkeypatch.setattr(reporting, "_last", float("-inf"))
    monkeypatch.setattr(reporting, "_send", found.append)
    return found


def test_a_loss_that_requires_grad(told: list[Progress]) -> None:
    progress(1, 1, loss=torch.ones((), requires_grad=True))
    assert told == [Progress(1, 1, {"loss": 1.0})]


def test_not_every_step_is_told_but_the_last_is(told: list[Progress]) -> None:
    for step in range(1, 10_001):
        progress(step, 10_000, loss=1 / step)
    assert told[0] == Progress(1, 10_000, {"loss": 1.0})
    assert told[-1] == Progress(10_000, 10_000, {"loss": 1e-4})
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("arguments", "figures", "kind", "says"),
    [
        ((3, 2), {}, ValueError, "^done is 3, wanted at most total, which is 2"),
        ((-1, 2), {}, ValueError, "^done is -1, wanted at least 0"),
        ((0, 0), {}, ValueError, "^total is 0, wanted at least 1"),
        ((0.5, 2), {}, TypeError, "^done is 0.5, wanted an int"),
        ((1, 2), {"loss": "low"}, TypeError, "^loss is 'low', wanted a number"),
    ],
)
def test_wrong_arguments(
    told: list[Progress], arguments: tuple[int, int], figures: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        progress(*arguments, **figures)
    assert not told


def test_a_line_for_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for _ in range(2):  # the second is another run
        for step in range(1, 41):
            lines.show(Progress(step, 40, {"loss": 2.0 / step}))
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == ["4/40  loss 0.5", "8/40  loss 0.25", "12/40  loss 0.1667"]
    assert len(out) == 20


def test_outside_of_a_launch_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reporting, "_last", float("-inf"))
    monkeypatch.setenv("RANK", "1")
    progress(2, 2)
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):  # the second is something new
        progress(1, 1)
    assert capsys.readouterr().out == "1/1\n1/1\n"


def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console")
    drawn = io.StringIO()
    bar = Bar(console.Console(file=drawn, force_terminal=True, width=100, force_jupyter=False))
    bar.show(Progress(1, 4, {"loss": 0.5}))
    print("written meanwhile")
    bar.show(Progress(4, 4, {"loss": 0.25}))
    bar.close()
    assert "4/4" in drawn.getvalue()
    assert "loss 0.25" in drawn.getvalue()


def test_a_bar_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting.display() as show:  # pytest's capture is none
        show(Progress(1, 1))
    assert capsys.readouterr().out == "1/1\n"
