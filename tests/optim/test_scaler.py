"""LossScaler: GradScaler's trace, the same skips on every rank, no message for them, true gradients after unscale_."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.models import perceptron
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size

INTERVAL = 3
STEPS = 14
INF_AT = {4: 1, 5: 0, 12: 1}  # step -> rank


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    return perceptron(6, 9, 2, dtype=dtype)


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def poison(step: int, rank: int, model: nn.Module) -> list[Any]:
    """Hooks that put an infinity into one gradient of the rank whose turn it is."""
    if INF_AT.get(step) != rank:
        return []
    weight = next(model.parameters())
    return [weight.register_hook(lambda grad: torch.full_like(grad, float("inf")))]


Trace = list[tuple[float, list[float]]]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, backward: Callable[[int], None]) -> Trace:
    """The scale, and a fingerprint of the parameters, after every step."""
    trace = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), [float(p.detach().double().sum()) for p in model.parameters()]))
    return trace


def expected_scales() -> list[float]:
    scale, tracker, scales = 2.0**10, 0, []
    for step in range(STEPS):
        if step in INF_AT:
            scale, tracker = scale * 0.5, 0
        else:
            tracker += 1
            if tracker == INTERVAL:
                scale, tracker = scale * 2, 0
        scales.append(scale)
    return scales


def train(kind: str, options: dict[str, Any], fused: bool = False) -> Trace:
    rank, _ = rank_and_size()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if "compression" in options else 0.9)
    if fused:
        pycomm.fuse(optimizer)
    scaler: Any
    if kind == "pycomm":
        scaler = pycomm.LossScaler(2.0**10, growth_interval=INTERVAL)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=INTERVAL)

    def backward(step: int) -> None:
        hooks = poison(step, rank, model)
        scaler.scale(loss_at(model, step, rank)).backward()
        for hook in hooks:
            hook.remove()

    with attached(optimizer, model, loss_scaler=scaler, **options):
        trace = run(model, optimizer, scaler, backward)
        assert_replicas_equal(model)
    return trace


OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "small buckets": {"bucket_mb": 1e-4},
    "float16 on the wire": {"compression": pycomm.FP16()},
    "DGC": {"compression": pycomm.DGC(0.3)},
    "int8": {"compression": pycomm.Int8()},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_trace_of_gradscaler(two_ranks: RankPool, options: str, fused: bool) -> None:
    """An infinity on one rank: both skip, both halve, and everything else is what GradScaler would do."""
    ours = two_ranks.run(train, "pycomm", OPTIONS[options], fused)
    theirs = two_ranks.run(train, "torch", OPTIONS[options], False)
    assert [scale for scale, _ in ours[0]] == expected_scales()
    assert [scale for scale, _ in theirs[0]] == expected_scales()
    assert ours[0] == ours[1]
    for (_, mine), (_, over_hosts) in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(over_hosts, rel=1e-5)
    for step in INF_AT:
        assert ours[0][step][1] == ours[0][step - 1][1]


def messages_of_three_steps(scaled: bool) -> list[str]:
    from pycomm.collectives.channel import Channel
    from pycomm.collectives.communicator import Communicator

    rank, _ = rank_and_size()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = pycomm.LossScaler(enabled=scaled)
    sent: list[str] = []

    def counting(kind: type, name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            sent.append(name)
            return original(self, *args, **options)

        return counted

    with attached(optimizer, model, loss_scaler=scaler), pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"):
            patch.setattr(Communicator, name, counting(Communicator, name))
        patch.setattr(Channel, "all_reduce_apart", counting(Channel, "all_reduce_apart"))
        for step in range(3):
            scaler.scale(loss_at(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return sent


def test_agreeing_on_a_skip_costs_no_message(two_ranks: RankPool) -> None:
    assert two_ranks.run(messages_of_three_steps, True) == two_ranks.run(messages_of_three_steps, False)
    sent = two_ranks.run(messages_of_three_steps, True)[0]
    assert sent == ["all_reduce_apart", "broadcast", *["all_reduce_apart"] * 2]  # one bucket, whose order is agreed on


@on_ranks(2)
def test_an_overflow_of_the_sum_alone_is_seen() -> None:
    """Finite on both ranks; their sum is not."""
    p = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = pycomm.LossScaler(1.0)
    with attached(optimizer, [("p", p)], loss_scaler=scaler, average=False):
        (p * 2e38).sum().backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(p, torch.zeros(4))
    assert scaler.get_scale() == 0.5


def unscale_and_look(kind: str, fused: bool) -> list[float]:
    rank, _ = rank_and_size()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fused:
        pycomm.fuse(optimizer)
    scaler: Any = pycomm.LossScaler(2.0**12) if kind == "pycomm" else torch.amp.GradScaler("cpu", init_scale=2.0**12)
    norms: list[float] = []
    with attached(optimizer, model, loss_scaler=scaler, accumulate=2):
        for step in range(3):
            optimizer.zero_grad()
            passes = 2 if step < 2 else 1  # the last window is ragged: unscale_ flushes it
            for q in range(passes):
                scaler.scale(loss_at(model, 10 * step + q, rank) / 2).backward()
            if kind == "torch" and passes == 1:
                return norms
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            scaler.step(optimizer)
            scaler.update()
    return norms


@pytest.mark.parametrize("fused", [False, True])
def test_true_gradients_after_unscaling(two_ranks: RankPool, fused: bool) -> None:
    ours, theirs = two_ranks.run(unscale_and_look, "pycomm", fused), two_ranks.run(unscale_and_look, "torch", False)
    assert ours[0] == ours[1]
    assert len(ours[0]) == 3
    assert ours[0][:2] == pytest.approx(theirs[0], rel=1e-5)
    assert 1e-4 < ours[0][2] < 1.0


class TestAlone:
    """LossScaler without attach."""

    def test_trace(self) -> None:
        traces = []
        for scaler in (
            pycomm.LossScaler(2.0**10, growth_interval=INTERVAL),
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=INTERVAL),
        ):
            model = make()
            optimizer = torch.optim.Adam(model.parameters())

            def backward(step: int, model: nn.Module = model, scaler: Any = scaler) -> None:
                hooks = poison(step, 1, model) + poison(step, 0, model)
                scaler.scale(loss_at(model, step, 0)).backward()
                for hook in hooks:
                    hook.remove()

            traces.append(run(model, optimizer, scaler, backward))
        assert traces[0] == traces[1]

    def test_static(self) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = pycomm.LossScaler(8.0, growth_interval=1, dynamic=False)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert (p.tolist(), scaler.get_scale(), scaler.skipped_steps) == ([-1.0, -1.0], 8.0, 1)

    def test_not_enabled(self) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = pycomm.LossScaler(enabled=False)
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (p.tolist(), scaler.get_scale(), scaler.state_dict()) == ([0.0, 0.0], 1.0, {})

    def test_scale_of_nested_outputs(self) -> None:
        scaler = pycomm.LossScaler(4.0)
        a, (b, c) = scaler.scale([torch.ones(()), (torch.ones(1), torch.ones(2))])
        assert (a.tolist(), b.tolist(), c.tolist()) == (4.0, [4.0], [4.0, 4.0])

    def test_state_is_exchanged_with_gradscaler(self) -> None:
        theirs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=7)
        theirs.scale(torch.ones(()))
        ours = pycomm.LossScaler()
        ours.load_state_dict(theirs.state_dict())
        assert ours.state_dict() == theirs.state_dict()
        buffer = io.BytesIO()
        torch.save(ours.state_dict(), buffer)
        buffer.seek(0)
        theirs.load_state_dict(torch.load(buffer, weights_only=True))
        assert theirs.get_scale() == 32.0

    def test_never_infinite(self) -> None:
        p = nn.Parameter(torch.zeros(1))
        scaler = pycomm.LossScaler(2.0**127, growth_interval=1)
        p.grad = torch.zeros(1)
        scaler.step(torch.optim.SGD([p], lr=1.0))
        scaler.update()
        assert scaler.get_scale() == 2.0**127

    def test_says_when_it_is_no_overflow(self) -> None:
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = pycomm.LossScaler(2.0**-9)
        for _ in range(3):
            p.grad = torch.full((1,), float("nan"))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scaler.step(optimizer)
            scaler.update()
        assert not caught  # once
        again = pycomm.LossScaler(2.0**-10)
        with pytest.warns(RuntimeWarning, match=r"not finite at a loss scale of 0\.00097.*this is not an overflow"):
            again.step(optimizer)

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])  # by kernels, and by its own step
    def test_gradients_of_masters_that_users_replace(self, make: Any) -> None:
        ends = []
        for replaces in (False, True):
            p = nn.Parameter(torch.ones(4, dtype=torch.float16))
            optimizer, scaler = make([p], lr=1.0), pycomm.LossScaler(8.0)
            masters = pycomm.master_weights(optimizer)
            for factor in (0.25, 0.5):
                scaler.scale((p * torch.arange(4)).sum()).backward()
                scaler.unscale_(optimizer)
                (master,) = masters.parameters()
                assert master.grad is not None
                if replaces:
                    master.grad = master.grad * factor
                else:
                    master.grad.mul_(factor)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            ends.append(p.tolist())
        assert ends[0] == ends[1]
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        master.grad = None
        with pytest.raises(RuntimeError, match="the gradient of a master was removed after unscale_"):
            scaler.step(optimizer)

    def test_order_of_calls(self) -> None:
        p = nn.Parameter(torch.zeros(1))
        p.grad = torch.zeros(1)
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = pycomm.LossScaler()
        with pytest.raises(RuntimeError, match="no step"):
            scaler.update()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)
        scaler.update()
        with pytest.raises(RuntimeError, match="no closure"):
            scaler.step(optimizer, closure=lambda: 0.0)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"init_scale": 0}, "init_scale is 0, wanted a positive number"),
            ({"init_scale": -2.0}, "init_scale is -2"),
            ({"init_scale": float("inf")}, "init_scale is inf"),
            ({"init_scale": float("nan")}, "init_scale is nan"),
            ({"growth_factor": 1.0}, "growth_factor is 1.0, wanted a number above 1"),
            ({"growth_factor": -2.0}, "growth_factor is -2"),
            ({"backoff_factor": 1.0}, "backoff_factor is 1.0, wanted a number between 0 and 1"),
            ({"backoff_factor": 0.0}, "backoff_factor is 0"),
            ({"growth_interval": 0}, "growth_interval is 0, wanted at least 1"),
        ],
    )
    def test_bad_numbers(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            pycomm.LossScaler(**options)

    def test_other_mistakes(self) -> None:
        with pytest.raises(TypeError, match="growth_interval is 2.5, wanted an int"):
            pycomm.LossScaler(growth_interval=2.5)  # type: ignore[arg-type]
        scaler = pycomm.LossScaler()
        with pytest.raises(ValueError, match="new_scale is -1"):
            scaler.update(-1.0)
        with pytest.raises(RuntimeError, match="not enabled"):
            scaler.load_state_dict({})
        with pytest.raises(ValueError, match="the state has no 'growth_factor'"):
            scaler.load_state_dict({"scale": 1.0})
        with pytest.raises(TypeError, match="outputs is a float"):
            scaler.scale(3.0)
        p = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        p.grad = torch.zeros(1, dtype=torch.float16)
        with pytest.raises(
            ValueError, match="gradients in float16 would underflow without the scale: see pycomm.master"
        ):
            scaler.unscale_(torch.optim.SGD([p], lr=1.0))


BAD_NUMBERS: list[Any] = ["2", None, True, [2.0], float("nan"), float("inf"), -1]


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_states_that_are_none(key: str) -> None:
    """An error that names the key, and nothing is changed."""
    scaler = pycomm.LossScaler(32.0, growth_interval=7)
    before = scaler.state_dict()
    other = pycomm.LossScaler(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3).state_dict()
    without = {name: value for name, value in other.items() if name != key}
    with pytest.raises(ValueError, match=f"the state has no {key!r}"):
        scaler.load_state_dict(without)
    for value in [*BAD_NUMBERS, *([] if key == "_growth_tracker" else [0, 0.0])]:
        with pytest.raises(ValueError, match=f"the state's {key!r} is .*, wanted a positive number"):
            scaler.load_state_dict({**other, key: value})
    for state in ([other], None, "state", 3):
        with pytest.raises(ValueError, match=f"the state is a {type(state).__name__}, wanted what"):
            scaler.load_state_dict(state)  # type: ignore[arg-type]
    assert scaler.state_dict() == before
