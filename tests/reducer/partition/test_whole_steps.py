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
)
from tests.reducer.partition.whole_optimizers import (
    OPTIMIZERS,
    Averaging,
    KeepingTensors,
    Orthogonal,
    PreparingOnce,
)

SHARED = pycomm.Sharding("optimizer", independent=True)
SHARDS: dict[str, Any] = {
    "optimizer": SHARED,
    "all gradients": pycomm.Sharding("optimizer", grads="full", independent=True),
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
        assert_same(trained(make, bodies.few_steps, bodies.few_steps, shard=SHARED), wanted)


@on_ranks(3)
def test_hosts() -> None:
    with on_hosts("aab"):
        for name in ("Orthogonal", "Replacing", "Averaging"):
            wanted = trained(OPTIMIZERS[name], bodies.few_steps, bodies.few_steps)
            assert_same(trained(OPTIMIZERS[name], bodies.few_steps, bodies.few_steps, shard=SHARED), wanted)


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
def test_a_step_that_fails_on_one_rank_is_an_error_of_all() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard=SHARED) as reducer:
        steps(optimizer, model, 0, 1)
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(rank(), 0))
        if rank() == 1:
            optimizer.state[next(iter(optimizer.state))]["momentum"] = "none"
        found, text = (AttributeError, "mul_") if rank() == 1 else (pycomm.CommError, r"rank 1.*step\(\) failed")
        with pytest.raises(found, match=text):
            optimizer.step()
        assert_unusable_until_loaded(reducer, optimizer, model, model)


@on_ranks(2)
def test_parameters_that_join_frozen() -> None:
    def joining(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, 1)
        late = nn.Parameter(torch.full((4, 3), 0.5), requires_grad=False)
        model.register_parameter("late", late)
        optimizer.add_param_group({"params": [late]})
        for step in range(1, 6):
            late.requires_grad_(step > 3)
            optimizer.zero_grad()
            model()  # where new parameters are noticed
            thawed = [late] if late.requires_grad else []
            grads = [*gradients_of(rank(), step), torch.full((4, 3), 1.0 + rank())]
            backward([*model.weights, *thawed], grads[: len(SHAPES) + len(thawed)])
            optimizer.step()

    assert_same(trained(Orthogonal, joining, shard=SHARED), trained(Orthogonal, joining))


def late_steps(optimizer: torch.optim.Optimizer, model: Weights, number: int, late: list[nn.Parameter]) -> None:
    for step in range(number):
        optimizer.zero_grad()
        model()  # where new parameters are noticed
        grads = [*gradients_of(0, step)[: len(SHAPES)], *(torch.full(p.shape, 1.0 + i) for i, p in enumerate(late))]
        backward([*model.weights, *late], grads)
        optimizer.step()


@on_ranks(2)
def test_half_precision_parameters_that_come_later() -> None:
    def body(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, 4)
        late = [nn.Parameter(torch.full((90, 80), 0.5 + i, dtype=torch.bfloat16)) for i in range(2)]
        for number, param in enumerate(late):
            model.register_parameter(f"late{number}", param)
        optimizer.add_param_group({"params": late})
        late_steps(optimizer, model, 4, late)

    half: Any = torch.bfloat16
    assert_same(trained(PreparingOnce, body, shard=SHARED, dtype=half), trained(PreparingOnce, body, dtype=half))


@on_ranks(2)
def test_state_of_parameters_that_come_later() -> None:
    def body(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        steps(optimizer, model, 0, 4)
        late = [nn.Parameter(torch.full((4, 3), 0.5 + i)) for i in range(2)]
        for number, param in enumerate(late):
            model.register_parameter(f"late{number}", param)
        optimizer.add_param_group({"params": late})
        late_steps(optimizer, model, 4, late)

    assert_same(trained(PreparingOnce, body, shard=SHARED), trained(PreparingOnce, body))


@on_ranks(2)
def test_gradients_that_travel_in_half_precision() -> None:
    wanted = trained(Orthogonal, bodies.few_steps, bodies.few_steps, compression="bf16")
    found = trained(Orthogonal, bodies.few_steps, bodies.few_steps, compression="bf16", shard=SHARED)
    assert_same(found, wanted)


SCALERS = [lambda: torch.amp.GradScaler("cpu", 2.0**4), lambda: pycomm.LossScaler(2.0**4)]


def skipped_steps(make: Callable[[], Any], shard: pycomm.Sharding | None) -> tuple[list[Any], float]:
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
    (found, scale), (wanted, its_scale) = skipped_steps(make, SHARED), skipped_steps(make, None)
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
        assert_same(trained(OPTIMIZERS[name], *parts, dtype=HALF[dtype], shard=SHARED), wanted)
    wanted = trained(
        torch.optim.Adagrad, bodies.few_steps, bodies.few_steps, dtype=HALF[dtype]
    )  # no kernels for masters
    assert_same(
        trained(torch.optim.Adagrad, bodies.few_steps, bodies.few_steps, dtype=HALF[dtype], shard="optimizer"),
        wanted,
    )


@on_ranks(3)
def test_masters_on_hosts() -> None:
    parts = (bodies.few_steps, bodies.few_steps)
    with on_hosts("aab"):
        wanted = trained(Orthogonal, *parts, dtype=torch.bfloat16)
        assert_same(trained(Orthogonal, *parts, dtype=torch.bfloat16, shard=SHARED), wanted)


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
    with attached(optimizer, model, shard=SHARED) as reducer:
        steps(optimizer, model, 0, 5)
        own = [p for p in model.parameters() if reducer._table.partition.spans.is_own(p)]  # type: ignore[union-attr]
        assert 0 < len(own) < len(SHAPES)
        assert len(handle.masters()) == len(own)
        saved = optimizer.state_dict()["state"]
        assert all(saved[i]["master_weight"].dtype == torch.float32 for i in range(len(SHAPES)))
    assert len(handle.masters()) == len(SHAPES)


@pytest.mark.behavior(
    "Sharded steps",
    "have NaN gradients without a scaler, where the optimizer keeps its own step",
    "The step is taken; in CPU memory all its gradients are NaN.",
)
@pytest.mark.parametrize("make", [OPTIMIZERS["NAdam"], OPTIMIZERS["Adadelta"], adafactor])
@on_ranks(2)
def test_gradients_that_are_not_finite(make: Any) -> None:
    """Without a scaler the step is taken, and in CPU memory all gradients of it are then NaN, on all ranks."""
    model = Weights()
    optimizer = make(model.parameters())
    with attached(optimizer, model, bucket_mb=0.005, shard=SHARED):
        for step in range(4):
            optimizer.zero_grad()
            grads = gradients_of(rank(), step)
            if step == 1 and rank() == 1:
                grads[0][2] = torch.nan
                grads[4][3] = torch.inf
            backward(model.parameters(), grads)
            optimizer.step()
            owned = {id(p) for group in optimizer.param_groups for p in group["params"] if p.numel() > 0}
            finite = {bool(torch.isfinite(p).all()) for p in model.parameters() if id(p) in owned}
            assert finite == {step < 1}
        assert_replicas_equal(nn.ParameterList(p.nan_to_num(7.0) for p in model.parameters()))


@on_ranks(3)
def test_state_is_kept_by_owners_and_the_step_is_shared_out() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)), nn.Linear(64, 3))
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard=SHARED) as reducer:
        own = [p for p in model.parameters() if reducer._table.partition.spans.is_own(p)]  # type: ignore[union-attr]
        for step in range(4):
            train_on(model, optimizer, step)
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


@on_ranks(2)
def test_state_that_cannot_be_sent_is_an_error_of_all_ranks() -> None:
    model = Weights()
    optimizer = KeepingTensors(model.parameters())
    with attached(optimizer, model, shard=SHARED):
        steps(optimizer, model, 0, 1)
        with pytest.raises(ValueError, match="its state of a parameter is a Tensor, wanted a dict"):
            optimizer.state_dict()
        optimizer.state.clear()


@on_ranks(2)
def test_gradients_that_are_written_are_refused_from_the_first_step_on() -> None:
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with attached(optimizer, model, shard=SHARED):
        for step in range(5):
            optimizer.zero_grad()
            backward(model.parameters(), gradients_of(rank(), step))
            if step in (0, 4):
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
    with log_of(said), attached(optimizer, model, shard=SHARED) as reducer:
        assert reducer.stats()["step_shares"][0]["parameters"] == 1
    assert [line[:50] for line in said] == ["the optimizer's step is shared out unevenly: rank "[:50]] * (rank() == 0)


@contextmanager
def log_of(said: list[str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        from pycomm.training.reducer.partition import spans

        patch.setattr(spans._LOG, "warning", lambda text, *args: said.append(text % args))
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
    with attached(optimizer, model, shard=SHARED if before else None) as reducer:
        steps(optimizer, model, 0, 5)
        pycomm.save(folder, reducer).wait()
    other, optimizer = made()
    with attached(optimizer, other, shard=SHARED if after else None) as reducer:
        steps(optimizer, other, 7, 8)
        pycomm.load(folder, reducer)
        steps(optimizer, other, 5, 9)
        assert_same(flat_values_of(optimizer), wanted)


def resumed(folder: str, begin: int, end: int, hosts: str) -> list[Any]:
    """Continue from plain state dicts, as scripts write them, and leave such; return values at the end."""
    model = Weights()
    optimizer = Orthogonal(model.parameters())
    with on_hosts(hosts), attached(optimizer, model, shard=SHARED, average=False):
        if begin > 0:
            first_ranks_steps(optimizer, model, 20, 21)  # so that it is loaded into steps that are shared out
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
    assert_same(trained(Orthogonal, bodies.few_steps, shard=SHARED), trained(Orthogonal, bodies.few_steps))


@on_ranks(3)
def test_fewer_parameters_than_ranks() -> None:
    model, alone = nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False)
    alone.load_state_dict(model.state_dict())
    optimizer, other = Orthogonal(model.parameters()), Orthogonal(alone.parameters())
    dist.barrier()
    with attached(optimizer, model, shard=SHARED), attached(other, alone):
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
    options = grouped(timeout=20, shard=SHARED, check_replicas=0)
    reducer = pycomm.attach(optimizer, model, **options)
    steps(optimizer, model, 0, 4)
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
