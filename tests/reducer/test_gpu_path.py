"""The path of parameters on a GPU, taken here by parameters in CPU memory.

The ranks pretend that CPU memory is a GPU's: work that is handed to the communication stream is done
as late as it may be, when somebody waits for it, and whoever looks at a tensor's value on the host
during backward is found out. Results must be those of the ordinary path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import pycomm
from pycomm.collectives.channel import Channel
from pycomm.training.reductions.phase import HostCopy
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, own_state
from tests.reducer.models import loss_of, make_model, sgd

STREAM = 7
SECONDS = ("wait_seconds", "pack_seconds", "wire_seconds", "unpack_seconds", "hidden_share")
NOT_COMPARED = {*SECONDS, "waits", "transport"}


class LateWork:
    """Work of a stream that is as slow as it may be: it is done when somebody waits for it, or for a later one."""

    pending: ClassVar[list[LateWork]] = []

    def __init__(self, job: Callable[[], Any]) -> None:
        self.job, self.result = job, None
        self.pending.append(self)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> Any:
        profiler = sys.getprofile()
        sys.setprofile(None)  # a stream would do this
        try:
            while self in self.pending:
                first = self.pending.pop(0)
                first.result = first.job()
        finally:
            sys.setprofile(profiler)
        return self.result

    def ends_within(self, _seconds: float | None) -> bool:
        self.wait()
        return True


HOST_READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu", "nonzero")


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Refuses what would make the host wait for a GPU."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the host read a tensor's value")

    with pytest.MonkeyPatch.context() as context:
        for name in HOST_READS:
            context.setattr(torch.Tensor, name, refuse)
        yield


@contextmanager
def pretended_gpu() -> Iterator[list[set[int]]]:
    """Yields the streams that made the gradients of each bucket."""
    followed: list[set[int]] = []
    LateWork.pending.clear()

    @contextmanager
    def reading(_: Channel, __: torch.device, producers: set[int]) -> Iterator[None]:
        followed.append(set(producers))
        yield

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr("pycomm.collectives.bucket.on_gpu", lambda _: True)
        context.setattr("pycomm.training.reducer.parameters.on_gpu", lambda _: True)
        context.setattr("pycomm.training.reductions.replicas.on_gpu", lambda _: True)
        context.setattr(Channel, "submit_on_gpu", lambda _, __, job: LateWork(job))
        context.setattr(Channel, "reading", reading)
        context.setattr(Channel, "current_stream_of", staticmethod(lambda _: lambda: STREAM))
        yield followed


class Scaler:
    """Scaler like GradScaler, with a scale of its own per step."""

    def __init__(self) -> None:
        self.value = 1.0

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


def train(rank: int, compression: Any, pretend: bool, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Some steps, one of which overflows on rank 1 and one in which rank 0 lacks a gradient."""
    options = dict(options)
    weight = options.pop("weight", None)
    model, scaler = make_model(dtype=dtype), Scaler()
    model.append(nn.Linear(5, 5).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {"grads": [], "broken": []}
    options.update(compression=compression, loss_scaler=scaler, bucket_mb=0.002)
    with attached(optimizer, model, **options) as reducer:
        for step in range(7):
            optimizer.zero_grad()
            scaler.value = 2.0**step
            complete = step != 5 or rank != 0
            if weight is not None:
                reducer.set_weight(weight + rank)
            loss = scaler.scale(loss_of(model if complete else model[:-1], rank, step))
            if step == 3 and rank == 1:
                loss = loss * torch.inf
            if pretend and complete:
                with no_host_reads():
                    loss.backward()
            else:
                loss.backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            if step == 3:
                seen["broken"] = [bool(torch.isfinite(g).all()) for g in grads]
                continue
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(scaler.value)
            seen["grads"].append(grads)
            optimizer.step()
        seen["state"] = own_state(reducer)
        seen["stats"] = {k: v for k, v in reducer.stats().items() if k not in NOT_COMPARED}
        seen["parameters"] = [p.detach().clone() for p in model.parameters()]
    return seen


def compare(compression: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    wanted = train(rank, compression, False, dtype, options)
    with pretended_gpu() as followed:
        got = train(rank, compression, True, dtype, options)
    assert followed[0] == {STREAM}
    # Factors that are no powers of two are float32 on the device and float64 on the host.
    # On the device each term of a mean is divided, on the host their sum: the same where that is exact.
    size = torch.distributed.get_world_size()
    # On the host PowerSGD has kernels of its own, whose sums have another order.
    is_exact = not options and size & (size - 1) == 0 and not isinstance(compression, pycomm.PowerSGD)
    tolerance = 0.0 if is_exact else 2e-3 if isinstance(compression, pycomm.FP16) else 1e-5
    for a, b in zip(wanted["grads"], got["grads"], strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    for x, y in zip(wanted["parameters"], got["parameters"], strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    assert not any(wanted["broken"])
    assert not any(got["broken"])
    assert wanted["state"].keys() == got["state"].keys()
    for name, entry in wanted["state"].items():
        assert entry.keys() == got["state"][name].keys()
        for key, value in entry.items():
            torch.testing.assert_close(value, got["state"][name][key], rtol=tolerance, atol=tolerance)
    norm, norm_there = (each["stats"].pop("residual_norm", 0.0) for each in (wanted, got))
    assert norm_there == pytest.approx(norm, rel=1e-3)
    if not compression.transactional:  # a GPU is not asked whose gradient it was
        wanted["stats"]["last_nonfinite"] = got["stats"]["last_nonfinite"]
    assert wanted["stats"] == got["stats"]
    if compression.transactional:
        assert got["stats"]["nonfinite_steps"] == 1
        assert got["stats"]["last_nonfinite"].endswith("on rank 1")


METHODS = {
    "none": pycomm.NoCompression(),
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "topk": pycomm.TopK(0.2),
    "topk_without_feedback": pycomm.TopK(0.2, error_feedback=False),
    "topk_half": pycomm.TopK(0.2, half_values=True),
    "dgc": pycomm.DGC(0.2, 0.9, clip_norm=0.1, weight_decay=0.01),
    "dgc_nesterov": pycomm.DGC(0.2, 0.9, nesterov=True),
    "int8": pycomm.Int8(),
    "onebit": pycomm.OneBit(),
    "qsgd": pycomm.QSGD(7),
    "terngrad": pycomm.TernGrad(),
    "randomk": pycomm.RandomK(0.2),
    "powersgd": pycomm.PowerSGD(1),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_same_results_without_a_look_at_the_host(method: str, dtype: torch.dtype) -> None:
    compare(METHODS[method], dtype, {})


@pytest.mark.parametrize("method", ["none", "fp16", "dgc"])
@on_ranks(2)
def test_weights(method: str) -> None:
    compare(METHODS[method], torch.float32, {"weight": 3.0})


@pytest.mark.parametrize("options", [{}, {"weight": 2.0}], ids=str)
@pytest.mark.parametrize("ratio", [0.1, 1.0])
@on_ranks(2)
def test_clipping_of_each_ranks_gradient(ratio: float, options: dict[str, Any]) -> None:
    compare(pycomm.DGC(ratio, clip_local_norm=0.3), torch.float32, options)


def refuse_copies(*_: object) -> None:
    raise AssertionError("the host waited for a GPU, or recorded an event that never happens")


@pytest.mark.parametrize("method", ["none", "topk"])
@on_ranks(2)
def test_a_step_that_is_captured(method: str) -> None:
    """The host neither waits for what earlier steps left, nor leaves anything for later ones."""
    rank, model = torch.distributed.get_rank(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pretended_gpu(), attached(optimizer, model, compression=METHODS[method], bucket_mb=0.002):
        for step in range(8):
            optimizer.zero_grad()
            with pytest.MonkeyPatch.context() as context:
                if step in (4, 5, 6):
                    context.setattr(torch.cuda, "is_initialized", lambda: True)
                    context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    context.setattr(HostCopy, "put", refuse_copies)
                    context.setattr(HostCopy, "get", refuse_copies)
                loss_of(model, rank, step).backward()
            if step != 5:  # a graph of backward alone
                optimizer.step()


def python_calls_of_backward(pretend: bool) -> int:
    """Return the calls that the interpreter sees in a backward() of 128 small gradients in four buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(64)))
    optimizer, calls = sgd(model), 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with pretended_gpu() if pretend else nullcontext(), attached(optimizer, model, bucket_mb=1 / 256):
        for step in range(6):
            loss = model(torch.ones(2, 8)).sum()
            calls = 0
            sys.setprofile(note if step == 5 else None)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
    return calls


@on_ranks(2)
def test_gradients_are_counted_as_in_cpu_memory() -> None:
    """By the extension: a hook in Python is called for each, but hands over only the last one of a bucket."""
    assert python_calls_of_backward(True) <= 1.2 * python_calls_of_backward(False)


@on_ranks(2)
def test_a_bucket_follows_every_stream_that_made_a_gradient_in_this_pass() -> None:
    """Even one that earlier passes did not use, and none that only they did: that one may not be captured."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
    optimizer, now = sgd(model), STREAM
    streams: dict[int, int] = {}

    def use(stream: int) -> None:
        nonlocal now
        now = stream

    for layer, param in enumerate(model.parameters()):  # the stream changes before the gradient is counted
        param.register_post_accumulate_grad_hook(lambda _, layer=layer: use(streams.get(layer, STREAM)))
    with pretended_gpu() as followed, pytest.MonkeyPatch.context() as context:
        context.setattr(Channel, "current_stream_of", staticmethod(lambda _: lambda: now))
        with attached(optimizer, model, bucket_mb=1 / 1024):  # two buckets, of layers 7 to 4 and 3 to 0
            for streams in ({}, {}, {5: 8}, {1: 9, 2: 10}, {}):
                followed.clear()
                model(torch.ones(2, 8)).sum().backward()
                assert [each - {STREAM} for each in followed] == [
                    {s for layer, s in streams.items() if layer in part} for part in (range(4, 8), range(4))
                ]
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_half_parameters() -> None:
    """Residuals of their own, in float32."""
    compare(METHODS["topk"], torch.bfloat16, {})


@on_ranks(2)
def test_the_watch_notices() -> None:
    x = torch.ones((), requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: print(bool(p.grad)))
    with no_host_reads(), pytest.raises(AssertionError, match="the host read a tensor's value"):
        (x * 2).backward()
