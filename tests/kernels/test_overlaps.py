"""Arrays that lie over each other: what a contract does not allow is refused by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import Quantization

BLOCK = 4096  # bytes of the memory from which a call's arrays are cut
Cut = Callable[..., torch.Tensor]
Case = tuple[str, Callable[[Cut], Any]]


def cut_from(block: torch.Tensor) -> Cut:
    """``cut(begin, count)``: elements of ``block``, counted in elements of their type."""

    def cut(begin: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return block.view(dtype)[begin : begin + count]

    return cut


def some_block() -> torch.Tensor:
    return torch.arange(BLOCK // 4, dtype=torch.float32).view(torch.uint8)


def ints(cut: Cut, begin: int, count: int) -> torch.Tensor:
    return cut(begin, count, torch.int32)


def selection_in_sparsify(cut: Cut, values: int = 200, indices: int = 220, thresholds: int = 240) -> None:
    out = cut(values, 6), ints(cut, indices, 6)
    kernels.sparsify(cut(0, 64), None, [cut(100, 64)], [6], out, cut(thresholds, 1))


CHUNKS = kernels.Chunks(4, 64)
REFUSED: dict[str, Case] = {
    "topk: values over x": (
        "values overlaps x",
        lambda cut: kernels.topk(cut(0, 64), 8, (cut(60, 8), ints(cut, 100, 8))),
    ),
    "topk: indices over x": (
        "indices overlaps x",
        lambda cut: kernels.topk(cut(0, 64), 8, (cut(100, 8), ints(cut, 8, 8))),
    ),
    "topk: values over indices": (
        "(values overlaps indices|indices overlaps values)",
        lambda cut: kernels.topk(cut(0, 64), 8, (cut(100, 8), ints(cut, 107, 8))),
    ),
    "topk: threshold over x": (
        "threshold overlaps x",
        lambda cut: kernels.topk(cut(0, 64), 8, (cut(100, 8), ints(cut, 120, 8)), threshold=cut(63, 1)),
    ),
    "scatter_add: out over indices": (
        "out overlaps indices",
        lambda cut: kernels.scatter_add(cut(0, 64), ints(cut, 62, 4), cut(100, 4)),
    ),
    "scatter_add: out over values": (
        "out overlaps values",
        lambda cut: kernels.scatter_add(cut(0, 64), ints(cut, 100, 4), cut(30, 4)),
    ),
    "sparsify: thresholds over acc": (
        "thresholds overlaps acc|acc overlaps thresholds",
        lambda cut: selection_in_sparsify(cut, thresholds=63),
    ),
    "sparsify: values over acc": (
        "values overlaps acc|acc overlaps values",
        lambda cut: selection_in_sparsify(cut, values=60),
    ),
    "sparsify: indices over a gradient": (
        r"indices overlaps grads\[0\]",
        lambda cut: selection_in_sparsify(cut, indices=98),
    ),
    "reduce: out over a part of an input": (
        r"out overlaps inputs\[1\]",
        lambda cut: kernels.reduce(cut(0, 64), [cut(100, 64), cut(32, 64)]),
    ),
    "reduce: out one element off": (
        r"out overlaps inputs\[0\]",
        lambda cut: kernels.reduce(cut(1, 64), [cut(0, 64), cut(100, 64)]),
    ),
    "pack: out over a source, not in its place": (
        r"out overlaps tensors\[1\]",
        lambda cut: kernels.pack([cut(100, 8), cut(0, 8)], cut(0, 16)),
    ),
    "accumulate: acc over a part of the residual": (
        "acc overlaps residual",
        lambda cut: kernels.accumulate(cut(0, 64), cut(10, 64), cut(100, 64)),
    ),
    "quantize: codes over x": (
        "codes overlaps x",
        lambda cut: kernels.quantize(cut(0, 64), Quantization(64), (cut(100, 1), cut(0, 64, torch.uint8))),
    ),
    "pack_signs: words over x": (
        "(out|words) overlaps x",
        lambda cut: kernels.pack_signs(cut(0, 64), cut(100, 1), ints(cut, 10, 2)),
    ),
    "pack_chunks: words over x": (
        "words overlaps x",
        lambda cut: kernels.pack_chunks(cut(0, 64), CHUNKS, ints(cut, 10, CHUNKS.num_words(64))),
    ),
    "unpack_chunks: out over words": (
        r"out overlaps words\[0\]",
        lambda cut: kernels.unpack_chunks([ints(cut, 10, CHUNKS.num_words(64))], CHUNKS, cut(0, 64)),
    ),
    "adam_step: a weight over its gradient": (
        r"weights\[0\] overlaps grads\[0\]",
        lambda cut: kernels.adam_step(
            [cut(0, 64)],
            [cut(63, 64)],
            [cut(200, 64)],
            [cut(300, 64)],
            lr=0.1,
            moments=kernels.Moments((0.9, 0.99), 1e-8, 1),
        ),
    ),
}

ALLOWED: dict[str, Callable[[Cut], Any]] = {
    "reduce: out is an input": lambda cut: kernels.reduce(cut(0, 64), [cut(100, 64), cut(0, 64)]),
    "reduce: inputs over each other": lambda cut: kernels.reduce(cut(200, 64), [cut(0, 64), cut(32, 64)]),
    "pack: a source in its place": lambda cut: kernels.pack([cut(100, 8), cut(8, 8)], cut(0, 16)),
    "accumulate: acc is the residual": lambda cut: kernels.accumulate(cut(0, 64), cut(0, 64), cut(100, 64)),
    "quantize: the remainder is x": lambda cut: kernels.quantize(
        cut(0, 64), Quantization(64), (cut(100, 1), cut(500, 64, torch.uint8)), remainder=cut(0, 64)
    ),
    "pack_chunks: the remainder is x": lambda cut: kernels.pack_chunks(
        cut(0, 64), CHUNKS, ints(cut, 100, CHUNKS.num_words(64)), remainder=cut(0, 64)
    ),
    "sparsify: side by side": lambda cut: selection_in_sparsify(cut, 64, 70, 76),
    "topk: side by side": lambda cut: kernels.topk(cut(0, 64), 8, (cut(64, 8), ints(cut, 72, 8)), threshold=cut(80, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lies_over_something_else_is_refused(name: str) -> None:
    says, call = REFUSED[name]
    block = some_block()
    before = block.clone()
    with pytest.raises(ValueError, match=f"^({says}), wanted an array of its own to write to"):
        call(cut_from(block))
    assert torch.equal(block, before), "it was refused, and written to all the same"


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_contract_allows_is_done(name: str) -> None:
    block = some_block()
    before = block.clone()
    ALLOWED[name](cut_from(block))
    assert not torch.equal(block, before)
