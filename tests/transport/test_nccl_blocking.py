"""Calls into NCCL that wait for other ranks: which thread makes them, and how each of them ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycomm import CommError
from tests.transport.nccl_ranks import (
    NOW,
    Fake,
    close_all,
    eventually,
    groups,
    on_device,
    on_ranks,
    requires_emulator,
    run_ranks,
)

pytestmark = requires_emulator

NOT_UNDER_WAY = "all_reduce: timed out: NCCL could not start it: a rank is missing or calls something else"


def vector(length: int = 4) -> Any:
    return on_device(np.ones(length, np.float32))


@pytest.fixture
def acquainted(fake: Fake) -> list[Any]:
    """Two ranks that have done an all-reduce of four elements, and a send from 0 to 1."""
    members = groups(2)

    def begin(rank: int) -> None:
        members[rank].all_reduce(vector(), "sum", **NOW)
        move = members[rank].recv if rank else members[rank].send
        move(vector(), 1 - rank, **NOW)

    run_ranks(2, begin)
    return members


@pytest.mark.parametrize("overruled", [None, "0", "1"])
@pytest.mark.parametrize(("version", "mode"), [(22105, "polled"), (22203, "blocking")])
def test_the_kind_of_communicator(
    fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, mode: str, overruled: str | None
) -> None:
    """Before 2.22 a call that waits could not be aborted safely. Either kind works, whatever the environment says."""
    library = tmp_path / f"{version}_{overruled}.so"
    shutil.copy(fake_library, library)
    old = Fake(library)
    old.version(version)
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", str(library))
    if overruled is not None:
        monkeypatch.setenv("NCCL_COMM_BLOCKING", overruled)
    members = groups(2)
    assert old.words("modes") == [mode] * 2
    for _ in range(3):
        xs = [vector(), vector()]
        run_ranks(2, lambda rank: members[rank].all_reduce(xs[rank], "sum", **NOW))  # noqa: B023
        assert [x.host.tolist() for x in xs] == [[2.0] * 4] * 2
    if overruled != "1":  # or it is stuck for ever, as old versions are then
        with pytest.raises(CommError, match=NOT_UNDER_WAY):
            members[0].all_reduce(vector(), "sum", stream=0, timeout=0.3)
        eventually(lambda: old.aborts() == 1)
    close_all(members)
    assert old.misuses() == 0


def test_only_the_first_operation_of_its_kind_has_a_thread(alone: Any, fake: Fake) -> None:
    here = threading.get_native_id()
    kinds: list[Callable[[], None]] = [
        lambda: alone.all_reduce(vector(), "sum", **NOW),
        lambda: alone.all_reduce(vector(), "max", **NOW),
        lambda: alone.all_reduce(vector(300), "sum", **NOW),
        lambda: alone.all_reduce(on_device(np.ones(4)), "sum", **NOW),
        lambda: alone.broadcast(vector(), 0, **NOW),
        lambda: alone.all_gather(vector(), vector(), **NOW),
    ]
    for call in kinds:
        threads = []
        for _ in range(3):
            call()
            threads.append(fake.last_thread())
        assert threads[0] != here
        assert threads[1:] == [here, here]
    alone.all_reduce(vector(5), "sum", **NOW)  # of about that size
    assert fake.last_thread() == here


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_that_is_missing(acquainted: list[Any], fake: Fake, first: bool) -> None:
    """Abort in a group, wait until the call is out, end the group: or memory would be freed under the call."""
    started = time.monotonic()
    with pytest.raises(CommError, match=f"rank 1: {NOT_UNDER_WAY} after ") as caught:
        acquainted[1].all_reduce(vector(400 if first else 4), "sum", stream=0, timeout=0.3)
    assert 0.3 <= caught.value.elapsed <= time.monotonic() - started < 5
    eventually(lambda: fake.aborts() == 1)
    assert fake.words("calls")[-3:] == ["ncclGroupStart", "ncclCommAbort", "ncclGroupEnd"]
    with pytest.raises(CommError) as again:
        acquainted[1].check()
    assert str(again.value) == str(caught.value)
    close_all(acquainted)
    assert (fake.aborts(), fake.destroys()) == (1, 1)


@pytest.mark.parametrize("first", [True, False])
def test_closing_ends_a_call_in_another_thread(acquainted: list[Any], fake: Fake, first: bool) -> None:
    outcomes: list[Any] = []

    def wait_for_nobody() -> None:
        x = vector(400 if first else 4)
        outcomes.extend(on_ranks(1, lambda _: acquainted[0].all_reduce(x, "sum", **NOW)))

    thread = threading.Thread(target=wait_for_nobody)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    acquainted[0].close("another thread closed it")
    thread.join(5)
    assert time.monotonic() - started < 5
    assert isinstance(outcomes[0], CommError)
    assert r"all_reduce: the communicator was closed (another thread closed it) meanwhile" in str(outcomes[0])
    close_all(acquainted)
    assert (fake.aborts(), fake.destroys()) == (1, 1)


@pytest.mark.parametrize("first", [True, False])
def test_an_error_while_a_call_waits(acquainted: list[Any], fake: Fake, first: bool) -> None:
    timer = threading.Timer(0.2, lambda: fake.async_error(6))
    timer.start()
    started = time.monotonic()
    with pytest.raises(CommError, match="all_reduce: NCCL reported ncclRemoteError|failed: ncclAllReduce: ncclRemote"):
        acquainted[0].all_reduce(vector(400 if first else 4), "sum", **NOW)
    assert time.monotonic() - started < 5
    eventually(lambda: fake.aborts() == 1)
    fake.async_error(0)
    close_all(acquainted)


def test_ctrl_c_in_the_first_operation(acquainted: list[Any], fake: Fake) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        acquainted[0].all_reduce(vector(400), "sum", **NOW)
    assert time.monotonic() - started < 5
    assert fake.aborts() == 1
    close_all(acquainted)


def test_ranks_that_come_late_are_waited_for(acquainted: list[Any]) -> None:
    def run(rank: int) -> Any:
        time.sleep(0.3 * rank)
        x, y = vector(), vector(400)
        acquainted[rank].all_reduce(x, "sum", **NOW)
        time.sleep(0.3 * rank)
        acquainted[rank].all_reduce(y, "sum", **NOW)
        return [*x.host.tolist(), *y.host.tolist()]

    assert run_ranks(2, run) == [[2.0] * 404] * 2
    close_all(acquainted)


STUCK = """
import ctypes, os, time
from tests.transport.nccl_ranks import Fake
import pycomm._native as _native
from pycomm import CommError
fake = Fake(os.environ["PYCOMM_NCCL_LIBRARY"])
fake.deaf(True)
fake.never_ready(True)
started = time.monotonic()
try:
    _native.NcclGroup(0, 2, 0, b"x" * 128, False, 0.3, [])
except CommError as error:
    print(error)
assert time.monotonic() - started < 15
"""


@pytest.mark.slow
def test_a_creation_that_cannot_be_aborted_is_left_behind(fake_library: Path) -> None:
    """The process ends all the same."""
    environment = {**os.environ, "PYCOMM_NCCL_LIBRARY": str(fake_library)}
    run = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "creating the NCCL communicator: timed out waiting for all 2 ranks after 0." in run.stdout
