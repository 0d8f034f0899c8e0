"""Ranks that die, shut down or have not begun: errors that come at once, and nothing that is left."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
import pycomm.horovod as hvd
from tests.horovod.training import batch_of, loss_of, make_model, sgd
from tests.horovod.worlds import horovod
from tests.on_ranks import Pools, on_ranks


def test_calls_before_init() -> None:
    assert not hvd.is_initialized()
    model = make_model()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
        hvd.join,
        hvd.barrier,
        hvd.stop_timeline,
        lambda: hvd.start_timeline("nowhere"),
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.synchronize(1),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(sgd(model)),
    ):
        with pytest.raises(ValueError, match=r"has not been initialized; call hvd.init\(\) first"):
            call()
    assert hvd.global_process_set.ranks == []
    hvd.shutdown()  # nothing to do


def test_pycomm_does_not_import_it() -> None:
    code = "import sys, pycomm; assert 'pycomm.horovod' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd="/")


@on_ranks(2)
def test_init_shutdown_and_init_again() -> None:
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [2.0, 2.0]
        some = hvd.add_process_set([0])
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), process_set=some)
        hvd.barrier()
        hvd.shutdown()
        assert some.process_set_id is None
        assert some.size() is None
        assert not hvd.is_initialized()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 20  # torch's own groups keep some


@on_ranks(2)
def test_a_rank_that_shuts_down_is_not_waited_for() -> None:
    hvd.init()
    start = time.monotonic()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="rank 1.*Horovod has been shut down"):
            hvd.allreduce(torch.ones(2), name="alone")
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            hvd.allreduce(torch.ones(2))
        assert time.monotonic() - start < 30
    hvd.shutdown()


@on_ranks(2)
def test_optimizers_after_a_shutdown() -> None:
    with horovod():
        model = make_model()
        optimizer = sgd(model)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss_of(model, batch_of(0, 0)).backward()
        optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="shut down since this optimizer was wrapped"):
        optimizer.step()
    with horovod():
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        optimizer.step()
        both = hvd.allgather_object([p.detach() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def _die_in_between(how: str) -> str:
    hvd.init()
    hvd.barrier()
    model = make_model()
    optimizer = sgd(model)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if hvd.rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    calls: dict[str, Callable[[], Any]] = {
        "backward": lambda: loss_of(model, batch_of(0, 0)).backward(),
        "asynchronous": lambda: [hvd.synchronize(hvd.allreduce_async(torch.ones(3), name=f"n{i}")) for i in range(3)],
        "join": hvd.join,
    }
    with pytest.raises(pycomm.CommError) as caught:
        calls[how]()
    assert how == "backward" or isinstance(caught.value, hvd.HorovodInternalError)
    assert time.monotonic() - start < 20
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("how", ["backward", "asynchronous", "join"])
def test_a_rank_that_dies(new_ranks: Pools, how: str) -> None:
    outcomes = new_ranks(2).outcomes(_die_in_between, how)
    assert isinstance(outcomes[1].error, ChildProcessError)
    assert "rank 1" in outcomes[0].result, outcomes[0]


class Lines(logging.Handler):
    """Lines of the log; the first in which ``pattern`` is found makes a file."""

    def __init__(self, pattern: str, file: Path) -> None:
        super().__init__()
        self._pattern, self._file = pattern, file

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(self._pattern, record.getMessage()):
            self._file.touch()


@on_ranks(2, timeout=40)
def test_stalls_are_named_before_they_end(tmp_path: Path) -> None:
    os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "0.2"
    try:
        hvd.init()
    finally:
        del os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]
    try:
        for number, (asks, pattern) in enumerate(
            (
                (False, r"allreduce\.late waits for rank 1, to come and say"),
                (True, r"allreduce\.late waits for rank 1(;|$)"),
            )
        ):
            said = tmp_path / str(number)
            if hvd.rank() == 1 and asks:
                handle = hvd.allreduce_async(torch.ones(2), name="other")  # takes part in rounds
            hvd.barrier()
            if hvd.rank() == 0:
                handler = Lines(pattern, said)
                logging.getLogger("pycomm").addHandler(handler)
                hvd.allreduce(torch.ones(2), name="late")  # rank 1 asks for it once this rank has said that it waits
                logging.getLogger("pycomm").removeHandler(handler)
                handle = hvd.allreduce_async(torch.ones(2), name="other")
            else:
                while not said.exists():
                    time.sleep(0.05)
                hvd.allreduce(torch.ones(2), name="late")
                handle = handle if asks else hvd.allreduce_async(torch.ones(2), name="other")
            hvd.synchronize(handle)
        hvd.barrier()
    finally:
        hvd.shutdown()


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "`operations are not done after ... s, the limit (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS): ...`",
    "Ranks asked for different operations; the text lists who did not ask.",
)
@on_ranks(2)
def test_ranks_that_wait_for_each_other_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2")
    hvd.init()
    calls = [lambda: hvd.broadcast(torch.ones(4), 0, name="a"), lambda: hvd.allreduce(torch.ones(4), name="a")]
    with pytest.raises(hvd.HorovodInternalError, match=r"not done after 2 s.*_STALL_SHUTDOWN_TIME") as caught:
        calls[hvd.rank()]()
    assert "broadcast.a waits for rank 1" in str(caught.value)
    assert "allreduce.a waits for rank 0" in str(caught.value)
    hvd.shutdown()


@on_ranks(2)
def test_timeline(tmp_path: Path) -> None:
    with horovod():
        for marks in (True, False):
            path = tmp_path / f"timeline-{marks}.json"
            hvd.start_timeline(str(path), mark_cycles=marks)
            hvd.allreduce(torch.ones(3), name="seen")
            hvd.broadcast(torch.ones(3), 0, name="sent")
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(3), name="unseen")
            if hvd.rank() == 0:
                events = json.loads(path.read_text())
                names = [event["name"] for event in events]
                for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST"):
                    assert name in names
                assert ("CYCLE_START" in names) == marks
                assert "allreduce.seen" in str(events)
                assert "unseen" not in str(events)
                begun = sum(event["ph"] == "B" for event in events)
                assert begun == sum(event["ph"] == "E" for event in events) == 4
                assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")


@pytest.mark.parametrize(
    "name", ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_CYCLE_TIME"]
)
@on_ranks(2)
def test_a_number_that_is_none_on_one_rank_is_an_error_on_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match=f"{name} is 'soon' in the environment, wanted a number"):
        hvd.init()
    assert not hvd.is_initialized()
    monkeypatch.delenv(name, raising=False)
    with horovod():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@on_ranks(2)
def test_a_timeline_that_cannot_be_written_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, folder = tmp_path / f"fifo{dist.get_rank()}", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir(exist_ok=True)
    for path, problem in (
        (fifo, f"{fifo} is a FIFO, wanted a regular file"),
        (folder, f"{folder} is a folder, wanted a regular file"),
        (tmp_path / "missing" / "timeline.json", "[Errno 2] No such file or directory"),
    ):
        monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
        text = f"HOROVOD_TIMELINE is '{path}', wanted a file that can be written: {problem}"
        prefix = "" if dist.get_rank() == 0 else "rank 0 could not use its environment: "
        with pytest.raises(ValueError, match="^" + re.escape(prefix) + (re.escape(text) if not prefix else "HOROVOD")):
            hvd.init()
        assert not hvd.is_initialized()
        assert not [thread.name for thread in threading.enumerate() if "horovod" in thread.name]
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    with horovod():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    if dist.get_rank() == 0:
        assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()
