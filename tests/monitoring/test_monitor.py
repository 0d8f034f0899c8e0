"""pycomm.monitor: rows of figures on the terminal, in TensorBoard, or for a function."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.tools.monitoring import FIELDS
from pycomm.tools.monitoring.monitor import Monitor, row_between, writers_of
from tests.on_ranks import on_ranks
from tests.reducer.models import loss_of, make_model, sgd

Rows = list[dict[str, Any]]
MODULE = sys.modules[Monitor.__module__]  # the package has a function of its name


class Summary:
    """What is written of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


def train(reducer: pycomm.Reducer, model: Any, steps: int) -> None:
    for step in range(steps):
        reducer.optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        reducer.optimizer.step()


@on_ranks(2)
def test_rows_are_written_wherever_they_are_wanted() -> None:
    model = make_model()
    reducer = pycomm.attach(sgd(model), model, compression=pycomm.TopK(0.1))
    rows: Rows = []
    summary = Summary()
    monitor = pycomm.monitor(reducer, every=2, to=[summary, rows.append])
    train(reducer, model, 5)
    assert [row["step"] for row in rows] == [2, 4]
    monitor.close()
    monitor.close()
    train(reducer, model, 3)
    assert [row["step"] for row in rows] == [2, 4, 5]  # the last one when it was closed
    assert all(tuple(row) == FIELDS for row in rows)
    assert {tag for tag, _, _ in summary.written} >= {"pycomm/seconds", "pycomm/bytes_sent", "pycomm/compression_error"}
    assert {step for _, _, step in summary.written} == {2, 4, 5}
    row = rows[1]
    assert row["seconds"] > 0
    assert row["pack_seconds"] > 0
    assert row["wire_seconds"] > 0
    assert row["bytes_sent"] == reducer.stats()["bytes_sent"] / 8
    assert 0 <= row["hidden_share"] <= 1
    assert 0 < row["compression_error"] < 1
    assert row["compression_ratio"] == pytest.approx(reducer.stats()["compression_ratio"])
    assert row["waited_for_rank"] in (0, 1)
    reducer.detach()


@on_ranks(2)
def test_the_hook_of_ddp_is_monitored_too() -> None:
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model)
    handle = pycomm.ddp.register(model)
    rows: Rows = []
    with pytest.raises(TypeError, match="wanted the torch optimizer whose steps are counted"):
        pycomm.monitor(handle, every=1, to=rows.append)
    with pycomm.monitor(handle, every=1, to=rows.append, optimizer=optimizer):
        for step in range(2):
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["bytes_sent"] > 0
    handle.remove()


@on_ranks(2)
def test_a_writer_that_fails_is_given_up_and_training_goes_on(tmp_path: Path) -> None:
    model = make_model()
    reducer = pycomm.attach(sgd(model), model)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm").addHandler(handler)
    rows: Rows = []

    def fail(_: object) -> None:
        raise OSError("the disk is full")

    with pycomm.monitor(reducer, every=1, to=[fail, rows.append]):
        train(reducer, model, 3)
    logging.getLogger("pycomm").removeHandler(handler)
    assert len(rows) == 3
    assert said == [f"[pycomm rank {dist.get_rank()}] pycomm.monitor stops writing to CallWriter: the disk is full"]
    reducer.detach()


class Counted:
    """What is monitored, with figures as they are told."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.figures: dict[str, Any] | None = {}

    def stats(self) -> dict[str, Any]:
        if self.figures is None:
            raise RuntimeError("detached")
        return dict(self.figures)


def test_nothing_is_written_while_no_steps_are_counted() -> None:
    counted = Counted(sgd(make_model()))  # as where one process averages with nobody
    rows: Rows = []
    with pycomm.monitor(counted, every=1, to=rows.append):
        counted.optimizer.step()
        assert rows == []
        counted.figures = {"steps": 2, "bytes_sent": 10}
        counted.optimizer.step()
    assert [(row["step"], row["bytes_sent"]) for row in rows] == [(2, 5.0)]


def test_figures_that_fail_stop_the_monitor_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted, writer = Counted(sgd(make_model())), Closable()
    monkeypatch.setattr(MODULE, "_writer_of", lambda target, _: target)
    with pycomm.monitor(counted, every=1, to=[writer]):
        counted.figures = None
        counted.optimizer.step()
        counted.optimizer.step()
    assert caplog.messages == ["[pycomm] pycomm.monitor stops, as there are no figures: RuntimeError: detached"]
    assert writer.closed == 1


class Unclosable:
    """Writer whose ``close`` fails."""

    def write(self, row: object) -> None:
        pass

    def close(self) -> None:
        raise OSError("the disk is full")


class Closable:
    """Writer that knows whether it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def write(self, row: object) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def test_what_cannot_be_closed_keeps_nothing_else_open(
    one_rank_group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    reducer = pycomm.attach(sgd(model), model)
    good = Closable()
    monkeypatch.setattr(MODULE, "_writer_of", lambda target, _: target)
    with pycomm.monitor(reducer, to=[Unclosable(), good]):
        assert good.closed == 0
    assert good.closed == 1
    assert caplog.messages == ["[pycomm rank 0] pycomm.monitor could not close Unclosable: the disk is full"]
    reducer.detach()


def test_a_target_that_is_wrong_leaves_none_before_it_open(
    one_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Closable()
    monkeypatch.setattr(MODULE, "_live_table", lambda: made)
    model = make_model()
    reducer = pycomm.attach(sgd(model), model)
    with pytest.raises(TypeError, match="to is 7"):
        pycomm.monitor(reducer, to=["table", 7])
    assert made.closed == 1
    reducer.detach()


def test_wrong_arguments(one_rank_group: None, tmp_path: Path) -> None:
    model = make_model()
    reducer = pycomm.attach(sgd(model), model)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "every is 1.5, wanted an int", {"every": 1.5}),
        (ValueError, "every is 0, wanted at least 1", {"every": 0}),
        (TypeError, "to is 7, wanted 'table', the path", {"to": 7}),
        (ValueError, "or a list of these; a function writes a file", {"to": tmp_path / "rows.csv"}),
        (TypeError, "optimizer is 3", {"optimizer": 3}),
    ]
    for kind, text, arguments in wrong:
        with pytest.raises(kind, match=re.escape(text)):
            pycomm.monitor(reducer, **arguments)
    with pytest.raises(TypeError, match="reducer is of type Linear"):
        pycomm.monitor(torch.nn.Linear(1, 1))
    assert list(tmp_path.iterdir()) == []
    reducer.detach()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_target_is_an_error_on_all_ranks_that_names_the_choices(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = "wanted 'table', the path of TensorBoard's folder, a SummaryWriter, a function, or a list of these"
    monkeypatch.chdir(tmp_path)
    for wrong in ("tableau", "Table", "tables"):
        with pytest.raises(ValueError, match=re.escape(f"to is {wrong!r}, {choices}. A folder of that name is './")):
            writers_of(wrong, rank)
    for package, to in (("tensorboard", "runs/7"), ("tensorboard", "./tableau"), ("rich", "table")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=re.escape(choices)):
            writers_of(to, rank)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_known_is_none() -> None:
    before = {"steps": 2, "bytes_sent": 10, "wait_seconds": 1.0}
    row = row_between(before, {"steps": 4, "bytes_sent": 30, "wait_seconds": 3.0}, 5.0, 99.0)
    assert tuple(row) == FIELDS
    assert {key: value for key, value in row.items() if value is not None} == {
        "step": 4,
        "time": 99.0,
        "seconds": 2.5,
        "wait_seconds": 1.0,
        "bytes_sent": 10,
    }


def test_the_slowest_rank_of_the_interval_is_named() -> None:
    def stats(steps: int, *seconds: float) -> dict[str, Any]:
        by_rank = {rank: {"seconds": each, "longest": each, "times": 1} for rank, each in enumerate(seconds)}
        return {"steps": steps, "waits": {"by_rank": by_rank}}

    row = row_between(stats(0, 9.0, 1.0), stats(2, 9.5, 5.0), 1.0, 0.0)
    assert (row["waited_for_rank"], row["waited_for_seconds"]) == (1, 2.0)


def test_table_on_a_terminal_and_elsewhere() -> None:
    console = pytest.importorskip("rich.console")
    from pycomm.tools.monitoring.live import LiveTable

    row = row_between({"steps": 0, "wait_seconds": 0.0, "bytes_sent": 0}, {"steps": 1, "wait_seconds": 0.5}, 1.0, 0.0)
    for terminal in (True, False):
        out = io.StringIO()
        writer = LiveTable(console.Console(file=out, force_terminal=terminal, width=200))
        for step in range(12):
            writer.write({**row, "step": step, "nonfinite_steps": 1, "last_nonfinite": "parameter 'w' on rank 1"})
        writer.close()
        assert "parameter 'w' on rank 1" in out.getvalue()
        assert "500 ms" in out.getvalue()
