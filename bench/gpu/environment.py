"""Device, driver and libraries, without which a figure from a GPU means nothing."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from bench.harness.mpi import installed_version
from bench.harness.results import environment

_CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """Return the device and ``bench.harness.results.environment()``, which is left out where pycomm is not."""
    found: dict[str, Any] = {"torch": torch.__version__}
    with contextlib.suppress(ImportError):
        found |= environment()
        found["nccl"] = _nccl()
    versions = [installed_version(name) for name in _CUPY]
    found["cupy"] = next((version for version in versions if version is not None), None)
    found["cuda_runtime"] = torch.version.cuda
    return {**_device(device), **found}


def l2_bytes(device: torch.device) -> int:
    """Return the size of the cache that inputs must not fit into; 0 on a CPU, where nothing is claimed."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    # Older torch does not tell; no GPU of its time has more.
    return int(getattr(properties, "L2_cache_size", 128 << 20))


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": l2_bytes(device),
        "driver": _driver(),
    }


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip().partition("\n")[0]
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def _nccl() -> dict[str, str] | None:
    """Return version and path of the NCCL that pycomm would use."""
    from pycomm.collectives.transport.nccl import nccl_version

    found = nccl_version()
    return None if found is None else {"version": found[0], "path": found[1]}
