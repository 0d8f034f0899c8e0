"""scatter_add, absmax, and the number of threads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pycomm._native as _native
from pycomm import kernels
from tests.kernels.reference import FLOATS, assert_same_bits, interesting, misaligned, pairs, simd

__all__ = ["simd"]


@pytest.mark.parametrize(("target", "source"), pairs(FLOATS))
def test_scatter_add_adds_in_order(target: torch.dtype, source: torch.dtype) -> None:
    out = torch.randn(50).to(target)
    indices = torch.tensor([3, 3, 49, 0, 3], dtype=torch.int32)
    values = torch.randn(5).to(source)
    wide = torch.float64 if torch.float64 in (target, source) else torch.float32
    wanted = out.clone()
    for i, v in zip(indices.tolist(), values, strict=True):
        wanted[i] = (wanted[i].to(wide) + v.to(wide) * 0.3).to(target)
    kernels.scatter_add(out, indices, values, scale=torch.tensor(0.3, dtype=wide).item())
    assert_same_bits(out, wanted)


def test_scatter_add_refuses_bad_indices_and_writes_nothing() -> None:
    for bad in (-1, 10, 2**31 - 1):
        out = torch.zeros(10)
        with pytest.raises(ValueError, match=rf"indices\[1\] is {bad}, wanted 0 <= index < 10"):
            kernels.scatter_add(out, torch.tensor([0, bad], dtype=torch.int32), torch.ones(2))
        assert not out.any()
    with pytest.raises(TypeError, match="indices has dtype int64"):
        kernels.scatter_add(torch.zeros(3), torch.tensor([0]), torch.ones(1))
    with pytest.raises(ValueError, match="indices has 1 elements, wanted 2"):
        kernels.scatter_add(torch.zeros(3), torch.tensor([0], dtype=torch.int32), torch.ones(2))


@pytest.mark.usefixtures("simd")
@given(n=st.integers(0, 200), offset=st.integers(0, 63), seed=st.integers(0, 99))
def test_absmax(n: int, offset: int, seed: int) -> None:
    x = interesting(n, torch.float32, seed)
    found = float(kernels.absmax([misaligned(x, offset), np.zeros(3, np.float16)]))
    if torch.isnan(x).any():
        assert np.isnan(found)
    else:
        assert found == (x.abs().max().item() if n else 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_absmax_of_every_type(dtype: torch.dtype) -> None:
    x = torch.randn(100_000).to(dtype)
    x[-1] = -77.0
    assert kernels.absmax([x]).item() == 77.0
    x[50] = float("nan")
    assert torch.isnan(kernels.absmax([torch.ones(3), x]))
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.absmax([])


def test_threads_follow_torch_until_told_otherwise() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert kernels.num_threads() == 2
        kernels.set_num_threads(3)
        assert kernels.num_threads() == 3
        kernels.set_num_threads(None)
        torch.set_num_threads(1)
        assert kernels.num_threads() == 1
    finally:
        kernels.set_num_threads(None)
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="count is 0"):
        kernels.set_num_threads(0)


def test_threads_work_again_in_a_forked_child() -> None:
    script = """
import os, torch
from pycomm import kernels
kernels.set_num_threads(2)
x, out = torch.ones(4_000_000), torch.empty(4_000_000)
kernels.pack([x], out)
child = os.fork()
if child == 0:
    kernels.pack([x], out, scale=2.0)
    os._exit(0 if out[-1] == 2.0 else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd="/")


class OnlyInterface:
    """Has ``__array_interface__`` and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def test_the_array_interface() -> None:
    out = OnlyInterface(np.zeros(4, np.float32))
    finite = kernels.pack([OnlyInterface(np.arange(4, dtype=np.float64))], out, scale=2.0)
    assert bool(finite)
    assert out.array.tolist() == [0, 2, 4, 6]
    values, indices = kernels.topk(out, 2)
    assert (values.tolist(), indices.tolist()) == ([4, 6], [2, 3])


def test_build_info() -> None:
    info = _native.build_info()
    assert {"version", "cuda", "simd", "compiler"} <= info.keys()
    assert info["simd"] == _native.simd()
