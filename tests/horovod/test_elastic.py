"""State that is saved and restored; training that goes on when ranks are lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
import pycomm.horovod as hvd
from pycomm.horovod.elastic import ElasticSampler, ObjectState, TorchState, run, run_fn
from tests.horovod.training import assert_equal_models, batch_of, loss_of, make_model, sgd
from tests.horovod.worlds import horovod
from tests.on_ranks import Pools, on_ranks


@on_ranks(2)
def test_state_is_saved_restored_and_made_equal() -> None:
    with horovod():
        model, other = make_model(seed=hvd.rank()), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1))
        state: Any = TorchState(model, optimizer, other=other, epoch=hvd.rank(), history=[hvd.rank()])
        state.sync()
        assert (state.epoch, state.history, optimizer.param_groups[0]["lr"]) == (0, [0], 0.1)
        everyones = hvd.allgather_object([p.detach() for p in [*model.parameters(), *other.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*everyones, strict=True))
        before = [p.detach().clone() for p in model.parameters()]
        for keep in (False, True):
            state.epoch = 5
            state.history.append(7)
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
            if keep:
                state.commit()
            state.restore()
            assert (state.epoch, state.history) == ((5, [0, 7]) if keep else (0, [0]))
            assert torch.equal(next(model.parameters()), before[0] + (1.0 if keep else 0.0))
        replaced = nn.Linear(2, 2)
        state.other = replaced
        with torch.no_grad():
            replaced.weight.zero_()
        state.restore()
        assert replaced.weight.any()


@on_ranks(2, fresh=True)
def test_hosts_that_change() -> None:
    with horovod():
        state: Any = TorchState(epoch=0)
        rounds: list[int] = []
        if hvd.rank() == 1:
            state.on_hosts_updated(1.0, 2)

        def train(state: Any) -> str:
            rounds.append(state.epoch)
            state.epoch += 1
            state.commit()
            return "done"

        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(hvd.size())])
        assert run(train)(state) == "done"
        assert rounds == [0, 1]
        assert resets == [2]


def test_run_fn_restores_and_resets() -> None:
    calls: list[str] = []

    class Kept(ObjectState):
        def on_reset(self) -> None:
            calls.append("on_reset")

    state: Any = Kept(lambda value: value, lambda: 0, step=0)

    def body(state: Any) -> int:
        calls.append(f"step {state.step}")
        state.step += 1
        if len(calls) == 1:
            state.commit()
            state.step += 10
            raise hvd.HorovodInternalError("lost")
        if len(calls) == 4:
            state.commit()
            raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        if len(calls) == 7:
            raise hvd.InvalidRequestError("a mistake")
        return int(state.step)

    with pytest.raises(hvd.InvalidRequestError, match="a mistake"):
        run_fn(body, lambda: calls.append("reset"))(state)
    assert calls == ["step 0", "reset", "on_reset", "step 1", "reset", "on_reset", "step 2"]
    with pytest.raises(ValueError, match="min_ranks is 0"):
        run(body, min_ranks=0)


@on_ranks(2)
def test_sampler() -> None:
    with horovod():
        data = list(range(10))
        for shuffle in (False, True):
            sampler = ElasticSampler(data, shuffle=shuffle)
            assert len(sampler) == 5
            parts = hvd.allgather_object(list(sampler))
            assert sorted(parts[0] + parts[1]) == data
            sampler.record_batch(0, 2)  # of both ranks
            state: Any = TorchState(sampler=sampler)
            done = {i for part in parts for i in part[:2]}
            sampler.reset()
            rest = hvd.allgather_object(list(sampler))
            assert sorted(rest[0] + rest[1]) == sorted(set(data) - done)
            state.commit()
            sampler.record_batch(1, 2)
            state.restore()
            assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
            sampler.set_epoch(1)
            next_parts = hvd.allgather_object(list(sampler))
            assert sorted(next_parts[0] + next_parts[1]) == data
            assert (next_parts == parts) == (not shuffle)
        short = ElasticSampler([1], shuffle=False)
        assert hvd.allgather_object(list(short)) == [[0], [0]]
        short.record_batch(0, 1)
        short.reset()
        assert list(short) == []


def _train_on(steps: int, dies_at: dict[int, int], min_ranks: int = 1) -> list[torch.Tensor] | str:
    """Train ``steps`` steps; the rank that is first ``r`` kills itself in step ``dies_at[r]``."""
    hvd.init()
    first = hvd.rank()
    model = make_model(seed=first)
    optimizer = sgd(model)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state: Any = TorchState(model, optimizer, step=0, ranks=[])

    def train(state: Any) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), state.step))
            if dies_at.get(first) == state.step:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            state.step += 1
            state.ranks.append(hvd.size())
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
            state.commit()

    try:
        run(train, min_ranks)(state)
    except pycomm.CommError as error:
        return str(error)
    sizes = state.ranks
    hvd.shutdown()
    return [*model.parameters(), torch.tensor(sizes)]


def _reference(sizes: list[int]) -> nn.Module:
    model = make_model(seed=0)
    optimizer = sgd(model)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, batch_of(rank, step)) / size).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("dies", [2, 0], ids=["the last rank", "rank 0"])
def test_goes_on_without_a_rank(new_ranks: Pools, dies: int) -> None:
    outcomes = new_ranks(3).outcomes(_train_on, 5, {dies: 2})
    wanted = _reference([3, 3, 2, 2, 2])
    for rank, outcome in enumerate(outcomes):
        if rank == dies:
            assert isinstance(outcome.error, ChildProcessError)
            continue
        assert outcome.error is None, outcome.trace
        *parameters, sizes = outcome.result
        assert sizes.tolist() == [3, 3, 2, 2, 2]
        model = make_model()
        with torch.no_grad():
            for p, q in zip(model.parameters(), parameters, strict=True):
                p.copy_(q)
        assert_equal_models(model, wanted)


def test_too_few_are_left(new_ranks: Pools) -> None:
    outcomes = new_ranks(2).outcomes(_train_on, 3, {1: 1}, 2)
    assert "fewer than min_ranks=2" in outcomes[0].result, outcomes[0].trace
