"""The flight recorder: what is noted of operations, and when a file is written."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.recorder import DIRECTORY, Recorder, recorders, run_labelled
from pycomm.collectives.recorder.dump import dump, folder
from pycomm.collectives.recorder.ring import LENGTH, Entry
from pycomm.collectives.recorder.watch import dump_on_signal
from tests.on_ranks import on_ranks
from tests.reducer.attaching import over_tcp
from tests.reducer.models import loss_of, make_model, sgd


@contextlib.contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Have files written to ``place``."""
    before = os.environ[DIRECTORY]
    os.environ[DIRECTORY] = str(place)
    try:
        yield
    finally:
        os.environ[DIRECTORY] = before
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def entries_of(communicator: pycomm.Communicator) -> list[Entry]:
    return communicator.channel.recorder.entries()


def written(place: Path) -> dict[str, Any]:
    """Return what this process has written."""
    [path] = place.glob(f"*-{os.getpid()}.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def group_in(content: dict[str, Any], communicator: pycomm.Communicator) -> dict[str, Any]:
    wanted = communicator.channel.recorder.group
    [group] = [group for group in content["groups"] if group["name"] == wanted]
    return dict(group)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "torch"])
@on_ranks(2)
def test_operations_are_noted_with_the_lines_that_called_them(transport: str) -> None:
    with pycomm.Communicator(transport=transport) as c:
        before = c.channel.recorder.count  # of the agreement on networks
        x = torch.ones(6)

        def on_numpy() -> None:
            c.all_reduce(np.ones(3, np.int64), "max")

        began = time.monotonic()
        on_numpy()
        run_labelled("something", lambda: c.broadcast(x, 1))
        work = c.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        c.barrier()
        c.send(x, 1 - c.rank, tag=5)
        c.recv(x, 1 - c.rank, tag=5)
        found = entries_of(c)[-6:]
    reduce, broadcast, asynchronous, barrier, send, receive = found
    assert (reduce.operation, reduce.dtype, reduce.elements, reduce.detail) == ("all_reduce", "int64", 3, ("max",))
    assert (broadcast.operation, broadcast.detail, broadcast.label) == ("broadcast", (1,), "something")
    assert (barrier.operation, barrier.elements, barrier.detail) == ("barrier", None, ())
    assert (send.detail, receive.detail) == ((1 - c.rank, 5), (1 - c.rank, 5))
    assert [each.number - before for each in found] == [1, 2, 3, 4, 4, 4]
    assert [each.line[2] for each in found if each.line] == [
        *("on_numpy", "<lambda>"),
        *["test_operations_are_noted_with_the_lines_that_called_them"] * 4,
    ]
    first = on_numpy.__code__.co_firstlineno
    assert [each.line[:2] for each in (reduce, asynchronous) if each.line] == [
        (__file__, first + 1),
        (__file__, first + 6),
    ]
    assert all(began <= each.began <= (each.ended or 0.0) for each in found if each is not receive)


@on_ranks(2)
def test_only_the_last_operations_are_kept_and_all_are_counted() -> None:
    with pycomm.Communicator() as c:
        recorder, x = c.channel.recorder, torch.zeros(1)
        before = recorder.count
        for _ in range(LENGTH + 10):
            c.all_reduce(x)
        assert recorder.count == before + LENGTH + 10
        numbers = [entry.number for entry in recorder.entries()]
        assert numbers == list(range(before + 11, before + LENGTH + 11))
        assert 0.0 < recorder.ring.seconds < 60.0


@on_ranks(2)
def test_buckets_of_a_reducer_are_noted_with_the_line_of_backward() -> None:
    model = make_model()
    reducer = pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(bucket_mb=1e-3))
    for step in range(2):
        model.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
    engine = reducer._engine
    noted = [entry for lane in engine.lanes for entry in entries_of(lane) if entry.label]
    num_buckets = len(engine.table.buckets)
    reducer.detach()
    assert num_buckets > 1
    assert {entry.label for entry in noted} == {f"bucket {number}" for number in range(1, num_buckets + 1)}
    line = test_buckets_of_a_reducer_are_noted_with_the_line_of_backward.__wrapped__.__code__.co_firstlineno + 6  # type: ignore[attr-defined]
    assert {entry.line[:2] for entry in noted if entry.line} == {(__file__, line)}


@on_ranks(2)
def test_arguments_of_any_kind_are_noted_without_being_kept() -> None:
    with pycomm.Communicator() as c:
        for wrong in ("text", None, [1, 2], object()):
            with pytest.raises((TypeError, ValueError)):
                c.all_reduce(wrong)
        with pytest.raises((TypeError, ValueError)):
            c.all_reduce(torch.ones(2), torch.ones(1))  # type: ignore[arg-type]
        assert entries_of(c)[-1].detail == ("Tensor",)
        assert entries_of(c)[-1].error
        c.all_reduce(torch.ones(1))
        assert entries_of(c)[-1].error is None


@on_ranks(2)
def test_ranks_that_disagree_write_files(tmp_path: Path) -> None:
    with writing_to(tmp_path), pycomm.Communicator() as c:
        calls: list[Callable[[], object]] = [
            lambda: c.all_reduce(torch.ones(3)),
            lambda: c.broadcast(torch.ones(3), 0),
        ]
        with pytest.raises(ValueError, match="disagree"):
            calls[c.rank]()
        group = group_in(written(tmp_path), c)
        last = group["operations"][-1]
        assert last["operation"] == ("all_reduce" if c.rank == 0 else "broadcast")
        assert last["line"]["file"] == __file__
        assert "disagree" in last["error"]
        assert (group["rank"], group["ranks"], group["count"]) == (c.rank, [0, 1], last["number"])
        c.barrier()


@pytest.mark.parametrize("over_hosts", [False, True], ids=["shared memory", "tcp"])
@on_ranks(2, fresh=True)
def test_a_rank_that_is_lost_makes_the_other_one_write(tmp_path: Path, over_hosts: bool) -> None:
    with writing_to(tmp_path), over_tcp(over_hosts):
        c = pycomm.Communicator(timeout=2)
        if c.rank == 1:
            return  # and does not come
        with pytest.raises(pycomm.CommError):
            c.all_reduce(torch.ones(3))
        content = written(tmp_path)
        c.close()
    assert content["reason"].startswith("rank 0: all_reduce")
    assert group_in(content, c)["operations"][-1]["error"] == content["reason"]


@on_ranks(2)
def test_sigusr2_writes_even_inside_an_operation(tmp_path: Path) -> None:
    with writing_to(tmp_path), pycomm.Communicator() as c:
        dump_on_signal()
        if c.rank == 0:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
            timer.start()
            c.barrier()
            timer.join()
            content = written(tmp_path)
            last = group_in(content, c)["operations"][-1]
            assert content["reason"] == "SIGUSR2"
            assert (last["operation"], last["seconds"]) == ("barrier", None)
            assert content["main_thread"]["file"] == __file__
        else:
            time.sleep(0.6)
            c.barrier()


class Busy:
    """A stream in the middle of a write."""

    def write(self, _: str) -> int:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    def flush(self) -> None:
        raise RuntimeError("reentrant call")


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`the last operations of this rank are in ...`",
    "`pycomm explain` with these files says which rank did something else.",
)
def test_sigusr2_comes_while_the_program_writes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with writing_to(tmp_path):
        dump_on_signal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Busy())
            os.kill(os.getpid(), signal.SIGUSR2)
        assert written(tmp_path)["reason"] == "SIGUSR2"
    assert "[pycomm] the last operations of this rank are in " in capfd.readouterr().err


def test_recorders_are_listed_while_another_thread_makes_some() -> None:
    kept: list[Recorder] = []
    maker = threading.Thread(target=lambda: kept.extend(Recorder("made meanwhile", 0, [0]) for _ in range(1000)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        while maker.is_alive():
            recorders()
    finally:
        sys.setswitchinterval(interval)
        maker.join()
    assert len(kept) == 1000
    assert set(kept) <= set(recorders())


def test_a_handler_of_the_programs_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        dump_on_signal()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_where_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY)
    assert "pycomm_flight_" in str(folder())
    monkeypatch.setenv(DIRECTORY, "")
    assert folder() is None
    assert dump("nothing is to be written") is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "file"))
    assert dump("it cannot be written") is None
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "new"))
    path = dump("asked for")
    assert path is not None
    assert json.loads(path.read_text())["reason"] == "asked for"
    assert [each.name for each in (tmp_path / "new").iterdir()] == [path.name]


@pytest.fixture
def default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where files go if nothing is said; not made yet."""
    monkeypatch.delenv(DIRECTORY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = folder()
    assert place is not None
    return place


def test_the_default_folder_is_this_users_alone(
    default_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = dump("asked for")
    assert path is not None
    assert default_folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600

    path.unlink()
    default_folder.chmod(0o770)
    assert dump("others may write to it") is None
    assert "other users may write to it (mode 770)" in caplog.text

    default_folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: default_folder.stat().st_uid + 1)
        assert dump("it is another user's") is None
    assert "it belongs to user" in caplog.text

    elsewhere = default_folder.rename(default_folder.with_name("elsewhere"))
    default_folder.symlink_to(elsewhere)
    assert dump("it is a link") is None
    assert "it is not a folder, or is a link to one" in caplog.text
    assert list(elsewhere.iterdir()) == []


def test_no_link_is_followed_to_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "flights"))
    path = dump("asked for")
    assert path is not None
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    path.with_name(f".{path.name}.partial").symlink_to(precious)
    assert dump("asked for again") == path
    assert precious.read_text() == "as it was"
    assert json.loads(path.read_text())["reason"] == "asked for again"
    assert not path.is_symlink()


def fill(place: Path, name: str, age: float) -> None:
    """Make 140 files with a number instead of the star, of which the first is the oldest."""
    for number in range(140):
        path = place / name.replace("*", str(number))
        path.write_text("{}")
        os.utime(path, (time.time() - age + number,) * 2)


def test_files_of_earlier_days_are_deleted(default_folder: Path) -> None:
    default_folder.mkdir(mode=0o700)
    name = f"rank0-{socket.gethostname()}-*.json"
    fill(default_folder, name, age=2 * 24 * 3600.0)
    others = [default_folder / other for other in ("rank0-results.json", "rank0-elsewhere-7.json", "rank0-x.json")]
    for other in others:
        other.write_text("{}")
        os.utime(other, (0, 0))
    assert dump("one more") is not None
    assert all(other.exists() for other in others)
    assert not (default_folder / name.replace("*", "0")).exists()
    assert (default_folder / name.replace("*", "139")).exists()
    assert len(list(default_folder.iterdir())) == 128 + len(others) + 1


def test_files_of_today_stay(default_folder: Path) -> None:
    default_folder.mkdir(mode=0o700)
    fill(default_folder, f"rank0-{socket.gethostname()}-*.json", age=3600.0)
    assert dump("one more") is not None
    assert len(list(default_folder.iterdir())) == 141


def test_files_in_a_folder_that_was_named_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    fill(tmp_path, f"rank0-{socket.gethostname()}-*.json", age=2 * 24 * 3600.0)
    assert dump("one more") is not None
    assert len(list(tmp_path.iterdir())) == 141


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "torch"])
@on_ranks(2)
def test_a_communicator_that_is_dropped_is_forgotten(transport: str) -> None:
    made = pycomm.Communicator(transport=transport)
    group = made.channel.recorder.group
    assert group in {recorder.group for recorder in recorders()}
    made.barrier()
    made.close()
    del made
    gc.collect()
    assert group not in {recorder.group for recorder in recorders()}
