"""NCCL that fails, hangs, or is left alone; and ends of every kind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycomm._native as _native
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
    stall,
)

pytestmark = requires_emulator

RESULTS = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    8: "ncclTimeout",
    77: "ncclResult_t 77",
}


@pytest.mark.parametrize("polls", [0, 1, 50])
def test_in_progress_is_waited_for(fake: Fake, polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's environment can make communicators poll."""
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    fake.in_progress(polls)
    members = groups(2)

    def run(rank: int) -> Any:
        x = on_device(np.full(5, rank + 1.0, np.float32))
        members[rank].all_reduce(x, "sum", **NOW)
        return x.host

    for result in run_ranks(2, run):
        np.testing.assert_array_equal(result, np.full(5, 3.0))
    close_all(members)
    assert (fake.aborts(), fake.destroys()) == (0, 2)


@pytest.mark.parametrize("code", RESULTS)
def test_every_code_is_named(alone: Any, fake: Fake, code: int) -> None:
    fake.fail("ncclAllReduce", code)
    x = on_device(np.ones(4, np.float32))
    with pytest.raises(CommError) as caught:
        alone.all_reduce(x, "sum", **NOW)
    assert f"rank 0: all_reduce: NCCL 2.30.3 failed: ncclAllReduce: {RESULTS[code]} (" in str(caught.value)
    assert "(what this code means): what NCCL wrote down last after " in str(caught.value)
    assert (caught.value.rank, caught.value.peer, caught.value.operation) == (0, None, "all_reduce")
    fake.fail("ncclAllReduce", 0)
    with pytest.raises(CommError, match="NCCL 2.30.3 failed: ncclAllReduce") as again:
        alone.broadcast(x, 0, **NOW)
    assert str(again.value) == str(caught.value)
    alone.close("")
    assert (fake.aborts(), fake.destroys()) == (1, 0)


FUNCTIONS: dict[str, Callable[[Any, Any], None]] = {
    "ncclReduceScatter": lambda group, x: group.reduce_scatter(x, x, "sum", **NOW),
    "ncclAllGather": lambda group, x: group.all_gather(x, x, **NOW),
    "ncclBroadcast": lambda group, x: group.broadcast(x, 0, **NOW),
    "ncclReduce": lambda group, x: group.reduce(x, 0, "sum", **NOW),
    "ncclCommGetAsyncError": lambda group, x: group.check(),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_checked(alone: Any, fake: Fake, function: str) -> None:
    fake.fail(function, 6)
    with pytest.raises(CommError, match="ncclRemoteError"):
        FUNCTIONS[function](alone, on_device(np.ones(4, np.float32)))
    assert fake.aborts() == 1


@pytest.mark.parametrize("function", ["ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"])
def test_every_function_of_a_group_is_checked(alone: Any, fake: Fake, function: str) -> None:
    fake.fail(function, 5)
    x = on_device(np.ones(4, np.float32))
    alone.group_start()
    alone.send(x, 0, **NOW)
    alone.recv(x, 0, **NOW)
    with pytest.raises(CommError, match=f"rank 0: group: NCCL 2.30.3 failed: {function}: ncclInvalidUsage") as caught:
        alone.group_end(5.0)
    assert caught.value.operation == "group"
    calls = fake.words("calls")
    # Or the abort would only have been collected.
    assert calls.count("ncclGroupStart") - calls.count("ncclGroupEnd") == (function == "ncclGroupStart")
    assert fake.aborts() == 1


def test_creation_fails(fake: Fake) -> None:
    fake.fail("ncclCommInitRankConfig", 1)
    with pytest.raises(CommError, match="ncclCommInitRankConfig: ncclUnhandledCudaError .*wrote down last") as caught:
        groups(1)
    assert (caught.value.peer, caught.value.operation) == (None, "creating the NCCL communicator")
    assert fake.aborts() == 0  # there was nothing to abort
    fake.reset()
    fake.async_error(6)
    with pytest.raises(CommError, match="ncclCommInitRankConfig: ncclRemoteError"):
        groups(1)
    assert fake.aborts() == 1
    fake.reset()
    fake.fail("ncclGetUniqueId", 2)
    with pytest.raises(RuntimeError, match="NCCL 2.30.3: ncclGetUniqueId failed: ncclSystemError"):
        groups(1)


def test_creation_times_out(fake: Fake) -> None:
    fake.never_ready(True)
    outcomes = on_ranks(2, lambda rank: _native.NcclGroup(rank, 2, 0, b"x" * 128, False, 0.4, []))
    for rank, error in enumerate(outcomes):
        assert isinstance(error, CommError)
        assert f"rank {rank}: creating the NCCL communicator: timed out waiting for all 2 ranks after " in str(error)
        assert (error.rank, error.peer) == (rank, None)
        assert 0.4 <= error.elapsed < 60
    assert fake.aborts() == 2


def test_async_error(fake: Fake) -> None:
    """Found by the watchdog while an operation is on the device; nobody calls anything."""
    members = groups(2)
    run_ranks(2, lambda rank: members[rank].broadcast(on_device(np.ones(3, np.float32)), 0, **NOW))
    stall(True)
    run_ranks(2, lambda rank: members[rank].all_reduce(on_device(np.ones(3, np.float32)), "sum", **NOW))
    time.sleep(0.15)
    assert fake.aborts() == 0
    members[0].check()
    fake.async_error(6)
    eventually(lambda: fake.aborts() == 2)
    x = on_device(np.ones(3, np.float32))
    later: list[Callable[[Any], None]] = [
        lambda group: group.all_reduce(x, "sum", **NOW),
        lambda group: group.broadcast(x, 0, **NOW),
        lambda group: group.group_start(),
        lambda group: group.check(),
    ]
    for rank, group in enumerate(members):
        for call in later:
            with pytest.raises(CommError) as caught:
                call(group)
            error = caught.value
            assert f"rank {rank}: all_reduce: NCCL reported ncclRemoteError (what this code means): " in str(error)
            assert "the results of this and of later operations are not valid" in str(error)
            assert "this communicator cannot be used again" in str(error)
            assert (error.rank, error.peer, error.operation) == (rank, None, "all_reduce")
            assert 0.1 <= error.elapsed < 60
    close_all(members)
    close_all(members)
    assert (fake.aborts(), fake.destroys()) == (2, 0)


def test_an_error_between_operations_is_found_when_asked(alone: Any, fake: Fake) -> None:
    alone.check()
    fake.async_error(2)
    with pytest.raises(CommError, match="check: NCCL reported ncclSystemError"):
        alone.check()
    assert fake.aborts() == 1


def test_an_operation_that_does_not_end_on_the_device(alone: Any, fake: Fake) -> None:
    stall(True)
    x = on_device(np.ones(3, np.float32))
    alone.broadcast(x, 0, **NOW)
    alone.all_reduce(x, "sum", stream=0, timeout=0.3)  # this one is to blame, not the older one
    time.sleep(0.1)
    alone.check()
    eventually(lambda: fake.aborts() == 1)
    for _ in range(2):
        with pytest.raises(CommError, match=r"rank 0: all_reduce: timed out on the device after \d") as caught:
            alone.all_reduce(x, "sum", **NOW)
        assert caught.value.operation == "all_reduce"
        assert 0.3 <= caught.value.elapsed < 60
    alone.close("")
    assert (fake.aborts(), fake.destroys()) == (1, 0)


def test_a_peer_that_does_not_come(fake: Fake) -> None:
    members = groups(2)
    with pytest.raises(CommError, match="rank 1: all_gather: timed out: NCCL could not start it") as caught:
        members[1].all_gather(on_device(np.ones(4)), on_device(np.ones(2)), stream=0, timeout=0.3)
    assert 0.3 <= caught.value.elapsed < 60
    eventually(lambda: fake.aborts() == 1)
    close_all(members)
    assert (fake.aborts(), fake.destroys()) == (1, 1)


def test_ended_operations_are_forgotten(alone: Any, fake: Fake) -> None:
    """Their timeouts do not strike later, and events are used again."""
    x = on_device(np.ones(3, np.float32))
    for _ in range(200):
        alone.all_reduce(x, "sum", stream=0, timeout=0.2)
    time.sleep(0.5)
    alone.check()
    stall(True)
    alone.all_reduce(x, "sum", **NOW)
    stall(False)
    time.sleep(0.2)
    alone.check()
    assert fake.aborts() == 0


def test_close_while_operations_are_pending(alone: Any, fake: Fake) -> None:
    stall(True)
    alone.all_reduce(on_device(np.ones(3, np.float32)), "sum", **NOW)
    started = time.monotonic()
    alone.close("the user had enough")
    assert time.monotonic() - started < 4
    assert (fake.aborts(), fake.destroys()) == (1, 0)
    for call in (alone.check, alone.group_start):
        with pytest.raises(CommError, match=r"all_reduce: the communicator was closed \(the user had enough\) meanwhi"):
            call()


def test_close_lets_operations_end(alone: Any, fake: Fake) -> None:
    stall(True)
    alone.all_reduce(on_device(np.ones(3, np.float32)), "sum", **NOW)
    timer = threading.Timer(0.2, lambda: stall(False))
    timer.start()
    alone.close("done")
    timer.join()
    assert (fake.aborts(), fake.destroys()) == (0, 1)
    alone.check()
    with pytest.raises(CommError, match=r"rank 0: broadcast: this communicator is closed \(done\)"):
        alone.broadcast(on_device(np.ones(3)), 0, **NOW)


def test_close_ends_a_call_in_another_thread(fake: Fake) -> None:
    members = groups(2)
    outcomes: list[Any] = []

    def wait_for_nobody() -> None:
        outcomes.extend(on_ranks(1, lambda _: members[0].all_reduce(on_device(np.ones(3)), "sum", **NOW)))

    thread = threading.Thread(target=wait_for_nobody)
    thread.start()
    time.sleep(0.2)
    members[0].close("another thread closed it")
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(outcomes[0], CommError)
    assert "another thread closed it" in str(outcomes[0])
    close_all(members)
    assert (fake.aborts(), fake.destroys()) == (1, 1)


@pytest.mark.slow
def test_an_abort_that_hangs_is_left_behind(alone: Any, fake: Fake) -> None:
    fake.slow_abort(13_000)
    fake.fail("ncclAllReduce", 1)
    started = time.monotonic()
    with pytest.raises(CommError, match="ncclUnhandledCudaError"):
        alone.all_reduce(on_device(np.ones(3, np.float32)), "sum", **NOW)
    alone.close("")
    assert time.monotonic() - started < 12
    while fake.aborts() == 0:  # before the next test counts
        time.sleep(0.05)


def interrupted(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` went on after Ctrl-C."""
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - started - 0.3


def test_ctrl_c_ends_a_wait(fake: Fake) -> None:
    members = groups(2)
    out, x = on_device(np.ones(4)), on_device(np.ones(2))
    assert interrupted(lambda: members[0].all_gather(out, x, **NOW)) < 5
    with pytest.raises(CommError, match=r"rank 0: all_gather: interrupted after \d"):
        members[0].check()
    assert fake.aborts() == 1
    assert interrupted(lambda: _native.NcclGroup(0, 2, 0, b"z" * 128, True, 20.0, [])) < 5
    assert fake.aborts() == 2
    close_all(members)


def test_dropping_and_closing_twice(fake: Fake) -> None:
    members = groups(2)
    members[0].close("")
    members[0].close("")
    members.clear()
    assert (fake.aborts(), fake.destroys()) == (0, 2)


def test_an_end_that_fails_is_an_abort(fake: Fake) -> None:
    (group,) = groups(1)
    fake.fail("ncclCommFinalize", 3)
    group.close("")
    assert (fake.aborts(), fake.destroys()) == (1, 0)


@pytest.mark.parametrize("before", [None, "Tree"])
def test_ring_is_said_through_the_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    if before is not None:
        monkeypatch.setenv("NCCL_ALGO", before)
    expected = None if before is None else before.encode()
    fake.in_progress(20)
    close_all(groups(3, ring=True))
    assert fake.words("algorithms") == ["Ring"] * 3
    assert getenv(b"NCCL_ALGO") == expected
    fake.reset()
    close_all(groups(2, ring=False))
    assert fake.words("algorithms") == [before or "-"] * 2
    fake.reset()
    fake.never_ready(True)
    with pytest.raises(CommError):
        _native.NcclGroup(0, 2, 0, b"y" * 128, True, 0.2, [])
    assert getenv(b"NCCL_ALGO") == expected


def test_ring_and_others_take_turns(fake: Fake) -> None:
    """Communicators that must not see NCCL_ALGO=Ring wait until it is gone, no longer than their timeout."""
    ids = [_native.nccl_unique_id([]) for _ in range(3)]
    outcomes: list[Any] = []

    def create(ring: bool, unique_id: bytes, size: int, timeout: float) -> Any:
        return on_ranks(1, lambda _: _native.NcclGroup(0, size, 0, unique_id, ring, timeout, []))[0]

    waiting = threading.Thread(target=lambda: outcomes.append(create(True, ids[0], 2, 1.5)))  # for a rank 1 never seen
    waiting.start()
    time.sleep(0.2)
    impatient = create(False, ids[1], 1, 0.3)
    assert isinstance(impatient, CommError)
    assert "timed out waiting for a communicator with another algorithm in this process after " in str(impatient)
    patient = create(False, ids[2], 1, 20.0)
    waiting.join()
    assert not isinstance(patient, Exception), patient
    assert isinstance(outcomes[0], CommError)
    assert fake.words("algorithms") == ["-"]
    patient.close("")
