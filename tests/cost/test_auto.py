"""compression="auto": the choice for a link, the same on all ranks, and changes that lose nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.compression.base import Operation
from pycomm.compression.methods.powersgd import LowRankCodec
from pycomm.training.cost import auto, pricing
from pycomm.training.cost.auto import cheapest
from pycomm.training.cost.pricing import Costs, MeasuredLink, PricedLine
from tests.compression.machines import gradients_of
from tests.ranks import RankPool
from tests.reducer.attaching import attached, logged, own_state

Pools = Callable[[int], RankPool]
RESULTS = Path(__file__).parents[2] / "bench" / "results"

FAST = MeasuredLink(PricedLine(1e-5, 1e-10), PricedLine(1e-5, 1e-10), 4)
SLOW = MeasuredLink(PricedLine(1e-4, 1e-7), PricedLine(1e-4, 1e-7), 4)
COSTS = {
    "dense": Costs(0.001, [Operation("all_reduce", 40_000_000)]),
    "fp16": Costs(0.004, [Operation("all_reduce", 20_000_000)]),
    "dgc": Costs(0.010, [Operation("all_gather", 55_000)]),
}


def test_the_cheapest() -> None:
    assert cheapest(COSTS, FAST, None) == "dense"
    assert cheapest(COSTS, SLOW, None) == "dgc"
    between = MeasuredLink(PricedLine(0, 3.5e-10), PricedLine(0, 3.5e-10), 4)  # dense 15 ms, fp16 11 ms, dgc 10.02 ms
    assert cheapest(COSTS, between, None) == "fp16", "less than 20 % faster does not pay for losing more"
    assert cheapest(COSTS, between, "dgc") == "dgc", "nor is it a reason to change"
    faster = MeasuredLink(PricedLine(0, 2.4e-10), PricedLine(0, 2.4e-10), 4)  # dense 10.6 ms, fp16 8.8 ms
    assert cheapest(COSTS, faster, None) == "dense"
    assert cheapest(COSTS, FAST, "dgc") == "dense"


class ScriptedLinks:
    """Stand-in for measuring: links in the order in which they are to be found."""

    def __init__(self, links: list[MeasuredLink]) -> None:
        self._links = links

    def __call__(self, *_: Any) -> MeasuredLink:
        return self._links.pop(0) if len(self._links) > 1 else self._links[0]


def priced(method: Any, *_: Any, repeats: int) -> Costs:
    """Stand in for a rehearsal; PowerSGD costs what DGC does, which is a method with a warm-up only."""
    if isinstance(method, pycomm.FP8 | pycomm.Int4):
        return Costs(1.0)
    name = {pycomm.PowerSGD: "dgc", pycomm.DGC: "dgc", pycomm.FP16: "fp16"}.get(type(method), "dense")
    return Costs(COSTS[name].local, COSTS[name].operations)


def changes_and_loses_nothing(links: list[MeasuredLink], momentum: float) -> list[int]:
    """Check over every change that what was applied and what is left add up to what came."""
    rank, size = dist.get_rank(), dist.get_world_size()
    each_measured = [link for link in links for _ in range(auto._VERDICTS)]
    vars(auto).update(measure_link=ScriptedLinks(each_measured), rehearse=priced, _INTERVAL=4)
    try:
        torch.manual_seed(0)
        params: dict[str, torch.Tensor] = {"w": nn.Parameter(torch.zeros(300, 400)), "b": nn.Parameter(torch.zeros(7))}
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        applied = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
        came = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
        used = []
        with attached(optimizer, params.items(), compression=pycomm.Auto(0.01, 2, momentum=momentum)) as reducer:
            for step in range(16):
                everyone = gradients_of(params, size, step)
                optimizer.zero_grad()
                loss: Any = torch.stack([(p * everyone[rank][name]).sum() for name, p in params.items()]).sum()
                loss.backward()
                stats = reducer.stats()
                used.append(stats.get("buckets_dense", 0))
                for name, p in params.items():
                    assert p.grad is not None
                    applied[name] += p.grad
                    came[name] += sum(each[name].double() for each in everyone) / size
                if momentum == 0.0:
                    left = own_state(reducer)["w"]["residual"].double()
                    dist.all_reduce(left)
                    assert (left + applied["w"] - came["w"]).abs().max() < 1e-4
            assert torch.allclose(applied["b"].float(), came["b"].float(), atol=1e-4) or momentum > 0
        return used
    finally:
        vars(auto).update(measure_link=pricing.measure_link, rehearse=pricing.rehearse, _INTERVAL=200)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("links", [[SLOW, FAST, SLOW], [FAST, SLOW, FAST]], ids=["slow first", "fast first"])
def test_the_link_changes(two_ranks: RankPool, links: list[MeasuredLink], momentum: float) -> None:
    first, second = two_ranks.run(changes_and_loses_nothing, links, momentum)
    assert first == second
    slow_first = links[0] is SLOW
    assert first[0] == (0 if slow_first else 1)
    assert set(first) == {0, 1}


def verdicts(links: list[MeasuredLink], nap: float) -> tuple[str, dict[str, Any], list[str], float]:
    """Return the method, its account, what was logged, and the seconds of attach, if these links are measured."""

    def slowly(*arguments: Any, repeats: int) -> Costs:
        time.sleep(nap)
        return priced(*arguments, repeats=repeats)

    vars(auto).update(measure_link=ScriptedLinks(list(links)), rehearse=slowly)
    try:
        p = nn.Parameter(torch.zeros(500, 500))
        start = time.monotonic()
        with (
            logged() as lines,
            attached(torch.optim.SGD([p], lr=0.1), [("p", p)], compression="auto") as reducer,
        ):
            seconds = time.monotonic() - start
            for _ in range(2):
                p.grad = None
                (p * 2).sum().backward()
            (told,) = reducer.stats()["auto"]
            return told["method"], told, lines, seconds
    finally:
        vars(auto).update(measure_link=pricing.measure_link, rehearse=pricing.rehearse)


def test_it_says_what_it_chose_and_why(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(verdicts, [FAST, SLOW, SLOW, SLOW], 0.0)
    method, told, lines, _ = first
    assert method == "powersgd"
    assert second[:3] == (method, told, [])  # rank 0 logs
    assert told["settled"]
    assert told["ratios"]["dense"] == 1.0
    assert told["ratios"]["powersgd"] < 0.01 < told["ratios"]["fp16"] < 0.6
    (line,) = lines
    begins = r'\[pycomm rank 0\] compression="auto" chose powersgd for buckets of 1 MB \('
    rest = r"fp16 0\.50, fp8 \d\.\d\d, int4 \d\.\d\d, powersgd 0\.00 times the 4e\+03 ms of dense\); a method must stay"
    assert re.match(begins + rest, line), line


def test_without_three_equal_verdicts_in_two_seconds_it_is_dense(two_ranks: RankPool) -> None:
    for method, told, lines, seconds in two_ranks.run(verdicts, 50 * [FAST, SLOW], 0.04):
        assert method == "dense"
        assert not told["settled"]
        assert all("no 3 equal verdicts in a row" in line for line in lines)
        assert seconds < auto._SECONDS + 2.0  # the rest of attach, beside other tests


def test_only_methods_that_keep_the_loss_are_chosen_from() -> None:
    """By the bench's report: within 1 % of the loss of dense gradients, with their warm-up."""
    report = json.loads((RESULTS / "compression_losses.json").read_text())
    warm = pycomm.Auto(momentum=0.9, warmup_steps=100)
    for optimizer, names in (("AdamW", pycomm.Auto().methods()), ("SGD", [*pycomm.Auto().methods(), *warm.methods()])):
        losses = report["losses"][optimizer]
        assert set(names) <= losses.keys()
        assert all(losses[name] <= 1.01 * losses["dense"] for name in names)
    assert "dgc" in warm.methods()
    assert "dgc" not in pycomm.Auto(momentum=0.9).methods()
    assert report["losses"]["SGD"]["powersgd(4)"] > 1.01 * report["losses"]["SGD"]["dense"]  # it can fail


def takes_something() -> tuple[str, dict[str, Any]]:
    p = nn.Parameter(torch.zeros(500, 500))
    with attached(torch.optim.SGD([p], lr=0.1), [("p", p)], compression="auto") as reducer:
        state = reducer.state_dict()
        reducer.load_state_dict(state)
        loss: Any = p.sum()
        loss.backward()
        assert p.grad is not None
        everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, p.grad)
        assert all(torch.equal(grad, p.grad) for grad in everyone)
        return state["method"], {k: v for k, v in reducer.stats().items() if k.startswith("buckets_")}


def test_all_ranks_choose_alike(rank_pools: Pools) -> None:
    outcomes = rank_pools(3).run(takes_something)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0] == "Auto"


class Clock:
    """Clock that moves on by 1 ms whenever it is read, so that all work takes as long, on busy cores too."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


def method_chosen(delay: float) -> tuple[str, float]:
    """Return the method on a slow link, and its time over dense gradients', where PowerSGD needs ``delay`` more."""
    send, clock = LowRankCodec.send, Clock()

    def slowly(self: LowRankCodec, *arguments: Any) -> Any:
        clock.now += delay
        return send(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measure_link", ScriptedLinks([SLOW]))
        patch.setattr(LowRankCodec, "send", slowly)
        for module in (auto, pricing):
            patch.setattr(module, "time", clock)
        p = nn.Parameter(torch.zeros(500, 500))
        with attached(torch.optim.SGD([p], lr=0.1), [("p", p)], compression="auto") as reducer:
            (p * 2).sum().backward()
            (told,) = reducer.stats()["auto"]
            return told["method"], told["ratios"]["powersgd"]


def test_the_choice_follows_a_method_that_becomes_slow(two_ranks: RankPool) -> None:
    """Costs are measured on the spot: a bucket of 1 MB takes 100 ms dense, and by PowerSGD a few."""
    (before, ratio), other = two_ranks.run(method_chosen, 0.0)
    assert (before, ratio) == other
    assert before == "powersgd"
    assert ratio < 0.5
    (after, ratio), _ = two_ranks.run(method_chosen, 0.2)
    assert after != "powersgd"
    assert ratio > 1.0
