"""``pycomm info``: the facts that a bug report should begin with."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycomm import kernels
from pycomm.collectives.freed_memory import VARIABLE, why_not_kept
from pycomm.collectives.transport.nccl import build_info, nccl_version, why_not_registered
from pycomm.kernels import cuda_devices


def run(_arguments: argparse.Namespace) -> int:
    """Print the facts; return the exit code."""
    facts = collect()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def collect() -> dict[str, str]:
    """Return the facts by name."""
    build = build_info()
    return {
        "pycomm": build["version"],
        "compiler": build["compiler"],
        "simd": build["simd"],
        "cuda": _cuda(build),
        "gpus": _gpus(),
        "nccl": " at ".join(nccl_version() or ["none found"]),
        "registered": _registered(),
        "malloc": _malloc(),
        "python": f"{platform.python_version()} ({platform.platform()})",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "transports": "; ".join(transports()) or "none",
    }


def _registered() -> str:
    why_not, no_windows = why_not_registered(), why_not_registered(symmetric=True)
    if why_not:
        return f"no memory with NCCL: {why_not}"
    windows = f"no windows: {no_windows}" if no_windows else "messages as windows (off: PYCOMM_NCCL_WINDOWS=0)"
    return f"buckets on GPUs, with NCCL (off: PYCOMM_NCCL_REGISTER=0); {windows}"


def _malloc() -> str:
    why_not = why_not_kept()
    return f"as it is: {why_not}" if why_not else f"keeps freed memory, in ranks of a group (off: {VARIABLE}=0)"


def _cuda(build: dict[str, Any]) -> str:
    if build["cuda"] is None:
        return "none (built without)"
    architectures = build["cuda_architectures"].split(",")
    says = f"{build['cuda']}, for {', '.join(architectures)}"
    if all(name.endswith("-virtual") for name in architectures):
        says += " (the driver of a newer GPU compiles the kernels when they are first used)"
    return says


def _gpus() -> str:
    count, why_none = cuda_devices()
    if count == 0:
        return f"none: {why_none}"
    try:
        kernels.absmax([torch.ones(1, device="cuda")])
    except RuntimeError as error:  # of torch, or a kernel's that the driver has no code for
        return f"{count}, and no kernel runs: {error}"
    return f"{count}, and kernels run"


def transports() -> list[str]:
    """Return the transports that ``Communicator`` could use on this machine."""
    found = []
    if has_anonymous_memory():
        found.append("shared_memory (ranks of one host)")
    if dist.is_available():
        checks = {
            "gloo": dist.is_gloo_available,
            "nccl": dist.is_nccl_available,
            "mpi": dist.is_mpi_available,
        }
        backends = [name for name, is_there in checks.items() if is_there()]
        over = ", ".join(backends) or "no backend"
        if found and backends:
            found.append(f"hierarchical (hosts with several ranks: shared memory, and {over} between them)")
        found.append(f"torch ({over})")
    return found


def has_anonymous_memory() -> bool:
    # Tried, not looked up: sandboxes forbid the call even if the kernel has it.
    try:
        os.close(os.memfd_create("pycomm-info", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True
