"""Speed of this machine as a device: of multiplications, and of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pycomm.parallel.planning.candidates import Device

_WIDTH = 1024
_BYTES = 1 << 27  # more than caches hold
_REPEATS = 7


def measure_device() -> Device:
    """Measure this machine, with torch's number of threads: products of float32 matrices, and copies. Takes a second.

    A model's own work is slower than products of large matrices.
    """
    a, b = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    product = torch.empty(_WIDTH, _WIDTH)
    seconds = _median(lambda: torch.mm(a, b, out=product))
    source, target = torch.ones(_BYTES // 4), torch.ones(_BYTES // 4)
    copy = _median(lambda: target.copy_(source))
    return Device(2.0 * _WIDTH**3 / seconds, 2.0 * _BYTES / copy)


def _median(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
