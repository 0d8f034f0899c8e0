"""What users get told whose build, driver or machine cannot work on GPU arrays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pycomm._native as _native
from pycomm import kernels

pytestmark = pytest.mark.skipif(_native.cuda_devices()[0] > 0, reason="there is a GPU")

HAS_CUDA = _native.build_info()["cuda"] is not None


class OnGpu:
    """As cupy's arrays look from outside."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


def test_the_reason_is_given_without_failing() -> None:
    count, why = _native.cuda_devices()
    assert count == 0
    assert len(why) > 10


@pytest.mark.skipif(HAS_CUDA, reason="this build has CUDA")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match=r"x is on a CUDA device, but this build .* has no CUDA kernels: install"):
        kernels.topk(OnGpu(), 1, out=(torch.empty(1), torch.empty(1, dtype=torch.int32)))


@pytest.mark.skipif(not HAS_CUDA, reason="this build has no CUDA")
def test_no_driver() -> None:
    with pytest.raises(RuntimeError, match=r"tensors\[1\] is on a CUDA device, which cannot be used: .*driver"):
        kernels.pack([torch.zeros(4), OnGpu()], torch.empty(8))


@pytest.mark.skipif(not HAS_CUDA, reason="this build has no CUDA")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_driver_too_old(tmp_path: Path) -> None:
    """A libcuda that says it supports CUDA 11.4 only; importing works, and the text names both versions."""
    source = tmp_path / "libcuda.c"
    source.write_text("int cuDriverGetVersion(int *v) { *v = 11040; return 0; } int cuInit(unsigned f) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=60)
    asked = subprocess.run(
        [sys.executable, "-c", "import pycomm; import pycomm._native as _native; print(_native.cuda_devices()[1])"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd="/",  # where the source tree does not hide the installed package
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "the NVIDIA driver is too old: it supports CUDA 11.4, this build of pycomm requires CUDA 1" in asked.stdout


def test_a_device_that_is_neither() -> None:
    with pytest.raises(ValueError, match="x is on device meta, wanted an array in CPU or CUDA memory"):
        kernels.topk(torch.empty(4, device="meta"), 1)
