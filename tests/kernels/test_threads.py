"""The number of threads that kernels use, and their pool after a fork."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pycomm import kernels
from tests.ranks import SLOWER


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
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60 * SLOWER, cwd="/")
