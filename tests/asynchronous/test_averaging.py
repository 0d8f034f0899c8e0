"""``local_sgd``: what ranks come to that meet every so many steps is what one process comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError
from tests.asynchronous.averaged import HALVES, Course, flat
from tests.asynchronous.runs import loss_of, model_of
from tests.ddp.test_gradients import NEW, lost_by
from tests.on_ranks import Pools, on_ranks
from tests.reducer.models import close
from tests.survival.training import die

TIMEOUT = 110.0
STEPS = 13
OUTERS = [None, pycomm.Nesterov(0.7, 0.9)]


@pytest.mark.pairwise
@pytest.mark.parametrize("outer", OUTERS, ids=["local SGD", "DiLoCo"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("delay", "top"), [(0, None), (1, None), (3, None), (0, 0.2), (2, 0.2)])
@on_ranks(2, 3, timeout=TIMEOUT)
def test_it_is_what_one_process_comes_to(
    outer: pycomm.Nesterov | None, fragments: int, delay: int, top: float | None
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model_of()
    if rank > 0:
        with torch.no_grad():
            next(model.parameters()).zero_()  # rank 0's is copied
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    compression = None if top is None else pycomm.TopK(top)
    options: dict[str, Any] = {"outer": outer, "fragments": fragments, "delay": delay, "compression": compression}
    handle = pycomm.local_sgd(optimizer, model, every=4, timeout=60, **options)
    handle.set_weight(rank + 1)
    course = Course(size, STEPS, outer=outer, delay=delay, top=top)
    if fragments == 2:
        course.turns = HALVES
    for step, wanted in enumerate(course.expected()):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), wanted[rank], rtol=1e-12, atol=1e-12)
    stats, met = (
        handle.stats(),
        [piece for step in range(STEPS) for piece, turn in course.turns if step % 4 + 1 == turn],
    )
    if delay == 0:
        assert stats["meetings"] == len(met)
    if delay == 0 and top is None:
        values = 8 * sum(piece.stop - piece.start for piece in met)
        assert 0 <= stats["bytes_sent"] - values <= stats["meetings"] * 8 * 200  # flags travel too
    handle.meet()
    if top is None:
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, flat(model))
        assert all(torch.equal(other, everyones[0]) for other in everyones)
    handle.detach()
    handle.detach()


@pytest.mark.parametrize("method", NEW, ids=repr)
@on_ranks(3, timeout=TIMEOUT)
def test_outer_gradients_lose_nothing_in_parts(method: Any) -> None:
    """With a plain outer step, parameters move by what was received; that and what is left is the mean of moves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.local_sgd(
        optimizer, model, every=2, outer=pycomm.Nesterov(1.0, 0.0), compression=method, timeout=60
    )
    came, start = torch.zeros_like(flat(model)), flat(model)
    for step in range(6):
        before = flat(model)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        alone = before - 0.05 * torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        if step % 2 == 0:
            anchor = before
        optimizer.step()
        if step % 2 == 1:  # they have met
            moved = alone - anchor
            dist.all_reduce(moved)
            came += moved / size
    left, own = [], handle.state_dict()["compression"]
    for name, p in model.named_parameters():
        residual = own.get(name, {}).get("residual", torch.zeros_like(p)).double()
        left.append(residual.reshape(-1))
    unsent = torch.cat(left)
    dist.all_reduce(unsent)
    everyones = [torch.empty_like(came) for _ in range(size)]
    dist.all_gather(everyones, flat(model))
    assert all(torch.equal(other, everyones[0]) for other in everyones)
    close(flat(model) - start - unsent, came, lost_by(method))
    handle.detach()


@pytest.mark.parametrize("fragments", [1, 2])
@on_ranks(3, timeout=TIMEOUT)
def test_elastic_averaging_is_what_one_process_comes_to(fragments: int) -> None:
    rank, size, every, pull = dist.get_rank(), 3, 4, 0.8 / 3
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    outer = pycomm.Elastic(0.8)
    handle = pycomm.local_sgd(optimizer, model, every=every, outer=outer, fragments=fragments, timeout=60)
    models = [model_of() for _ in range(size)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in models]
    center = flat(models[0])
    for step in range(STEPS):
        for number, (each, its) in enumerate(zip(models, optimizers, strict=True)):
            its.zero_grad()
            loss_of(each, number, step).backward()
            its.step()
        for piece, turn in HALVES if fragments == 2 else [(slice(None), every)]:
            if step % every + 1 == turn:
                now = torch.stack([flat(each) for each in models])
                apart = now[:, piece] - center[piece]
                now[:, piece] -= pull * apart
                center[piece] += pull * apart.sum(0)
                for each, values in zip(models, now, strict=True):
                    torch.nn.utils.vector_to_parameters(values.clone(), each.parameters())
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), flat(models[rank]), rtol=1e-12, atol=1e-12)
    handle.take_center()
    torch.testing.assert_close(flat(model), center, rtol=1e-12, atol=1e-12)
    handle.detach()


@pytest.mark.parametrize("strength", [0, 1.5, -0.1, float("nan"), "0.9", None])
def test_an_elastic_strength_is_checked(strength: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="strength is .*, wanted a number"):
        pycomm.Elastic(strength)


@pytest.mark.parametrize(
    "options",
    [{}, {"delay": 3, "compression": pycomm.TopK(0.2)}, {"outer": pycomm.Elastic()}],
    ids=["plain", "under way", "elastic"],
)
@on_ranks(2, timeout=TIMEOUT)
def test_it_goes_on_from_its_state(options: dict[str, Any]) -> None:
    rank, ends = dist.get_rank(), []
    options = {"every": 4, "outer": pycomm.Nesterov(), "fragments": 2, "timeout": 60, **options}
    has_velocity = isinstance(options["outer"], pycomm.Nesterov)
    for interrupted in (False, True):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = pycomm.local_sgd(optimizer, model, **options)
        for step in range(STEPS):
            if interrupted and step == 6:
                state, weights = handle.state_dict(), model.state_dict()
                handle.detach()
                model = model_of()
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                handle = pycomm.local_sgd(optimizer, model, **options)
                model.load_state_dict(weights)  # each rank's own
                handle.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        ends.append(flat(model))
        with pytest.raises(ValueError, match="not a LocalAverager"):
            handle.load_state_dict({})
        velocities = {} if has_velocity else {"0.weight": torch.zeros(5, 6)}
        state = {**handle.state_dict(), "velocities": velocities}
        with pytest.raises(ValueError, match="another outer optimizer"):
            handle.load_state_dict(state)
        state = {**handle.state_dict(), "compression": {"other": {}}}
        with pytest.raises(ValueError, match="compression"):
            handle.load_state_dict(state)
        handle.detach()
    assert torch.equal(ends[0], ends[1])


def contributions(state: dict[str, Any]) -> torch.Tensor:
    """Return the residuals in a state, flat; rounded as they are kept."""
    entries = state["compression"].items()
    return torch.cat([entry["residual"].double().reshape(-1) for _, entry in sorted(entries)])


def trained(handle: Any, model: torch.nn.Module, steps: range, rank: int) -> None:
    for step in steps:
        handle.optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        handle.optimizer.step()


METHODS = [pycomm.ChunkTopK(8, decay=0.95), pycomm.TopK(0.2), pycomm.Int8(), pycomm.PowerSGD(1)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("how", ["rank 0's on all", "of fewer ranks", "another order", "their own"])
@on_ranks(3, timeout=TIMEOUT)
def test_the_sum_of_residuals_is_kept_whoever_loads_them(how: str, method: Any) -> None:
    rank = dist.get_rank()
    options: dict[str, Any] = {"every": 2, "outer": pycomm.Nesterov(1.0, 0.0), "timeout": 60}
    few = dist.new_group([0, 1])
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.local_sgd(optimizer, model, compression=method, **options)
    trained(handle, model, range(6), rank)
    state = handle.state_dict()
    handle.detach()
    assert state["identity"] == {"rank": rank, "world_size": 3}
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, state)
    wanted = torch.stack([contributions(each) for each in states]).sum(0)
    assert wanted.abs().max() > 1e-4
    group = few if how == "of fewer ranks" else dist.group.WORLD
    if how == "of fewer ranks" and rank == 2:
        return
    given = {"rank 0's on all": 0, "another order": (rank + 1) % 3}.get(how, rank)
    again = model_of()
    handle = pycomm.local_sgd(
        torch.optim.SGD(again.parameters(), 0.05), again, compression=method, process_group=group, **options
    )
    again.load_state_dict(model.state_dict())
    handle.load_state_dict(states[given])
    loaded: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(loaded, contributions(handle.state_dict()), group=group)
    torch.testing.assert_close(torch.stack(loaded).sum(0), wanted, rtol=1e-5, atol=1e-7)
    if how == "their own":
        assert torch.equal(loaded[rank], contributions(state))
    trained(handle, again, range(6, 8), rank)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_a_state_without_residuals_loads_anywhere() -> None:
    rank, ends = dist.get_rank(), []
    for given in (rank, 0):
        model = model_of()
        handle = pycomm.local_sgd(
            torch.optim.SGD(model.parameters(), 0.05), model, every=2, outer=pycomm.Nesterov(), timeout=60
        )
        trained(handle, model, range(4), rank)
        states: list[Any] = [None] * 2
        if rank == 0 or given:  # not collective: rank 0 may save alone
            states[rank] = handle.state_dict()
        dist.broadcast_object_list(states, 0)
        if given:
            states[rank] = handle.state_dict()
        handle.detach()
        again = model_of()
        handle = pycomm.local_sgd(
            torch.optim.SGD(again.parameters(), 0.05), again, every=2, outer=pycomm.Nesterov(), timeout=60
        )
        again.load_state_dict(model.state_dict())
        handle.load_state_dict(states[given])
        trained(handle, again, range(4, 8), rank)
        ends.append(flat(again))
        handle.detach()
    assert torch.equal(ends[0], ends[1])


@on_ranks(2, timeout=TIMEOUT)
def test_a_state_that_does_not_fit_one_rank_is_an_error_on_all() -> None:
    model = model_of()
    handle = pycomm.local_sgd(
        torch.optim.SGD(model.parameters(), 0.05), model, every=2, compression=pycomm.TopK(0.2), timeout=60
    )
    trained(handle, model, range(2), dist.get_rank())
    state = handle.state_dict()
    before = contributions(state)
    wrong = {**state, "compression": {}} if dist.get_rank() == 1 else state
    with pytest.raises(ValueError, match=r"state\['compression'\] is of another compression"):
        handle.load_state_dict(wrong)
    assert torch.equal(contributions(handle.state_dict()), before)
    handle.detach()


def make(options: dict[str, Any]) -> None:
    model = model_of(options.pop("dtype", torch.float32))
    other = options.pop("other", None)
    if other is not None and dist.get_rank() == 1:
        options |= other
    params = list(model.parameters())[: options.pop("params", None)]
    pycomm.local_sgd(torch.optim.SGD(params, 0.1), model, timeout=60, **options).detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": 2, "fragments": 3}, "fragments=3, wanted at most every=2"),
        ({"every": 4, "outer": "sgd"}, "outer is 'sgd', wanted None, a pycomm.Nesterov or a pycomm.Elastic"),
        ({"every": 4, "outer": pycomm.Elastic(), "delay": 1}, "delay=1 with outer=Elastic(strength=0.9), wanted 0"),
        (
            {"every": 4, "outer": pycomm.Elastic(), "compression": "fp16"},
            "compression=FP16() with outer=Elastic(strength=0.9), wanted None: ranks stay apart",
        ),
        ({"every": 4, "outer": pycomm.Elastic(), "other": {"outer": None}}, "the ranks disagree: setting"),
        ({"every": 4, "delay": 4}, "delay=4, wanted less than every=4"),
        ({"every": 4, "delay": -1}, "delay"),
        ({"every": 4, "compression": "topk"}, "compression is 'topk'"),
        ({"every": 4, "compression": "auto"}, "name a method"),
        ({"every": 4, "on_failure": "ignore"}, "on_failure is 'ignore'"),
        ({"every": 4, "other": {"delay": 1}}, "the ranks disagree: setting"),
        ({"every": 4, "params": 3}, "does not belong to the optimizer"),
        ({"every": 4, "other": {"every": 5}}, "the ranks disagree: setting"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, (ValueError, TypeError)), outcome.trace
        assert problem in str(outcome.error)


def lose_one() -> int:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    pycomm.local_sgd(optimizer, model, every=3, timeout=60)
    for step in range(6):
        if dist.get_rank() == 1 and step == 4:
            die()
        try:
            optimizer.step()
        except CommError:
            return step
    return -1


def test_a_rank_that_dies_is_an_error_at_the_next_meeting(new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(lose_one, timeout=TIMEOUT)
    assert [outcomes[0].result, outcomes[2].result] == [5, 5]


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_parameter_that_is_not_finite_is_named_on_every_rank() -> None:
    for compression in (None, pycomm.Int8()):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = pycomm.local_sgd(optimizer, model, every=2, compression=compression, timeout=60)
        optimizer.step()
        if dist.get_rank() == 1:
            list(model.parameters())[3].data[1] = float("nan")
        with pytest.raises(RuntimeError, match=r"'2\.bias' is not finite on rank 1"):
            optimizer.step()
        handle.detach()


@on_ranks(2, timeout=TIMEOUT)
def test_a_meeting_after_no_step_changes_nothing() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.local_sgd(optimizer, model, every=2, outer=pycomm.Nesterov(), timeout=60)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    before = flat(model)
    handle.meet()
    handle.meet()
    assert torch.equal(flat(model), before)
    assert handle.stats()["meetings"] == 2
    optimizer.step()
    handle.meet()
    assert not torch.equal(flat(model), before)
    handle.detach()
