"""Several buckets in flight between hosts, which are invented. Ranks are real processes."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import pycomm
from pycomm import CommError
from pycomm.compression.dense import DenseExchange
from pycomm.training.reducer.buckets import numbers_of_lanes
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import grouped

STEPS = 3


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300) for _ in range(8)]
    return torch.nn.Sequential(*layers)


def attached(hosts: str, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer, pycomm.Reducer]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with on_hosts(hosts):
        return model, optimizer, pycomm.attach(optimizer, model, **grouped(**{"timeout": 20, **options}))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
@on_ranks(4)
def test_a_mean_whose_sum_would_overflow_is_finite(hosts: str) -> None:
    """Between hosts packing divides by the number of ranks, where that is exact."""
    model = torch.nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with on_hosts(hosts):
        reducer = pycomm.attach(optimizer, model, **grouped(timeout=20))
    rank = reducer._engine.communicator.rank
    rows = torch.tensor([[0.1, 1 / 3, -7.7], [1e-30, 2.5, 0.7], [3e30, -1e-7, 0.2], [1e20, 0.9, 2e38]])
    for _ in range(STEPS):  # the first one only counts gradients
        optimizer.zero_grad()
        (model.weight * rows[rank]).sum().backward()
        expected = (rows / 4).double().sum(0)
        torch.testing.assert_close(model.weight.grad, expected.float().expand(5, 3), rtol=1e-6, atol=0.0)
    assert reducer.stats()["nonfinite_steps"] == 0


@pytest.mark.parametrize(
    ("hosts", "transport", "num_lanes"),
    [("abcd", "tcp", 2), ("aabb", "hierarchical", 2), ("aaaa", "shared_memory", 1)],
)
@on_ranks(4)
def test_gradients_are_averages(hosts: str, transport: str, num_lanes: int) -> None:
    alone = make_model()
    model, optimizer, reducer = attached(hosts, bucket_mb=1.0)
    rank = reducer._engine.communicator.rank
    assert reducer.stats()["transport"] == transport
    lanes = [id(sent.communicator) for sent in reducer._table.buckets]
    assert len(lanes) > 2
    assert len(set(lanes)) == num_lanes
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        alone.zero_grad()
        losses = [alone(batch(p, step)).square().mean() for p in range(4)]
        torch.stack(losses).mean().backward()
        for mine, parameter in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-4, atol=1e-7)
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)
        optimizer.step()
    reducer.detach()


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
@on_ranks(4)
def test_a_bucket_does_not_wait_for_the_one_before(hosts: str) -> None:
    """The first bucket is held back until the second one has arrived."""
    model, _, reducer = attached(hosts, bucket_mb=1.5)
    buckets, plain, arrived = reducer._table.buckets, DenseExchange.send, threading.Event()
    assert len(buckets) > 1

    def send(self: DenseExchange) -> None:
        if self is buckets[0].exchange:
            assert arrived.wait(15)
        plain(self)
        if self is buckets[1].exchange:
            arrived.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DenseExchange, "send", send)
        model(batch(0, 0)).sum().backward()
    reducer.detach()


@pytest.mark.parametrize(
    ("sizes", "loads", "numbers"),
    [
        ([1, 4, 16, 20], [0, 0], [1, 0, 1, 0]),
        ([25, 0, 15], [0, 0], [1, 0, 0]),  # the small one does not count as a turn
        ([5], [0, 0], [0]),
        ([5], [3, 0], [1]),
        ([0, 0, 7, 7], [0, 0], [1, 0, 1, 0]),
        ([3, 3], [0], [0, 0]),
        ([], [0, 0], []),
    ],
)
def test_lanes_carry_about_as_much(sizes: list[int], loads: list[int], numbers: list[int]) -> None:
    """And the first one, where ranks compare what they do, carries the only bucket, or one of several."""
    assert numbers_of_lanes(sizes, loads) == numbers


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
@on_ranks(4, fresh=True)
def test_another_operation_in_place_of_a_step_is_an_error_of_all(hosts: str) -> None:
    """Although a bucket is sent before the ranks have compared anything."""
    model, _, reducer = attached(hosts, bucket_mb=1.5, timeout=60)
    communicator = reducer._engine.communicator
    model(batch(communicator.rank, 0)).sum().backward()
    loss = model(batch(communicator.rank, 1)).sum()
    with pytest.raises(ValueError, match="the ranks disagree"):  # and not that a rank has ended, or the timeout
        communicator.all_reduce(torch.ones(300)) if communicator.rank == 0 else loss.backward()


@on_ranks(4)
def test_first_bucket_is_small_only_between_hosts() -> None:
    sparse = pycomm.TopK(0.01)
    for hosts, compression, small in (
        ("abcd", None, True),
        ("aabb", pycomm.FP16(), True),
        ("aabb", sparse, False),
        ("aaaa", None, False),
    ):
        _, _, reducer = attached(hosts, compression=compression, bucket_mb=25)
        sizes = [sent.bucket.memory.nbytes / 2**20 for sent in reducer._table.buckets]
        large = [size for size in sizes if size > 0.1]  # TopK's biases have a bucket of their own
        assert (len(large) > 1 and large[0] <= 1) == small, (hosts, compression, sizes)
        reducer.detach()


@on_ranks(4, fresh=True)
def test_an_error_on_one_rank_ends_the_step_of_all() -> None:
    model, _, reducer = attached("aabb", bucket_mb=1.5)
    rank = reducer._engine.communicator.rank
    model(batch(rank, 0)).sum().backward()
    if rank == 2:
        next(model.parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises((ZeroDivisionError, CommError, ValueError, RuntimeError)) as caught:
        model(batch(rank, 1)).sum().backward()
    assert rank == 2 or "rank 2" in str(caught.value), str(caught.value)
    reducer.detach()


def dies(hosts: str) -> CommError | None:
    model, _, reducer = attached(hosts, bucket_mb=1.5)
    rank = reducer._engine.communicator.rank
    model(batch(rank, 0)).sum().backward()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        model(batch(rank, 1)).sum().backward()
    return caught.value


@pytest.mark.parametrize("hosts", ["aabb"])
def test_a_death_is_named_on_every_lane(new_ranks: Pools, hosts: str) -> None:
    for rank, outcome in enumerate(new_ranks(4).outcomes(dies, hosts)):
        if rank < 3:
            assert outcome.error is None, outcome.trace
            assert outcome.result.peer == 3, str(outcome.result)
