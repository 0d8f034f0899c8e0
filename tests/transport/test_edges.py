"""Signals, forks, views that go away, peers that tamper: nothing crashes, hangs or overwrites."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import CommError, Communicator, kernels
from pycomm.collectives.transport import choice
from pycomm.worker import Worker
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool

TRANSPORTS = ["shared_memory", "tcp", "torch"]


def wait_for(work: Any) -> None:
    if work is not None:
        work.wait()


def close_in_a_handler(how: str) -> str:
    communicator = Communicator(timeout=60)
    communicator.barrier()
    if communicator.rank == 1:
        time.sleep(2.0)
        with pytest.raises(CommError, match="rank 0") as caught:
            communicator.all_reduce(torch.ones(1000))
        communicator.close()
        return str(caught.value.peer)
    calls: list[str] = []

    def handler(*_: object) -> None:
        calls.append("called")
        if how == "collective":
            with pytest.raises(CommError, match="called by a signal handler"):
                communicator.barrier()
        communicator.close("it was told to end")

    old = signal.signal(signal.SIGTERM, handler)
    threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    try:
        with pytest.raises(CommError, match="closed meanwhile"):
            wait_for(communicator.all_reduce(torch.ones(1000), async_op=how == "async"))
    finally:
        signal.signal(signal.SIGTERM, old)
    with pytest.raises(CommError, match="closed"):
        communicator.barrier()
    communicator.close()
    return " ".join(calls)


@pytest.mark.parametrize("how", ["sync", "async", "collective"])
def test_a_signal_handler_may_close(new_ranks: Pools, how: str) -> None:
    assert new_ranks(2).run(close_in_a_handler, how) == ["called", "0"]


def in_the_operation(thread: int) -> Any:
    """Return where a thread is, if that is in an operation of a communicator."""
    frame = sys._current_frames()[thread]
    inside = frame.f_code.co_filename.endswith("channel.py") and frame.f_code.co_name == "run"
    return (id(frame), frame.f_lasti) if inside else None


def views_go_away(directory: str) -> list[str]:
    """Rank 0's arrays are cleared and closed by another thread while it waits for rank 1."""
    communicator = Communicator(timeout=60)
    communicator.barrier()
    array, mapped = bytearray(100_000), mmap.mmap(-1, 100_000)
    refused: list[str] = []
    main = threading.get_ident()
    for name, x, disturbance in (("clear", array, array.clear), ("close", mapped, mapped.close)):
        flag = Path(directory) / name

        def disturb(name: str = name, disturbance: Callable[[], Any] = disturbance, flag: Path = flag) -> None:
            seen = None
            while seen is None or in_the_operation(main) != seen:  # twice at the same place: it waits
                seen = in_the_operation(main)
                time.sleep(0.05)
            try:
                disturbance()
            except BufferError:
                refused.append(name)
            flag.touch()

        if communicator.rank == 0:
            thread = threading.Thread(target=disturb)
            thread.start()
            communicator.broadcast(x, 1)
            thread.join()
            assert bytes(x[:100_000]) == b"x" * 100_000
        else:
            while not flag.exists():
                time.sleep(0.01)
            communicator.broadcast(bytearray(b"x" * 100_000), 1)
    communicator.close()
    return refused


def test_views_are_held_until_the_end(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(views_go_away, str(tmp_path))[0] == ["clear", "close"]


def test_one_thread_however_many_submit_first() -> None:
    for _ in range(100):
        worker = Worker("pycomm-test")
        gate = threading.Barrier(8)
        ran_on: list[int] = []

        def submit(worker: Worker = worker, gate: threading.Barrier = gate, ran_on: list[int] = ran_on) -> None:
            gate.wait()
            worker.submit(lambda: ran_on.append(threading.get_ident())).wait()

        threads = [threading.Thread(target=submit) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        worker.stop(patience=5.0)
        assert len(ran_on) == 8
        assert len(set(ran_on)) == 1


@on_ranks(2)
def test_a_thread_that_cannot_start_is_an_error_on_all() -> None:
    with Communicator(timeout=30) as communicator:
        if communicator.rank == 1:
            start = threading.Thread.start

            def refuse(self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            threading.Thread.start = refuse  # type: ignore[method-assign]
            try:
                with pytest.raises(RuntimeError, match="no thread could be started for an async operation"):
                    communicator.all_reduce(torch.ones(10), async_op=True)
            finally:
                threading.Thread.start = start  # type: ignore[method-assign]
        else:
            with pytest.raises(ValueError, match="rank 1 could not take part: no thread could be started"):
                communicator.all_reduce(torch.ones(10))
        for asynchronous in (True, False):
            x = torch.ones(10)
            work = communicator.all_reduce(x, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert x[0] == 2


def mistaken_constructor(transport: str, arguments: dict[str, Any]) -> str:
    said = ""
    rank = torch.distributed.get_rank()
    for attempt in range(3):
        wrong = arguments if rank == 1 else {}
        with pytest.raises((ValueError, TypeError)) as caught:
            Communicator(**{"timeout": 30, "transport": transport, **wrong})
        said = str(caught.value)
        if attempt == 1:  # and in between it works
            with Communicator(timeout=30, transport=transport) as communicator:
                communicator.barrier()
    with Communicator(timeout=30, transport=transport) as communicator:
        x = torch.ones(3)
        communicator.all_reduce(x)
        assert x[0] == 2
    return said


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": 1e18}, "timeout is 1e+18"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"timeout": [0] * 100_000}, "timeout is [0"),
        ({"transport": "pigeon"}, "transport is 'pigeon'"),
        ({"transport": b"torch"}, "transport is b'torch'"),
        ({"network": 3}, "network is 3"),
        ({"network": "/dev/zero"}, "wanted a regular file"),
    ],
)
def test_a_wrong_constructor_is_an_error_on_all(
    two_ranks: RankPool, transport: str, arguments: dict[str, Any], says: str
) -> None:
    started = time.monotonic()
    innocent, guilty = two_ranks.run(mistaken_constructor, transport, arguments)
    assert says in guilty
    assert "rank 1" in innocent
    assert says in innocent
    assert time.monotonic() - started < 60


def test_a_pipe_is_no_network(tmp_path: Path) -> None:
    from pycomm import schedule

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path, "a\0b"):
        with pytest.raises(ValueError, match="network is"):
            schedule.load(path)


def dump_core(directory: str) -> str:
    """Rank 1 dies with a lot of memory to write."""
    os.chdir(directory)  # where the core goes, unless the system has another place for it
    communicator = Communicator(timeout=60)
    communicator.barrier()
    if communicator.rank == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ballast = np.ones(300_000_000, np.uint8)
        ctypes.CDLL(None).abort()
        return str(ballast[0])
    with pytest.raises(CommError) as caught:
        communicator.barrier()
    communicator.close()
    assert caught.value.peer == 1
    return str(caught.value)


@pytest.mark.slow
def test_a_crash_is_noticed(new_ranks: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(2).outcomes(dump_core, str(tmp_path), timeout=120)
    for core in tmp_path.iterdir():
        core.unlink()
    assert outcomes[0].result is not None, outcomes[0].trace
    assert "rank 1 died" in outcomes[0].result or "rank 1 is dumping core" in outcomes[0].result


@on_ranks(2)
def test_sizes_that_overflow() -> None:
    with Communicator(timeout=30) as communicator:
        for size, dtype in (
            (2**63 - 1, torch.uint8),
            (2**62, torch.float64),
            (2**70, torch.uint8),
            (2**61, torch.int32),
        ):
            with pytest.raises(MemoryError, match=r"needed"):
                communicator.empty(size, dtype)
        for shape in (True, 1.5, "abc", None, (2, True)):
            with pytest.raises(TypeError, match="shape is"):
                communicator.empty(shape)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="device is 'meta'"):
            communicator.empty(3, device="meta")
        communicator.barrier()


def seals_and_descriptors() -> tuple[int, int]:
    """A mapping that fails gives every descriptor back."""
    import resource

    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm").read_text().split()
    used = int(status[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), limits[1]))
    try:
        with pytest.raises((MemoryError, CommError)):
            Communicator(timeout=20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    after = len(os.listdir("/proc/self/fd"))
    with Communicator(timeout=20) as communicator:
        communicator.barrier()
    return before, after


@pytest.mark.skipif("libasan" in Path("/proc/self/maps").read_text(), reason="AddressSanitizer maps all there is")
def test_a_mapping_that_fails_leaks_nothing(new_ranks: Pools) -> None:
    for before, after in new_ranks(2).run(seals_and_descriptors):
        assert after == before


def test_memory_is_sealed() -> None:
    from pycomm.collectives.transport import rendezvous

    descriptor = rendezvous.anonymous_memory(4096)
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(descriptor)


@on_ranks(2)
def test_threads_may_make_communicators_at_the_same_time() -> None:
    """Whichever of rank 0's meets which of rank 1's: all of them meet."""

    def make(_: int) -> float:
        with Communicator(timeout=30) as communicator:
            x = torch.ones(3)
            communicator.all_reduce(x)
            return x[0].item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, range(8))) == [2.0] * 8


def no_socket() -> str:
    rank = torch.distributed.get_rank()
    listen = vars(choice)["listen"]

    def refuse(size: int) -> Any:
        raise OSError(24, "Too many open files")

    if rank == 1:
        vars(choice)["listen"] = refuse
    try:
        with pytest.raises((OSError, ValueError)) as caught:
            Communicator(timeout=60)
    finally:
        vars(choice)["listen"] = listen
    with Communicator(timeout=30) as communicator:
        communicator.barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_without_sockets_is_an_error_on_all(two_ranks: RankPool) -> None:
    innocent, guilty = two_ranks.run(no_socket)
    assert guilty == "OSError: [Errno 24] Too many open files"
    assert innocent == "ValueError: rank 1 could not take part: [Errno 24] Too many open files"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_in_place_with_one_rank(one_rank_group: None, transport: str) -> None:
    """As with several: the smaller array is this rank's part of the larger one."""
    with Communicator(timeout=20, transport=transport) as communicator:
        x = torch.arange(8.0)
        communicator.all_gather(x, x[0:8])
        communicator.reduce_scatter(x, x[0:8])
        assert torch.equal(x, torch.arange(8.0))
        with pytest.raises(ValueError, match="out overlaps x"):
            communicator.all_gather(x[:7], x[1:8])


class Restless(torch.Tensor):
    """Says of every copy that it is not contiguous."""

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return False

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


def test_a_copy_that_is_none_either() -> None:
    with pytest.raises(TypeError, match=r"tensors\[0\] is a Restless whose copies are not contiguous"):
        kernels.absmax([torch.ones(8)[::2].as_subclass(Restless)])


def test_counts_of_numpy() -> None:
    values, _ = kernels.topk(torch.arange(9.0), np.int64(3))  # type: ignore[arg-type]
    assert values.tolist() == [6.0, 7.0, 8.0]


@on_ranks(2)
def test_small_operations_of_two_threads() -> None:
    """The second waits for the first, which needs the interpreter's lock to look for signals while it waits."""
    with Communicator(timeout=20) as communicator:
        arrays = [torch.ones(5), torch.ones(5)]
        if communicator.rank == 0:
            threads = [threading.Thread(target=communicator.all_reduce, args=(x,)) for x in arrays]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            time.sleep(0.3)
            for x in arrays:
                communicator.all_reduce(x)
        assert all(torch.equal(x, torch.full((5,), 2.0)) for x in arrays)
