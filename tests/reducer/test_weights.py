"""set_weight: every sample counts the same, whoever had it, with every method that sends gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from tests.docs.pages import ROOT, blocks_of
from tests.docs.running import surroundings
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import attached, logged, rank_and_size


def gradients_of(options: dict[str, Any], weights: list[list[Any]], nan_at: tuple[int, int] = (-1, -1)) -> None:
    """Train with weights[rank] for the rank's passes. The gradient of pass q on rank r is 10 r + q + 1, or NaN."""
    rank, size = rank_and_size()
    p = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with attached(optimizer, [("p", p)], **options) as reducer:
        for _ in range(3):  # from the second on gradients live in the bucket
            optimizer.zero_grad()
            if not weights[rank]:
                reducer.set_weight(0)
            for q, weight in enumerate(weights[rank]):
                reducer.set_weight(weight)
                value = float("nan") if nan_at == (rank, q) else 10.0 * rank + q + 1
                (p * value).sum().backward()
            if options.get("accumulate", 1) > 1:
                reducer.flush()
            pairs = [(w, 10.0 * r + q + 1) for r in range(size) for q, w in enumerate(weights[r]) if w > 0]
            wanted = sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)
            if options.get("average", True) is False:
                wanted *= size
            assert p.grad is not None
            torch.testing.assert_close(p.grad, torch.full_like(p, wanted), rtol=options_tolerance(options), atol=0)


def options_tolerance(options: dict[str, Any]) -> float:
    return {"FP16": 2e-3, "BF16": 2e-2}.get(type(options.get("compression")).__name__, 1e-6)


METHODS = [None, pycomm.FP16(), pycomm.BF16(), pycomm.DGC(1.0, momentum=0.0), pycomm.TopK(1.0), pycomm.RandomK(1.0)]


@pytest.mark.parametrize("compression", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("average", [True, False])
@on_ranks(2)
def test_one_pass(compression: Any, average: bool) -> None:
    gradients_of({"compression": compression, "average": average}, [[3], [5]])


@pytest.mark.parametrize("compression", METHODS, ids=lambda method: type(method).__name__)
def test_windows_of_several_lengths(rank_pools: Pools, compression: Any) -> None:
    weights = [[3.0, 3.0, 1.5], [2.0], [4.0, 0.5]]
    rank_pools(3).run(gradients_of, {"compression": compression, "accumulate": 3}, weights)


@on_ranks(1)
def test_one_rank() -> None:
    gradients_of({"accumulate": 2}, [[np.int64(3), np.float32(1)]])


@pytest.mark.parametrize("compression", METHODS, ids=lambda method: type(method).__name__)
@on_ranks(2)
def test_a_rank_without_samples_may_have_nan(compression: Any) -> None:
    gradients_of({"compression": compression}, [[4], [0]], (1, 0))


@on_ranks(2)
def test_a_window_may_begin_without_samples() -> None:
    gradients_of({"accumulate": 2}, [[4, 4], [0, 3]], (1, 0))


@on_ranks(2)
def test_a_rank_may_have_no_pass() -> None:
    gradients_of({"accumulate": 2}, [[4, 2], []])


@on_ranks(1, 2)
def test_weights_that_sum_to_zero() -> None:
    """An error on every rank; the step after it is an ordinary one."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with attached(optimizer, [("p", p)]) as reducer:
        for _ in range(2):
            reducer.set_weight(0)
            with pytest.raises(ValueError, match="the weights of this step sum to zero over all ranks"):
                p.sum().backward()
            optimizer.zero_grad()
        reducer.set_weight(2)
        p.sum().backward()
        assert p.grad is not None
        assert p.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-1, ValueError, "num_samples is -1, wanted a finite number that is not negative"),
        (float("nan"), ValueError, "num_samples is nan"),
        (float("inf"), ValueError, "num_samples is inf"),
        (True, TypeError, "num_samples is True, wanted a number"),
        ("3", TypeError, "num_samples is '3', wanted a number"),
        (torch.tensor(3), TypeError, "wanted a number"),
    ],
)
@pytest.mark.usefixtures("one_rank_group")
def test_no_weight(value: Any, error: type[Exception], match: str) -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    with attached(torch.optim.SGD([p], lr=1.0), [("p", p)]) as reducer:
        with pytest.raises(error, match=match):
            reducer.set_weight(value)


@pytest.mark.usefixtures("one_rank_group")
def test_not_in_the_middle_of_a_window() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    with attached(torch.optim.SGD([p], lr=1.0), [("p", p)], accumulate=3, compression=pycomm.TopK(0.5)) as reducer:
        p.sum().backward()
        with pytest.raises(ValueError, match="inside an accumulation window that began without it"):
            reducer.set_weight(3)
        reducer.flush()
        p.grad = None
        reducer.set_weight(3)
        p.sum().backward()
        with pytest.raises(ValueError, match="num_samples is 0 inside an accumulation window"):
            reducer.set_weight(0)
        reducer.flush()


@pytest.mark.behavior(
    "Passes and steps",
    "call `set_weight` with `accumulate` above 1",
    "Do not divide the loss by the passes; a log line says so.",
)
@pytest.mark.parametrize("accumulate", [1, 4])
@on_ranks(2)
def test_the_first_weight_under_accumulation_says_not_to_divide(accumulate: int) -> None:
    """A divided loss would give a quarter of the gradient."""
    p = torch.nn.Parameter(torch.zeros(3))
    with attached(torch.optim.SGD([p], 0.1), [("p", p)], accumulate=accumulate) as reducer, logged() as said:
        for number in range(8):
            reducer.set_weight(number + 1)
            p.sum().backward()
    said = [line for line in said if "set_weight" in line]
    if accumulate == 1:
        assert said == []
    else:
        assert len(said) == 1
        assert "accumulate=4: with weights, the loss must not be divided by the number of passes" in said[0]


@on_ranks(2)
def test_the_documented_loop_is_the_mean_over_all_tokens() -> None:
    """The loop of docs/from_ddp.md, on batches with different numbers of tokens that count."""
    (block,) = (each for each in blocks_of("docs/from_ddp.md") if "# tokens that count" in each.code)
    rank, size = rank_and_size()
    names = surroundings("")
    batches = [
        [
            (torch.randn(8, 16, generator=seed), torch.where(torch.arange(8) < 2 + (3 * i + 5 * r) % 7, i % 4, -100))
            for i, seed in enumerate(torch.Generator().manual_seed(10 * r + i) for i in range(6))
        ]
        for r in range(size)
    ]
    torch.manual_seed(0)
    for p in names["model"].parameters():
        torch.nn.init.normal_(p, std=0.3)
    alone = copy.deepcopy(names["model"])
    names["batches"] = batches[rank]
    exec(block.code, names)
    names["reducer"].detach()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for i in range(0, 6, 2):
        optimizer.zero_grad()
        parts = [batches[r][i + j] for r in range(size) for j in range(2)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        names["loss_fn"](alone(x), y).backward()
        optimizer.step()
    for p, wanted in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, wanted)


def test_pages_and_docstrings_say_the_same_where_people_divide() -> None:
    words = "the loss must not be divided by the number of passes"
    pages = ("quick_start", "faq", "from_ddp", "large_batch")
    texts = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages]
    for text in [*texts, pycomm.attach.__doc__, pycomm.Reducer.set_weight.__doc__]:
        assert words in " ".join((text or "").split())
