"""Steps that ranks of several hosts take together: the bits of steps alone."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives.channel import Channel
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.partition import test_same_steps as whole
from tests.reducer.partition.stepping import (
    OPTIMIZERS,
    Weights,
    assert_same,
    assert_unusable_until_loaded,
    backward,
    gradients_of,
    own_span,
    rank,
    values_of,
)

HOSTS = {2: "ab", 3: "aab", 4: "abab"}
SHARDS: dict[str, dict[str, Any]] = {
    "own gradients": {"shard": "optimizer"},
    "all gradients": {"shard": "optimizer", "grads": "full"},
}


@contextmanager
def hosts() -> Iterator[None]:
    with on_hosts(HOSTS[dist.get_world_size()]):
        yield


def assert_same_as_alone(name: str, body: whole.Body, shard: str, dtype: Any = torch.float32, **options: Any) -> None:
    """Compare ``body`` with and without ``shard``: parameters and the whole ``state_dict()``, to the bit."""
    with hosts():
        wanted = whole.trained(OPTIMIZERS[name], body, dtype, **options)
        assert_same(whole.trained(OPTIMIZERS[name], body, dtype, **options, **SHARDS[shard]), wanted)


@on_ranks(2)
def test_every_rule_has_the_bits_of_a_step_alone() -> None:
    for name in OPTIMIZERS:
        assert_same_as_alone(name, whole.few_steps, "own gradients")


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(4)
def test_hosts_with_several_ranks(shard: str) -> None:
    for name in ("Adam", "LAMB"):
        assert_same_as_alone(name, whole.few_steps, shard)


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(3)
def test_all_that_training_does(shard: str) -> None:
    bodies = (whole.schedules, whole.missing_gradients, whole.new_parameters, whole.kept_gradients, whole.clipped_steps)
    for body in bodies:
        assert_same_as_alone("Adam", body, shard)
    assert_same_as_alone("Adam", whole.windows, shard, accumulate=2)


@on_ranks(2)
def test_gradients_that_travel_in_half_precision() -> None:
    for method in (pycomm.FP16(), pycomm.BF16()):
        assert_same_as_alone("Adam", whole.few_steps, "own gradients", compression=method)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("name", "dtype"), [("Adam", torch.float16), ("LARS", torch.bfloat16)])
@on_ranks(2)
def test_masters_and_a_loss_scaler(name: str, dtype: torch.dtype, shard: str) -> None:
    with hosts():
        found = [
            whole.trained(
                *(OPTIMIZERS[name], whole.half_steps(dtype, 5.0), dtype),
                loss_scaler=pycomm.LossScaler(2.0**4),
                **options,
            )
            for options in ({}, SHARDS[shard])
        ]
    assert_same(found[1], found[0])


class Layers(nn.Module):
    """Layers, each with a bucket of its own."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(num))
        self.extra = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.extra).sum()


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Let no parameters arrive inside, until the function is called that this yields."""
    gate = threading.Event()
    original = Channel.all_gather_v

    def wait(self: Channel, outs: Any, x: Any) -> None:
        assert gate.wait(30)
        original(self, outs, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "all_gather_v", wait)
        yield gate.set
        gate.set()


def stepped(model: Layers, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 64), 0.1 + rank())).backward()
    optimizer.step()


@on_ranks(2)
def test_a_step_ends_when_all_parameters_are_there() -> None:
    wanted = Layers()
    whole_optimizer = torch.optim.Adam(wanted.parameters(), lr=0.05)
    pycomm.fuse(whole_optimizer)
    with hosts(), attached(whole_optimizer, wanted):
        stepped(wanted, whole_optimizer)
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with hosts(), attached(optimizer, model, shard="optimizer", bucket_mb=0.02), held_back() as let_go:
        timer = threading.Timer(0.2, let_go)
        began = time.monotonic()
        timer.start()
        stepped(model, optimizer)
        assert time.monotonic() - began > 0.15
        timer.join()
        assert all(type(p) is nn.Parameter for p in model.parameters())
        # Through their memory, which asks nobody.
        for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
            assert np.array_equal(one.detach().numpy(), other.detach().numpy())
        assert_replicas_equal(model)


@on_ranks(2)
def test_optimizer_state_is_kept_by_parts() -> None:
    """What is not this rank's own is never touched: it takes no memory."""
    model = nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(model.parameters())
    with hosts(), attached(optimizer, model, shard="optimizer") as reducer:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2048)).sum().backward()
            optimizer.step()
        kept = optimizer.state[model.weight]["exp_avg"].view(-1)
        own = own_span(model.weight, reducer)
        assert own.stop - own.start < 0.51 * model.weight.numel()
        others = max(kept[: own.start], kept[own.stop :], key=len)
        assert resident_pages(kept[own]) > 0.99
        assert resident_pages(others) == 0.0
        assert not bool(others.any())
        state = optimizer.state_dict()["state"][0]["exp_avg"]
        assert bool((state != 0).all())
        assert state.shape == model.weight.shape
    assert optimizer.state[model.weight]["exp_avg"].shape == model.weight.shape
    assert bool((optimizer.state[model.weight]["exp_avg"] != 0).all())


def resident_pages(x: torch.Tensor) -> float:
    """Return the share of the pages of ``x`` that take memory (/proc/self/pagemap, bit 63)."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = x.data_ptr() // page + 1, (x.data_ptr() + x.nbytes) // page
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first)), np.uint64)
    return float((entries >> np.uint64(63)).mean())


@on_ranks(2)
def test_state_goes_on_in_other_ways_of_stepping() -> None:
    """3 steps spread, 2 alone after detach(), 2 spread after load_state_dict(): as 7 alone."""
    results = []
    for spread in (False, True):
        model = Weights()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        if not spread:
            pycomm.fuse(optimizer)
        shard: dict[str, Any] = {"shard": "optimizer"} if spread else {}
        with hosts():
            for begin, end, options in ((0, 3, shard), (3, 5, {}), (5, 7, shard)):
                fused = pycomm.fuse(optimizer) if spread and not options else None
                with attached(optimizer, model, **options):
                    if begin == 5:
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    for number in range(begin, end):
                        optimizer.zero_grad()
                        backward(model.parameters(), gradients_of(rank(), number))
                        optimizer.step()
                if fused is not None:
                    fused.detach()
        results.append(values_of(optimizer))
    assert_same(results[1], results[0])


@pytest.mark.parametrize(("before", "after"), [(True, False), (True, True), (False, True)])
@on_ranks(3)
def test_checkpoints(before: bool, after: bool, tmp_path: Path) -> None:
    """Written by ranks that step together, or not, and read by such as do, or not."""
    wanted = whole.trained(OPTIMIZERS["Adam"], train)
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    if not before:
        pycomm.fuse(optimizer)
    with hosts(), attached(optimizer, model, **({"shard": "optimizer"} if before else {})) as reducer:
        train(reducer, optimizer, model, 0, 3)
        pycomm.save(tmp_path / "saved", reducer).wait()
    other = Weights()
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    if not after:
        pycomm.fuse(optimizer)
    with hosts(), attached(optimizer, other, **({"shard": "optimizer"} if after else {})) as reducer:
        train(reducer, optimizer, other, 7, 8)
        pycomm.load(tmp_path / "saved", reducer)
        train(reducer, optimizer, other, 3, 5)
    assert_same(values_of(optimizer), wanted)


def train(_: Any, optimizer: torch.optim.Optimizer, model: Weights, begin: int = 0, end: int = 5) -> None:
    for number in range(begin, end):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, number))  # the same of all ranks: their average is exact
        optimizer.step()


@on_ranks(2)
def test_compiled_code() -> None:
    model = Layers()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with hosts(), attached(optimizer, model, shard="optimizer", bucket_mb=0.02):
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.full((2, 64), 0.1 + rank())).backward()
            optimizer.step()
        assert_replicas_equal(model)


def lose_a_rank(point: str) -> None:
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with hosts():
        reducer = pycomm.attach(
            optimizer, model, tuning=pycomm.Tuning(timeout=20, bucket_mb=0.02, check_replicas=0), shard="optimizer"
        )
    stepped(model, optimizer)
    dying = rank() == 1
    if dying and point.endswith("gathering"):
        Channel.all_gather_v = lambda *_: os._exit(1)  # type: ignore[method-assign]
    if dying and point == "before the step":
        optimizer.zero_grad()
        model(torch.ones(2, 64)).backward()
        os._exit(1)

    with pytest.raises(pycomm.CommError, match="rank 1"):
        stepped(model, optimizer)
    assert_unusable_until_loaded(reducer, optimizer, lambda: model(torch.ones(1, 64)), model)


@pytest.mark.behavior(
    "Sharded steps",
    "lose a rank in a step",
    "`CommError`. All parameters are new, or training refuses until you load a checkpoint.",
)
@pytest.mark.parametrize("point", ["before the step", "before its gathering"])
def test_no_mixture_trains_on(point: str, new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(lose_a_rank, point, timeout=60.0)
    left = [outcomes[0], outcomes[2]]
    assert [outcome.error for outcome in left] == [None] * 2, [outcome.trace for outcome in left]
