"""Partitioned steps: state and checkpoints, one copy of the parameters, mistakes, and the end."""

from __future__ import annotations

import copy
import gc
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, grouped
from tests.reducer.partition.stepping import OPTIMIZERS, Weights, assert_same, backward, gradients_of, rank, values_of
from tests.reducer.test_around_torch import proxy_of


def steps(optimizer: torch.optim.Optimizer, model: Weights, first: int, last: int) -> None:
    """Step by gradients that are the same for any number of ranks."""
    for step in range(first, last):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, step))
        optimizer.step()


def alone(name: str, last: int) -> list[Any]:
    model = Weights()
    optimizer = OPTIMIZERS[name](model.parameters())
    pycomm.fuse(optimizer)
    steps(optimizer, model, 0, last)
    return values_of(optimizer)


@pytest.mark.behavior(
    "Sharded steps",
    "`state_dict()` on one rank, on one host",
    "The complete state. Over several hosts: call it on all ranks.",
)
@pytest.mark.parametrize("shard", ["optimizer", pycomm.Sharding("optimizer", grads="full")], ids=str)
@on_ranks(2)
def test_one_rank_saves_the_whole_state_by_itself(shard: str, tmp_path: Path) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with attached(optimizer, model, shard=shard, bucket_mb=0.005):
        steps(optimizer, model, 0, 3)
        if rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        dist.barrier()
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        small = io.BytesIO()
        torch.save(model.weights[3].detach(), small)
        assert len(small.getvalue()) < 2048, "a parameter is saved by itself, without its bucket"
    other = Weights()
    optimizer = OPTIMIZERS["AdamW"](other.parameters())
    pycomm.fuse(optimizer)
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(optimizer, other, 3, 5)
    assert_same(values_of(optimizer), alone("AdamW", 5))


@pytest.mark.parametrize("shard", ["optimizer", pycomm.Sharding("optimizer", grads="full")], ids=str)
@on_ranks(4)
def test_state_of_another_number_of_ranks_is_loaded(shard: str) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    pycomm.fuse(optimizer)
    steps(optimizer, model, 0, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    other = Weights()
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    with attached(optimizer, other, shard=shard):
        steps(optimizer, other, 6, 8)
        other.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        dist.barrier()
        steps(optimizer, other, 3, 5)
        assert_same(values_of(optimizer), alone("Adam", 5))


@on_ranks(2)
def test_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        steps(optimizer, model, 0, 3)
        wanted = values_of(optimizer)
        state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
        save(state, checkpoint_id=str(tmp_path / "there"))
        steps(optimizer, model, 3, 4)
        state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
        load(state, checkpoint_id=str(tmp_path / "there"))
        optimizer.load_state_dict(state["optimizer"])
        dist.barrier()
        assert_same(values_of(optimizer), wanted)


@pytest.mark.parametrize(("before", "after"), [("optimizer", None), ("optimizer", "optimizer"), (None, "optimizer")])
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_of_another_kind(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with attached(optimizer, model, shard=before) as reducer:
        steps(optimizer, model, 0, 3)
        pycomm.save(tmp_path / "saved", reducer).wait()
    other = Weights()
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    if after is None:
        pycomm.fuse(optimizer)
    with attached(optimizer, other, shard=after) as reducer:
        steps(optimizer, other, 7, 8)
        pycomm.load(tmp_path / "saved", reducer)
        steps(optimizer, other, 3, 5)
        if before is not None:  # torch's own steps round otherwise
            assert_same(values_of(optimizer), alone("Adam", 5))


@on_ranks(2)
def test_ranks_have_one_copy_of_state() -> None:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, shard="optimizer"):
        steps(optimizer, model, 0, 1)
        dist.barrier()
        weight = model.weights[0]
        if rank() == 0:
            optimizer.state[weight]["momentum_buffer"].fill_(3.0)
        dist.barrier()
        assert bool((optimizer.state[weight]["momentum_buffer"] == 3.0).all())
        dist.barrier()


@on_ranks(2)
def test_a_forked_child_reads_its_parents_parameters() -> None:
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        steps(optimizer, model, 0, 1)
        wanted = float(model())
        child = os.fork()
        if child == 0:
            os._exit(0 if float(model()) == wanted else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("shard", ["optimizer", pycomm.Sharding("optimizer", grads="full")], ids=str)
@on_ranks(2, fresh=True)
def test_after_detach_each_rank_steps_alone_and_nothing_is_shared(shard: str) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with attached(optimizer, model, shard=shard):
        steps(optimizer, model, 0, 3)
    gc.collect()
    assert not any("memfd:pycomm" in line for line in Path("/proc/self/maps").read_text().splitlines())
    if rank() == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    dist.barrier()
    if rank() == 0:
        pycomm.fuse(optimizer)
        steps(optimizer, model, 3, 5)
        assert_same(values_of(optimizer), alone("AdamW", 5))
    dist.barrier()


# Mistakes.


def refused(match: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        pycomm.attach(optimizer, model, **grouped(timeout=30, **options))
    optimizer.zero_grad()


KEPT = ["optimizer state"]


@pytest.mark.behavior(
    "Sharded steps",
    "`shard` with `survive`, methods that do not sum, or half precision without masters",
    "`ValueError`.",
)
@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    model = Weights()
    adam = torch.optim.Adam(model.parameters())
    refused("shard is 'model'", model, adam, shard="model")
    refused("LBFGS", model, torch.optim.LBFGS(model.parameters()), shard="optimizer")
    refused("TopK", model, adam, shard="optimizer", compression=pycomm.TopK(0.1))
    refused(r"survive=Survive\(\)", model, adam, shard="optimizer", on_failure="shrink")
    refused("all_parameters", model, adam, shard="optimizer", all_parameters=True)
    for method in (pycomm.FP16(sum="float32"), pycomm.BF16(sum="float32")):  # else it would be ignored
        says = rf'grads="part" and compression={type(method).__name__}\(sum="float32"\)'
        refused(says, model, adam, shard="optimizer", compression=method)
    refused(r'ignore=\["optimizer state"\] cannot be combined with shard', model, adam, shard="optimizer", ignore=KEPT)
    half = Weights().half()
    refused("master_weights", half, torch.optim.Adam(half.parameters()), shard="optimizer")
    refused("shard is 'parameters'", model, adam, shard="parameters")
    groups = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + rank()))
    refused("parameter group", model, groups, shard="optimizer")
    with attached(adam, model, shard="optimizer", grads="full", compression=pycomm.FP16(sum="float32")):
        steps(adam, model, 0, 1)
    with attached(adam, model, shard="optimizer"):  # nothing was left behind
        steps(adam, model, 0, 1)


@pytest.mark.behavior(
    "Sharded steps",
    "step a closure, clip by torch's `clip_grad_norm_`, or replace gradients or `param.data`",
    "Error everywhere; nothing is written.",
)
@on_ranks(2, fresh=True)
def test_mistakes_in_a_step_are_errors_of_all_ranks_and_write_nothing() -> None:
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        steps(optimizer, model, 0, 1)
        before = values_of(optimizer)
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, 1))
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: torch.zeros(()))
        optimizer.param_groups[0]["lr"] = 0.5 + rank()
        with pytest.raises(ValueError, match="0.5"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        grad = model.weights[0].grad
        assert grad is not None
        if rank() == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ValueError, match=r"clip_grad_norm|written to"):
            optimizer.step()
        assert_same(values_of(optimizer), before)
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, 1))
        if rank() == 1:
            model.weights[0].grad = grad * 0.5
        with pytest.raises(ValueError, match="written to"):
            optimizer.step()
        assert_same(values_of(optimizer), before)
        steps(optimizer, model, 2, 3)
        if rank() == 1:
            model.weights[0].data = model.weights[0].detach().clone()
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, 1))
        with pytest.raises((RuntimeError, ValueError), match="has been replaced"):
            optimizer.step()


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2, fresh=True)
def test_gradients_that_are_not_cleared(unused: bool) -> None:
    """The next pass would add to the average in this rank's own part, and to a local gradient elsewhere."""
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters())
    with attached(optimizer, model, shard="optimizer"):
        steps(optimizer, model, 0, 1)
        params, given = list(model.parameters()), gradients_of(rank(), 1)
        for param in params[unused:] if unused else []:
            param.grad = None
        match = "is the average over the ranks that an earlier" if unused else r"backward\(\) ran again on the averaged"
        with pytest.raises(RuntimeError, match=match):
            backward(params[unused:], given[unused:])


@on_ranks(2)
def test_gradients_that_are_whole_need_not_be_cleared() -> None:
    model, alone = Weights(), Weights()
    optimizer, other = torch.optim.NAdam(model.parameters()), torch.optim.NAdam(alone.parameters())
    with attached(optimizer, model, shard="optimizer", grads="full"):
        for number in range(5):
            backward(alone.parameters(), average_of(number))
            other.step()
            backward(model.parameters(), gradients_of(rank(), number))
            optimizer.step()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def average_of(number: int) -> list[torch.Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*(gradients_of(r, number) for r in range(2)), strict=True)]


class Masking(torch.optim.Optimizer):
    """Has the groups and state of the one inside, and changes parameters after its step, as Magma does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_(p.grad.sign(), alpha=1e-3)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
@on_ranks(2)
def test_a_wrapper_that_changes_parameters_itself_is_refused_with_shard(kind: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    given = Masking(optimizer)
    with pytest.raises(ValueError, match=rf"this is a Masking around its {kind.__name__}: .*pass the"):
        pycomm.attach(given, model, shard="optimizer", tuning=pycomm.Tuning(timeout=20))
    pycomm.attach(given, model, tuning=pycomm.Tuning(timeout=20)).detach()
    for how in ("accelerate", "fabric"):
        proxy = proxy_of(optimizer, how)
        type(proxy).__module__ = "accelerate.optimizer"
        pycomm.attach(proxy, model, shard="optimizer", tuning=pycomm.Tuning(timeout=20)).detach()
