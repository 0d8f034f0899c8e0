"""The ranks agree on NCCL before they use it: whatever is wrong on one is an error on all, and no hang."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm._native as _native
from pycomm import CommError
from pycomm.collectives.transport import nccl
from pycomm.collectives.transport.gpu import GpuQueue
from pycomm.collectives.transport.nccl import NcclTransport
from tests.transport.nccl_ranks import NOW, Fake, contribution, on_device, on_ranks, requires_emulator, run_ranks

pytestmark = requires_emulator


class Table:
    """An all-gather of bytes between threads."""

    def __init__(self, size: int) -> None:
        self._rows: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def share(self, rank: int, mine: bytes) -> list[bytes]:
        self._rows[rank] = mine
        self._barrier.wait()
        everyone = list(self._rows)
        self._barrier.wait()
        return everyone


def transports(size: int, devices: int = 2, algorithms: tuple[str, ...] = ("native",), **settings: Any) -> list[Any]:
    """Return each rank's transport, or its error."""
    table = Table(size)

    def create(rank: int) -> NcclTransport:
        algorithm = algorithms[rank % len(algorithms)]
        return NcclTransport(
            rank, size, rank % devices, lambda mine: table.share(rank, mine), algorithm, **{"timeout": 20.0, **settings}
        )

    return on_ranks(size, create)


def is_rank(rank: int) -> bool:
    return threading.current_thread().name == f"rank {rank}"


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_everything_works(fake: Fake, algorithm: str) -> None:
    members = transports(2, algorithms=(algorithm,))

    def run(rank: int) -> None:
        c, other = members[rank], 1 - rank
        x = on_device(contribution(rank, 6, np.float32), rank)
        c.all_reduce(x, "mean", **NOW)
        parts = [contribution(p, 6, np.float32) for p in range(2)]
        np.testing.assert_array_equal(x.host, (parts[0] + parts[1]) / 2)
        c.broadcast(x, 1, **NOW)
        everything, part = on_device(np.zeros(12, np.float32), rank), on_device(np.zeros(3, np.float32), rank)
        c.all_gather(everything, on_device(parts[rank], rank), **NOW)
        np.testing.assert_array_equal(everything.host, np.concatenate(parts))
        c.reduce_scatter(part, on_device(parts[rank], rank), "max", **NOW)
        np.testing.assert_array_equal(part.host, np.maximum(*parts)[rank * 3 : rank * 3 + 3])
        mine = on_device(parts[rank], rank)  # has to live until the group's end
        with c.grouped(20.0):
            c.send(mine, other, **NOW)
            c.recv(x, other, **NOW)
        np.testing.assert_array_equal(x.host, parts[other])
        c.check()
        c.close()
        c.close()

    run_ranks(2, run)
    assert fake.words("algorithms") == (["Ring"] * 2 if algorithm == "ring" else ["-"] * 2)
    assert (fake.aborts(), fake.destroys()) == (0, 2)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_parts_of_different_lengths(fake: Fake, op: str) -> None:
    """Each is reduced to one rank, and sent by it, in one group; some are empty."""
    members, lengths = transports(3, devices=3), (5, 0, 1000)

    def run(rank: int) -> None:
        queue = GpuQueue(rank, 20.0, lambda *_: members[rank])
        parts = [[contribution(7 * p + q, n, np.float32) for q, n in enumerate(lengths)] for p in range(3)]
        xs = [on_device(part, rank) for part in parts[rank]]
        queue.reduce_scatter_v(xs, op)
        sums = [sum(part[q] for part in parts) / (3 if op == "mean" else 1) for q in range(3)]
        for q, x in enumerate(xs):
            np.testing.assert_allclose(x.host, sums[q] if q == rank else parts[rank][q], rtol=1e-6)
        queue.all_gather_v(xs)
        for x, wanted in zip(xs, sums, strict=True):
            np.testing.assert_allclose(x.host, wanted, rtol=1e-6)
        queue.close()

    run_ranks(3, run)
    assert fake.words("calls").count("ncclGroupEnd") == 6


def test_a_group_whose_body_raises_does_not_happen(fake: Fake) -> None:
    (alone,) = transports(1)
    x = on_device(np.ones(3, np.float32))

    def raise_inside() -> None:
        with alone.grouped(20.0):
            alone.send(x, 0, **NOW)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        raise_inside()
    alone.all_reduce(x, "sum", **NOW)
    assert "ncclSend" not in fake.words("calls")
    assert "ncclAllReduce" in fake.words("calls")
    alone.close()


def problem_on(rank: int, instead: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: instead(*args) if is_rank(rank) else otherwise(*args)


def test_a_rank_without_nccl(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: list[str]) -> Any:
        raise RuntimeError("NCCL was not found: install it")

    monkeypatch.setattr(_native, "nccl_library", problem_on(1, missing, _native.nccl_library))
    for outcome in transports(2):
        assert type(outcome) is RuntimeError
        assert str(outcome) == "rank 1 cannot use NCCL: NCCL was not found: install it"
    assert "ncclGetUniqueId" not in fake.words("calls")


def test_different_versions(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _native, "nccl_library", problem_on(2, lambda _: ("2.27.3", "/there/libnccl.so.2"), _native.nccl_library)
    )
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for outcome in transports(3):
        assert isinstance(outcome, ValueError)
        assert "different versions of NCCL: rank 2 2.27.3 (/there/libnccl.so.2), rank 0 2.30.3 (" in str(outcome)


def test_algorithms(fake: Fake) -> None:
    for outcome in transports(2, algorithms=("native", "magic")):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == "rank 1 cannot use NCCL: algorithm is 'magic', wanted one of native, ring"
    for outcome in transports(2, algorithms=("native", "ring")):
        assert isinstance(outcome, ValueError)
        assert str(outcome) == "the ranks disagree: rank 1 has algorithm 'ring', rank 0 'native'"


@pytest.mark.behavior(
    "Starting and launching", "`ranks ... and ... are on the same GPU`", "Call `torch.cuda.set_device(local_rank)`."
)
def test_ranks_on_one_gpu(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    for outcome in transports(3, devices=2):
        assert isinstance(outcome, ValueError)
        assert "ranks 0 and 2 are on the same GPU (device 0 of " in str(outcome)
        assert "NCCL is 2.30.3, and rank 0 has no NCCL_MULTI_RANK_GPU_ENABLE" in str(outcome)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for member in transports(2, devices=1):
        member.close()
    _, path = _native.nccl_library([])
    monkeypatch.setattr(_native, "nccl_library", lambda _: ("2.29.7", path))
    for outcome in transports(2, devices=1):
        assert isinstance(outcome, ValueError)
        assert str(outcome).endswith("which links them by sockets: NCCL is 2.29.7")


def test_ranks_on_one_gpu_that_nccl_takes_for_hosts(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any NCCL takes them, if no two of them are on the same host and GPU."""
    plan_of, hosts = nccl._plan_of, ["a", "b", None]

    def named(*args: Any) -> dict[str, Any]:
        return plan_of(*args) | {"host": hosts[int(threading.current_thread().name[-1])]}

    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(nccl, "_plan_of", named)
    for member in transports(3, devices=1):
        member.close()
    hosts[2] = "b"
    for outcome in transports(3, devices=1):
        assert isinstance(outcome, ValueError)
        assert str(outcome).startswith("ranks 1 and 2 are on the same GPU")
        assert "another NCCL_HOSTID for each rank" in str(outcome)


def test_the_name_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "ours")
    assert nccl._plan_of([], 0, "native", [])["host"] == "ours"


def test_no_unique_id(fake: Fake) -> None:
    fake.fail("ncclGetUniqueId", 2)
    for outcome in transports(2):
        assert type(outcome) is RuntimeError
        assert "rank 0 cannot use NCCL: NCCL 2.30.3: ncclGetUniqueId failed: ncclSystemError" in str(outcome)


def test_creation_that_fails_on_one_rank(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        create(*args).close("it has no memory")
        raise RuntimeError("rank 1 has no memory")

    create = _native.NcclGroup
    monkeypatch.setattr(_native, "NcclGroup", problem_on(1, fail, create))
    innocent, guilty = transports(2)
    assert str(guilty) == "rank 1 has no memory"
    assert isinstance(innocent, CommError)
    assert "rank 0: creating the NCCL communicator: rank 1 failed (rank 1 has no memory)" in str(innocent)
    assert (innocent.rank, innocent.peer) == (0, 1)
    assert fake.aborts() + fake.destroys() == 2


def test_creation_that_times_out(fake: Fake) -> None:
    fake.never_ready(True)
    for rank, outcome in enumerate(transports(2, timeout=0.3)):
        assert isinstance(outcome, CommError)
        assert f"rank {rank}: creating the NCCL communicator: timed out waiting for all 2 ranks" in str(outcome)
    assert fake.aborts() == 2


def test_where_packages_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nccl.candidate_paths() == []
    library.write_bytes(b"")
    assert nccl.candidate_paths() == [str(library)]


def test_version_for_bug_reports(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    version = nccl.nccl_version()
    assert version is not None
    assert version[0] == "2.30.3"
    monkeypatch.setenv("PYCOMM_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    assert nccl.nccl_version() is None


def test_one_rank_in_a_capture(fake: Fake) -> None:
    """Every rank hears of it; the capture goes on, and so do the ranks."""
    from tests.emulator.graphs import VALID, capture

    table = Table(2)

    def create(rank: int) -> NcclTransport:
        streams = [9] if rank == 0 else [7]
        return NcclTransport(rank, 2, rank, lambda mine: table.share(rank, mine), timeout=20.0, streams=streams)

    with capture(stream=9) as graph:
        outcomes = on_ranks(2, create)
    assert graph.state == VALID
    for outcome in outcomes:
        assert isinstance(outcome, RuntimeError)
        assert "rank 0 cannot use NCCL: the first operation of algorithm 'native' on GPU 0: the str" in str(outcome)
        assert "warm up" in str(outcome)
    for member in on_ranks(2, create):
        member.close()


@pytest.mark.behavior(
    "Starting and launching",
    "`the NVIDIA driver supports CUDA ..., and NCCL requires 12.3`",
    "pycomm's and torch's operations on a GPU can deadlock. Install a newer driver.",
)
@pytest.mark.parametrize(
    ("driver", "given", "wanted"), [(12030, None, "1"), (13000, "0", "0"), (12020, None, None), (12020, "1", "1")]
)
def test_communicators_on_one_gpu_keep_the_order_of_the_calls(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    driver: int,
    given: str | None,
    wanted: str | None,
) -> None:
    """From the first communicator on, if the driver can, unless the user has it otherwise; NCCL sees it."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given or "")  # and restored
    if given is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    monkeypatch.setattr(_native, "cuda_driver_version", lambda: driver)
    (alone,) = transports(1)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"NCCL_LAUNCH_ORDER_IMPLICIT") == (None if wanted is None else wanted.encode())
    assert ("the NVIDIA driver supports CUDA 12.2, and NCCL requires 12.3" in caplog.text) == (wanted is None)
    alone.close()


def test_importing_sets_nothing() -> None:
    script = "import os, pycomm; print([name for name in os.environ if name.startswith('NCCL_')])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    # Where the source tree does not hide the installed package.
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=100, cwd="/")
    assert output.strip() == "[]"
