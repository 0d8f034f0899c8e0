"""Ranks that die, hang, are interrupted or fork. Every test here loses or blocks real processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from pycomm import CommError, Communicator
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool


def endless_all_reduce(flag: str) -> str:
    """Large all-reduces until one fails; describes the error."""
    communicator = Communicator(timeout=60)
    x = communicator.empty(8_000_000).fill_(1.0)
    Path(flag + str(communicator.rank)).write_text(str(os.getpid()))
    started = time.monotonic()
    try:
        while time.monotonic() - started < 50:
            communicator.all_reduce(x, "mean")
    except CommError as error:
        again = ""
        try:
            communicator.all_reduce(x)
        except CommError as later:
            again = str(later)
        communicator.close()
        return f"{error.rank} {error.peer} {error.operation} {error.elapsed < 5} | {error} | {again}"
    return "no error"


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... died`",
    "Look at its output, then in the kernel log for an out-of-memory kill.",
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_within_seconds(new_ranks: Pools, tmp_path: Path, size: int) -> None:
    pool = new_ranks(size)
    victim = size - 1

    def kill() -> None:
        file = tmp_path / f"at{victim}"
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(int(file.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    outcomes = pool.outcomes(endless_all_reduce, str(tmp_path / "at"), timeout=40)
    killer.join()
    assert time.monotonic() - started < 15
    assert isinstance(outcomes[victim].error, ChildProcessError)
    texts = [outcome.result for outcome in outcomes[:victim]]
    for rank, text in enumerate(texts):
        assert text.startswith(f"{rank} "), text
        assert "all_reduce True" in text
        assert "this communicator is broken since an earlier failure" in text
    # Who notices the death itself names the victim; others may hear of it from a survivor that gave up first.
    assert any(f"{rank} {victim} all_reduce" in text for rank, text in enumerate(texts))
    assert all(f"rank {victim} died" in text for text in texts), texts


def wait_for_nobody() -> tuple[str, int | None, float]:
    communicator = Communicator(timeout=1.0)
    error: CommError | None = None
    if communicator.rank == 0:
        with pytest.raises(CommError) as caught:
            communicator.barrier()
        error = caught.value
    else:
        time.sleep(2.5)
        with pytest.raises(CommError) as caught:
            communicator.barrier()
        error = caught.value
    communicator.close()
    return str(error), error.peer, error.elapsed


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`timed out waiting for rank ...`",
    "That rank is alive, but did not call this operation: stuck, stopped or elsewhere.",
)
def test_timeout(new_ranks: Pools) -> None:
    (first, peer, elapsed), (second, _, _) = new_ranks(2).run(wait_for_nobody)
    assert "rank 0: barrier: timed out waiting for rank 1 after " in first
    assert peer == 1
    assert 1.0 <= elapsed < 30.0
    assert "rank 0 gave up (rank 0: barrier: timed out" in second


def leave_early() -> str:
    communicator = Communicator(timeout=30)
    communicator.barrier()
    if communicator.rank == 1:
        communicator.close()
        return ""
    with pytest.raises(CommError) as caught:
        communicator.barrier()
    communicator.close()
    return str(caught.value)


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`rank ... gave up (...)`",
    "That rank closed its communicator, for the reason in brackets.",
)
def test_a_peer_that_closed(two_ranks: RankPool) -> None:
    assert "rank 1 gave up (rank 1: it closed its communicator)" in two_ranks.run(leave_early)[0]


def interrupted() -> str:
    communicator = Communicator(timeout=30)
    communicator.barrier()
    if communicator.rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            communicator.all_reduce(torch.ones(1000))
        assert time.monotonic() - started < 3
        communicator.close()
        return "interrupted"
    time.sleep(1.5)
    with pytest.raises(CommError) as caught:
        communicator.all_reduce(torch.ones(1000))
    communicator.close()
    return str(caught.value)


def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(new_ranks: Pools) -> None:
    first, second = new_ranks(2).run(interrupted)
    assert first == "interrupted"
    assert "rank 0: interrupted in all_reduce" in second


@on_ranks(2)
def test_close_ends_an_operation_in_progress() -> None:
    communicator = Communicator(timeout=30)
    communicator.barrier()
    if communicator.rank == 0:
        work = communicator.all_reduce(torch.ones(100_000), async_op=True)
        assert work is not None
        time.sleep(0.3)
        started = time.monotonic()
        communicator.close()
        assert time.monotonic() - started < 3
        with pytest.raises(CommError, match="closed meanwhile"):
            work.wait()
    else:
        time.sleep(1.0)
        communicator.close()


def fork_a_worker(flag: str) -> str:
    """A DataLoader worker forked in the middle; then rank 1 is killed while its worker lives on."""
    communicator = Communicator(timeout=60)
    x = communicator.empty(1_000_000).fill_(1.0)
    dataset = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork")
    for (batch,) in loader:
        x.fill_(batch.sum().item())
        communicator.all_reduce(x, "mean")
        assert x[0] == batch.sum()
    child = os.fork()
    if child == 0:
        with pytest.raises(CommError, match="inherited by a fork"):
            communicator.barrier()
        assert x[5] == x[0]  # memory stays readable
        communicator.close()
        del x
        os.kill(os.getpid(), signal.SIGSTOP) if communicator.rank == 1 else os._exit(0)
    if communicator.rank == 0:
        os.waitpid(child, 0)
        communicator.barrier()
        Path(flag).write_text(str(child))
        started = time.monotonic()
        with pytest.raises(CommError, match="rank 1 died"):
            communicator.barrier()
        assert time.monotonic() - started < 5
        communicator.close()
        return "noticed"
    os.waitpid(child, os.WUNTRACED)
    Path(flag + ".child").write_text(str(child))
    communicator.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_a_forked_worker_harms_nothing(new_ranks: Pools, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    outcomes = new_ranks(2).outcomes(fork_a_worker, str(flag))
    assert isinstance(outcomes[1].error, ChildProcessError), outcomes[1].trace
    os.kill(int((tmp_path / "flag.child").read_text()), signal.SIGKILL)
    assert outcomes[0].result == "noticed", outcomes[0].trace


def shared_mappings() -> int:
    return sum("memfd:pycomm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_and_close() -> tuple[int, int, int, int]:
    gc.collect()  # what earlier tests dropped inside exceptions
    descriptors = len(os.listdir("/proc/self/fd"))
    mappings = shared_mappings()
    for _ in range(5):
        with Communicator(timeout=30) as communicator:
            communicator.all_reduce(communicator.empty(1_000_000).fill_(1.0))
            communicator.all_reduce(torch.ones(9), async_op=True)
    del communicator
    return descriptors, len(os.listdir("/proc/self/fd")), mappings, shared_mappings()


def test_nothing_is_left_open(two_ranks: RankPool) -> None:
    two_ranks.run(open_and_close)
    for before, after, mappings_before, mappings_after in two_ranks.run(open_and_close):
        assert after == before
        assert mappings_after == mappings_before


EXIT_WITHOUT_CLOSING = """
import os, sys, torch, torch.distributed as dist
import pycomm
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
communicator = pycomm.Communicator(timeout=60)
communicator.barrier()
if rank == 0:
    work = communicator.all_reduce(torch.ones(100_000), async_op=True)  # nobody will come
else:
    import time; time.sleep(1.0)
print("leaving")
"""


def test_a_script_may_simply_end(tmp_path: Path) -> None:
    """Also with an operation in progress on the communication thread: no hang, no crash, no core."""
    from tests.ranks import free_port

    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT_WITHOUT_CLOSING, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=40)
            assert process.returncode == 0, err
            assert out == "leaving\n"
    finally:
        for process in processes:
            process.kill()
