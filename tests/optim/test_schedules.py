"""Learning-rate rules, warm-up, and growth of the batch: golden numbers, closed forms, torch's, resumed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pycomm.optim.lr_schedules import BatchSizeGrowth, WarmupLR, linear_scaled_lr, sqrt_scaled_lr


def sgd(*lrs: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs or (1.0,)], lr=7.0)


def take_step(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    """One step of a training loop; the learning rates that it was done with."""
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    optimizer.step()
    scheduler.step()
    return lrs


def trace(make: Callable[[torch.optim.Optimizer], Any], steps: int, lr: Any = 1.0) -> list[float]:
    optimizer = sgd(lr)
    scheduler = make(optimizer)
    return [take_step(optimizer, scheduler)[0] for _ in range(steps)]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


def test_scaling_rules() -> None:
    # Goyal et al. 2017: 0.1 at 256, 3.2 at 8192.
    assert linear_scaled_lr(0.1, 8192) == 3.2
    assert linear_scaled_lr(0.1, 256) == 0.1
    assert linear_scaled_lr(0.4, 8, base_batch_size=32) == 0.1
    # You et al. 2020, LAMB on ImageNet: 4 / (2^3 * 100) at 512, 4 / (2^1.5 * 100) at 4096, 4 / 100 at 32768.
    assert sqrt_scaled_lr(4 / 800, 32768, 512) == 0.04
    assert sqrt_scaled_lr(4 / 800, 4096, 512) == pytest.approx(4 / (2**1.5 * 100), rel=1e-15)
    assert sqrt_scaled_lr(1.0, 1024) == 2.0


def test_golden_numbers() -> None:
    lrs = trace(partial(WarmupLR, warmup_steps=4, start_factor=0.2), 11)
    assert lrs == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1, 1], rel=1e-15, abs=1e-16)


def test_warmup_alone() -> None:
    assert trace(lambda optimizer: WarmupLR(optimizer, 4), 6) == [0, 0.25, 0.5, 0.75, 1, 1]
    assert trace(lambda optimizer: WarmupLR(optimizer, 0), 3) == [1, 1, 1]
    assert trace(lambda optimizer: WarmupLR(optimizer, 1, start_factor=0.5), 3) == [0.5, 1, 1]
    assert trace(lambda optimizer: WarmupLR(optimizer, 2, start_factor=1), 3) == [1, 1, 1]
    # Goyal et al. 2017: from the unscaled to the scaled learning rate.
    lr = linear_scaled_lr(0.1, 8192)
    lrs = trace(lambda optimizer: WarmupLR(optimizer, 10, start_factor=256 / 8192), 11, lr)
    assert lrs[0] == 0.1
    assert lrs[10] == 3.2
    assert np.diff(lrs) == pytest.approx([0.31] * 10)


def test_exactly_the_closed_form() -> None:
    lrs = trace(lambda optimizer: WarmupLR(optimizer, 3, start_factor=0.3), 25, 0.7)
    for step, lr in enumerate(lrs):
        assert lr == 0.7 * (0.3 + (1 - 0.3) * step / 3 if step < 3 else 1.0), step


def test_as_torch_where_torch_has_it() -> None:
    ours = trace(lambda optimizer: WarmupLR(optimizer, 12, start_factor=0.2), 40, 0.7)
    over_hosts = trace(lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, total_iters=12), 40, 0.7)
    assert ours == pytest.approx(over_hosts, rel=1e-12)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR itself, in early releases
@pytest.mark.parametrize(
    "decay",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 30, power=2),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [7, 20], gamma=0.2),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / 30) ** 2),
    ],
)
def test_torchs_decay_after_the_warmup(decay: Callable[[torch.optim.Optimizer], Any]) -> None:
    def both(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.SequentialLR(optimizer, [WarmupLR(optimizer, 10), decay(optimizer)], [10])

    lrs = trace(both, 40, 0.7)
    assert lrs[:10] == trace(lambda optimizer: WarmupLR(optimizer, 10), 10, 0.7)
    assert lrs[10:] == pytest.approx(trace(decay, 30, 0.7), rel=1e-12)


def test_groups_keep_their_ratio() -> None:
    optimizer = sgd(0.5, 2.0, 0.0)
    scheduler = WarmupLR(optimizer, 3, start_factor=0.1)
    for step in range(12):
        lrs = take_step(optimizer, scheduler)
        assert lrs == [0.5 * scheduler.factor(step), 2.0 * scheduler.factor(step), 0.0]
    assert scheduler.get_last_lr() == [0.5, 2.0, 0.0]
    assert isinstance(scheduler, lr_scheduler.LRScheduler)


def test_lr_that_is_a_tensor() -> None:
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
    scheduler = WarmupLR(optimizer, 13, start_factor=0.1)
    wanted = trace(lambda o: WarmupLR(o, 13, start_factor=0.1), 22, 0.5)
    for step in range(22):
        assert optimizer.param_groups[0]["lr"] is lr, "in place: a captured graph reads it"
        assert lr == torch.tensor(wanted[step])
        if step == 10:
            state = saved(scheduler.state_dict())
            scheduler.load_state_dict(state)
        take_step(optimizer, scheduler)
    assert scheduler.base_lrs == [0.5]


@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize("at", [0, 2, 3, 8, 22])
def test_resumed_in_the_middle(steps: int, at: int) -> None:
    def make(optimizer: torch.optim.Optimizer, **options: Any) -> WarmupLR:
        return WarmupLR(optimizer, steps, start_factor=0.1, **options)

    first = sgd(0.3, 0.7)
    scheduler = make(first)
    for _ in range(at):
        take_step(first, scheduler)
    states = saved({"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()})
    wanted = [take_step(first, scheduler) for _ in range(25)]

    second = sgd(9.0, 9.0)
    resumed = make(second)
    second.load_state_dict(states["optimizer"])
    resumed.load_state_dict(states["scheduler"])
    assert resumed.last_epoch == at
    assert [take_step(second, resumed) for _ in range(25)] == wanted
    assert resumed.state_dict() == scheduler.state_dict()

    third = sgd(9.0, 9.0)
    third.load_state_dict(states["optimizer"])
    by_step = make(third, last_epoch=at - 1)
    assert [take_step(third, by_step) for _ in range(25)] == wanted


def test_inside_torchs_compositions() -> None:
    optimizer = sgd()
    chained = lr_scheduler.ChainedScheduler([WarmupLR(optimizer, 4), lr_scheduler.ConstantLR(optimizer, 0.5, 10)])
    for _ in range(2):
        take_step(optimizer, chained)
    state = saved(chained.state_dict())
    take_step(optimizer, chained)
    chained.load_state_dict(state)
    assert chained._schedulers[0].last_epoch == 2


def test_what_else_was_done_to_lr_lasts_one_step() -> None:
    optimizer = sgd()
    scheduler = WarmupLR(optimizer, 4)
    optimizer.param_groups[0]["lr"] = 55.0
    assert [take_step(optimizer, scheduler)[0] for _ in range(3)] == [55.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: linear_scaled_lr(0, 8), ValueError, "base_lr is 0, wanted a positive number"),
        (lambda: linear_scaled_lr(float("inf"), 8), ValueError, "base_lr is inf, wanted a positive number"),
        (lambda: linear_scaled_lr(1.0, -8), ValueError, "batch_size is -8, wanted at least 1"),
        (lambda: sqrt_scaled_lr(1.0, 8, 0), ValueError, "base_batch_size is 0, wanted at least 1"),
        (lambda: sqrt_scaled_lr(1.0, 8.0), TypeError, "batch_size is 8.0, wanted an int"),  # type: ignore[arg-type]
        (lambda: linear_scaled_lr("1", 8), TypeError, "base_lr is '1', wanted a number"),  # type: ignore[arg-type]
        (lambda: WarmupLR(sgd(), -1), ValueError, "warmup_steps is -1, wanted at least 0"),
        (lambda: WarmupLR(sgd(), 9e4), TypeError, "warmup_steps is 90000.0, wanted an int"),  # type: ignore[arg-type]
        (lambda: WarmupLR(sgd(), True), TypeError, "warmup_steps is True, wanted an int"),
        (lambda: WarmupLR(sgd(), 5, start_factor=2), ValueError, "start_factor is 2, wanted 0 to 1"),
        (lambda: WarmupLR(sgd(), 5, start_factor=math.nan), ValueError, "start_factor is nan, wanted 0 to 1"),
        (lambda: WarmupLR(sgd(), 9, last_epoch=-2), ValueError, "last_epoch is -2, wanted at least -1"),
        (lambda: WarmupLR(nn.Linear(2, 2), 9), TypeError, "optimizer is a Linear, wanted a torch.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: BatchSizeGrowth(0, [5], 2), ValueError, "initial is 0, wanted at least 1"),
        (lambda: BatchSizeGrowth(8, [5, 4], 2), ValueError, r"milestones\[1\] is 4, wanted more than 5 before it"),
        (lambda: BatchSizeGrowth(8, [3, 3], 2), ValueError, r"milestones\[1\] is 3, wanted more than 3 before it"),
        (lambda: BatchSizeGrowth(8, [0, 3], 2), ValueError, r"milestones\[0\] is 0, wanted at least 1"),
        (lambda: BatchSizeGrowth(8, [1.5], 2), TypeError, r"milestones\[0\] is 1.5, wanted an int"),  # type: ignore[list-item]
        (lambda: BatchSizeGrowth(8, 30, 2), TypeError, "milestones is 30, wanted a sequence of ints"),  # type: ignore[arg-type]
        (lambda: BatchSizeGrowth(8, [5], 1), ValueError, "factor is 1, wanted a number above 1"),
        (lambda: BatchSizeGrowth(8, [5], 10**400), ValueError, "factor is larger than any float"),
        (lambda: BatchSizeGrowth(8, [5], 2, maximum=7), ValueError, "maximum is 7, wanted at least initial = 8"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_numpy_numbers_become_plain() -> None:
    growth = BatchSizeGrowth(8, np.array([3, 5]), factor=np.float32(2.5))  # type: ignore[arg-type]
    assert growth.state_dict() == BatchSizeGrowth(8, (3, 5), factor=2.5).state_dict()
    scheduler = WarmupLR(sgd(), np.int64(2), start_factor=np.float32(0.5))  # type: ignore[arg-type]
    for one in (growth, scheduler):
        assert saved(one.state_dict()) == one.state_dict()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda o: WarmupLR(o, 3), "warmup_steps = 3, this WarmupLR has 2; wanted the same; for another"),
        (lambda o: WarmupLR(o, 2, start_factor=0.5), "start_factor = 0.5, this WarmupLR has 0.0"),
        (lambda o: lr_scheduler.StepLR(o, 3), "state_dict is not of a WarmupLR"),
        (lambda o: WarmupLR(sgd(1.0, 2.0), 2), "has 2 parameter groups, the optimizer has 1"),
    ],
)
def test_state_of_another_schedule(other: Callable[[torch.optim.Optimizer], Any], says: str) -> None:
    optimizer = sgd()
    scheduler = WarmupLR(optimizer, 2)
    take_step(optimizer, scheduler)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=says):
        scheduler.load_state_dict(other(sgd()).state_dict())
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("key", ["schedule", "base_lrs", "_last_lr", "last_epoch"])
def test_states_that_are_none(key: str) -> None:
    """An error that names what is missing or wrong, and nothing is changed."""
    optimizer = sgd()
    scheduler = WarmupLR(optimizer, 2)
    take_step(optimizer, scheduler)
    before = scheduler.state_dict()
    other = WarmupLR(sgd(), 2).state_dict()
    with pytest.raises(ValueError, match=f"state_dict is not of a WarmupLR, .*: it has no '{key}'"):
        scheduler.load_state_dict({name: value for name, value in other.items() if name != key})
    wrong: list[Any] = [None, "x", {"a": 1}, ["x"], 1.5]
    for value in wrong if key == "last_epoch" else [*wrong, 3]:
        with pytest.raises(ValueError, match="state_dict"):
            scheduler.load_state_dict({**other, key: value})
    states: list[Any] = [None, [other], "state", {}]
    for state in states:
        with pytest.raises(ValueError, match="state_dict is not of a WarmupLR"):
            scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before


@pytest.mark.parametrize("key", ["steps", "growth"])
def test_states_of_growth_that_are_none(key: str) -> None:
    growth = BatchSizeGrowth(8, [3, 6], 2)
    grow(growth, 4)
    before = growth.state_dict()
    other = BatchSizeGrowth(8, [3, 6], 2).state_dict()
    with pytest.raises(ValueError, match=f"state_dict is not of a BatchSizeGrowth, .*: it has no '{key}'"):
        growth.load_state_dict({name: value for name, value in other.items() if name != key})
    for value in (None, "x", [1], -1, 1.5, True):
        with pytest.raises(ValueError, match=r"state_dict|steps is -1"):
            growth.load_state_dict({**other, key: value})
    for state in (None, [other], "state"):
        with pytest.raises(ValueError, match="state_dict is not of a BatchSizeGrowth"):
            growth.load_state_dict(state)  # type: ignore[arg-type]
    assert growth.state_dict() == before


def grow(growth: BatchSizeGrowth, steps: int) -> list[tuple[int, float]]:
    values = []
    for _ in range(steps):
        values.append((growth.batch_size, growth.lr_factor))
        growth.step()
    return values


def test_batch_size_growth() -> None:
    # Smith et al. 2018, section 5.1: 128, 640, 3200, 16000 instead of three decays by 5; or capped after the first.
    assert grow(BatchSizeGrowth(128, [2, 3, 5], 5), 6) == [
        *[(128, 1.0)] * 2,
        (640, 1.0),
        *[(3200, 1.0)] * 2,
        (16000, 1.0),
    ]
    capped = grow(BatchSizeGrowth(128, [2, 3, 5], 5, maximum=640), 6)
    assert [size for size, _ in capped] == [128, 128, 640, 640, 640, 640]
    assert [factor for _, factor in capped] == [1, 1, 1, 0.2, 0.2, 0.04]
    # Capped in the middle of a factor.
    assert grow(BatchSizeGrowth(100, [1], 10, maximum=400), 2) == [(100, 1.0), (400, 0.4)]
    assert grow(BatchSizeGrowth(100, [], 10), 2) == [(100, 1.0)] * 2


@pytest.mark.parametrize("factor", [1.1, 1.5, 2, 7.3])
@pytest.mark.parametrize("maximum", [None, 10, 11, 50])
def test_noise_scale_follows_the_decay(factor: float, maximum: int | None) -> None:
    milestones = (3, 4, 8, 20)
    growth = BatchSizeGrowth(10, milestones, factor, maximum)
    for step, (size, lr_factor) in enumerate(grow(growth, 25)):
        reached = sum(step >= milestone for milestone in milestones)
        assert isinstance(size, int)
        assert size == min(round(10 * factor**reached), maximum or 10**9)
        assert lr_factor / size == pytest.approx((1 / factor) ** reached / 10, rel=1e-14)
        assert lr_factor <= 1 + 0.5 / (size - 0.5), "above 1 by the rounding of the batch at most"


def test_growth_resumes() -> None:
    growth = BatchSizeGrowth(8, [3, 6], 2)
    grow(growth, 4)
    state = saved(growth.state_dict())
    resumed = BatchSizeGrowth(8, [3, 6], 2)
    resumed.load_state_dict(state)
    fewer = BatchSizeGrowth(8, [3, 6], 2, maximum=10)
    fewer.load_state_dict(state)
    assert grow(resumed, 4) == grow(growth, 4) == [(16, 1.0)] * 2 + [(32, 1.0)] * 2
    assert grow(fewer, 4) == [(10, 0.625)] * 2 + [(10, 0.3125)] * 2
    with pytest.raises(ValueError, match="factor = 2.0, this BatchSizeGrowth has 3.0; wanted the same$"):
        BatchSizeGrowth(8, [3, 6], 3).load_state_dict(state)
    with pytest.raises(ValueError, match="not of a BatchSizeGrowth"):
        growth.load_state_dict({})


def test_growth_with_a_scheduler() -> None:
    optimizer = sgd(2.0)
    scheduler, growth = WarmupLR(optimizer, 2), BatchSizeGrowth(4, [3, 5], 2, maximum=8)
    lrs = []
    for _ in range(7):
        lrs += take_step(optimizer, scheduler)
        growth.step()
        for group in optimizer.param_groups:
            group["lr"] *= growth.lr_factor
    assert lrs == [0, 1, 2, 2, 2, 1, 1]
