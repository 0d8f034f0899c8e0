"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch._C._distributed_c10d import HashStore

import pycomm
from tests import pairwise, selection
from tests.kernels.gpus import why_skipped
from tests.on_ranks import Pools
from tests.processes import child_processes
from tests.ranks import SLOWER, RankPool

_MOST_RANKS = 8
"""Most ranks of this process's pools: each takes up to half a gigabyte, and several processes run tests at a time."""

# Deterministic, and no deadline: these machines stall now and then.
settings.register_profile(
    "pycomm",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("PYCOMM_TEST_EXAMPLES", "60")),
)
settings.register_profile("quick", settings.get_profile("pycomm"), max_examples=10)
settings.load_profile("pycomm")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["PYCOMM_FLIGHT_DIR"] = ""  # errors on purpose write no files; tests of the recorder name a folder
# Shells without job control start background jobs with Ctrl-C ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Pools]:
    """``pool_of(size)``: processes are started once per size, and again if a test lost one, or others required room.

    Two ranks, which most tests have, are new processes like those of users: imports of their own, and another order of
    sets on each. More of them are forked, and so is everything where importing torch takes half a minute.
    """
    pools: dict[int, RankPool] = {}  # the one that was used last is last

    def pool_of(size: int) -> RankPool:
        if size in pools and not pools[size].alive():
            pools.pop(size).close()
        pool = pools.pop(size, None)
        if pool is None:
            while sum(pools) + size > _MOST_RANKS and (forked := [other for other in pools if other != 2]):
                pools.pop(forked[0]).close()
            pool = RankPool(size, forked=size != 2 or SLOWER > 1)
        pools[size] = pool
        return pool

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two_ranks(rank_pools: Pools) -> RankPool:
    return rank_pools(2)


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """Initialize torch.distributed with this process as its only rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def new_ranks() -> Iterator[Pools]:
    """Pools of their own for tests that kill ranks."""
    pools: list[RankPool] = []

    def start(size: int) -> RankPool:
        pools.append(RankPool(size, forked=True))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process of ours outlives the session, and nothing of ours ever has a name in /dev/shm."""
    yield
    named = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(("pycomm", "torch"))]
    assert not named, f"left behind: {named}"


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_option(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes for two cores, as tests wait for half of their time; none for tests that are named."""
    return min(8, max(2, 3 * len(os.sched_getaffinity(0)) // 2)) if selection.is_whole_part(config) else 0


def pytest_report_header() -> str:
    return f"pycomm: {pycomm.__file__}"


def pytest_configure(config: pytest.Config) -> None:
    if selection.part_of(config) == "quick":
        config.option.reportchars = "fE"  # tests skipped without a GPU would be hundreds of lines
        if "PYCOMM_TEST_EXAMPLES" not in os.environ:
            settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import nothing of what the quick part leaves out."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if path in selection.LEFT_OUT and selection.part_of(config) == "quick" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    pairwise.mark_slow(items)
    result = yield  # this deselects tests marked slow
    part = selection.part_of(config)
    if part != "all":
        quick, rest = selection.divide(items)
        items[:], left_out = (quick, rest) if part == "quick" else (rest, quick)
        config.hook.pytest_deselected(items=left_out)
    return result


def pytest_collection_finish() -> None:
    """Keep the modules out of later collections of garbage, which many tests ask for: half a second each."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    without_gpu = sum("GPU" in str(report.longrepr) for report in reports)
    if without_gpu:
        terminalreporter.write_line(f"{without_gpu} skipped tests require a GPU or its emulator (.ci/sanitize).")
    if selection.part_of(config) == "quick":
        terminalreporter.write_line(selection.ADVICE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = why_skipped({marker.name for marker in item.iter_markers()})
    if reason is not None:
        pytest.skip(reason)


def pytest_sessionfinish() -> None:
    children = child_processes()
    for pid, command in list(children.items()):
        if "multiprocessing.forkserver" in command:  # which ends with this process
            del children[pid]
            children.update(child_processes(parent=pid))
    left = [command for command in children.values() if command and "resource_tracker" not in command]
    assert not left, f"processes left behind: {left}"
