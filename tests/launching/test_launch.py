"""``pycomm.launch``: what comes back, what is shown, and what is said of ranks that fail."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import pycomm
from pycomm.tools.launching.pool import RankPool
from pycomm.tools.launching.serving import RankError
from tests.launching import functions
from tests.ranks import PRELOAD

CORES = len(os.sched_getaffinity(0))

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def _no_process_more() -> Iterator[None]:
    before = set(mp.active_children())  # of other tests
    yield
    assert set(mp.active_children()) <= before


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take a hundredth of a second to start."""
    monkeypatch.setattr("pycomm.tools.launching.launcher.RankPool", functools.partial(RankPool, preload=PRELOAD))


forked = pytest.mark.usefixtures("_forked")


def test_results_by_rank_and_lines_of_all(capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    results = pycomm.launch(functions.look_around, 2, (2,), {"suffix": "!"}, environment={"GREETING": "hello"})
    assert dict(os.environ) == before
    for rank, found in enumerate(results):
        assert torch.equal(found["total"], torch.tensor([5.0]))
        threads = max(1, CORES // 2)
        assert found["environment"] == [str(rank), str(rank), "2", "2", str(threads), "hello"]
        assert found["threads"] == threads
        assert found["backend"] == "gloo"
        assert found["nested"].startswith(f"launch was called in a rank of pycomm.launch (rank {rank} of 2): ")
        assert found["parent"] == os.getpid()
    out, errors = capfd.readouterr()
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == [f"[rank {rank}] first of {rank}!", f"[rank {rank}] second of {rank}"]
    assert len(out.splitlines()) == 4
    assert sorted(errors.splitlines()) == ["[rank 0] mistake", "[rank 1] mistake"]


def test_more_ranks_than_cores_on_another_backend_from_a_thread() -> None:
    size = CORES + 1
    with ThreadPoolExecutor(1) as other:
        results = other.submit(pycomm.launch, functions.sum_of_ranks, size, backend="pycomm").result()
    assert results == [(size * (size - 1) / 2, 1)] * size


def test_a_function_that_makes_its_group_itself() -> None:
    assert pycomm.launch(functions.joins_by_itself, 2, backend=None, threads=1) == [2, 2]


def test_omp_num_threads_of_the_environment() -> None:
    ((variables, threads),) = pycomm.launch(functions.threads_of_rank, 1, environment={"OMP_NUM_THREADS": "3,2"})
    assert (variables, threads) == ("3,2", 3)


def test_one_rank_as_it_writes(capfd: pytest.CaptureFixture[str]) -> None:
    pycomm.launch(functions.writes_much, 1, output=0)
    out = capfd.readouterr().out
    assert out.splitlines()[:2000] == [f"line {number} {'x' * 50}" for number in range(2000)]
    assert "\ufffd is no text\n10 %\r50 %\r100 %\n" in out
    assert "from C\n" in out
    assert "no end" in out


def test_lines_are_whole(capfd: pytest.CaptureFixture[str]) -> None:
    pycomm.launch(functions.writes_much, 1)
    out = capfd.readouterr().out
    assert all(line.startswith("[rank 0] ") for line in out.splitlines())
    assert "[rank 0] 100 %\n" in out
    assert "50 %" not in out
    assert "from C\n" in out
    assert "no end" in out
    assert out.count("\n") in (
        2003,
        2004,
    )  # C's buffer is written before Python's or after it, to the line without an end


def test_what_is_left_to_the_end_of_the_process_is_done(tmp_path: Path) -> None:
    pycomm.launch(functions.leaves_work, 2, (str(tmp_path),))
    for rank in range(2):
        found = {path.name: path.read_text() for path in (tmp_path / str(rank)).iterdir()}
        assert found == {"thread": "done", "handler": "2 ranks", "file": "written"}


def test_what_a_rank_started_holds_nothing_up(capfd: pytest.CaptureFixture[str]) -> None:
    (pid,) = pycomm.launch(functions.leaves_a_child, 1, output=None)
    os.kill(pid, signal.SIGKILL)  # it is still there
    assert capfd.readouterr() == ("", "")


def test_progress_where_no_bar_can_be_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    pycomm.launch(functions.makes_progress, 1, output=None)
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "100/100  loss 0.01"
    assert all(re.fullmatch(r"\d+/100  loss [\d.]+", line) for line in lines)


@forked
def test_the_rank_that_raised_is_named_and_the_others_are_ended() -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed:\n\nTraceback.*\n  File .*functions.py") as caught:
        pycomm.launch(functions.rank_1_raises, 2)
    error = caught.value
    assert str(error).endswith("KeyError: 'rank 1 is to blame'")
    assert "launching/" not in str(error).replace("tests/launching/", "")
    assert (error.rank, error.signal) == (1, None)
    assert error.traceback in f"{error}\n"
    assert isinstance(error.__cause__, KeyError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.traceback) == (str(error), 1, error.traceback)


@forked
@pytest.mark.parametrize(("kind", "name"), [("locked", "this one is locked"), ("picky", "PickyError: both words")])
def test_an_exception_that_cannot_travel(kind: str, name: str) -> None:
    with pytest.raises(RankError, match=f"(?s)^rank 0 failed:.*{name}$") as caught:
        pycomm.launch(functions.raises, 1, (kind,), output=None)
    assert caught.value.__cause__ is None


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    with pytest.raises(RankError) as caught:
        pycomm.launch(functions.rank_0_is_killed, 1, output=None)
    assert (caught.value.rank, caught.value.signal) == (0, signal.SIGKILL)
    assert str(caught.value) == (
        "rank 0 was killed by SIGKILL (out of memory?); the end of its standard error:\n\nabout to go\n"
    )


@forked
@pytest.mark.parametrize("how", ["well", "without a word"])
def test_a_rank_may_exit(how: str) -> None:
    assert pycomm.launch(functions.ends, 1, (how,)) == [None]


@forked
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("badly", r"^rank 0 failed:\n(?s:.*)SystemExit: 3$"),
        ("quietly", "^rank 0 ended with exit code 0, and without a result$"),
        (
            "by a lock",
            "(?s)^rank 0 failed:.*SerializationError: the result of rank 0, a lock, cannot be sent to another process",
        ),
        ("by a generator", "(?s)^rank 0 failed:.*the result of rank 0, a generator, cannot be sent"),
    ],
)
def test_a_rank_without_a_result(how: str, says: str) -> None:
    with pytest.raises(RankError, match=says):
        pycomm.launch(functions.ends, 1, (how,))


@forked
def test_the_rank_that_is_not_done_in_time_is_named_with_where_it_is() -> None:
    with pytest.raises(RankError, match="^not done after 5 s: rank 1\n\nrank 1:\n") as caught:
        pycomm.launch(functions.sleeps, 2, (90.0,), output=None, timeout=timedelta(seconds=5))
    assert caught.value.rank == 1
    assert re.search(r"\n  File \".*functions.py\", line \d+ in sleeps", str(caught.value))


@forked
def test_the_rank_that_does_not_end_is_named() -> None:
    with pytest.raises(RankError, match="^not done after 5 s: rank 1\n") as caught:
        pycomm.launch(functions.leaves_an_endless_thread, 2, timeout=5)
    assert caught.value.rank == 1


def generates() -> Iterator[int]:
    yield 1


async def waits() -> None:
    pass


async def generates_and_waits() -> AsyncIterator[int]:
    yield 1


class TestWrongArguments:
    """Nothing is started."""

    @pytest.fixture(autouse=True)
    def _nothing_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pycomm.tools.launching.launcher.RankPool", None)

    @pytest.mark.parametrize(
        ("arguments", "kind", "says"),
        [
            ({"function": 3}, TypeError, "^function is 3, wanted something that can be called"),
            ({"function": generates}, TypeError, "^function is a generator function"),
            ({"function": waits}, TypeError, "^function is a coroutine function"),
            ({"function": generates_and_waits}, TypeError, "^function is an asynchronous generator function"),
            ({"ranks": 0}, ValueError, "^ranks is 0, wanted at least 1"),
            ({"ranks": 2.0}, TypeError, "^ranks is 2.0, wanted an int"),
            ({"ranks": 5000}, ValueError, "^ranks is 5000, wanted at most 1024"),
            ({"args": torch.ones(2)}, TypeError, r"^args is a Tensor, wanted a tuple or a list, such as args=\(x,\)"),
            ({"kwargs": [1]}, TypeError, "^kwargs is a list, wanted a Mapping"),
            ({"kwargs": {1: 2}}, TypeError, "^kwargs has 1: 2, wanted strings"),
            ({"environment": {"A": 1}}, TypeError, "^environment has 'A': 1, wanted strings"),
            (
                {"environment": {"OMP_NUM_THREADS": "7"}, "threads": 2},
                ValueError,
                "^environment has OMP_NUM_THREADS '7', and threads is 2: pass one of them",
            ),
            ({"environment": {"OMP_NUM_THREADS": "no"}}, ValueError, "^environment has OMP_NUM_THREADS 'no', wanted a"),
            ({"environment": {"OMP_NUM_THREADS": "0"}}, ValueError, "^environment has OMP_NUM_THREADS '0', wanted a"),
            ({"backend": "glue"}, ValueError, "^backend is 'glue': this torch has no backend 'glue'"),
            ({"backend": "cpu:gloo,"}, ValueError, "^backend is 'cpu:gloo,': this torch has no backend ''"),
            ({"backend": 3}, TypeError, "^backend is a int, wanted a str"),
            ({"output": 2}, ValueError, "^output is 2, wanted a rank below 2"),
            ({"output": "rank 1"}, ValueError, "^output is 'rank 1', wanted \"all\""),
            ({"threads": 0}, ValueError, "^threads is 0, wanted at least 1"),
            ({"timeout": 0}, ValueError, "^timeout is 0, wanted a positive number of seconds"),
            ({"patience": -1}, ValueError, "^patience is -1, wanted a positive number of seconds"),
            ({"args": (generates(),)}, TypeError, "^function, with args and kwargs, cannot be sent"),
        ],
    )
    def test_says_what_is_wrong(self, arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
        with pytest.raises(kind, match=says):
            pycomm.launch(**{"function": functions.sum_of_ranks, "ranks": 2, **arguments})

    def test_one_gpu_for_each_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.distributed.is_backend_available", lambda _: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        with pytest.raises(ValueError, match="^ranks is 2, wanted at most one for each of 1 GPUs"):
            pycomm.launch(functions.sum_of_ranks, backend="cpu:gloo,cuda:nccl")

    def test_under_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError, match=r"^launch was called in a rank of torchrun \(rank 1 of 3\)"):
            pycomm.launch(functions.sum_of_ranks)

    @pytest.mark.parametrize("function", [lambda: 1, functools.partial(lambda: 1)])
    def test_a_lambda_without_cloudpickle(self, function: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(TypeError, match="(?s)^function, .*lambda.*; define it at the top level of a module, or"):
            pycomm.launch(function)


def test_a_detached_stream_is_no_failure() -> None:
    assert pycomm.launch(functions.put_another_encoding_over_stdout, 2) == [0, 1]
