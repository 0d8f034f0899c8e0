"""Closures, passes of one rank alone, passes of another optimizer, ranks that are out of step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.optim.models import (
    assert_replicas_equal,
    attached,
    average_gradients,
    close,
    loss_of,
    losses_at,
    make_model,
    over_torch,
    own_state,
)
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# optimizer.step(closure)


def closures(compression: Any, fused: bool, keyword: bool) -> None:
    """As Lightning trains: the last backward of a window runs inside the closure."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    optimizer = sgd(model)
    if fused:
        pycomm.fuse(optimizer)
    with attached(optimizer, model, accumulate=3, compression=compression) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())

            def last(step: int = step) -> torch.Tensor:
                loss = loss_of(model, rank, 3 * step + 2) / 3
                loss.backward()
                return loss

            for i in (0, 1):
                (loss_of(model, rank, 3 * step + i) / 3).backward()
            if keyword:
                optimizer.step(closure=last)
            else:
                optimizer.step(last)
            total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
            for i in range(3):
                for name, grad in average_gradients(plain, losses_at(3 * step + i)).items():
                    total[name] += grad / 3
            for name, p in model.named_parameters():
                close(p.detach(), plain.get_parameter(name).detach() - 0.1 * total[name], 1e-9)
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) after 2 of 3 backward passes"):
            optimizer.step(lambda: loss_of(model, rank, 0).backward())
        reducer.flush()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("keyword", [False, True])
def test_closures_in_windows(two_ranks: RankPool, fused: bool, keyword: bool) -> None:
    two_ranks.run(closures, None, fused, keyword)


def test_closures_in_windows_with_error_feedback(two_ranks: RankPool) -> None:
    two_ranks.run(closures, pycomm.TopK(1.0), False, True)


# paused()


def saliency(compression: Any, set_to_none: bool, who: list[int]) -> None:
    """One rank, or each in its own time, looks at gradients of the weights between steps."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    optimizer, alone = sgd(model), sgd(plain)
    with attached(optimizer, model, compression=compression, bucket_mb=0.001) as reducer:
        for step in range(4):
            if rank in who:
                before = reducer.stats()["bytes_sent"]
                with reducer.paused():
                    own = average_gradients(model, [partial(loss_of, rank=rank, step=100 + step)])
                    optimizer.zero_grad()
                    loss_of(model, rank, 100 + step).backward()
                    for name, p in model.named_parameters():
                        close(p.grad, own[name])
                assert reducer.stats()["bytes_sent"] == before
            optimizer.zero_grad(set_to_none=set_to_none)
            wanted = average_gradients(plain, losses_at(step))
            loss_of(model, rank, step).backward()
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            optimizer.step()
            for name, p in plain.named_parameters():
                p.grad = wanted[name]
            alone.step()
            if rank in who:  # a penalty, after the step, on top of what is there
                optimizer.zero_grad(set_to_none=set_to_none)
                with reducer.paused():
                    loss_of(model, rank, 200).backward()
                    loss_of(model, rank, 201).backward()
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.data.zero_()  # as it was done once
        assert_replicas_equal(model)
        if compression is not None:
            for entry in own_state(reducer).values():
                for tensor in entry.values():
                    assert tensor.abs().max() < 1e-12  # of density 1 nothing is left


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_a_pass_inside_paused_is_local(two_ranks: RankPool, set_to_none: bool, who: list[int]) -> None:
    two_ranks.run(saliency, None, set_to_none, who)
    two_ranks.run(saliency, pycomm.TopK(1.0), set_to_none, who)


def leftovers(named: bool) -> None:
    rank = dist.get_rank()
    says = "the gradient of '.*' is still what a backward\\(\\) inside reducer.paused\\(\\) left"
    for when in ("backward", "step", "step after the average"):
        model = make_model()
        optimizer = sgd(model)
        reducer = pycomm.attach(optimizer, model.named_parameters() if named else model, timeout=30)
        if when == "step after the average":
            loss_of(model, rank, 0).backward()
        with reducer.paused():
            loss_of(model, rank, 1).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=says):
            loss_of(model, rank, 2).backward() if when == "backward" else optimizer.step()
        for p, b in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, b)
        reducer.detach()


@pytest.mark.parametrize("named", [True, False])
def test_what_a_paused_pass_left_must_go(two_ranks: RankPool, named: bool) -> None:
    two_ranks.run(leftovers, named)


def leftover_of_one_rank(torch_transport: bool) -> str:
    """The rank that is right is told at once, not at the timeout."""
    rank = dist.get_rank()
    model = make_model()
    with over_torch(torch_transport):
        reducer = pycomm.attach(sgd(model), model, timeout=50)
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    if rank == 0:
        with reducer.paused():
            loss_of(model, rank, 1).backward()
    started = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        loss_of(model, rank, 2).backward()
    assert all(p.grad is None for p in model.parameters()) or rank == 0
    assert time.monotonic() - started < 20
    reducer.detach()
    return str(raised.value)


@pytest.mark.parametrize("torch_transport", [False, True])
def test_the_others_are_told(two_ranks: RankPool, torch_transport: bool) -> None:
    guilty, innocent = two_ranks.run(leftover_of_one_rank, torch_transport)
    assert "is still what a backward() inside reducer.paused() left" in guilty
    assert (
        "rank 0 could not take part" if torch_transport else "rank 0 gave up (rank 0: the gradient of '"
    ) in innocent


def paused_in_a_window() -> None:
    model = make_model()
    with attached(sgd(model), model, accumulate=2) as reducer:
        loss_of(model, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="paused\\(\\) inside an accumulation window"):
            with reducer.paused():
                pass
        loss_of(model, dist.get_rank(), 0).backward()


def test_not_inside_a_window(two_ranks: RankPool) -> None:
    two_ranks.run(paused_in_a_window)


# Ranks that are out of step


def one_extra(named: bool, torch_transport: bool, compression: Any) -> str:
    """Without paused(): the next reduction says so, on every rank, and names the rank."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with over_torch(torch_transport):
        reducer = pycomm.attach(
            optimizer, model.named_parameters() if named else model, timeout=50, compression=compression
        )
    steps = 0

    def run() -> None:
        nonlocal steps
        for step in range(8):
            if step == 3 and rank == 1:
                optimizer.zero_grad()
                loss_of(model, rank, 50).backward()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            steps += 1

    with pytest.raises((RuntimeError, ValueError), match="reducer.paused") as raised:
        run()
    assert steps == 4 - rank  # what rank 1 ran was taken for a step once, by rank 0
    assert all(p.grad is None for p in model.parameters()) or compression is not None
    reducer.detach()
    return str(raised.value)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("torch_transport", [False, True])
def test_ranks_out_of_step_are_told(two_ranks: RankPool, named: bool, torch_transport: bool) -> None:
    for says in two_ranks.run(one_extra, named, torch_transport, None):
        assert "the ranks are out of step" in says
        assert "rank 0: 4, rank 1: 3. Rank 1 ran a backward() that the others did not" in says
        assert "with reducer.paused():" in says


@pytest.mark.parametrize("method", [pycomm.FP16(), pycomm.BF16()])
def test_ranks_out_of_step_with_stateless_methods(two_ranks: RankPool, method: Any) -> None:
    for says in two_ranks.run(one_extra, False, False, method):
        assert "rank 0: 4, rank 1: 3. Rank 1 ran a backward()" in says


@pytest.mark.parametrize(
    "method",
    [pycomm.TopK(0.1), pycomm.Int8(), pycomm.OneBit(), pycomm.RandomK(0.1), pycomm.PowerSGD(1), pycomm.TopK(1.0)],
    ids=repr,
)
def test_ranks_out_of_step_with_error_feedback(two_ranks: RankPool, method: Any) -> None:
    """The rank itself knows that its extra pass went into no step; the other one is told."""
    innocent, guilty = two_ranks.run(one_extra, False, False, method)
    assert "optimizer.step() has not used the last averaged gradients" in guilty
    assert "rank 1 gave up (rank 1: optimizer.step() has not used the last averaged gradients" in innocent


# Another optimizer's pass


class Gan:
    """A discriminator, whose optimizer is attached with compression, and a generator."""

    def __init__(self, compression: Any) -> None:
        torch.manual_seed(0)
        self.d, self.g = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(3, 6, dtype=torch.float64)
        self.opt_d, self.opt_g = sgd(self.d), sgd(self.g)
        self.red_d = pycomm.attach(self.opt_d, self.d, compression=compression, timeout=30)
        self.red_g = pycomm.attach(self.opt_g, self.g, timeout=30)

    def losses(self, step: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, z = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (6, 3))
        return lambda: (self.d(x) ** 2).mean(), lambda: (self.d(self.g(z)) ** 3).mean()

    def close(self) -> None:
        self.red_d.detach()
        self.red_g.detach()


def gan(compression: Any, torch_transport: bool) -> None:
    with over_torch(torch_transport):
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


@pytest.mark.parametrize("torch_transport", [False, True])
def test_a_generators_pass_through_its_discriminator(two_ranks: RankPool, torch_transport: bool) -> None:
    two_ranks.run(gan, pycomm.TopK(1.0), torch_transport)
    two_ranks.run(gan, None, torch_transport)


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


def a_scaler_skips() -> None:
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


def test_skipped_steps_are_no_mistake(two_ranks: RankPool) -> None:
    two_ranks.run(a_scaler_skips)


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


def test_a_step_left_out_on_purpose(two_ranks: RankPool) -> None:
    two_ranks.run(left_out_on_purpose, True)
    for error in two_ranks.errors(left_out_on_purpose, False):
        assert "a step that is left out on purpose wants reducer.skip_step()" in str(error)


class Sharpness(torch.optim.SGD):
    """As SAM: climbs by the gradients that are there, asks for others, steps by those from where it began."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
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


def sharpness(compression: Any) -> None:
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


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
def test_optimizers_that_ask_twice(two_ranks: RankPool, compression: Any) -> None:
    two_ranks.run(sharpness, compression)


def stops_in_the_middle(torch_transport: bool) -> str:
    """Rank 1 fails after its first buckets have gone: what it says is not taken for a gradient."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with over_torch(torch_transport):
        reducer = pycomm.attach(optimizer, model, timeout=50, bucket_mb=0.0001)
    loss_of(model, rank, 0).backward()
    optimizer.zero_grad()
    if rank == 1:
        model[0].bias.register_hook(lambda grad: exec("raise ArithmeticError('out of memory, say')"))
    before, started = [p.detach().clone() for p in model.parameters()], time.monotonic()
    with pytest.raises((RuntimeError, ValueError, ArithmeticError)) as raised:
        loss_of(model, rank, 1).backward()
    if rank == 1:
        time.sleep(2)  # it caught the exception, and does something else
    assert time.monotonic() - started < 25
    assert all(p.grad is None for p in model.parameters()) or rank == 1
    if rank == 1:
        with pytest.raises(RuntimeError, match="ended with an exception after part of its gradients had been sent"):
            optimizer.step()
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, b)
    reducer.detach()
    return str(raised.value)


@pytest.mark.parametrize("torch_transport", [False, True])
def test_a_rank_that_stops_in_the_middle(two_ranks: RankPool, torch_transport: bool) -> None:
    innocent, guilty = two_ranks.run(stops_in_the_middle, torch_transport)
    assert "out of memory, say" in guilty
    assert "rank 1" in innocent
