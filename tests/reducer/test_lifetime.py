"""attach leaves nothing behind, neither after a failure nor when the model is dropped; exceptions in backward."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives.recorder import dump
from pycomm.training.reducer.changes import ArrivalOrder
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import Training, attached, grouped, over_tcp
from tests.reducer.models import average_gradients, batch_of, close, explode, loss_of, losses_at, make_model, sgd


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def little_to_collect() -> Iterator[None]:
    """Let collections look only at what is made meanwhile: they take long among all that torch has imported."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def dropped(compression: Any, over_hosts: bool, named: bool) -> None:
    with over_tcp(over_hosts), little_to_collect():
        counts = []
        for _ in range(4):
            model = make_model()
            optimizer = sgd(model)
            reducer = pycomm.attach(
                optimizer,
                model.named_parameters() if named else model,
                compression=compression,
                tuning=pycomm.Tuning(timeout=30),
            )
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
            watched = [weakref.ref(thing) for thing in (model, model[0].weight, optimizer, reducer)]
            del model, optimizer, reducer
            gc.collect()
            assert [ref() for ref in watched] == [None] * 4
            time.sleep(0.05)
            counts.append((num_descriptors(), threading.active_count()))
        assert counts[1:] == counts[:1] * 3


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2)
def test_a_dropped_model_takes_everything_with_it(over_hosts: bool, named: bool) -> None:
    dropped(None, over_hosts, named)


@pytest.mark.parametrize("compression", [pycomm.TopK(0.1), pycomm.PowerSGD(1), "auto", pycomm.FP16()], ids=repr)
@on_ranks(2)
def test_a_dropped_model_with_compression(compression: Any) -> None:
    dropped(compression, False, False)


@pytest.mark.parametrize("end", ["detach", "dropped"])
@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_a_rank_that_ends_well_after_one_step_logs_no_alarm(first: int, end: str) -> None:
    """The order of the buckets is still on its way: the other rank comes to it later."""
    training = Training()
    failed: list[str] = []
    late = dist.get_rank() != first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump, "dump_failure", lambda _, why: failed.append(why))
        agree = ArrivalOrder.agree

        def later(order: ArrivalOrder) -> None:
            time.sleep(0.5 * late)
            agree(order)

        patch.setattr(ArrivalOrder, "agree", later)
        training.step(0)
        if end == "detach":
            training.reducer.detach()
        del training
        gc.collect()
        dist.barrier()
    assert failed == []


@pytest.mark.behavior(
    "Wrappers, copies and parameters", "drop the optimizer after `attach` got names only", "Error at the next backward."
)
@on_ranks(2)
def test_it_lives_as_long_as_optimizer_or_module() -> None:
    """A Reducer that nobody keeps goes on; without optimizer and module, gradients are not silently local."""
    rank = dist.get_rank()
    model = make_model()
    optimizer: Any = sgd(model)
    pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
    del optimizer
    gc.collect()
    loss_of(model, rank, 0).backward()
    close(model[0].weight.grad, average_gradients(make_model(), losses_at(0))["0.weight"])
    model = make_model()
    optimizer = sgd(model)
    pycomm.attach(optimizer, model.named_parameters(), tuning=pycomm.Tuning(timeout=30))
    gc.collect()
    loss_of(model, rank, 0).backward()
    close(model[0].weight.grad, average_gradients(make_model(), losses_at(0))["0.weight"])
    optimizer = sgd(model)
    gc.collect()
    with pytest.raises(RuntimeError, match="is no longer averaged: the optimizer that was attached is gone"):
        loss_of(model, rank, 1).backward()
    optimizer.zero_grad()
    with attached(optimizer, model):
        loss_of(model, rank, 1).backward()
        close(model[0].weight.grad, average_gradients(make_model(), losses_at(1))["0.weight"])


@on_ranks(2)
def test_attached_anew_without_a_collection() -> None:
    """The old optimizer is dropped; whether a garbage collector has been there does not matter."""
    rank = dist.get_rank()
    model = make_model()
    gc.disable()
    try:
        for step in range(3):
            optimizer = sgd(model)
            pycomm.attach(optimizer, model.named_parameters(), tuning=pycomm.Tuning(timeout=30))
            model.zero_grad()
            loss_of(model, rank, step).backward()
            close(model[0].weight.grad, average_gradients(make_model(), losses_at(step))["0.weight"])
            del optimizer
    finally:
        gc.enable()


class Broken(pycomm.NoCompression):
    """Fails when its bucket is made, on one rank."""

    def make(self, bucket: Any, communicator: Any) -> Any:
        if communicator.rank == 1:
            raise MemoryError("no room for this bucket")
        return super().make(bucket, communicator)


def fails(how: str) -> str:
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    gc.collect()
    before = num_descriptors(), threading.active_count()
    options: dict[str, Any] = {}
    if how == "while it is made":
        options["compression"] = Broken()
    elif how == "by an argument of one rank":
        options["accumulate"] = 0 if rank == 1 else 1
    elif how == "by a setting":
        options["bucket_mb"] = 1 + rank
    elif how == "by an algorithm":
        options["algorithm"] = "rong"
    with pytest.raises((ValueError, MemoryError)) as raised:
        pycomm.attach(optimizer, model, **grouped(timeout=30, **options))
    said = f"{type(raised.value).__name__}: {raised.value}"
    del raised  # whose traceback knows a lot
    gc.collect()
    time.sleep(0.05)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert (num_descriptors(), threading.active_count()) == before
    with attached(optimizer, model):
        loss_of(model, rank, 0).backward()
        close(model[0].weight.grad, average_gradients(make_model(), losses_at(0))["0.weight"])
    return said


FAILURES = {
    "while it is made": ("rank 1 could not attach: no room for this bucket", "MemoryError: no room for this bucket"),
    "by an argument of one rank": ("rank 1 could not attach: accumulate is 0", "ValueError: accumulate is 0"),
    "by a setting": ("the ranks disagree: setting 7", "the ranks disagree: setting 7"),
    "by an algorithm": ("algorithm is 'rong', wanted one of", "algorithm is 'rong', wanted one of"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_attach_leaves_nothing(two_ranks: RankPool, how: str) -> None:
    for said, wanted in zip(two_ranks.run(fails, how), FAILURES[how], strict=True):
        assert wanted in said


def interrupted(over_hosts: bool) -> float:
    """Rank 0 waits in attach for a rank that does not come; Ctrl-C ends that, and leaves nothing."""
    model = make_model()
    optimizer = sgd(model)
    if dist.get_rank() == 1:
        return 0.0
    gc.collect()
    before = num_descriptors(), threading.active_count()
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    with over_tcp(over_hosts), pytest.raises(KeyboardInterrupt):
        pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=60))
    took = time.monotonic() - started
    timer.join()
    gc.collect()
    while threading.active_count() > before[1] and time.monotonic() < started + 30:
        time.sleep(0.05)  # the thread that asks the store ends once it has the answer
    assert (num_descriptors(), threading.active_count()) == before
    assert not optimizer._optimizer_step_pre_hooks
    return took


@pytest.mark.parametrize("over_hosts", [False, True])
def test_control_c_during_attach(new_ranks: Pools, over_hosts: bool) -> None:
    took = new_ranks(2).run(interrupted, over_hosts)[0]
    assert took < 40  # of the timeout's 60


@pytest.mark.behavior(
    "Passes and steps",
    "raise an exception in backward",
    "The pass is dropped. If gradients were already sent: error everywhere.",
)
@on_ranks(1)
def test_an_exception_in_backward_with_one_rank() -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=pycomm.TopK(1.0), bucket_mb=0.0001) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            explode(model)
            optimizer.zero_grad()
            wanted = average_gradients(model, losses_at(step))
            loss_of(model, 0, step).backward()
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            optimizer.step()
        assert reducer.stats()["steps"] == 4


class SparseLater(nn.Module):
    """Several buckets, of which one gets a sparse gradient if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(50, 4), make_model()

    def forward(self, x: torch.Tensor, sparse: bool) -> torch.Tensor:
        self.first.sparse = sparse
        return self.last(x).square().mean() + self.first(torch.arange(4)).double().square().mean()


@on_ranks(1)
def test_a_rank_alone_goes_on_after_a_bucket_that_cannot_be_sent() -> None:
    model = SparseLater()
    optimizer = sgd(model)
    x = batch_of(0, 0)[0]
    with attached(optimizer, model, compression=pycomm.TopK(0.5), bucket_mb=0.001) as reducer:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(x, sparse=step in (2, 4))
            if step in (2, 4):
                with pytest.raises(ValueError, match="the gradient of 'first.weight' is sparse"):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
        assert reducer.stats()["steps"] == 4


@on_ranks(2)
def test_a_flush_inside_backward_is_an_error_that_says_so() -> None:
    model = make_model()
    with attached(sgd(model), model) as reducer:
        loss = loss_of(model, dist.get_rank(), 0)
        model[0].bias.register_post_accumulate_grad_hook(lambda _: reducer.flush())
        with pytest.raises(RuntimeError, match=r"inside backward\(\): call it when backward\(\) has returned"):
            loss.backward()
