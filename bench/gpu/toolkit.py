"""Programs of the CUDA toolkit, which is often installed without being on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_VARIABLES = ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH")
_USUAL = ("/usr/local/cuda", "/opt/cuda")


def find_tool(name: str) -> str | None:
    """Return the path of a program: on PATH, else in the toolkit that the environment names, else in the usual one."""
    roots = [*filter(None, map(os.environ.get, _VARIABLES)), *_USUAL]
    folders = [Path(root, folder) for root in roots for folder in ("bin", name)]  # compute-sanitizer has its own
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def architecture_here() -> str:
    """Return the first GPU's architecture as CMake names it: "90-real"; "native" if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "native"
    found = re.match(r"(\d+)\.(\d+)", said)
    return "native" if found is None else f"{found[1]}{found[2]}-real"
