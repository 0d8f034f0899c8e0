"""Tests of cutting models into stages: by structure, by tracing, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pycomm.parallel import cut
from pycomm.tools.cli.demo.model import ByteGPT

WIDTH = 4


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers() -> nn.Sequential:
    return nn.Sequential(block(), nn.Sequential(block(), block()), nn.Linear(WIDTH, WIDTH))


class Shortcut(nn.Module):
    """Model whose first layer is added to what the last one takes, and whose input is used again in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.a(x))
        out: torch.Tensor = self.d(self.c(self.b(first) * x) + first)
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def run(stages: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    passed: Any = (x,)
    for stage in stages:
        passed = stage(*passed)
        passed = passed if isinstance(passed, tuple) else (passed,)
    out: torch.Tensor = passed[0]
    return out


def test_a_sequential_is_cut_by_its_structure() -> None:
    model = layers()
    stages = cut(model, [["0", "1.0"], ["1.1"], ["2"]])
    x = torch.randn(3, WIDTH)
    assert torch.equal(run(stages, x), model(x))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert {id(p) for stage in stages for p in stage.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    ("model", "stages", "example"),
    [
        (Shortcut(), [["a"], ["b"], ["c"], ["d"]], torch.randn(2, WIDTH)),
        (ByteGPT(16, 3, 8, 2), [["byte_embedding"], ["blocks.1"], ["norm"]], torch.randint(0, 256, (2, 8))),
    ],
    ids=["shortcut", "gpt"],
)
def test_any_other_model_is_cut_by_tracing(model: nn.Module, stages: list[list[str]], example: torch.Tensor) -> None:
    made = cut(model, stages, example)
    assert len(made) == len(stages)
    torch.testing.assert_close(run(made, example), model(example), rtol=0, atol=0)
    assert {id(p) for stage in made for p in stage.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([], "wanted one or more names"),
        ([["0"], []], "wanted one or more names"),
        ([["0"], ["nothing"]], "'nothing', which is not in the model"),
        ([["0"], ["2", "1"]], "stage 1 has '2' where the model runs '1.0.0'"),
        ([["0"], ["1"]], "'2' is in no stage"),
        ([["0", "1"], ["1", "2"]], "where the model runs '2'"),
        ([["0", "1", "2"], ["2"]], "where the model runs 'no more'"),
    ],
)
def test_wrong_stages_are_refused(stages: list[list[str]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cut(layers(), stages)


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "tie parameters of two stages, or cut a stage without parameters",
    "`ValueError`.",
)
def test_a_model_that_cannot_be_cut_is_refused() -> None:
    x = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match="requires an example"):
        cut(Shortcut(), [["a"], ["b"]])
    with pytest.raises(ValueError, match="'e', which is not in the model"):
        cut(Shortcut(), [["a"], ["e"]], x)
    with pytest.raises(ValueError, match="cannot be traced"):
        cut(Shortcut(), [["a"], ["b"]], torch.randn(2, WIDTH + 1))
    with pytest.raises(ValueError, match="'b.weight' is the same as 'a.weight'"):
        cut(Tied(), [["a"], ["b"]], x)
    tied = Tied()
    with pytest.raises(ValueError, match="'1.weight' is used by stage 0 and by stage 1"):
        cut(nn.Sequential(tied.a, tied.b), [["0"], ["1"]])
    with pytest.raises(ValueError, match="stage 1 has no parameters"):
        cut(nn.Sequential(tied.a, nn.Tanh()), [["0"], ["1"]])


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "switch a traced stage between training and evaluation",
    "Error. `functional.dropout` keeps its mode silently.",
)
def test_a_traced_model_keeps_the_mode_of_its_dropout() -> None:
    class Dropping(Shortcut):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.drop(super().forward(x))
            return out

    x = torch.randn(2, WIDTH)
    stages = cut(Dropping(), [["a"], ["c"]], x)
    stages[1].train()
    with pytest.raises(RuntimeError, match="traced for training"):
        stages[1].eval()
    made = cut(Dropping().eval(), [["a"], ["c"]], x)
    torch.testing.assert_close(run(made, x), run(made, x))
    cut(Shortcut(), [["a"], ["c"]], x)[0].eval()
