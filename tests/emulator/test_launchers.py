"""Every launcher: in a capture, with and without a warm-up, and when a launch fails. The CPU is the measure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import EMULATED

pytestmark = pytest.mark.skipif(not EMULATED, reason="wants the emulator: .ci/sanitize")

if EMULATED:
    from tests.emulator.arrays import DeviceArray, library
    from tests.emulator.graphs import VALID, capture

STREAM = 9
SIZES = (70, 1, 300)
TOTAL = sum(SIZES)
MOMENTS = kernels.Moments(betas=(0.9, 0.99), eps=1e-8, step=3)
CHUNKS = kernels.Chunks(20, 128, 4)
CODEC = kernels.Quantization(block=64)


class Arrays:
    """Makes the arrays of a case, on one device; the same values each time."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._generator = torch.Generator().manual_seed(11)

    def put(self, host: torch.Tensor) -> Any:
        return DeviceArray(host.clone(), 0, STREAM) if self._on_gpu else host.clone()

    def random(self, size: int = TOTAL) -> Any:
        return self.put(torch.randn(size, generator=self._generator))

    def several(self) -> list[Any]:
        return [self.random(size) for size in SIZES]

    def positive(self) -> list[Any]:
        return [self.put(torch.rand(size, generator=self._generator) + 0.1) for size in SIZES]

    def zeros(self, size: int = TOTAL, dtype: torch.dtype = torch.float32) -> Any:
        return self.put(torch.zeros(size, dtype=dtype))

    def indices(self) -> Any:
        return self.put(torch.arange(0, TOTAL, 3, dtype=torch.int32))


Call = Callable[[kernels.Scratch | None], Sequence[Any]]
"""Does it once; returns what it writes to."""


def pack(on: Arrays) -> Call:
    tensors, out = on.several(), on.zeros()
    return lambda scratch: [out, kernels.pack(tensors, out, 0.5, scratch=scratch)]


def pack_flagged(on: Arrays) -> Call:
    tensors, out, flags = on.several(), on.zeros(), on.zeros(len(SIZES) + 1 + 6)
    bits, has_data = on.put(torch.tensor([True, False, True])), [number % 3 != 1 for number in range(len(SIZES))]

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.pack_flagged(tensors, has_data, out, flags, bits, 0.5, limit=1.0, scratch=scratch)
        return [out, flags]

    return call


def unpack(on: Arrays) -> Call:
    flat, outs = on.random(), on.several()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.unpack(flat, outs, 0.5, scratch=scratch)
        return outs

    return call


def reduce(on: Arrays) -> Call:
    out, inputs = on.zeros(), [on.random() for _ in range(3)]

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.reduce(out, [out, *inputs], "sum", scratch=scratch)
        return [out]

    return call


def absmax(on: Arrays) -> Call:
    tensors = on.several()
    return lambda scratch: [kernels.absmax(tensors, scratch=scratch)]


def squared_norms(on: Arrays) -> Call:
    tensors = on.several()
    return lambda scratch: [kernels.squared_norms(tensors, scratch=scratch)]


def hashes(on: Arrays) -> Call:
    tensors = on.several()
    return lambda scratch: [kernels.hashes(tensors, scratch=scratch)]


def accumulate(on: Arrays) -> Call:
    acc, grads = on.random(), on.several()
    return lambda scratch: [acc, kernels.accumulate(acc, acc, grads, 0.5, scratch=scratch)]


def accumulate_chunks(on: Arrays) -> Call:
    acc, grads, out = on.random(), on.several(), on.zeros(CHUNKS.num_words(TOTAL), torch.int32)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        return [acc, out, kernels.accumulate_chunks(acc, acc, grads, 0.5, CHUNKS, out, scratch=scratch)]

    return call


def accumulate_quantized(on: Arrays) -> Call:
    acc, grads = on.random(), on.several()
    scales, codes = on.zeros(CODEC.num_blocks(TOTAL)), on.zeros(CODEC.code_bytes(TOTAL), torch.uint8)
    parts = [(0, TOTAL, None, scales, codes)]

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        return [acc, scales, codes, kernels.accumulate_quantized(acc, acc, grads, 0.5, CODEC, parts, scratch=scratch)]

    return call


def sparsify(on: Arrays) -> Call:
    acc, grads, thresholds = on.random(), on.several(), on.zeros(3)
    out = (on.zeros(23), on.zeros(23, torch.int32))

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        flags = kernels.sparsify(acc, acc, grads, [7, 0, 16], out, thresholds, 0.5, scratch=scratch)
        return [acc, *out, *flags]

    return call


def orthogonalize(on: Arrays) -> Call:
    config = kernels.LowRank([(70, 9), (1, 3), (300, 40)], 4)
    p = on.put(torch.randn(config.num_p, dtype=torch.float64, generator=torch.Generator().manual_seed(11)))

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.orthogonalize(p, config, scratch=scratch)
        return [p]

    return call


def topk(on: Arrays) -> Call:
    x = on.random()
    return lambda scratch: kernels.topk(x, 20, scratch=scratch)


def scatter_add(on: Arrays) -> Call:
    out, indices, values = on.random(), on.indices(), on.random(len(range(0, TOTAL, 3)))

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.scatter_add(out, indices, values, 0.5, scratch=scratch)
        return [out]

    return call


def dequantize(on: Arrays) -> Call:
    out, (scales, codes) = on.zeros(), kernels.quantize(on.random(), CODEC)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.dequantize([scales, scales], [codes, codes], CODEC, out, 0.5, scratch=scratch)
        return [out]

    return call


def requantize(on: Arrays) -> Call:
    scales, codes = kernels.quantize(on.random(), CODEC)
    out = on.zeros(CODEC.num_blocks(TOTAL)), on.zeros(CODEC.code_bytes(TOTAL), torch.uint8)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.requantize([scales, scales], [codes, codes], CODEC, out, count=TOTAL, scratch=scratch)
        return out

    return call


def unpack_signs(on: Arrays) -> Call:
    out, magnitude = on.zeros(), on.put(torch.tensor([0.5]))
    words = kernels.pack_signs(on.random(), magnitude)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.unpack_signs([words, words], [magnitude, magnitude], out, scratch=scratch)
        return [out]

    return call


def unpack_chunks(on: Arrays) -> Call:
    out, words = on.zeros(), kernels.pack_chunks(on.random(), CHUNKS)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.unpack_chunks([words] * 40, CHUNKS, out, 0.5, scratch=scratch)  # more than are passed by value
        return [out]

    return call


def unpack_indices(on: Arrays) -> Call:
    count = len(range(0, TOTAL, 3))
    words = on.put(kernels.pack_indices(torch.arange(0, TOTAL, 3, dtype=torch.int32), TOTAL))
    return lambda scratch: [kernels.unpack_indices(words, TOTAL, count, scratch=scratch)]


class Entries:
    """Messages of entries of one rank, and what is done with them."""

    def __init__(self, on: Arrays) -> None:
        indices = on.indices()
        self.layout = kernels.EntryLayout(len(SIZES), 4, len(indices), TOTAL, "float32", True)
        self.message = on.zeros(self.layout.num_bytes, torch.uint8)
        verdict = on.zeros(self.layout.verdict_places(1)[-1], torch.uint8)
        self.gathered = kernels.Gathered(self.layout, 1, self.message, on.zeros(len(indices), torch.int32), verdict)
        finite = on.put(torch.ones(len(SIZES), dtype=torch.bool))
        largest = on.put(torch.tensor([3.0]))
        self.taken = kernels.Taken(on.random(len(indices)), indices, on.random(), finite, largest)
        kernels.pack_entries(self.message, self.taken, self.gathered)
        kernels.unpack_entries(self.gathered, 1.0, 1e38)


def pack_entries(on: Arrays) -> Call:
    entries = Entries(on)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.pack_entries(entries.message, entries.taken, entries.gathered)
        return [entries.message, entries.taken.flat]

    return call


def unpack_entries(on: Arrays) -> Call:
    entries = Entries(on)

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.pack_entries(entries.message, entries.taken, entries.gathered)  # prepares the verdict
        kernels.unpack_entries(entries.gathered, 1.0, 1e38, scratch=scratch)
        return [entries.gathered.indices]

    return call


def add_entries(on: Arrays) -> Call:
    entries, out = Entries(on), on.zeros()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.add_entries(entries.gathered, 0.5, out)
        return [out]

    return call


def momentum_step(on: Arrays) -> Call:
    weights, grads, buffers = on.several(), on.several(), on.several()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.momentum_step(weights, grads, buffers, lr=0.1, momentum=0.9, scratch=scratch)
        return [*weights, *buffers]

    return call


def adam_step(on: Arrays) -> Call:
    weights, grads, averages, squares = on.several(), on.several(), on.several(), on.positive()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.adam_step(weights, grads, averages, squares, lr=0.1, moments=MOMENTS, scratch=scratch)
        return [*weights, *averages, *squares]

    return call


def rmsprop_step(on: Arrays) -> Call:
    weights, grads, squares = on.several(), on.several(), on.positive()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.rmsprop_step(weights, grads, squares, lr=0.1, alpha=0.9, eps=1e-8, scratch=scratch)
        return [*weights, *squares]

    return call


def adagrad_step(on: Arrays) -> Call:
    weights, grads, sums = on.several(), on.several(), on.positive()

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        kernels.adagrad_step(weights, grads, sums, lr=0.1, eps=1e-8, scratch=scratch)
        return [*weights, *sums]

    return call


def lamb(on: Arrays) -> Call:
    weights, grads, averages, squares = on.several(), on.several(), on.several(), on.positive()
    rates = on.put(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))

    def call(scratch: kernels.Scratch | None) -> Sequence[Any]:
        norms = kernels.lamb_moments(weights, grads, averages, squares, moments=MOMENTS, scratch=scratch)
        kernels.lamb_apply(weights, averages, squares, rates, moments=MOMENTS, scratch=scratch)
        return [*weights, *averages, *squares, norms]

    return call


def quantize(on: Arrays) -> Call:
    x, out = on.random(), (on.zeros(CODEC.num_blocks(TOTAL)), on.zeros(CODEC.code_bytes(TOTAL), torch.uint8))
    return lambda scratch: kernels.quantize(x, CODEC, out)


def pack_chunks(on: Arrays) -> Call:
    x, out = on.random(), on.zeros(CHUNKS.num_words(TOTAL), torch.int32)
    return lambda scratch: [kernels.pack_chunks(x, CHUNKS, out)]


def pack_signs(on: Arrays) -> Call:
    x, magnitude = on.random(), on.put(torch.tensor([0.5]))
    out = on.zeros(kernels.sign_words(TOTAL), torch.int32)
    return lambda scratch: [kernels.pack_signs(x, magnitude, out)]


def pack_indices(on: Arrays) -> Call:
    indices = on.indices()
    out = on.zeros(kernels.packed_words(TOTAL, len(indices)), torch.int32)
    return lambda scratch: [kernels.pack_indices(indices, TOTAL, out)]


WITHOUT_SCRATCH = (quantize, pack_chunks, pack_signs, pack_indices, pack_entries, add_entries)
CASES = (
    pack,
    pack_flagged,
    unpack,
    reduce,
    absmax,
    squared_norms,
    hashes,
    accumulate,
    accumulate_chunks,
    accumulate_quantized,
    sparsify,
    orthogonalize,
    topk,
    scatter_add,
    dequantize,
    requantize,
    unpack_signs,
    unpack_chunks,
    unpack_indices,
    unpack_entries,
    momentum_step,
    adam_step,
    rmsprop_step,
    adagrad_step,
    lamb,
)
each_launcher = pytest.mark.parametrize("case", [*CASES, *WITHOUT_SCRATCH], ids=lambda case: case.__name__)


def test_all_kernels_are_here() -> None:
    names = [name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))]
    wanted = {name for name in names if "scratch" in inspect.signature(getattr(kernels, name)).parameters}
    assert wanted - {"lamb_moments", "lamb_apply"} == {case.__name__ for case in CASES} - {"lamb"}


def flattened(results: Sequence[Any]) -> list[Any]:
    return [one for result in results for one in (flattened(result) if isinstance(result, tuple) else [result])]


def require_equal(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for array, reference in zip(flattened(got), flattened(wanted), strict=True):
        tolerance = 1e-12 if reference.dtype == torch.float64 else 0.0  # sums, which have another order
        torch.testing.assert_close(array.host, reference, rtol=tolerance, atol=tolerance)


@each_launcher
def test_a_graph_does_what_the_call_does(case: Callable[[Arrays], Call]) -> None:
    on_cpu, on_gpu, scratch = case(Arrays(False)), case(Arrays(True)), kernels.Scratch()
    require_equal(on_gpu(scratch), on_cpu(None))
    before = library().emulator_num_launches()
    with capture(STREAM) as graph:
        results = on_gpu(scratch)
    assert graph.state == VALID
    assert library().emulator_num_launches() == before
    for _ in range(2):
        wanted = on_cpu(None)
        graph.launch()
        require_equal(results, wanted)
    require_equal(on_gpu(scratch), on_cpu(None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_first_call_is_not_captured(case: Callable[[Arrays], Call]) -> None:
    on_cpu, on_gpu, scratch = case(Arrays(False)), case(Arrays(True)), kernels.Scratch()
    for given in (scratch, None):
        with capture(STREAM) as graph, pytest.raises(RuntimeError, match=r"scratch memory: .*\(warm up\)"):
            on_gpu(given)
        assert graph.state == VALID
    require_equal(on_gpu(scratch), on_cpu(None))


@each_launcher
def test_a_launch_that_fails(case: Callable[[Arrays], Call]) -> None:
    """Each launch of a call in turn. The error names it; the next call finds nothing half done in scratch memory."""
    launches = count_launches(case)
    assert launches >= 1
    for i in range(launches):
        on_cpu, on_gpu, scratch = case(Arrays(False)), case(Arrays(True)), kernels.Scratch()
        library().emulator_fail_launch(i)
        with pytest.raises(RuntimeError, match=r"^[a-z][\w ()]+: too many resources \(cudaErrorLaunchOutOfResources\)"):
            on_gpu(scratch)
        del on_gpu
        fresh = case(Arrays(True))
        require_equal(fresh(scratch), on_cpu(None))


def count_launches(case: Callable[[Arrays], Call]) -> int:
    call = case(Arrays(True))
    before: int = library().emulator_num_launches()
    call(kernels.Scratch())
    after: int = library().emulator_num_launches()
    return after - before
