"""Choices: what fits and is fast, the plan that comes of it, and why the others were refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pycomm.parallel import Plan
from pycomm.parallel.auto import styles_of
from pycomm.parallel.planning.candidates import Device, Task
from pycomm.parallel.planning.choose import Ranking, choose
from pycomm.parallel.planning.profile import make_without_memory, profile
from pycomm.schedule import Link, Network

WIDTH = 1024


def network(beta: float, alpha: float = 1e-6) -> Network:
    link = Link(alpha=alpha, beta=beta, gamma=0.0)
    return Network(name="test", within_host=link, between_hosts=link)


def stack(layers: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)]
        return nn.Sequential(*(module for pair in pairs for module in pair))

    return make


def ranked(make: Callable[[], nn.Module], compress: bool = False, **changes: Any) -> Ranking:
    settings = {"devices": 4, "memory": 1e9, "batch": 16, "device": Device(1e12, 1e11), "network": network(1e-10)}
    model = make_without_memory(make)
    split_by: Callable[[Mapping[str, str]], Any] = lambda split: profile(  # noqa: E731
        make, lambda count: torch.zeros(count, WIDTH), None, split
    )
    task = Task(**{**settings, **changes})
    return choose(task, model, split_by, lambda devices: styles_of(model, devices), compress)


def test_what_fits_everywhere_is_replicated() -> None:
    best = ranked(stack(4), batch=4096).options[0]
    assert best.candidate.dp == 4
    assert best.plan().mesh == {"dp": 4}
    assert best.plan().stages == ()


def test_options_are_in_order_and_within_memory() -> None:
    memory = 40e6
    ranking = ranked(stack(4), memory=memory)
    seconds = [option.seconds for option in ranking.options]
    assert seconds == sorted(seconds)
    assert all(option.price.largest <= memory for option in ranking.options)
    assert any(not math.isnan(each.needed) and each.needed > memory for each in ranking.refusals)


def test_a_layer_that_fits_nowhere_is_split() -> None:
    """One pair of layers of 4 MB, which with gradients and Adam's state take 32 MB: no stages, nor replicas, do."""
    best = ranked(stack(2), memory=12e6, batch=1).options[0]
    assert best.candidate.tp == 4
    assert set(best.plan().split.values()) == {"columns", "rows"}


def test_a_slow_network_makes_stages() -> None:
    ranking = ranked(stack(8), memory=90e6, network=network(1e-8), batch=64)
    best = ranking.options[0]
    assert best.candidate.pp > 1
    plan = best.plan()
    assert [name for stage in plan.stages for name in stage] == [str(number) for number in range(16)]
    model = stack(8)()
    for stage in plan.stages:
        assert any(list(model.get_submodule(name).parameters()) for name in stage)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["mesh"]["pp"] == best.candidate.pp


def test_compression_where_it_pays_alone() -> None:
    slow = ranked(stack(2), compress=True, network=network(1e-4), devices=2).options[0]
    assert slow.compression is not None
    assert slow.plan().compression == slow.compression
    fast = ranked(stack(2), compress=True, network=network(0.0, 0.0), devices=2)
    assert all(option.compression is None for option in fast.options)


def test_refusals_have_reasons() -> None:
    tied = stack(2)

    def make_tied() -> nn.Module:
        model = tied()
        model[2].weight = model[0].weight  # type: ignore[index]
        return model

    reasons = {each.reason for each in ranked(make_tied, batch=18).refusals}
    assert "layers '0' and '2' use one parameter, which two stages cannot" in reasons
    assert "a batch of 18 does not divide by 4" in reasons
    one = ranked(lambda: nn.Sequential(nn.Linear(WIDTH, 3)), devices=4).refusals
    assert any(each.what == "pp=4" and each.reason == "the model has 1 layers to make stages of" for each in one)
    assert len({(each.what, each.reason) for each in one}) == len(one)


def test_nothing_fits() -> None:
    ranking = ranked(stack(4), memory=1e6)
    assert ranking.options == ()
    assert math.isfinite(ranking.least)
    assert ranked(stack(4), memory=ranking.least).options
