"""Closures, passes of one rank alone, ranks that are out of step or stop."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, over_tcp, own_state
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

# optimizer.step(closure)


def closures(compression: Any, fused: bool, keyword: bool) -> None:
    """Train as Lightning does: the last backward of a window runs inside the closure."""
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
@on_ranks(2)
def test_closures_in_windows(fused: bool, keyword: bool) -> None:
    closures(None, fused, keyword)


@on_ranks(2)
def test_closures_in_windows_with_error_feedback() -> None:
    closures(pycomm.TopK(1.0), False, True)


# paused()


@pytest.mark.pairwise
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", [[0], [0, 1]])
@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@on_ranks(2)
def test_a_pass_inside_paused_is_local(compression: Any, set_to_none: bool, who: list[int]) -> None:
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


@pytest.mark.behavior(
    "Passes and steps",
    "leave the gradient of a pass inside `paused()` in `.grad`",
    "Error at the next backward or step, and on the other ranks.",
)
@pytest.mark.parametrize("named", [True, False])
@on_ranks(2)
def test_what_a_paused_pass_left_must_go(named: bool) -> None:
    rank = dist.get_rank()
    says = "the gradient of '.*' is still what a backward\\(\\) inside reducer.paused\\(\\) left"
    for when in ("backward", "step", "step after the average"):
        model = make_model()
        optimizer = sgd(model)
        reducer = pycomm.attach(
            optimizer, model.named_parameters() if named else model, tuning=pycomm.Tuning(timeout=30)
        )
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


def leftover_of_one_rank(over_hosts: bool) -> str:
    """The rank that is right is told at once, not at the timeout."""
    rank = dist.get_rank()
    model = make_model()
    with over_tcp(over_hosts):
        reducer = pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=50))
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


@pytest.mark.behavior(
    "Passes and steps",
    "leave the gradient of a pass inside `paused()` in `.grad`",
    "Error at the next backward or step, and on the other ranks.",
)
@pytest.mark.parametrize("over_hosts", [False, True])
def test_the_others_are_told(two_ranks: RankPool, over_hosts: bool) -> None:
    guilty, innocent = two_ranks.run(leftover_of_one_rank, over_hosts)
    assert "is still what a backward() inside reducer.paused() left" in guilty
    assert "rank 0 gave up (rank 0: the gradient of '" in innocent


@on_ranks(2)
def test_not_inside_a_window() -> None:
    model = make_model()
    with attached(sgd(model), model, accumulate=2) as reducer:
        loss_of(model, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="paused\\(\\) inside an accumulation window"):
            with reducer.paused():
                pass
        loss_of(model, dist.get_rank(), 0).backward()


# Ranks that are out of step


def one_extra(named: bool, over_hosts: bool, compression: Any) -> str:
    """Run a pass without paused(): the next reduction says so, on every rank, and names the rank."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with over_tcp(over_hosts):
        reducer = pycomm.attach(
            optimizer,
            model.named_parameters() if named else model,
            tuning=pycomm.Tuning(timeout=50),
            compression=compression,
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


@pytest.mark.behavior(
    "Passes and steps",
    "`the ranks are out of step: ...`",
    "A rank ran a pass or step that others did not: look for `if rank == 0:`. Put local passes into `paused()`.",
)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("over_hosts", [False, True])
def test_ranks_out_of_step_are_told(two_ranks: RankPool, named: bool, over_hosts: bool) -> None:
    for says in two_ranks.run(one_extra, named, over_hosts, None):
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


# A rank that stops


def stops_in_the_middle(over_hosts: bool) -> str:
    """Rank 1 fails after its first buckets have gone: what it says is not taken for a gradient."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with over_tcp(over_hosts):
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=50, bucket_mb=0.0001))
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


@pytest.mark.parametrize("over_hosts", [False, True])
def test_a_rank_that_stops_in_the_middle(two_ranks: RankPool, over_hosts: bool) -> None:
    innocent, guilty = two_ranks.run(stops_in_the_middle, over_hosts)
    assert "out of memory, say" in guilty
    assert "rank 1" in innocent
