"""Layouts by size alone: the literature's examples, and every small case against all that could be done."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from pycomm.tools.cli.plan.layers import Placement, balanced, place


def chosen(sizes: list[float], devices: int, memory: float = 10.0) -> Placement:
    layout, _ = place(sizes, devices, memory)
    assert layout is not None
    return layout


@pytest.mark.parametrize(
    ("sizes", "devices", "name", "largest"),
    [
        ([16, 1], 2, "intra-operator split of layer 1", 9),
        ([16, 2], 2, "intra-operator split of layer 1", 10),
        ([10, 10], 2, "inter-operator, 2 stages", 10),
        ([4, 4], 2, "data parallelism, 2 replicas", 8),
        ([4, 6], 1, "one device", 10),
        ([16, 2], 8, "intra-operator split of layer 1, 4 replicas", 10),
        ([10, 10], 8, "inter-operator, 2 stages, 4 replicas", 10),
        ([16, 16], 4, "hybrid, 2 stages of 2 devices, intra-operator split of layers 1, 2", 8),
        ([16, 16], 8, "hybrid, 2 stages of 2 devices, intra-operator split of layers 1, 2, 2 replicas", 8),
        ([20, 20], 4, "hybrid, 2 stages of 2 devices, intra-operator split of layers 1, 2", 10),
        ([2, 30, 2, 2], 4, "intra-operator split of layer 2", 9.5),
        ([5, 5, 5], 4, "inter-operator, 2 stages, 2 replicas", 10),
        ([7, 7, 7], 2, "nothing", 0),
    ],
)
def test_examples(sizes: list[float], devices: int, name: str, largest: float) -> None:
    layout, _ = place(sizes, devices, 10)
    assert (layout.name if layout else "nothing") == name
    if layout:
        assert layout.largest == pytest.approx(largest, rel=1e-12)


def test_the_rest_is_placed_where_it_does_not_fit_replicated() -> None:
    (stage,) = chosen([30, 2, 2, 2], 4).stages
    assert stage.cut == (1,)
    assert sorted(stage.placed) == [2, 3, 4]
    assert len(set(stage.placed.values())) == 3
    assert sorted(stage.loads) == [7.5, 9.5, 9.5, 9.5]


def test_nothing_fits() -> None:
    layout, considered = place([30, 30], 2, 10)
    assert layout is None
    assert considered
    assert all(reason.startswith("does not fit: ") for _, reason in considered)


def recount(layout: Placement, sizes: list[float], devices: int) -> float:
    """Return the bytes on the fullest device, from which device holds what, counted anew."""
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(1, len(sizes) + 1))
    assert layout.replicas * layout.width * len(layout.stages) + layout.spare == devices
    assert layout.replicas >= 1
    fullest = 0.0
    for stage in layout.stages:
        for device in range(layout.width):
            held = math.fsum(sizes[layer - 1] / layout.width for layer in stage.cut)
            for layer in set(stage.layers) - set(stage.cut):
                if not stage.placed or stage.placed[layer] == device:
                    held += sizes[layer - 1]
            assert held == pytest.approx(stage.loads[device], rel=1e-12)
            fullest = max(fullest, held)
    return fullest


def smallest_stage(sizes: list[float], number: int) -> float:
    """Return the smallest possible largest stage of ``number`` stages: all cuts tried."""
    return min(
        max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes))))
        for cuts in itertools.combinations(range(1, len(sizes)), number - 1)
    )


def test_against_everything_that_could_be_done() -> None:
    source = random.Random(0)
    kinds = set()
    for _ in range(400):
        sizes: list[float] = [source.randint(1, 30) for _ in range(source.randint(1, 6))]
        devices = source.randint(1, 6)
        layout, considered = place(sizes, devices, 10)
        for candidate, reason in considered:
            fullest = recount(candidate, sizes, devices)
            assert reason.startswith("does not fit") == (fullest > 10)
            assert (reason == "") == (candidate is layout)
        stages = range(1, min(devices, len(sizes)) + 1)
        whole = [number for number in stages if smallest_stage(sizes, number) <= 10]
        # Cut evenly over all devices, any total fits that all of them have room for.
        assert (layout is not None) == (sum(sizes) <= 10 * devices)
        if layout is None:
            continue
        kinds.add((layout.width > 1, len(layout.stages) > 1))
        assert (layout.width == 1) == bool(whole)
        if 1 in whole:
            assert len(layout.stages) == 1
        elif whole:
            assert len(layout.stages) in whole
        else:  # no narrower cut does, in however many stages
            assert all(
                smallest_stage(sizes, number) > 10 * width
                for width in range(2, layout.width)
                for number in range(1, len(sizes) + 1)
                if number * width <= devices and devices % (number * width) == 0
            )
    assert len(kinds) == 4


def test_balanced_stages_are_the_best() -> None:
    source = random.Random(1)
    for _ in range(300):
        sizes: list[float] = [source.choice([1, 2, 3, 0.1, 0.3, 7.7]) for _ in range(source.randint(1, 8))]
        number = source.randint(1, len(sizes))
        counts = balanced(sizes, number)
        assert len(counts) == number
        assert sum(counts) == len(sizes)
        assert min(counts) >= 1
        ends = [0, *itertools.accumulate(counts)]
        largest = max(sum(sizes[a:b]) for a, b in itertools.pairwise(ends))
        assert largest == pytest.approx(smallest_stage(sizes, number), rel=1e-12)


@pytest.mark.slow
def test_many_layers_and_devices() -> None:
    assert chosen([float(1 + number % 7) for number in range(256)], 1 << 16, 0.02).largest <= 0.02
