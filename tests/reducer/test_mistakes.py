"""Mistakes around attach: an error on every rank, or one that says what happened here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd
from tests.on_ranks import Pools, on_ranks
from tests.ranks import PerRank, RankPool
from tests.reducer.attaching import attached, grouped
from tests.reducer.models import close, explode, loss_of, make_model, sgd


def make(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model()
    options: dict[str, Any] = {}
    if kind == "wider":
        model = nn.Sequential(nn.Linear(12, 41, dtype=torch.float64), *list(model)[1:])
    elif kind == "float32":
        model = model.float()
    elif kind == "deeper":
        model.append(nn.Linear(5, 5, dtype=torch.float64))
    elif kind == "frozen":
        model[2].requires_grad_(False)
    elif kind == "renamed":
        model = nn.Sequential(*list(model))
        model = nn.Sequential(model[0], model[1], nn.Sequential(*list(model)[2:]))
    elif kind == "topk":
        options["compression"] = pycomm.TopK(0.5)
    elif kind == "topk 10 %":
        options["compression"] = pycomm.TopK(0.1)
    elif kind == "accumulate":
        options["accumulate"] = 2
    elif kind == "small buckets":
        options["bucket_mb"] = 1
    return model, options


def attach_differently(kind: str) -> str:
    model, options = make(kind)
    with pytest.raises(ValueError, match="the ranks disagree") as caught:
        pycomm.attach(sgd(model), model, **grouped(timeout=20, **options))
    dist.barrier()
    model, _ = make("same")
    with attached(sgd(model), model):
        loss_of(model, dist.get_rank(), 0).backward()
    return str(caught.value)


@pytest.mark.behavior(
    "Starting and launching",
    "`the ranks disagree: ...`",
    "In `attach`: another model, setting or order of parameters, or an argument that depends on the rank.",
)
@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (["same", "wider"], "parameter 0 is '0.weight: [41, 12] torch.float64' on rank 1, '0.weight: [40, 12]"),
        (["same", "float32"], "torch.float32' on rank 1"),
        (["same", "deeper"], "parameter 6 is '5.weight: [5, 5] torch.float64' on rank 1, 'nothing' on rank 0"),
        (["same", "frozen"], "'2.weight: [30, 40] torch.float64 frozen' on rank 1"),
        (["same", "renamed"], "'2.0.weight: [30, 40] torch.float64' on rank 1"),
        (
            ["same", "topk"],
            "setting 0 is 'compression=TopK(ratio=0.5, error_feedback=True, half_",
        ),
        (["topk", "topk 10 %"], "ratio=0.1"),
        (["same", "accumulate"], "'accumulate=2' on rank 1, 'accumulate=1' on rank 0"),
        (["same", "small buckets"], "'tuning=Tuning(bucket_mb=1.0)' on rank 1, 'tuning=Tuning()' on rank 0"),
    ],
)
def test_ranks_that_differ(two_ranks: RankPool, kinds: list[str], says: str) -> None:
    messages = two_ranks.run(attach_differently, PerRank(kinds))
    assert messages[0] == messages[1]
    assert says in messages[0]


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "another order of the optimizer's parameters on one rank",
    "`ValueError` everywhere.",
)
@pytest.mark.parametrize("call", ["attach", "horovod"])
@on_ranks(2)
def test_parameters_in_another_order(call: str) -> None:
    """State is sent by place: rank 0's would become that of other parameters."""
    rank, model = dist.get_rank(), make_model(seed=dist.get_rank())
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params if rank == 0 else params[::-1], lr=0.1)
    if rank == 0:
        loss_of(model, rank, 0).backward()
        optimizer.step()
    before = [param.detach().clone() for param in params]
    text = r"order of the optimizer's parameters: number 0 is '4.bias' on rank 1, '0.weight' on rank 0"
    if call == "horovod":
        hvd.init()
    with pytest.raises(ValueError, match=text):
        pycomm.attach(optimizer, model) if call == "attach" else hvd.DistributedOptimizer(
            optimizer, model.named_parameters()
        )
    assert len(optimizer.state) == (len(params) if rank == 0 else 0)
    if call == "attach":
        assert all(map(torch.equal, before, params))
    else:
        hvd.shutdown()


@on_ranks(2)
def test_wrong_arguments() -> None:
    model = make_model()
    optimizer = sgd(model)
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "optimizer is a Sequential", lambda: pycomm.attach(model, model)),
        (TypeError, "wanted a torch.nn.Module or", lambda: pycomm.attach(optimizer, list(model.parameters()))),
        (ValueError, "6 parameter.* are not among", lambda: pycomm.attach(optimizer, make_model())),
        (ValueError, "bucket_mb is 0", lambda: pycomm.attach(optimizer, model, tuning=pycomm.Tuning(bucket_mb=0))),
        (
            ValueError,
            "'nope'.*native.*ring",
            lambda: pycomm.attach(optimizer, model, tuning=pycomm.Tuning(algorithm="nope")),
        ),
        (
            TypeError,
            "algorithm is 3, wanted a name",
            lambda: pycomm.attach(optimizer, model, tuning=pycomm.Tuning(algorithm=3)),  # type: ignore[arg-type]
        ),
        (ValueError, "accumulate is 0", lambda: pycomm.attach(optimizer, model, accumulate=0)),
        (TypeError, "accumulate is 1.5", lambda: pycomm.attach(optimizer, model, accumulate=1.5)),  # type: ignore[arg-type]
        (ValueError, "timeout is -1", lambda: pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=-1))),
        (ValueError, "compression is 'topk', wanted", lambda: pycomm.attach(optimizer, model, compression="topk")),
        (TypeError, r"compression is <class .*TopK", lambda: pycomm.attach(optimizer, model, compression=pycomm.TopK)),  # type: ignore[arg-type]
        (TypeError, "loss_scaler is 1024", lambda: pycomm.attach(optimizer, model, loss_scaler=1024.0)),
        (ValueError, "ratio is 0", lambda: pycomm.TopK(0)),
        (ValueError, "ratio is 1.5, wanted 0 < ratio <= 1", lambda: pycomm.TopK(1.5)),
        (ValueError, "ratio is nan", lambda: pycomm.TopK(float("nan"))),
        (TypeError, "ratio is '1%'", lambda: pycomm.TopK("1%")),  # type: ignore[arg-type]
        (
            ValueError,
            "belongs to a DistributedDataParallel, which averages gradients itself",
            lambda: pycomm.attach(optimizer, DistributedDataParallel(model)),
        ),
    ]
    for kind, says, call in bad:
        with pytest.raises(kind, match=says):
            call()


@on_ranks(2)
def test_parameters_that_cannot_be_averaged() -> None:
    model = make_model()
    optimizer = sgd(model)
    other = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(TypeError, match="parameter 'weight' has dtype torch.complex64"):
        pycomm.attach(sgd(other), other)
    elsewhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(TypeError, match="parameter 'weight', a Parameter on device meta, has no memory"):
        pycomm.attach(sgd(elsewhere), elsewhere)
    twice = [("same", p) for p in model.parameters()]
    with pytest.raises(ValueError, match="two parameters are called 'same'"):
        pycomm.attach(optimizer, twice)
    with attached(optimizer, model):
        with pytest.raises(ValueError, match="parameter '0.weight' is already attached"):
            pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=20))
    with attached(optimizer, model):
        pass


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ratio", "unknown argument 'ratio': wanted one of compression, accumulate, "),
        ("bucket_cap_mb", r"'bucket_cap_mb': did you mean tuning=pycomm.Tuning\(bucket_mb=...\)\?"),
        ("find_unused_parameters", "'find_unused_parameters': leave it out"),
    ],
)
@on_ranks(2)
def test_unknown_arguments(name: str, says: str) -> None:
    model = make_model()
    unknown: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=says):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=20), **unknown)


def wrong_on_one_rank(mistake: str) -> str:
    model = make_model()
    arguments: Any = [sgd(model), model]
    options: dict[str, Any] = {"timeout": 20}
    if dist.get_rank() == 1:
        if mistake == "other model":
            arguments[0] = sgd(make_model())
        elif mistake == "swapped":
            arguments.reverse()
        else:
            options[mistake] = "no_such_method"
    with pytest.raises((TypeError, ValueError)) as caught:
        pycomm.attach(*arguments, **grouped(**options))
    with attached(sgd(model), model):
        return str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("other model", "6 parameter(s) of the optimizer are not among"),
        ("swapped", "optimizer is a Sequential, wanted a torch.optim.Optimizer; attach(optimizer, model): swapped?"),
        (
            "bucket_size_mb",
            "attach got an unknown argument 'bucket_size_mb': did you mean tuning=pycomm.Tuning(bucket_mb=...)?",
        ),
        (
            "compression",
            "compression is 'no_such_method', wanted one of 'auto', 'fp16', 'bf16', 'fp8', 'int8', 'int4', 'onebit',",
        ),
    ],
)
def test_a_mistake_on_one_rank_is_an_error_on_all(two_ranks: RankPool, mistake: str, says: str) -> None:
    innocent, guilty = two_ranks.run(wrong_on_one_rank, mistake)
    assert guilty.startswith(says)
    assert innocent == f"rank 1 could not attach: {guilty}"


class Uninitialized(torch.optim.Optimizer):
    """Wrapper that does not call ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


@on_ranks(2)
def test_an_optimizer_without_hooks_is_refused_by_name() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="optimizer is a Uninitialized whose __init__ has not called"):
        pycomm.attach(Uninitialized(sgd(model)), model)


@on_ranks(2)
def test_other_entry_points_name_swapped_arguments_too() -> None:
    model = make_model()
    optimizer: Any = sgd(model)
    for call in (partial(pycomm.local_sgd, every=2), pycomm.gossip, pycomm.parameter_server):
        with pytest.raises((TypeError, ValueError), match=r"wanted a .*Optimizer; \w+\(optimizer, model\): swapped\?"):
            call(model, optimizer, timeout=20)


def test_without_a_process_group() -> None:
    model = make_model()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        pycomm.attach(sgd(model), model)


@pytest.mark.behavior(
    "Passes and steps",
    "`backward() ran again on the averaged gradient of ...`",
    "For several passes per step, pass `accumulate=n`. For other losses, use `paused()`. Otherwise `zero_grad()` "
    "is missing.",
)
@pytest.mark.parametrize("options", [{"compression": pycomm.TopK(0.5)}, {"average": False}], ids=["topk", "sum"])
@on_ranks(2)
def test_backward_twice_where_that_means_nothing(options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, **options):
        for clear in (True, False):
            optimizer.zero_grad(set_to_none=clear)
            loss_of(model, dist.get_rank(), 0).backward()
        said = r"backward\(\) ran again on the averaged gradient of '[024]\.(weight|bias)'.*accumulate=n"
        with pytest.raises(RuntimeError, match=said):
            loss_of(model, dist.get_rank(), 1).backward()


@on_ranks(2)
def test_backward_twice_is_right_for_means() -> None:
    """The average of an average plus fresh gradients is right for plain means."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, plain = make_model(), make_model()
    with attached(sgd(model), model):
        for step in range(2):
            loss_of(model, rank, step).backward()
        total = torch.stack([loss_of(plain, r, step) for r in range(size) for step in range(2)]).sum()
        (total / size).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            close(p.grad, q.grad)


@pytest.mark.behavior(
    "Passes and steps",
    "raise an exception in backward",
    "The pass is dropped. If gradients were already sent: error everywhere.",
)
@on_ranks(2)
def test_an_exception_in_backward() -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        loss_of(model, rank, 0).backward()  # learns
        optimizer.zero_grad()
        explode(model)
        # One bucket, not launched: the pass is forgotten on all ranks and the next one is whole.
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        grad = make_model()
        torch.stack([loss_of(grad, r, 1) for r in range(2)]).sum().backward()
        assert grad[0].weight.grad is not None
        close(model[0].weight.grad, grad[0].weight.grad / 2)
    with attached(optimizer, model, bucket_mb=0.0001) as reducer:
        loss_of(model, rank, 0).backward()
        explode(model)
        with pytest.raises(RuntimeError, match="ended with an exception after part of its gradients had been sent"):
            model(torch.ones(1, 12, dtype=torch.float64))
        assert reducer.stats()["steps"] == 1


@pytest.mark.behavior(
    "Wrappers, copies and parameters", "sparse gradients", "`ValueError` in backward. `pycomm.horovod` averages them."
)
@on_ranks(2)
def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    with attached(sgd(model), model):
        with pytest.raises(ValueError, match="the gradient of '0.weight' is sparse"):
            model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.behavior(
    "Gradients",
    "`the gradient of ... has not been averaged: ...`",
    "For parameters added after `attach`, call the attached module itself, or attach again.",
)
@on_ranks(2)
def test_a_gradient_that_nobody_averaged_is_not_stepped_on() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with attached(optimizer, model.named_parameters()):
        model[0].requires_grad_(True)
        torch.tanh(model[0](torch.ones(1, 12, dtype=torch.float64))).sum().backward()  # nothing that is hooked
        with pytest.raises(RuntimeError, match="the gradient of '0.weight' has not been averaged"):
            optimizer.step()


def die_in_backward(compression: Any) -> str:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(600, 600) for _ in range(6)])
    optimizer = sgd(model)
    reducer = pycomm.attach(optimizer, model, compression=compression, tuning=pycomm.Tuning(timeout=60, bucket_mb=1))
    step = 0
    started = time.monotonic()
    try:
        while time.monotonic() - started < 40:
            optimizer.zero_grad()
            if rank == 1 and step == 5:
                model[2].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            model(torch.ones(16, 600)).sum().backward()
            optimizer.step()
            step += 1
    except pycomm.CommError as error:
        reducer.detach()
        return f"{step} {error.peer} {error}"
    return "no error"


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.01)])
def test_a_rank_that_dies_in_backward(new_ranks: Pools, compression: Any) -> None:
    pool = new_ranks(2)
    started = time.monotonic()
    outcomes = pool.outcomes(die_in_backward, compression)
    assert time.monotonic() - started < 30
    assert outcomes[0].result.startswith("5 1 rank 0: "), outcomes[0]
    assert "rank 1 died" in outcomes[0].result
