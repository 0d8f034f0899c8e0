"""The GPUs that the tests of device kernels run on: a real one, or the emulator with several ways to interleave.

Which one is decided by how the tests are started: PYCOMM_TEST_EMULATOR=1 with the emulated build on the path
(``.ci/sanitize``), else a real one where there is one.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

EMULATED = os.environ.get("PYCOMM_TEST_EMULATOR") == "1"

# Markers, which conftest.py skips by: ``python -m bench.gpu check`` selects its tests with them.
requires_gpu = pytest.mark.requires_gpu
requires_cuda = pytest.mark.requires_cuda


def why_skipped(markers: Collection[str]) -> str | None:
    """Return why a test with these markers cannot run here; ``None`` if it can."""
    if "requires_cuda" in markers and (EMULATED or not torch.cuda.is_available()):
        return "needs a real GPU"
    if "requires_gpu" in markers and not EMULATED and not torch.cuda.is_available():
        return "no GPU here; .ci/sanitize runs this on the host"
    return None


@contextmanager
def waits_refused() -> Iterator[None]:
    """Let torch raise where it makes the host wait for a GPU; on leaving, restore what was set before.

    Setting the mode, which holds for the whole process, warns once that it does not find every wait. Where warnings
    are errors, that one is raised after the mode has been set, so it must not get out. What torch finds are blocking
    copies (``item``, ``tolist``, ``cpu``, and ``torch.tensor(values, device=...)``), waits for a stream, and operations
    whose result has a size that depends on values; waits for an event are not among them.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Gpu(ABC):
    """Puts CPU tensors on a device and gets them back."""

    @abstractmethod
    def put(self, tensor: torch.Tensor, device: int = 0) -> Any: ...

    @abstractmethod
    def get(self, array: Any) -> torch.Tensor: ...

    def puts(self, tensors: list[torch.Tensor]) -> list[Any]:
        return [self.put(tensor) for tensor in tensors]

    def garbage(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Any:
        """Uninitialized, with luck recognizable."""
        host = torch.empty(shape, dtype=dtype)
        host.view(-1).view(torch.uint8).fill_(0xA5)
        return self.put(host)


class TorchGpu(Gpu):
    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        # A view into larger memory keeps its offset, and with it its alignment.
        base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        moved = base.to(f"cuda:{device}")
        return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def get(self, array: torch.Tensor) -> torch.Tensor:
        return array.cpu()


class CupyGpu(TorchGpu):
    def put(self, tensor: torch.Tensor, device: int = 0) -> Any:
        import cupy

        moved = super().put(tensor, device)
        return moved if tensor.dtype == torch.bfloat16 else cupy.from_dlpack(moved)

    def get(self, array: Any) -> torch.Tensor:
        import cupy

        if isinstance(array, torch.Tensor):
            return array.cpu()
        return torch.from_numpy(cupy.asnumpy(array))


class EmulatedGpu(Gpu):
    def __init__(self, seed: int, threads_per_block: int, resident_blocks: int, multiprocessors: int = 2) -> None:
        from tests.emulator.arrays import library

        library().emulator_configure(seed, threads_per_block, resident_blocks, multiprocessors)

    def put(self, tensor: torch.Tensor, device: int = 0) -> Any:
        from tests.emulator.arrays import DeviceArray

        # A copy of the whole storage: what the kernels write must not reach the tensor itself.
        storage = tensor.untyped_storage().clone()
        host = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return DeviceArray(host, device)

    def get(self, array: Any) -> torch.Tensor:
        return array.host.clone()


EMULATIONS = {"32x1": (11, 32, 1), "64x3": (12, 64, 3), "96x2": (13, 96, 2), "256x2": (14, 256, 2)}
"""Threads per block and blocks under way; the seeds differ too, and move on with every kernel."""


def kinds() -> list[str]:
    if EMULATED:
        return list(EMULATIONS)
    return ["torch", "cupy"]


@pytest.fixture(params=kinds())
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Runs a test once per kind."""
    if request.param in EMULATIONS:
        yield EmulatedGpu(*EMULATIONS[request.param])
        return
    if request.param == "cupy":
        pytest.importorskip("cupy")
        yield CupyGpu()
    else:
        yield TorchGpu()


@pytest.fixture
def large_team() -> tuple[Gpu, int]:
    """A GPU, and a number of elements to select from that takes a team of more blocks than a block has threads."""
    return (EmulatedGpu(15, 32, 40, 20), 330_000) if EMULATED else (TorchGpu(), 3_000_000)
