"""How many kernels a bucket of sparse gradients takes on a GPU: at most eight with the collective, for any parameters.

tests/compression/test_operations.py shows that TopK and DGC make these calls, and no others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu

__all__ = ["gpu"]
pytestmark = [requires_gpu, pytest.mark.skipif(not EMULATED, reason="counts the emulator's launches")]

if EMULATED:
    from tests.emulator.arrays import DeviceArray, library

# What brings addresses and zeros, accumulate, select; pack, unpack, add; and the collective, which is not counted here.
KERNELS = 6
MOST = 8 - 1


def num_launches() -> int:
    """Kernels, and fills of memory."""
    total: int = library().emulator_num_launches() + library().emulator_num_fills()
    return total


class Step:
    """One step of DGC on emulated arrays, as SparseCodec and GatheredSum do it."""

    def __init__(self, gpu: Gpu, sizes: list[int], half: bool, clip: float | None = None) -> None:
        self.clip = clip
        total, counts = sum(sizes), [max(1, n // 100) for n in sizes]
        self.counts, count = counts, sum(counts)
        layout = kernels.EntryLayout(len(sizes), 32, count, total, "float32", half)

        def array(n: int, dtype: torch.dtype = torch.float32) -> Any:
            return gpu.put(torch.zeros(n, dtype=dtype))

        self.grads = gpu.puts([torch.randn(n) for n in sizes])
        self.acc, self.residual, self.velocity, self.old_velocity = (array(total) for _ in range(4))
        self.values, self.indices, self.largest = array(count), array(count, torch.int32), array(1)
        self.thresholds, self.num_missed = array(len(sizes)), array(1, torch.int32)
        self.message = array(layout.num_bytes, torch.uint8)
        verdict = array(layout.verdict_places(1)[-1], torch.uint8)
        self.gathered = kernels.Gathered(layout, 1, self.message, array(count, torch.int32), verdict)
        self.scratches = kernels.Scratch(), kernels.Scratch()
        self.finite, self.last_sources = gpu.put(torch.tensor([True])), array(1, torch.int64)

    def run(self) -> None:
        finite, _ = kernels.sparsify(
            self.acc,
            self.residual,
            self.grads,
            self.counts,
            (self.values, self.indices),
            self.thresholds,
            momentum=kernels.Momentum(self.velocity, self.old_velocity, 0.9),
            clip=self.clip,
            num_missed=self.num_missed,
            largest=self.largest,
            scratch=self.scratches[0],
        )
        taken = kernels.Taken(self.values, self.indices, self.acc, finite, self.largest, self.velocity)
        kernels.pack_entries(self.message, taken, self.gathered)
        kernels.unpack_entries(self.gathered, 1.0, 3e38, scratch=self.scratches[1])
        states = [(self.velocity, self.old_velocity), (self.acc, self.residual)]
        kernels.add_entries(
            self.gathered, 1.0, self.residual, states, finite=self.finite, last_sources=self.last_sources
        )


@pytest.mark.parametrize("num_params", [1, 54, 158])
def test_launches_of_a_dense_bucket(gpu: Gpu, num_params: int) -> None:
    """Two: what brings addresses and a zero, and pack; also where addresses are new, and some gradients are missing."""
    sizes = [100 + 7 * j for j in range(num_params)]
    out, flags = gpu.put(torch.zeros(sum(sizes))), gpu.put(torch.zeros(num_params + 1 + 128))
    scratch, counts = kernels.Scratch(), []
    kept = gpu.puts([torch.ones(n) for n in sizes])
    for step in range(4):
        grads = kept if step < 2 else gpu.puts([torch.ones(n) for n in sizes])
        before = num_launches()
        has_data = [step != 3 or j % 2 == 0 for j in range(num_params)]
        kernels.pack_flagged(grads, has_data, out, flags, gpu.put(torch.ones(64, dtype=torch.bool)), scratch=scratch)
        counts.append(num_launches() - before)
        assert gpu.get(flags)[: num_params + 1].tolist() == [*map(float, has_data), 0.0]
    assert counts == [2, 2, 2, 2]


@pytest.mark.pairwise
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("num_params", [1, 54, 158])
def test_launches_of_a_sparse_bucket(gpu: Gpu, num_params: int, clip: float | None, half: bool) -> None:
    torch.manual_seed(num_params)
    step = Step(gpu, [100 + 7 * j for j in range(num_params)], half, clip)
    counts = []
    for _ in range(3):
        before = num_launches()
        step.run()
        counts.append(num_launches() - before)
    wanted = KERNELS + (clip is not None)
    assert wanted <= MOST
    # The first time there are more addresses than one kernel brings: those of the outputs, which never change.
    assert counts == [wanted + 2 * num_params // 160, wanted, wanted]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_new_gradients_cost_nothing_more(gpu: Gpu, clip: float | None) -> None:
    step = Step(gpu, [64] * 150, False, clip)
    step.run()
    step.grads = gpu.puts([torch.randn(64) for _ in range(150)])
    before = num_launches()
    step.run()
    assert num_launches() - before == KERNELS + (clip is not None)


def test_all_kernels_are_loaded_before_the_first_launch_on_each_gpu() -> None:
    assert library().emulator_num_kernels() > 100
    before = num_launches()
    for device in (0, 1):
        kernels.pack([DeviceArray(torch.ones(9), device)], DeviceArray(torch.zeros(9), device))
    assert num_launches() > before
    assert library().emulator_num_unloaded_launches() == 0
