"""PYCOMM_COMPARE: the first steps' gradients are averaged once more by the user's own group, and compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reductions.reduction import Reduction
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.models import loss_of, make_model


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "PYCOMM_COMPARE" in record.getMessage() and record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


@contextmanager
def comparing(steps: str) -> Iterator[list[str]]:
    handler, logger = Said(), logging.getLogger("pycomm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOMM_COMPARE", steps)
        logger.addHandler(handler)
        try:
            yield handler.lines
        finally:
            logger.removeHandler(handler)


def train(dtype: torch.dtype = torch.float32, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    model = make_model(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, bucket_mb=0.004, **options) as reducer:
        for step in range(steps):
            scale = torch.inf if "loss_scaler" in options and step == 1 and rank == 1 else 1.0
            optimizer.zero_grad()
            (loss_of(model, rank, step) * scale).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
                optimizer.step()
        assert reducer.stats()["steps"] == steps
    return {name: value.clone() for name, value in model.state_dict().items()}


def said_of(lines: list[str]) -> str:
    if dist.get_rank() > 0:
        assert lines == []
        return ""
    (line,) = lines
    return line


@on_ranks(2)
def test_equal_to_the_bit() -> None:
    wanted = train()
    with comparing("3") as lines:
        found = train()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    line = said_of(lines)
    if line:
        begin = (
            "PYCOMM_COMPARE: in 3 steps, the averages of pycomm and of gloo were equal to the bit. backward() waited "
        )
        assert begin in line
        assert line.endswith("by gloo, of which nothing was hidden")


@on_ranks(3)
def test_equal_to_rounding() -> None:
    with comparing("4") as lines:
        train(torch.bfloat16)
    line = said_of(lines)
    assert not line or "were equal to rounding (the difference was at most " in line or "to the bit" in line


class Weighted(nn.Module):
    """A parameter that is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.b(self.a(x)) if both else self.a(x)


@on_ranks(2, 3)
def test_weights_windows_and_unused_parameters() -> None:
    torch.manual_seed(0)
    model, rank = Weighted().double(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comparing("3") as lines, attached(optimizer, model, accumulate=2) as reducer:
        for step in range(3):
            for part in range(2):
                reducer.set_weight(1 + (rank + part) % 2)
                model(torch.full((2, 4), 1.0 + rank + part).double(), both=step != 1 or rank == 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    line = said_of(lines)
    assert not line or " in 3 steps, the averages of pycomm and of gloo were equal to " in line


@on_ranks(2)
def test_sums_parts_and_batches_that_are_skipped() -> None:
    for options in ({"average": False}, {"shard": "optimizer"}):
        with comparing("4") as lines:
            train(**options)
        assert "equal to the bit" in said_of(lines) or dist.get_rank() > 0
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comparing("3") as lines, attached(optimizer, model) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            if step == 1 and dist.get_rank() == 1:
                reducer.skip_batch()
            elif step == 2:
                if dist.get_rank() == 0:
                    reducer.veto_step("this rank wants none")
                loss_of(model, dist.get_rank(), step).backward()
            else:
                loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    assert "in 3 steps, the averages of pycomm and of gloo were equal to the bit" in said_of(lines) or dist.get_rank()


@on_ranks(2)
def test_what_compression_leaves_out() -> None:
    parts = {}
    for method in (pycomm.FP16(), pycomm.TopK(0.05)):
        with comparing("4") as lines:
            train(compression=method)
        line = said_of(lines)
        if line:
            in_step, in_sum = line.partition("differed by ")[2].split(" % in a step, and in their sum by ")
            parts[type(method)] = float(in_step.split(" %")[0]), float(in_sum.split(" %")[0])
            assert f"{method} sends less than the gradients. backward() waited " in line
    if parts:
        assert 0.0 < parts[pycomm.FP16][0] < 0.1
        step, total = parts[pycomm.TopK]
        assert 20.0 < step < 100.0
        assert total < step, "error feedback sends later what a step leaves out"


@on_ranks(2)
def test_a_step_that_is_not_finite_does_not_count() -> None:
    with comparing("3") as lines:
        train(loss_scaler=torch.amp.GradScaler("cpu", enabled=True, init_scale=1.0))
    assert "in 3 steps" in said_of(lines) or dist.get_rank() > 0


@on_ranks(2)
def test_a_wrong_average_is_found() -> None:
    right = Reduction.pack

    def pack(self: Reduction, exchanging: Any, grads: Any, *rest: Any, **options: Any) -> None:
        wrong = [None if grad is None else 1.01 * grad for grad in grads] if dist.get_rank() == 1 else grads
        right(self, exchanging, wrong, *rest, **options)

    with pytest.MonkeyPatch.context() as patch, comparing("2") as lines:
        patch.setattr(Reduction, "pack", pack)
        train()
    line = said_of(lines)
    assert not line or "DIFFERED, by " in line


@on_ranks(2)
def test_bad_values() -> None:
    def refused(kind: type[Exception], says: str, **options: Any) -> None:
        with pytest.raises(kind, match=says):
            train(**options)

    with comparing("many"):
        refused(ValueError, "PYCOMM_COMPARE is 'many' in the environment, wanted a number")
    with comparing("3" if dist.get_rank() == 0 else "4"):
        refused(ValueError, "PYCOMM_COMPARE=")
    with comparing("3"):
        refused(ValueError, "PYCOMM_COMPARE cannot be combined with survive=", survive=pycomm.Survive())
    with comparing("0") as lines:
        train()
    assert lines == []
