"""Files that cannot be written: the error names the file and the reason. A limit on sizes stands for a full disk."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.horovod.timeline import Timeline
from pycomm.integrations.averaging import Averaging
from pycomm.schedule.network import Link, Network
from pycomm.tools.cli.bench import measure
from pycomm.tools.cli.plan import calibrate
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint
from pycomm.training.asynchronous.settings import Trace
from pycomm.training.checkpoint.files import Reserve, save_values, write_json
from pycomm.training.checkpoint.torch_files import write_tensors
from pycomm.training.reducer.step_trace import StepTrace
from tests.asynchronous.cores import core_of
from tests.checkpoint.test_failures import file_size_limit
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(60)
TENSORS = {"a": torch.ones(5000)}
LIMIT = 4000  # bytes


def write_trace(folder: Path) -> None:
    with contextlib.closing(Trace(folder / "trace")) as trace:
        for _ in range(100):
            trace.write({"event": "push", "worker": 1, "number": 2})


def write_server_checkpoint(folder: Path) -> None:
    core = core_of("async", size=1000)
    ServerCheckpoint(folder, core.state_spec()).write(core)


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "JSON of a checkpoint": (lambda folder: write_json(folder / "part.json", {"a": "x" * 5000}), "part.json.part"),
    "tensors of a checkpoint": (lambda folder: write_tensors(folder / "own", TENSORS), "own/tensors"),
    "the file that reports errors": (lambda folder: Reserve(folder / "writing"), "writing"),
    "values": (lambda folder: save_values(folder / "a.pt", TENSORS), "a.pt"),
    "a server's trace": (write_trace, "trace"),
    "a server's checkpoint": (write_server_checkpoint, "unfinished"),
    "a bench's report": (lambda folder: measure.write(folder / "out.json", {"a": "x" * 5000}), "out.json"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_the_file_is_named(what: str, tmp_path: Path) -> None:
    write, name = WRITERS[what]
    with file_size_limit(LIMIT), pytest.raises(OSError, match=f"File too large: '{re.escape(str(tmp_path))}/{name}'"):
        write(tmp_path)


def test_a_calibration_that_cannot_be_written_is_named() -> None:
    link = Link(alpha=1e-6, beta=1e-9, gamma=0.0)
    network = Network(name="here", within_host=link, between_hosts=link)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        calibrate._write(network, Path("/dev/full"))


def test_a_timeline_that_cannot_be_written_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline()
    timeline.start(str(tmp_path / "timeline"), mark_cycles=False)
    with file_size_limit(LIMIT):
        for number in range(1000):
            timeline.begin(f"allreduce.{number}", "ALLREDUCE")
            timeline.end(f"allreduce.{number}")
    assert not timeline.active
    timeline.stop()
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"the timeline {tmp_path}/timeline ends here: [Errno 27] File too large" in record.getMessage()


def test_a_trace_of_a_step_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = StepTrace(tmp_path, 1, 0, 1)
    trace.end_reduction()
    with file_size_limit(10):
        trace.end_step()
    assert f"could not be written to {tmp_path}/rank0.json: [Errno 27] File too large" in caplog.text


@on_ranks(2)
def test_a_null_byte_in_a_path_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, compression=pycomm.TopK(0.5))
    good, bad = str(tmp_path), f"{tmp_path}\0"
    for call in (
        lambda path: pycomm.save(path, reducer).wait(),
        lambda path: pycomm.load(path, reducer),
        lambda path: Averaging(reducer).save(path),
    ):
        with pytest.raises(ValueError, match=r"is not a path: it has a null byte"):
            call(bad if dist.get_rank() == 1 else good)
        call(good)
    reducer.detach()
