"""The stand-in for NCCL (fake_nccl.cpp), and ranks that are threads of this process, because the stand-in's are."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm._native as _native

requires_emulator = pytest.mark.skipif(
    os.environ.get("PYCOMM_TEST_EMULATOR") != "1",
    reason="wants the emulator and a stand-in for NCCL: .ci/sanitize",
)

HERE = Path(__file__).parent
NOW = {"stream": 0, "timeout": 20.0}


def build_fake(folder: Path, name: str, *flags: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / name
    sources = ["-I", str(HERE.parents[1] / "csrc"), str(HERE / "fake_nccl.cpp")]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *flags, *sources, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class Fake:
    """The switches of the stand-in at ``path``: ``fake.aborts()`` calls its ``fake_aborts()``."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.fake_algorithms.restype = ctypes.c_char_p
        self._library.fake_calls.restype = ctypes.c_char_p
        self._library.fake_modes.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, f"fake_{name}")

    def fail(self, function: str, result: int) -> None:
        self._library.fake_fail(function.encode(), result)

    def words(self, name: str) -> list[str]:
        text: bytes = getattr(self._library, f"fake_{name}")()
        return text.decode().split()


def on_device(values: Any, device: int = 0) -> Any:
    """A copy of a numpy array, on an emulated GPU."""
    from tests.emulator.arrays import DeviceArray

    return DeviceArray(torch.from_numpy(np.array(values, order="C")), device)


def stall(on: bool) -> None:
    """Let what is enqueued on the emulated GPU stay undone, or no longer."""
    from tests.emulator.arrays import library

    library().emulator_stall(on)


def on_ranks(size: int, function: Callable[[int], Any], timeout: float = 60.0) -> list[Any]:
    """``function(rank)`` in a thread per rank, named "rank 0" and so on: what they returned, or raised."""
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until ``holds()``, which a watchdog's thread brings about."""
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


def run_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what ``function(rank)`` returned on each rank; raise what one of them raised."""
    outcomes = on_ranks(size, function)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def groups(size: int, ring: bool = False, timeout: float = 20.0, devices: int = 1) -> list[Any]:
    unique_id = _native.nccl_unique_id([])
    return run_ranks(size, lambda r: _native.NcclGroup(r, size, r % devices, unique_id, ring, timeout, []))


def close_all(members: list[Any]) -> None:
    for group in members:
        group.close("the test is over")


def contribution(rank: int, n: int, dtype: Any) -> Any:
    """Small whole numbers, different for every rank and place, exactly summable in every type."""
    return ((np.arange(n) * (rank + 3) + rank) % 7).astype(dtype)
