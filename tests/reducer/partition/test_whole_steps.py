"""Steps of any optimizer that ranks take together, each for whole parameters of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reducer.partition.trial import NUM_STEPS
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, grouped
from tests.reducer.partition import test_same_steps as bodies
from tests.reducer.partition.stepping import (
    SHAPES,
    Weights,
    assert_same,
    assert_unusable_until_loaded,
    backward,
    gradients_of,
    rank,
    values_of,
)
from tests.reducer.partition.whole_optimizers import (
    OPTIMIZERS,
    Averaging,
    Bounded,
    CallingItself,
    ClippingAll,
    ClippingGroups,
    CountingApart,
    CountingForAll,
    DecayingAll,
    DecayingByAll,
    Estimating,
    KeepingElsewhere,
    KeepingInParameters,
    KeepingTensors,
    Orthogonal,
    PreparingOnce,
)

SHARDS: dict[str, Any] = {
    "optimizer": "optimizer",
    "all gradients": pycomm.Sharding("optimizer", grads="full"),
    "parameters": "parameters",
}


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    *parts: bodies.Body,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Any]:
    """Return what the ``parts`` leave, run with a new model that is attached with ``options``."""
    model = Weights(dtype)
    optimizer = make(model.parameters())
    if dtype is not torch.float32:
        pycomm.master_weights(optimizer)
    with attached(optimizer, model, bucket_mb=0.005, **options) as reducer:
        for part in parts:
            part(reducer, optimizer, model)
        if isinstance(optimizer, Averaging):
            optimizer.eval()
            assert_replicas_equal(model)
            shown = flat_values_of(optimizer)[0]
            optimizer.train()
        found = flat_values_of(optimizer)
        assert_replicas_equal(model)
    assert_same(flat_values_of(optimizer), found)  # whole again after detach()
    return [[*shown, *found[0]] if isinstance(optimizer, Averaging) else found[0], found[1]]


def flat_values_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return :func:`values_of`, where a list is a tensor."""
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    return [params, {i: {k: torch.as_tensor(v).clone() for k, v in entry.items()} for i, entry in state.items()}]


@on_ranks(3)
def test_every_optimizer_has_the_bits_of_a_step_alone() -> None:
    for make in OPTIMIZERS.values():
        wanted = trained(make, bodies.few_steps, bodies.few_steps)
        assert_same(trained(make, bodies.few_steps, bodies.few_steps, shard="optimizer"), wanted)


@on_ranks(3)
def test_hosts() -> None:
    with on_hosts("aab"):
        for name in ("Orthogonal", "Replacing", "Averaging"):
            wanted = trained(OPTIMIZERS[name], bodies.few_steps, bodies.few_steps)
            assert_same(trained(OPTIMIZERS[name], bodies.few_steps, bodies.few_steps, shard="optimizer"), wanted)


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(2)
def test_all_that_training_does(shard: str) -> None:
    for last in (bodies.clipped_steps, bodies.new_parameters):
        parts = (bodies.few_steps, bodies.schedules, bodies.missing_gradients, last)
        assert_same(trained(Averaging, *parts, shard=SHARDS[shard]), trained(Averaging, *parts))
    windows = (bodies.windows, bodies.windows)
    assert_same(
        trained(Orthogonal, *windows, accumulate=2, shard=SHARDS[shard]), trained(Orthogonal, *windows, accumulate=2)
    )


@on_ranks(2)
def test_a_step_that_fails_on_one_rank_in_the_trial_is_an_error_of_all() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        backward(model.parameters(), gradients_of(rank(), 0))
        if rank() == 1:
            optimizer.state[model.weights[0]]["momentum"] = "none"
        found, text = (AttributeError, "mul_") if rank() == 1 else (ValueError, "rank 1 could not step its own .*mul_")
        with pytest.raises(found, match=text):
            optimizer.step()
        optimizer.state.clear()
        pycomm.broadcast_parameters(model)  # the others have taken it
        steps(optimizer, model, 1, 2)


@on_ranks(2)
def test_parameters_that_join_frozen_in_the_trial() -> None:
    def joining(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, 1)
        late = nn.Parameter(torch.full((4, 3), 0.5), requires_grad=False)
        model.register_parameter("late", late)
        optimizer.add_param_group({"params": [late]})
        for step in range(1, NUM_STEPS + 3):
            late.requires_grad_(step > NUM_STEPS)
            optimizer.zero_grad()
            model()  # where new parameters are noticed
            thawed = [late] if late.requires_grad else []
            grads = [*gradients_of(rank(), step), torch.full((4, 3), 1.0 + rank())]
            backward([*model.weights, *thawed], grads[: len(SHAPES) + len(thawed)])
            optimizer.step()

    assert_same(trained(Orthogonal, joining, shard="optimizer"), trained(Orthogonal, joining))


def late_steps(optimizer: torch.optim.Optimizer, model: Weights, number: int, late: list[nn.Parameter]) -> None:
    for step in range(number):
        optimizer.zero_grad()
        model()  # where new parameters are noticed
        grads = [*gradients_of(0, step)[: len(SHAPES)], *(torch.full(p.shape, 1.0 + i) for i, p in enumerate(late))]
        backward([*model.weights, *late], grads)
        optimizer.step()


@on_ranks(2)
def test_half_precision_parameters_that_come_after_the_trial() -> None:
    def body(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, NUM_STEPS + 1)
        late = [nn.Parameter(torch.full((90, 80), 0.5 + i, dtype=torch.bfloat16)) for i in range(2)]
        for number, param in enumerate(late):
            model.register_parameter(f"late{number}", param)
        optimizer.add_param_group({"params": late})
        late_steps(optimizer, model, NUM_STEPS + 1, late)

    half: Any = torch.bfloat16
    assert_same(trained(PreparingOnce, body, shard="optimizer", dtype=half), trained(PreparingOnce, body, dtype=half))


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@on_ranks(2)
def test_parameters_that_come_after_the_trial_are_tried(hosts: str) -> None:
    model = Weights()
    optimizer = ClippingGroups(model.parameters())
    with on_hosts(hosts), attached(optimizer, model, shard="optimizer") as reducer:
        steps(optimizer, model, 0, NUM_STEPS + 1)
        late = [nn.Parameter(torch.full((90, 80), 0.5 + i)) for i in range(2)]
        for number, param in enumerate(late):
            model.register_parameter(f"late{number}", param)
        optimizer.add_param_group({"params": late, "clips": True})
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(ValueError, match="its step depends on all gradients together"):
                late_steps(optimizer, model, 1, late)
        whole: Any = reducer._table.partition.whole  # type: ignore[union-attr]
        assert {whole.owners.of(p) for p in late} == {0, 1}
        assert all(map(torch.equal, model.parameters(), before))  # nobody has taken the step
        optimizer.param_groups[-1]["clips"] = False
        for number in range(NUM_STEPS):
            assert {id(p) for p in whole._newcomers} == {id(p) for p in late}, number
            late_steps(optimizer, model, 1, late)
        assert not whole._newcomers
        assert_replicas_equal(model)


@on_ranks(2)
def test_state_of_parameters_that_come_after_the_trial() -> None:
    """Each rank makes that of others' new parameters for its trial, and keeps it there only."""

    def body(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, NUM_STEPS + 1)
        late = [nn.Parameter(torch.full((4, 3), 0.5 + i)) for i in range(2)]
        for number, param in enumerate(late):
            model.register_parameter(f"late{number}", param)
        optimizer.add_param_group({"params": late})
        late_steps(optimizer, model, NUM_STEPS + 1, late)

    assert_same(trained(PreparingOnce, body, shard="optimizer"), trained(PreparingOnce, body))


@on_ranks(2)
def test_gradients_that_travel_in_half_precision() -> None:
    wanted = trained(Orthogonal, bodies.few_steps, bodies.few_steps, compression="bf16")
    found = trained(Orthogonal, bodies.few_steps, bodies.few_steps, compression="bf16", shard="optimizer")
    assert_same(found, wanted)


SCALERS = [lambda: torch.amp.GradScaler("cpu", 2.0**4), lambda: pycomm.LossScaler(2.0**4)]


def skipped_steps(make: Callable[[], Any], shard: str | None) -> tuple[list[Any], float]:
    """Return the parameters and the scale after steps two of which have a gradient that is not finite on rank 1."""
    scaler, model = make(), Weights()
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard=shard, loss_scaler=scaler):
        for step in range(8):
            optimizer.zero_grad()
            grads = gradients_of(rank(), step)
            if step in (1, 6) and rank() == 1:
                grads[4][0] = torch.inf
            backward(model.parameters(), grads, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        assert_replicas_equal(model)
        return flat_values_of(optimizer), scaler.get_scale()


@pytest.mark.parametrize("make", SCALERS)
@on_ranks(2)
def test_scalers_skip_on_all_ranks(make: Any) -> None:
    (found, scale), (wanted, its_scale) = skipped_steps(make, "optimizer"), skipped_steps(make, None)
    assert_same(found, wanted)
    assert scale == its_scale < 2.0**4


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(p for p in params if p.numel() > 0)  # it divides by the number of elements


HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", HALF)
@on_ranks(3)
def test_masters_of_half_precision_parameters(dtype: str) -> None:
    for name in ("Orthogonal", "NAdam", "Replacing"):
        parts = (bodies.few_steps, bodies.schedules, bodies.missing_gradients, bodies.clipped_steps)
        wanted = trained(OPTIMIZERS[name], *parts, dtype=HALF[dtype])
        assert_same(trained(OPTIMIZERS[name], *parts, dtype=HALF[dtype], shard="optimizer"), wanted)
    wanted = trained(
        torch.optim.Adagrad, bodies.few_steps, bodies.few_steps, dtype=HALF[dtype]
    )  # no kernels for masters
    assert_same(
        trained(torch.optim.Adagrad, bodies.few_steps, bodies.few_steps, dtype=HALF[dtype], shard="parameters"), wanted
    )


@on_ranks(3)
def test_masters_on_hosts() -> None:
    parts = (bodies.few_steps, bodies.few_steps)
    with on_hosts("aab"):
        wanted = trained(Orthogonal, *parts, dtype=torch.bfloat16)
        assert_same(trained(Orthogonal, *parts, dtype=torch.bfloat16, shard="optimizer"), wanted)


@pytest.mark.parametrize("bound", [0.0, 5.0])
@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(2)
def test_masters_and_a_loss_scaler(shard: str, bound: float) -> None:
    found = []
    for options in ({}, {"shard": SHARDS[shard]}):
        parts = [bodies.half_steps(torch.float16, bound, skipped=number) for number in (1, 2)]
        scaler = pycomm.LossScaler(2.0**4)
        found.append(trained(Orthogonal, *parts, dtype=torch.float16, loss_scaler=scaler, **options))
    assert_same(found[1], found[0])


@on_ranks(3)
def test_each_rank_keeps_masters_of_its_own_parameters() -> None:
    model = Weights(torch.bfloat16)
    optimizer = Orthogonal(model.parameters())
    handle = pycomm.master_weights(optimizer)
    with attached(optimizer, model, shard="optimizer") as reducer:
        steps(optimizer, model, 0, NUM_STEPS + 2)
        own = [p for p in model.parameters() if reducer._table.partition.whole.owners.is_own(p)]  # type: ignore[union-attr]
        assert 0 < len(own) < len(SHAPES)
        assert len(handle.masters()) == len(own)
        saved = optimizer.state_dict()["state"]
        assert all(saved[i]["master_weight"].dtype == torch.float32 for i in range(len(SHAPES)))
    assert len(handle.masters()) == len(SHAPES)


@pytest.mark.parametrize("make", [OPTIMIZERS["NAdam"], OPTIMIZERS["Adadelta"], adafactor])
@on_ranks(2)
def test_gradients_that_are_not_finite_in_the_trial(make: Any) -> None:
    """Without a scaler they are stepped, as without shard; the trial does not take them for a coupling."""

    def not_finite(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        for step in range(NUM_STEPS + 4):
            optimizer.zero_grad()
            grads = gradients_of(rank(), step)
            if step in (1, 2) and rank() == 1:
                grads[0][2] = torch.nan
                grads[4][3] = torch.inf
            backward(model.parameters(), grads)
            optimizer.step()
            if reducer._settings.shard is not None:
                assert reducer._table.partition.whole.is_dealt == (step >= NUM_STEPS - 1)  # type: ignore[union-attr]

    ends = []
    for shard in (None, "optimizer"):
        model = Weights()
        optimizer = make(model.parameters())
        with attached(optimizer, model, bucket_mb=0.005, shard=shard) as reducer:
            not_finite(reducer, optimizer, model)
            found = flat_values_of(optimizer)
        assert any(not torch.isfinite(p).all() for p in found[0])
        assert all(torch.isfinite(p).all() for p in found[0] if p.shape == SHAPES[6])
        ends.append([[p.nan_to_num(7.0) for p in found[0]], found[1]])
        everyones = [torch.empty(sum(p.numel() for p in ends[-1][0])) for _ in range(2)]
        dist.all_gather(everyones, torch.cat([p.flatten() for p in ends[-1][0]]))
        assert torch.equal(*everyones)
    for entry in (*ends[0][1].values(), *ends[1][1].values()):
        entry.update({key: value.nan_to_num(7.0) for key, value in entry.items()})
    assert_same(ends[1], ends[0])


@on_ranks(3)
def test_state_is_kept_by_owners_and_the_step_is_shared_out() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)), nn.Linear(64, 3))
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard="optimizer") as reducer:
        for step in range(NUM_STEPS + 1):
            shares = reducer.stats()["step_shares"]
            assert len(optimizer.state) == (11 if step else 0)
            train_on(model, optimizer, step)
        own = [p for p in model.parameters() if reducer._table.partition.whole.owners.of(p) == rank()]  # type: ignore[union-attr]
        assert {id(p) for p in optimizer.state} == set(map(id, own))
        optimizer.zero_grad()
        loss = model(torch.full((2, 64), 1.0 + rank())).square().sum()
        local = dict(zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True))
        model(torch.full((2, 64), 1.0 + rank())).square().sum().backward()
        assert all(torch.equal(p.grad, g) != any(p is q for q in own) for p, g in local.items() if p.grad is not None)
        optimizer.step()
        shares = reducer.stats()["step_shares"]
        assert sum(share["parameters"] for share in shares.values()) == 11
        assert shares[rank()]["parameters"] == len(own)
        assert all(0.1 < share["share"] < 0.7 for share in shares.values()), shares
        assert len(optimizer.state_dict()["state"]) == 11


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 64), 0.1 * step + rank())).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (ClippingAll, r"it steps a parameter of shape .* otherwise: its step depends on all gradients"),
        (DecayingByAll, "it steps a parameter of shape .* otherwise: its step depends on all gradients"),
        (Bounded, "it steps a parameter of shape .* otherwise: its step depends on all gradients"),
        (Estimating, r"it has seen=\S+ after a step, and with these"),
    ],
)
@on_ranks(2)
def test_an_optimizer_that_couples_parameters_is_an_error_of_all_ranks(make: Any, match: str) -> None:
    model, alone = Weights(), Weights()
    optimizer, other = make(model.parameters()), make(alone.parameters())
    with attached(optimizer, model, shard="optimizer"), attached(other, alone):
        for one, its_model in ((optimizer, model), (other, alone)):
            backward(its_model.parameters(), gradients_of(rank(), 0))
            if one is optimizer:
                prefix = r"(rank \d could not step its own parameters alone, as shard= requires of \w+: )?"
                with pytest.raises(
                    ValueError, match=prefix + "with other gradients of some parameters, or none, " + match
                ):
                    one.step()
            else:
                one.step()
    assert_same([values_of(optimizer)[0], {}], [values_of(other)[0], {}])  # the step has been taken, by all
    optimizer.zero_grad()
    backward(model.parameters(), gradients_of(rank(), 1))
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (DecayingAll, "it changes a parameter of shape .* without a gradient, which another rank steps"),
        (CountingApart, r"it has state.all.seen=\S+ after a step"),
        (KeepingElsewhere, r"it has kept.\d=.* or it keeps a parameter's state elsewhere than in optimizer.state"),
        (CallingItself, "a copy of it, stepped to try it, writes to its state"),
        (CountingForAll, "it steps a parameter of shape .* otherwise"),
        (
            KeepingInParameters,
            "otherwise than a copy of it just before: it keeps state elsewhere than in",
        ),
        (KeepingTensors, "its state of a parameter is a Tensor, wanted a dict"),
    ],
)
@on_ranks(2)
def test_an_optimizer_that_cannot_be_shared_out_is_found_in_the_trial(make: Any, match: str) -> None:
    model = Weights()
    optimizer = make(model.parameters())
    with attached(optimizer, model, shard="optimizer"), pytest.raises(ValueError, match=match):
        steps(optimizer, model, 0, NUM_STEPS)
    assert all(isinstance(key, str) or any(key is p for p in model.parameters()) for key in optimizer.state)


@on_ranks(2)
def test_steps_too_small_to_show_a_coupling_end_no_trial() -> None:
    model = Weights()
    optimizer = ClippingAll(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        optimizer.param_groups[0]["lr"] = 1e-9
        steps(optimizer, model, 0, NUM_STEPS + 2)
        optimizer.param_groups[0]["lr"] = 0.05
        with pytest.raises(ValueError, match="its step depends on all gradients"):
            steps(optimizer, model, NUM_STEPS + 2, NUM_STEPS + 3)


@on_ranks(2)
def test_gradients_that_are_written_are_refused_from_the_first_step_on() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        for step in range(NUM_STEPS + 2):
            optimizer.zero_grad()
            backward(model.parameters(), gradients_of(rank(), step))
            if step in (0, NUM_STEPS + 1):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                with pytest.raises(ValueError, match="clip by reducer"):
                    optimizer.step()
            else:
                optimizer.step()


@on_ranks(2)
def test_uneven_shares_are_told() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 2, bias=False))
    optimizer = Orthogonal(model.parameters())
    said: list[str] = []
    with attached(optimizer, model, shard="optimizer") as reducer, log_of(said):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 256), 0.1 * step + rank())).square().sum().backward()
            optimizer.step()
        assert reducer.stats()["step_shares"][0]["parameters"] == 1
    assert [line[:50] for line in said] == ["the optimizer's step is shared out unevenly: rank "[:50]] * (rank() == 0)


@contextmanager
def log_of(said: list[str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        from pycomm.training.reducer.partition import owners

        patch.setattr(owners._LOG, "warning", lambda text, *args: said.append(text % args))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(True, False), (True, True), (False, True)])
@on_ranks(3)
def test_checkpoints(before: bool, after: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Written by ranks that step together, or not, and read by such as do, or not."""

    def made() -> tuple[Weights, torch.optim.Optimizer]:
        model = Weights(dtype)
        optimizer = Orthogonal(model.parameters())
        if dtype is not torch.float32:
            pycomm.master_weights(optimizer)
        return model, optimizer

    wanted = trained(Orthogonal, lambda r, o, m: steps(o, m, 0, 9), dtype=dtype)
    size = dist.get_world_size()
    model, optimizer = made()
    folder = tmp_path / str(size)
    with attached(optimizer, model, shard="optimizer" if before else None) as reducer:
        steps(optimizer, model, 0, 5)
        pycomm.save(folder, reducer).wait()
    other, optimizer = made()
    with attached(optimizer, other, shard="optimizer" if after else None) as reducer:
        steps(optimizer, other, 7, 8)
        pycomm.load(folder, reducer)
        steps(optimizer, other, 5, 9)
        assert_same(flat_values_of(optimizer), wanted)


def resumed(folder: str, begin: int, end: int, hosts: str) -> list[Any]:
    """Continue from plain state dicts, as scripts write them, and leave such; return values at the end."""
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with on_hosts(hosts), attached(optimizer, model, shard="optimizer", average=False):
        if begin > 0:
            first_ranks_steps(
                optimizer, model, 20, 20 + NUM_STEPS + 1
            )  # so that it is loaded into steps that are shared out
            saved = torch.load(f"{folder}/{begin}.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        first_ranks_steps(optimizer, model, begin, end)
        written = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if rank() == 0:
            torch.save(written, f"{folder}/{end}.pt")
        dist.barrier()
        assert_replicas_equal(model)
        return flat_values_of(optimizer)


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_state_dicts_of_other_numbers_of_ranks(rank_pools: Pools, hosts: str, tmp_path: Path) -> None:
    """Each rank has state of its own parameters only, and what is saved has all of it."""
    wanted = rank_pools(1).run(resumed, str(tmp_path), 0, 16, hosts)[0]
    ends = (0, 5, 10, 16)
    for size, begin, end in zip((2, 3, 1), ends, ends[1:], strict=False):
        found = rank_pools(size).run(resumed, str(tmp_path), begin, end, hosts)
    assert_same(found[0], wanted)


def first_ranks_steps(optimizer: torch.optim.Optimizer, model: nn.Module, begin: int, end: int) -> None:
    """Take steps by gradients whose sum has the same bits on any number of ranks."""
    for number in range(begin, end):
        optimizer.zero_grad()
        backward(model.parameters(), [g if rank() == 0 else torch.zeros_like(g) for g in gradients_of(0, number)])
        optimizer.step()


def steps(optimizer: torch.optim.Optimizer, model: nn.Module, begin: int, end: int) -> None:
    for number in range(begin, end):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, number))  # the same of all ranks: their average is exact
        optimizer.step()


@on_ranks(1)
def test_one_rank() -> None:
    assert_same(trained(Orthogonal, bodies.few_steps, shard="optimizer"), trained(Orthogonal, bodies.few_steps))


@on_ranks(3)
def test_fewer_parameters_than_ranks() -> None:
    model, alone = nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False)
    alone.load_state_dict(model.state_dict())
    optimizer, other = Orthogonal(model.parameters()), Orthogonal(alone.parameters())
    dist.barrier()
    with attached(optimizer, model, shard="optimizer"), attached(other, alone):
        for its_model, one in ((model, optimizer), (alone, other)):
            for step in range(6):
                one.zero_grad()
                its_model(torch.full((2, 5), 0.1 * step + rank())).square().sum().backward()
                one.step()
        assert_replicas_equal(model)
        assert torch.equal(model.weight, alone.weight)


def lose_a_rank() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    options = grouped(timeout=20, shard="optimizer", check_replicas=0)
    reducer = pycomm.attach(optimizer, model, **options)
    steps(optimizer, model, 0, NUM_STEPS + 1)
    optimizer.zero_grad()
    backward(model.parameters(), gradients_of(0, 9))
    if rank() == 1:
        reducer._table.partition.whole._bring_back = lambda: os._exit(1)  # type: ignore[union-attr, method-assign]
    with pytest.raises(pycomm.CommError, match="rank 1"):
        optimizer.step()
    assert_unusable_until_loaded(reducer, optimizer, model, model)


def test_a_rank_that_dies_in_its_step(new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(lose_a_rank, timeout=60.0)
    left = [outcomes[0], outcomes[2]]
    assert [outcome.error for outcome in left] == [None] * 2, [outcome.trace for outcome in left]


def test_shapes_have_matrices() -> None:
    assert sum(len(shape) == 2 for shape in SHAPES) >= 2
