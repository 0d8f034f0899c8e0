"""Device, driver and libraries, without which a figure from a GPU means nothing."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import torch

from bench.harness.installed import installed_version
from bench.harness.results import environment

_STATE = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}
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


def gpu_state(device: torch.device) -> dict[str, float] | None:
    """Return clocks, temperature and power as they are now, without which two figures cannot be compared.

    ``None`` where nvidia-smi does not tell all of them.
    """
    if device.type != "cuda":
        return None
    gpu = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # older torch does not tell
    query = f"--query-gpu={','.join(_STATE.values())}"
    said = _nvidia_smi(query, "--format=csv,noheader,nounits", *([] if gpu is None else [f"--id=GPU-{gpu}"]))
    try:
        return dict(zip(_STATE, map(float, (said or "").split(",")), strict=True))
    except ValueError:
        return None


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
    said = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if said is not None:
        return said
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return None


def _nvidia_smi(*options: str) -> str | None:
    """Return the first line that nvidia-smi answers, ``None`` where there is none or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().partition("\n")[0]
    return None


def _nccl() -> dict[str, str] | None:
    """Return version and path of the NCCL that pycomm would use."""
    from pycomm.collectives.transport.nccl import nccl_version

    found = nccl_version()
    return None if found is None else {"version": found[0], "path": found[1]}
