"""Mistakes with pycomm.ddp are errors on every rank, before anything is sent; a rank that dies is one at once."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.ddp import HookHandle, register
from pycomm.torch_internals.wrappers import zero_buckets
from tests.ddp.wrapping import OutOfOrder, step, wrapped
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import over_tcp
from tests.reducer.models import Explodes, average_gradients, close, loss_of, losses_at, make_model, sgd


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)


def hooked(model: nn.Module) -> Any:
    ddp_model = DistributedDataParallel(model)
    ddp_model.register_comm_hook(None, fp16_compress_hook)
    return ddp_model


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model)


MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]] = {
    "a plain module": (lambda model: model, {}, "ddp_model is a Sequential, wanted a DistributedDataParallel"),
    "another hook": (hooked, {}, "already has a communication hook, fp16_compress_hook"),
    "a compression": (ddp, {"compression": pycomm.TopK}, "compression is <class"),
    "a scaler": (ddp, {"loss_scaler": 3}, "loss_scaler is 3"),
    "an optimizer": (ddp, {"optimizer": 3}, "optimizer is a int, wanted a torch.optim.Optimizer or None"),
    "an algorithm": (ddp, {"algorithm": 3}, "algorithm is 3, wanted a name"),
    "sparse": (lambda model: ddp(Sparse()), {}, "'table' has sparse=True"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_a_mistake_on_one_rank_is_an_error_on_both(mistake: str) -> None:
    make, options, says = MISTAKES[mistake]
    mine = dist.get_rank() == 1
    model = make(make_model()) if mistake == "sparse" or mine else None
    if model is None and mistake == "another hook":
        model = hooked(make_model())
        model._comm_hooks.clear()
    elif model is None:
        model = ddp(make_model())
    if mine and mistake == "a plain module":
        ddp(make_model())  # takes part in what the other rank's does
    error = (
        TypeError
        if says.split()[0] in ("ddp_model", "compression", "loss_scaler", "optimizer", "algorithm")
        else ValueError
    )
    with pytest.raises(error if mine or mistake == "sparse" else ValueError) as caught:
        register(model, timeout=30, **(options if mine else {}))
    assert says.split(", wanted")[0] in str(caught.value)
    assert mine or mistake == "sparse" or str(caught.value).startswith("rank 1 could not register: ")


@on_ranks(2)
def test_settings_that_differ() -> None:
    model = ddp(make_model())
    with pytest.raises(ValueError, match="setting 0 is 'compression=TopK"):
        register(model, compression=pycomm.TopK(0.1 * (1 + dist.get_rank())))
    with pytest.raises(ValueError, match="algorithm"):
        register(model, algorithm="nonsense")
    with pytest.raises(ValueError, match="apply momentum twice"):
        register(model, compression=pycomm.DGC(0.1), optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    register(model).remove()  # nothing was left behind


@on_ranks(2)
def test_a_removed_hook_leaves_torchs_average_and_may_come_again() -> None:
    with wrapped(make_model(), pycomm.TopK(0.1)) as (model, handle):
        with pytest.raises(ValueError, match="hook of pycomm's: remove"):
            register(model)
        step(model, 0)
        handle.remove()
        wanted = average_gradients(make_model(), losses_at(1))
        for name, grad in step(model, 1).items():
            close(grad, wanted[name])
        again = register(model)
        for name, grad in step(model, 1).items():
            close(grad, wanted[name])
        assert again.stats()["steps"] == 1
        again.remove()


@on_ranks(2)
def test_attach_names_what_to_use_for_a_wrapped_model() -> None:
    model = ddp(make_model())
    with pytest.raises(ValueError, match="DistributedDataParallel.*pycomm.ddp.register"):
        pycomm.attach(sgd(model), model)


@on_ranks(2)
def test_a_dropped_model_takes_its_hook_with_it() -> None:
    counts = []
    for _ in range(3):
        model = ddp(make_model())
        handle = register(model, compression=pycomm.TopK(0.1))
        step(model, 0)
        watched = [weakref.ref(thing) for thing in (model, handle, handle.communicator)]
        del model, handle
        gc.collect()
        assert [ref() for ref in watched] == [None] * 3
        time.sleep(0.05)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[1] == counts[2]


def unpickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "train a `deepcopy` of the wrapper's module",
    "Error before its step. Copy the wrapper, or use `handle.paused()`.",
)
@on_ranks(2)
def test_training_a_copy_of_the_inner_module_is_an_error() -> None:
    with wrapped(make_model()) as (model, handle):
        own = copy.deepcopy(model.module)
        optimizer = sgd(own)
        loss_of(own, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="belongs to a copy"):
            optimizer.step()
        optimizer.zero_grad()
        with handle.paused():
            loss_of(own, dist.get_rank(), 0).backward()
            optimizer.step()
    own = copy.deepcopy(model.module)
    loss_of(own, dist.get_rank(), 0).backward()  # nothing is registered any more
    sgd(own).step()


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled], ids=lambda make: make.__name__)
@on_ranks(2)
def test_a_copy_of_the_whole_averages_by_itself_until_it_is_registered(copied: Callable[[Any], Any]) -> None:
    with wrapped(make_model()) as (model, _):
        again = copied(model)
        for number in range(3):
            step(again, number)
            sgd(again).step()
        wanted = average_gradients(again.module, losses_at(5))
        for name, grad in step(again, 5).items():
            close(grad, wanted[name])
        handle = register(again)
        for name, grad in step(again, 5).items():
            close(grad, wanted[name])
        assert handle.stats()["steps"] == 1
        handle.remove()


def step_until_an_error(transport: bool, options: dict[str, Any]) -> tuple[str, float, bool]:
    """Train until the other rank is gone; return the error's type, the seconds it took, and whether it names rank 1."""
    with over_tcp(transport):
        model = DistributedDataParallel(OutOfOrder(), **options)
        handle = register(model, compression=pycomm.TopK(0.1), timeout=30)
    # Not inside backward: DistributedDataParallel's own collectives in forward would notice first.
    for number in range(2):
        step(model, number)
    loss = loss_of(model, dist.get_rank(), 2)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loss.backward()
    except pycomm.CommError as error:
        found = type(error).__name__, time.monotonic() - began, error.peer == 1 and "rank 1" in str(error)
    for call in (handle.remove, handle.remove):
        call()
    return found


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_rank_that_dies_is_an_error_out_of_backward(new_ranks: Pools, options: dict[str, Any]) -> None:
    pool = new_ranks(2)
    outcome = pool.outcomes(step_until_an_error, False, options)[0]
    assert outcome.error is None, outcome.trace
    kind, seconds, named = outcome.result
    assert kind == "CommError"
    assert seconds < 5.0, "noticed, not timed out"  # a second, but on a busy machine
    assert named


def die_in_the_first_pass() -> str:
    """A static graph's first pass runs its hooks in a final callback, where errors take another way."""
    model = DistributedDataParallel(OutOfOrder(), static_graph=True)
    handle = register(model, timeout=30)
    loss = loss_of(model, dist.get_rank(), 0)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.CommError) as caught:
        loss.backward()
    handle.remove()
    return str(caught.value)


def take_all(model: Any, handle: HookHandle) -> None:
    for bucket in zero_buckets(model):
        handle._take(bucket)


def die_while_another_has_joined() -> str:
    """The rank that has joined runs its hook outside of backward."""
    model = DistributedDataParallel(OutOfOrder())
    handle = register(model, timeout=30)
    step(model, 0)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.CommError) as caught:
        take_all(model, handle)
    handle.remove()
    return str(caught.value)


@pytest.mark.parametrize("body", [die_in_the_first_pass, die_while_another_has_joined], ids=lambda body: body.__name__)
def test_errors_outside_of_a_gradients_hook_keep_their_type(new_ranks: Pools, body: Callable[[], str]) -> None:
    outcome = new_ranks(2).outcomes(body)[0]
    assert outcome.error is None, outcome.trace
    assert "rank 1" in outcome.result


def end_early(how: str) -> str:
    model = DistributedDataParallel(make_model())
    handle = register(model, timeout=30)
    for number in range(3):
        step(model, number)
    if dist.get_rank() == 1:
        if how == "removed":
            handle.remove()
        del model, handle
        gc.collect()
        dist.barrier()
        return ""
    with pytest.raises(pycomm.CommError) as caught:
        step(model, 3)
    dist.barrier()
    return str(caught.value)


@pytest.mark.behavior(
    "Ranks that differ", "end the training, or detach, on one rank", "`CommError` at once on ranks that wait for it."
)
@pytest.mark.parametrize("how", ["removed", "dropped"])
def test_the_end_of_one_rank_is_told_by_name(new_ranks: Pools, how: str) -> None:
    message, _ = new_ranks(2).run(end_early, how)
    assert "rank 1: it has ended its training after step 3" in message


class Boom(nn.Module):
    armed = False

    def forward(self, x: torch.Tensor) -> Any:
        return Explodes.apply(x) if self.armed else x


@on_ranks(2, fresh=True)
def test_an_exception_in_the_middle_of_backward_tells_the_others() -> None:
    boom = Boom()
    # The last layer fills a bucket, which is sent before the exception.
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 400), boom, nn.Linear(400, 400)).double())
    handle = register(model, timeout=30)
    x = torch.ones(2, 12, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
    assert handle.stats()["num_buckets"] == 2
    began = time.monotonic()
    boom.armed = dist.get_rank() == 0
    if boom.armed:
        with pytest.raises(ArithmeticError):
            model(x).sum().backward()
        with pytest.raises(RuntimeError):
            model(x).sum().backward()  # by DistributedDataParallel, or by the hook
    else:
        with pytest.raises(pycomm.CommError, match="ended with an exception after part of its gradients"):
            model(x).sum().backward()
        assert time.monotonic() - began < 10.0


def test_one_rank_needs_no_others(two_ranks: RankPool) -> None:
    two_ranks.run(_alone)


def _alone() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    with wrapped(make_model(), pycomm.TopK(0.5), process_group=groups[dist.get_rank()]) as (model, handle):
        grads = step(model, 0)
        left = handle.state_dict()["ranks"]["0"]
        loss_of(plain := make_model(), dist.get_rank(), 0).backward()
        for name, p in plain.named_parameters():
            close(grads[name] + (left[name]["residual"] if name in left else 0.0), p.grad)
