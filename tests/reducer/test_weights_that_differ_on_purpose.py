"""Weights that differ between the ranks while a gradient is computed, and are equal at the step; and causes of others.

A difference that a reduction finds is asked about once more before the step that uses it, of whichever optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.ddp
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, logged
from tests.reducer.models import close, loss_of, make_model, sgd

OTHER_CAUSES = {
    "written": ("was written to",),
    "drawn": ("random numbers",),
    "rewritten": ("another gradient",),
    "drift": ("a learning rate",),
    "flip": ("flipped bit",),
}


def assert_only_cause(cause: str, says: str) -> None:
    for other, words in OTHER_CAUSES.items():
        assert all((word in says) == (other == cause) for word in words), (other, says)


class Perturbing(torch.optim.Optimizer):
    """SAM: an ascent by this rank's own gradient, and a step of the optimizer inside by the gradient there."""

    def __init__(self, model: nn.Module, radius: float = 0.05) -> None:
        super().__init__(model.parameters(), {"radius": radius})
        self.inner = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def ascend(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad / (p.grad.norm() + 1e-12), alpha=self.param_groups[0]["radius"])

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["before"])
        self.inner.step()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.ascend()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.descend()


def alone(steps: int, size: int) -> nn.Module:
    """Return the model of one process, which ascends by each rank's own gradient."""
    model = make_model()
    optimizer = Perturbing(model)
    params = list(model.parameters())
    for step in range(steps):
        total = [torch.zeros_like(p) for p in params]
        for rank in range(size):
            for p, grad in zip(params, torch.autograd.grad(loss_of(model, rank, step), params), strict=True):
                p.grad = grad
            optimizer.ascend()
            there = torch.autograd.grad(loss_of(model, rank, step), params)
            with torch.no_grad():
                for p, sum_, grad in zip(params, total, there, strict=True):
                    sum_.add_(grad / size)
                    p.copy_(optimizer.state[p]["before"])
        for p, grad in zip(params, total, strict=True):
            p.grad = grad
        optimizer.descend()
    return model


def evaluate(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()


@pytest.mark.behavior(
    "Passes and steps",
    "compute gradients at weights that differ by rank (SAM, MAML)",
    "The average is right if you restore the weights; otherwise an error before the step.",
)
@pytest.mark.parametrize("how", ["steps of the inner optimizer", "closure", "scaler"])
@pytest.mark.parametrize("given", ["model", "names"])
@on_ranks(2)
def test_weights_perturbed_by_each_ranks_own_gradient(how: str, given: str) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = Perturbing(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how == "scaler")
    named: Any = model if given == "model" else list(model.named_parameters())
    with attached(optimizer, named, check_replicas=2) as reducer:
        for step in range(12):
            optimizer.zero_grad()
            with reducer.paused():
                loss_of(model, rank, step).backward()
            if how == "closure":
                optimizer.step(partial(evaluate, model, rank, step))
                continue
            optimizer.ascend()
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(optimizer.state[p]["before"])
            scaler.step(optimizer.inner)
            scaler.update()
        assert_replicas_equal(model)
    for p, wanted in zip(model.parameters(), alone(12, 2).parameters(), strict=True):
        close(p, wanted, 1e-9)


@on_ranks(2)
def test_weight_noise_of_each_rank_under_ddp() -> None:
    rank, model = dist.get_rank(), DistributedDataParallel(make_model())
    handle = pycomm.ddp.register(model, check_replicas=2, timeout=30)
    optimizer = sgd(model)
    for step in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(rank)), alpha=1e-3)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        with torch.no_grad():
            for p, was in zip(model.parameters(), before, strict=True):
                p.copy_(was)
        optimizer.step()
    assert_replicas_equal(model.module)
    handle.remove()


def noisy_steps(survives: bool, drifts: bool) -> tuple[int, tuple[int, ...], str]:
    """Rank 1 alone perturbs its weights; if it ``drifts``, it does not restore them once."""
    rank, model = dist.get_rank(), make_model()
    optimizer, says, step = sgd(model), "", 0
    survive: dict[str, Any] = {"survive": pycomm.Survive()} if survives else {}
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(check_replicas=2, timeout=30), **survive)
    try:
        for step in range(10):
            optimizer.zero_grad()
            before = model[0].weight.detach().clone()
            if rank == 1:
                model[0].weight.data.add_(0.01)
            loss_of(model, rank, step).backward()
            if not (drifts and step == 6):
                model[0].weight.data.copy_(before)
            optimizer.step()
    except RuntimeError as error:
        says = str(error)
    world = reducer.world
    reducer.detach()
    return step, world, says


@pytest.mark.parametrize("survives", [False, True])
def test_a_rank_that_perturbs_alone_is_not_left_behind(new_ranks: Pools, survives: bool) -> None:
    for step, world, says in new_ranks(3).run(noisy_steps, survives, False):
        assert (step, world, says) == (9, (0, 1, 2), "")


@pytest.mark.behavior(
    "Passes and steps",
    "compute gradients at weights that differ by rank (SAM, MAML)",
    "The average is right if you restore the weights; otherwise an error before the step.",
)
@pytest.mark.parametrize("survives", [False, True])
def test_a_rank_that_drifts_is_found_before_the_step(new_ranks: Pools, survives: bool) -> None:
    found = new_ranks(3).run(noisy_steps, survives, True)
    for rank, (step, world, says) in enumerate(found):
        if survives and rank != 1:
            assert (step, world, says) == (9, (0, 2), "")
            continue
        assert step == 6
        assert "parameter '0.weight' on rank 1 differs from the other ranks" in says
        assert_only_cause("drift", says)


def train(loss: Callable[[int], torch.Tensor], optimizer: Any, after: Callable[[int], Any] = lambda _: None) -> None:
    """Make ten steps; ``after(step)`` is called after the backward pass of each, ``after(-1)`` after the third step."""
    for step in range(10):
        optimizer.zero_grad()
        loss(step).backward()
        after(step)
        optimizer.step()
        if step == 2:
            after(-1)


@on_ranks(2)
def test_a_script_that_updates_without_an_optimizer_is_found_in_backward() -> None:
    rank, model = dist.get_rank(), make_model()
    reductions = 0

    def update() -> None:
        nonlocal reductions
        for step in range(10):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            reductions += 1
            for p in model.parameters():
                p.data.sub_(p.grad, alpha=0.1 * (1 + rank * (step == 0)))

    with attached(sgd(model), model), pytest.raises(RuntimeError, match="the replicas differ after 4 reductions"):
        update()
    assert reductions == 4


@on_ranks(2)
def test_a_skipped_step_puts_the_question_off() -> None:
    """The scaler skips the step that would answer; weights that stay different are found before the next one."""
    rank, model = dist.get_rank(), make_model()
    optimizer, scaler, stepped = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0), 0

    def run() -> None:
        nonlocal stepped
        for step in range(8):
            optimizer.zero_grad()
            if rank == 1 and step == 3:
                model[0].weight.data.add_(0.01)
            loss = loss_of(model, rank, step) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            stepped = step

    with attached(optimizer, model, loss_scaler=scaler):
        with pytest.raises(RuntimeError, match="the replicas differ after 4 reductions"):
            run()
    assert stepped == 3


# What steps the parameters.


@pytest.mark.behavior(
    "Passes and steps",
    "`backward() runs again before an optimizer.step() has used the last averages`, `optimizer.step() has not used "
    "the last averaged gradients`",
    "A log line; with error feedback, an error. Run passes without a step inside `paused()`.",
)
@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
@on_ranks(2)
def test_two_reductions_before_a_step_of_an_inner_optimizer(compression: Any) -> None:
    """Error feedback that belongs to another gradient than the applied one is an error; else a line is logged once."""
    rank, model = dist.get_rank(), make_model()
    optimizer = Perturbing(model)
    wrong = pytest.raises(RuntimeError, match=r"has not used the last averaged gradients.*paused\(\)")
    with logged() as noted, attached(optimizer, model, compression=compression) as reducer:
        with nullcontext() if compression is None else wrong:
            for step in range(6):
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                optimizer.inner.step()
            assert reducer._state.steps == 6
    assert all("paused()" in text for text in noted)
    assert len(noted) == (compression is None and rank == 0)


@on_ranks(2)
def test_an_inner_optimizer_in_an_open_window() -> None:
    model = make_model()
    optimizer = Perturbing(model)
    with attached(optimizer, model, accumulate=2):
        loss_of(model, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
            optimizer.inner.step()


@on_ranks(2)
def test_a_wrapper_around_the_attached_one_counts_once() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    around = Around(optimizer)
    with attached(optimizer, model, compression=pycomm.TopK(0.5)) as reducer:
        for step in range(4):
            around.zero_grad()
            loss_of(model, rank, step).backward()
            around.step()
        assert reducer._state.steps == 4
        assert_replicas_equal(model)


# Causes.


class Clamping(nn.Linear):
    """Its forward writes to the weight, as far as this rank's batch says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(1.0 - 1e-3 * float(x.abs().mean()))
        return super().forward(x)


def embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2))


def loss_of_words(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    words = torch.randint(10, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
    return model(words).square().mean()


def clamping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Clamping(12, 5)).double()


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "write parameters in forward, draw random numbers in the step, or step on rewritten gradients",
    "Error that names this cause. Do the same on all ranks; clip inside `paused()`, then `reduce()`.",
)
@pytest.mark.parametrize(
    ("make", "loss", "says"),
    [(embedding, loss_of_words, r"Embedding\(max_norm=1\)"), (clamping, loss_of, "a forward writes to it")],
    ids=["max_norm", "clamping"],
)
@pytest.mark.parametrize("way", ["attach", "survive", "ddp"])
@on_ranks(3)
def test_a_forward_that_writes_parameters_is_the_cause(make: Any, loss: Any, says: str, way: str) -> None:
    rank, model = dist.get_rank(), make()
    optimizer = sgd(model)
    if way == "ddp":
        model = DistributedDataParallel(model)
        handle: Any = pycomm.ddp.register(model, timeout=30)
    else:
        survive: dict[str, Any] = {"survive": pycomm.Survive()} if way == "survive" else {}
        handle = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30), **survive)
    with pytest.raises(RuntimeError, match=rf"parameter '0.weight' differs .*{says}") as raised:
        train(lambda step: loss(model, rank, step), optimizer)
    assert "was written to after the last optimizer.step() on ranks 0, 1, 2" in str(raised.value)
    assert_only_cause("written", str(raised.value))
    handle.remove() if way == "ddp" else handle.detach()


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "write parameters in forward, draw random numbers in the step, or step on rewritten gradients",
    "Error that names this cause. Do the same on all ranks; clip inside `paused()`, then `reduce()`.",
)
@pytest.mark.parametrize("source", ["torch", "numpy", "random"])
@on_ranks(2)
def test_random_numbers_of_the_step_are_the_cause(source: str) -> None:
    draw: dict[str, Callable[[], float]] = {
        "torch": lambda: float(torch.rand(())),
        "numpy": np.random.rand,
        "random": random.random,
    }

    class Rounding(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(1e-6 * draw[source]())

    rank, model = dist.get_rank(), make_model()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    optimizer = Rounding(model.parameters(), 0.1)
    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match=f"draws random numbers from the generator of {source}, whose") as raised:
            train(lambda step: loss_of(model, rank, step), optimizer)
    assert_only_cause("drawn", str(raised.value))


@on_ranks(2)
def test_generators_that_differ_and_are_not_drawn_from_are_no_cause() -> None:
    rank, model = dist.get_rank(), make_model()
    torch.manual_seed(rank)
    optimizer = sgd(model)

    def change(step: int) -> None:
        if step == -1 and rank == 1:
            model[0].weight.data.mul_(1.5)

    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match="the replicas differ after 3 reductions") as raised:
            train(lambda step: nn.functional.dropout(loss_of(model, rank, step).expand(4)).mean(), optimizer, change)
    assert_only_cause("drift", str(raised.value))


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "write parameters in forward, draw random numbers in the step, or step on rewritten gradients",
    "Error that names this cause. Do the same on all ranks; clip inside `paused()`, then `reduce()`.",
)
@on_ranks(2)
def test_a_gradient_that_a_wrapper_rewrites_is_the_cause() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def rewrite(step: int) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, float(rank))  # as from this rank's samples

    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match=r"another gradient of '0.weight' .*paused\(\).*reduce\(\)") as raised:
            train(lambda step: loss_of(model, rank, step), optimizer, rewrite)
    assert_only_cause("rewritten", str(raised.value))


@on_ranks(2)
def test_bits_that_differ_without_a_difference_of_values() -> None:
    rank, model = dist.get_rank(), nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with torch.no_grad():
        model.weight.fill_(0.0)
        model.bias.fill_(float("nan"))
    with attached(optimizer, model):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        if rank == 1:
            model.weight.detach().numpy()[:] = -0.0
        model(torch.ones(2, 64)).sum().backward()
        with pytest.raises(RuntimeError, match=r"the bits differ \(-0.0, NaN\), the values do not"):
            optimizer.step()
