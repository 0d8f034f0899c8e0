"""Rivals of ``bench.collectives``: what must be there for each, and how its ranks are started.

All sum ordinary memory, as none offers memory that every rank maps.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.harness.installed import UnavailableError, require
from bench.harness.mpi import MPIS, Mpi
from bench.harness.processes import kill_session

_BUILD_SECONDS = 600.0
_BUILD = """
import sys
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
operation = ShareMemCommBuilder().load(verbose=False)
# As DeepSpeed does: its sums of float32 require AVX2. Releases that cannot tell sum without asking.
if not getattr(operation, "vector_kernel_level", lambda: 1)():
    sys.exit("the processor has no AVX2")
"""
_GLOO_SHARED_MEMORY = b"AllreduceSharedMemoryData"  # Gloo's class, whose name is in the library's symbols


@dataclass(frozen=True)
class Rival:
    """One rival.

    Attributes:
        label: its name in tables.
        worker: class of its ranks in ``bench.collectives.peers``.
        memory: what it sums: "tensor", an ordinary one, or "array", NumPy's.
        find: checks that it can take part, and builds it if need be; returns how its ranks are started, if MPI does.
            Raises :class:`UnavailableError` if it cannot.
        setup: further arguments of the ranks' class.
        most_bytes: that it can sum; ``None``: there is no limit below what memory holds.
    """

    label: str
    worker: str
    memory: str
    find: Callable[[], Mpi | None]
    setup: Mapping[str, Any] = field(default_factory=dict)
    most_bytes: int | None = None


def _find_gloo() -> None:
    """Gloo comes with torch."""


def find_gloo_shared_memory() -> None:
    """Look for Gloo's all-reduce through shared memory, which releases of torch have or lack.

    Raises:
        UnavailableError: this torch lacks it.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(_GLOO_SHARED_MEMORY) < 0:
            raise UnavailableError("not in this torch")


def build_deepspeed() -> None:
    """Have DeepSpeed build its operation in its own cache, so that ranks only load it.

    Raises:
        UnavailableError: DeepSpeed is not installed, cannot build the operation, or the processor cannot run it.
    """
    require("deepspeed")
    # A process of its own: DeepSpeed's import takes seconds, prints, and changes torch. A session: it starts compilers.
    process = subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"not built within {_BUILD_SECONDS:g} s") from None
    finally:
        kill_session(process)
    if process.returncode:
        raise UnavailableError(f"not built: {_reason(output)}")


def _reason(output: str) -> str:
    """Return the line of a build's output that says why it failed: a compiler's first error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if " error: " in line]
    return [*errors, *lines[-1:], "no output"][0]


RIVALS: dict[str, Rival] = {
    "gloo": Rival("Gloo", "GlooPeer", "tensor", _find_gloo, {"shared_memory": False}),
    "gloo_shm": Rival("Gloo, shared memory", "GlooPeer", "tensor", find_gloo_shared_memory, {"shared_memory": True}),
    # It counts bytes in an int, in steps of 32 MiB.
    "deepspeed": Rival("DeepSpeed", "DeepSpeedPeer", "tensor", build_deepspeed, most_bytes=(1 << 31) - (32 << 20)),
    **{name: Rival(label, "MpiPeer", "array", find) for name, (label, find) in MPIS.items()},
}
"""By their names on the command line."""
