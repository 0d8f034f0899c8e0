"""A generator's pass through its discriminator, steps that are left out, optimizers that ask for two passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, over_tcp
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd


class Gan:
    """A discriminator, whose optimizer is attached with compression, and a generator."""

    def __init__(self, compression: Any) -> None:
        torch.manual_seed(0)
        self.d, self.g = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(3, 6, dtype=torch.float64)
        self.opt_d, self.opt_g = sgd(self.d), sgd(self.g)
        self.red_d = pycomm.attach(self.opt_d, self.d, compression=compression, tuning=pycomm.Tuning(timeout=30))
        self.red_g = pycomm.attach(self.opt_g, self.g, tuning=pycomm.Tuning(timeout=30))

    def losses(self, step: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, z = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        return lambda: (self.d(x) ** 2).mean(), lambda: (self.d(self.g(z)) ** 3).mean()

    def close(self) -> None:
        self.red_d.detach()
        self.red_g.detach()


@pytest.mark.behavior(
    "Passes and steps", "run a generator's backward through an attached discriminator", "Use `paused()`."
)
@pytest.mark.parametrize("over_hosts", [False, True])
@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@on_ranks(2)
def test_a_generators_pass_through_its_discriminator(compression: Any, over_hosts: bool) -> None:
    with over_tcp(over_hosts):
        ours, quiet = Gan(compression), Gan(None)
    for step in range(5):
        for it in (ours, quiet):
            of_d, of_g = it.losses(step)
            it.opt_d.zero_grad()
            of_d().backward()
            it.opt_d.step()
            it.opt_g.zero_grad()
            with it.red_d.paused():
                of_g().backward()
            it.opt_g.step()
    for p, q in zip(
        [*ours.d.parameters(), *ours.g.parameters()], [*quiet.d.parameters(), *quiet.g.parameters()], strict=True
    ):
        close(p.detach(), q.detach(), 1e-9)
    assert_replicas_equal(nn.ModuleList([ours.d, ours.g]))
    ours.close()
    quiet.close()


def gan_without_paused(zeroes: bool) -> str:
    """The generator's pass would enter the discriminator's residual: an error, however the user goes about it."""
    it = Gan(pycomm.TopK(0.1))
    step = 0

    def run() -> None:
        nonlocal step
        for step in range(3):
            of_d, of_g = it.losses(step)
            it.opt_d.zero_grad()
            of_d().backward()
            it.opt_d.step()
            it.opt_g.zero_grad()
            if zeroes:
                it.opt_d.zero_grad()
            of_g().backward()
            it.opt_g.step()

    with pytest.raises(RuntimeError, match="with reducer.paused") as raised:
        run()
    it.close()
    return f"{step} {raised.value}"


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_generators_pass_enters_no_residual(two_ranks: RankPool, zeroes: bool) -> None:
    for says in two_ranks.run(gan_without_paused, zeroes):
        assert "with reducer.paused():" in says
        if zeroes:
            assert says.startswith("1 optimizer.step() has not used the last averaged gradients")
        else:
            assert says.startswith("0 backward() ran again on the averaged gradient of")


@on_ranks(2)
def test_skipped_steps_are_no_mistake() -> None:
    """A step that was left out because gradients were not finite has committed nothing: no error."""
    model = make_model()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attached(optimizer, model, compression=pycomm.TopK(0.5), loss_scaler=scaler) as reducer:
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            scaler.scale(loss * (torch.inf if step in (2, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert reducer.stats()["nonfinite_steps"] == 2
        assert_replicas_equal(model)


def left_out_on_purpose(says_so: bool) -> None:
    """A step that is left out since its gradients are too large, with error feedback."""
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=pycomm.TopK(0.5)) as reducer:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            if step != 2:
                optimizer.step()
            elif says_so:
                reducer.skip_step()
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Passes and steps",
    "skip a step on purpose, with error feedback",
    "Call `reducer.skip_step()`; otherwise the next backward is an error.",
)
def test_a_step_left_out_on_purpose(two_ranks: RankPool) -> None:
    two_ranks.run(left_out_on_purpose, True)
    for error in two_ranks.errors(left_out_on_purpose, False):
        assert "a step that is left out on purpose needs reducer.skip_step()" in str(error)


class Sharpness(torch.optim.SGD):
    """Optimizer like SAM: climbs by the gradients, asks for others there, and steps by those from where it began."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        super().step()
        return loss


@pytest.mark.behavior("Passes and steps", "step a closure that runs two passes", "Both are averaged.")
@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
@on_ranks(2)
def test_optimizers_that_ask_twice(compression: Any) -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = Sharpness(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=compression) as reducer:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
        assert reducer.stats()["steps"] == 8
        assert_replicas_equal(model)


@pytest.mark.parametrize("first", ["the attached one", "the other one"])
@on_ranks(2)
def test_two_optimizers_that_step_the_same_averages(first: str) -> None:
    """One of them knows nothing of pycomm; a step that neither has averages for is still an error."""
    rank, model, plain = dist.get_rank(), make_model(), make_model()

    def optimizers_of(net: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), torch.optim.Adam(net.parameters(), 0.01)

    (own, other), (plain_own, plain_other) = optimizers_of(model), optimizers_of(plain)
    with attached(own, model) as reducer:
        for step in range(6):
            wanted = average_gradients(plain, losses_at(step))
            for name, p in plain.named_parameters():
                p.grad = wanted[name]
            own.zero_grad()
            loss_of(model, rank, step).backward()
            pairs = [(own, plain_own), (other, plain_other)]
            for pair in pairs if first == "the attached one" else reversed(pairs):
                for each in pair:
                    each.step()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                close(p.detach(), q.detach())
        assert reducer.stats()["steps"] == 6
        with pytest.raises(RuntimeError, match="has not been averaged: there was no backward"):
            own.step()
