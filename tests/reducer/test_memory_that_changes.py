"""Parameters whose memory changes after attach: another memory order is followed, another shape is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.ddp
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, rank_and_size
from tests.reducer.models import sgd


class Images(nn.Module):
    """Convolutions, whose memory order may change, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return self.last(x.mean((2, 3))).double()


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - 1).square().mean()


def convert(model: nn.Module, at: str, step: int) -> None:
    """Convert the model in one step, and back in a later one, on the ranks that ``at`` names."""
    if at == "all ranks" or (at == "one rank" and dist.get_rank() == 1):
        if step == 2:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif step == 5:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def step_by_step(model: nn.Module, optimizer: torch.optim.Optimizer, at: str) -> None:
    for step in range(8):
        optimizer.zero_grad()
        if step == 5:
            convert(model, at, step)
        loss_of(model, step).backward()
        if step == 2:
            convert(model, at, step)  # the gradients, too
        optimizer.step()


ATTACHED: dict[str, dict[str, Any]] = {
    "dense": {},
    "small buckets": {"bucket_mb": 0.0001},
    "FP16": {"compression": pycomm.FP16()},
    "Int8": {"compression": pycomm.Int8()},
    "PowerSGD": {"compression": pycomm.PowerSGD(2)},
    "TopK": {"compression": pycomm.TopK(0.2)},
    "survive": {"on_failure": "shrink"},
}


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "change the memory format while attached",
    "Gradients are right; sending takes a copy.",
)
@pytest.mark.parametrize("kind", list(ATTACHED))
@pytest.mark.parametrize("at", ["all ranks", "one rank"])
@on_ranks(2)
def test_another_memory_order_is_followed(kind: str, at: str) -> None:
    """As if it had not changed, up to the rounding of convolutions; also if it changes on one rank alone."""

    def run(at: str) -> nn.Module:
        model = Images()
        optimizer = sgd(model)
        with attached(optimizer, model, **ATTACHED[kind]):
            step_by_step(model, optimizer, at)
        return model

    require_equal(run(at), run("no rank"))


def require_equal(model: nn.Module, wanted: nn.Module, rtol: float = 1e-9) -> None:
    for (name, p), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=rtol, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["torch", "fused by torch", "fused here", "masters"])
@on_ranks(2)
def test_gradients_have_the_memory_order_of_their_parameters(kind: str) -> None:
    """Torch's fused optimizers read parameter and gradient as they lie."""
    _, size = rank_and_size()
    model, alone = Images(), Images()
    if kind == "masters":
        model, alone = model.bfloat16(), alone.bfloat16()
    adam = [torch.optim.AdamW(m.parameters(), 0.01, fused=kind == "fused by torch") for m in (model, alone)]
    if kind == "masters":
        pycomm.master_weights(adam[0])
        pycomm.master_weights(adam[1])
    elif kind == "fused here":
        pycomm.fuse(adam[0])
    with attached(adam[0], model):
        for step in range(8):
            for m in (model, alone) if step > 0 or kind != "fused by torch" else ():
                convert(m, "all ranks", step)
            if step in (2, 5) and kind == "fused by torch":  # which reads its own state as it lies, too
                for optimizer in adam:
                    optimizer.state.clear()
            for optimizer in adam:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            sum((loss_of(alone, step, r) / size for r in range(size)), torch.zeros(())).backward()
            for p, other in zip(model.parameters(), alone.parameters(), strict=True):
                assert p.grad is not None
                assert p.grad.stride() == p.stride()
                assert other.grad is not None
                if kind == "masters":
                    p.grad.copy_(other.grad)  # a mean of rounded gradients is another than a rounded mean
            for optimizer in adam:
                optimizer.step()
    require_equal(model, alone, 1e-2 if kind == "masters" else 1e-9)


@pytest.mark.parametrize("begins_converted", [False, True])
@on_ranks(2)
def test_inside_an_accumulation_window(begins_converted: bool) -> None:
    _, size = rank_and_size()
    model, alone = Images(), Images()
    optimizers = [sgd(model), sgd(alone)]
    if begins_converted:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with attached(optimizers[0], model, accumulate=2):
        for step in range(8):
            if step % 2 == 0:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if step in (3, 5):
                order = torch.channels_last if (step == 3) != begins_converted else torch.contiguous_format
                model.to(memory_format=order)  # type: ignore[call-overload]
            loss_of(model, step).backward()
            sum((loss_of(alone, step, r) / size for r in range(size)), torch.zeros(())).backward()
            if step % 2 == 1:
                for optimizer in optimizers:
                    optimizer.step()
    require_equal(model, alone)


@pytest.mark.parametrize("vetoed", [False, True])
@on_ranks(2)
def test_a_rank_without_a_batch(vetoed: bool) -> None:
    """Gradients in another memory order are copies, which the factor of ranks with a batch, or NaN, must reach."""
    model, alone = Images(), Images()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1.0)
    with attached(optimizer, model, loss_scaler=scaler if vetoed else None) as reducer:
        loss_of(model, 0).backward()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer.zero_grad()
        if vetoed and dist.get_rank() == 1:
            reducer.veto_step()
        if vetoed or dist.get_rank() == 0:
            loss_of(model, 1).backward()
        else:
            reducer.skip_batch()
        loss_of(alone, 1, 0).backward()
        for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert param.grad is not None
            if vetoed:
                assert bool(param.grad.isnan().all())
            else:
                torch.testing.assert_close(param.grad, wanted.grad)


@contextmanager
def _averaged(kind: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Any]:
    options: dict[str, Any] = {
        "mean": {},
        "Nesterov": {"outer": pycomm.Nesterov()},
        "Elastic": {"outer": pycomm.Elastic()},
        "delay": {"delay": 1, "fragments": 2},
        "TopK": {"compression": pycomm.TopK(0.2)},
    }
    if kind == "gossip":
        handle: Any = pycomm.gossip(optimizer, model, topology="ring", timeout=30)
    else:
        handle = pycomm.local_sgd(optimizer, model, every=2, timeout=30, **options[kind])
    yield handle
    handle.detach()


@pytest.mark.parametrize("at", ["all ranks", "one rank"])
@pytest.mark.parametrize("kind", ["mean", "Nesterov", "Elastic", "delay", "TopK", "gossip"])
@on_ranks(2)
def test_of_ranks_that_meet(kind: str, at: str) -> None:
    def run(at: str) -> nn.Module:
        model = Images()
        optimizer = sgd(model)
        with _averaged(kind, optimizer, model) as handle:
            step_by_step(model, optimizer, at)
            if kind != "gossip":
                handle.meet()
        return model

    require_equal(run(at), run("no rank"))


@on_ranks(3, timeout=90)
def test_of_servers_and_workers() -> None:
    """Serving ranks convert their model, too, as all ranks run one script."""

    def run(at: str) -> nn.Module:
        model = Images()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with pycomm.parameter_server(optimizer, model, servers=2, mode="sync", timeout=30) as server:
            if server.is_worker:
                for step in range(8):
                    with server.step():
                        convert(model, at, step)
                        loss_of(model, step).backward()
                server.pull()
            else:
                convert(model, at, 2)
        return model

    converted, wanted = run("all ranks"), run("no rank")
    if dist.get_rank() == 2:
        require_equal(converted, wanted)
    else:  # each has its own shard
        pairs = zip(converted.parameters(), wanted.parameters(), strict=True)
        assert all(torch.allclose(p, q, rtol=1e-9) for p, q in pairs)


@pytest.mark.parametrize("compression", [None, pycomm.FP16(), pycomm.DGC(0.5, weight_decay=0.1)], ids=repr)
@pytest.mark.parametrize("when", [-1, 1])
@on_ranks(2)
def test_under_distributed_data_parallel(when: int, compression: Any) -> None:
    """Before the wrapper is made, and after the first backward, when it sorts its buckets anew.

    In between, torch itself reads its buckets in another order than it wrote them.
    """

    def run(when: int) -> nn.Module:
        images = Images()
        if when < 0:
            convert(images, "all ranks", 2)
        model = DistributedDataParallel(images)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with closing(_Removed(pycomm.ddp.register(model, compression=compression, timeout=30))):
            for step in range(6):
                if when == step:
                    convert(images, "all ranks", 2)
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        return images

    require_equal(run(when), run(9), 1e-3 if isinstance(compression, pycomm.FP16) else 1e-9)


class _Removed:
    """Handle of a hook, which ``closing`` removes."""

    def __init__(self, handle: pycomm.ddp.HookHandle) -> None:
        self.close = handle.remove


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "another memory format on one rank at `attach`, or another shape through `.data`",
    "Error everywhere.",
)
@on_ranks(2)
def test_orders_that_differ_at_attach_are_an_error() -> None:
    model = Images()
    if dist.get_rank() == 1:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"'first.weight: \[4, 3, 3, 3\] torch.float64, strides \[27, 1, 9, 3\]' on"):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=30))


def shorter(p: torch.Tensor) -> torch.Tensor:
    return p.data[:1]


def longer(p: torch.Tensor) -> torch.Tensor:
    return torch.cat([p.data, p.data])


def turned(p: torch.Tensor) -> torch.Tensor:
    return p.data.reshape(p.shape[::-1])


class Sum(nn.Module):
    """Sum of two parameters of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return self.one.square().sum() + self.other.square().sum()


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "another memory format on one rank at `attach`, or another shape through `.data`",
    "Error everywhere.",
)
@pytest.mark.parametrize(
    ("kind", "at", "change"),
    [
        ("dense", "all ranks", shorter),
        ("dense", "one rank", turned),
        ("TopK", "one rank", longer),
        ("accumulate", "all ranks", turned),
        ("local_sgd", "all ranks", longer),
        ("local_sgd", "one rank", shorter),
        ("gossip", "one rank", turned),
    ],
)
@on_ranks(2)
def test_another_shape_is_an_error(kind: str, at: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """On every rank; it names the parameter and says what to do."""
    model = Sum()
    optimizer = sgd(model)
    around: AbstractContextManager[Any] = attached(
        optimizer,
        model,
        compression=pycomm.TopK(0.5) if kind == "TopK" else None,
        accumulate=2 if kind == "accumulate" else 1,
    )
    if kind == "local_sgd":
        around = _averaged("mean", optimizer, model)
    elif kind == "gossip":
        around = _averaged("gossip", optimizer, model)
    wanted = r"'one' was of shape \[2, 3\] when it was attached, and is of shape \[\d, \d\] now.*detach\(\)"

    def train() -> None:
        for step in range(8):
            if kind != "accumulate" or step % 2 == 0:
                optimizer.zero_grad()
            if step == 4 and (at == "all ranks" or dist.get_rank() == 1):
                model.one.data = change(model.one)
            model().backward()
            if kind != "accumulate" or step % 2 == 1:
                optimizer.step()

    with around, pytest.raises((RuntimeError, ValueError), match=wanted):
        train()


class Empty(nn.Module):
    """Layers without inputs or outputs, such as a LoRA of rank 0 and an expert that has been pruned away."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.none, self.no_output = nn.Linear(4, 3), nn.Linear(0, 3), nn.Linear(3, 0)
        self.flat = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) + self.none(x[:, :0])
        return torch.cat([x, self.no_output(x), self.flat.expand(len(x), 0)], 1)


def empty_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


EMPTY: dict[str, dict[str, Any]] = {
    "dense": {},
    "FP16": {"compression": pycomm.FP16()},
    "Int8": {"compression": pycomm.Int8()},
    "PowerSGD": {"compression": pycomm.PowerSGD(2)},
    "TopK": {"compression": pycomm.TopK(1.0)},
    "DGC": {"compression": pycomm.DGC(0.5)},
    "shard": {"shard": "optimizer"},
    "shard parts": {"shard": "optimizer", "grads": "part"},
    "fuse": {},
    "masters": {},
    "masters, own step": {},
}


@pytest.mark.parametrize("kind", list(EMPTY))
@on_ranks(2)
def test_parameters_without_elements(kind: str) -> None:
    rank, size = rank_and_size()
    model, alone = Empty(), Empty()
    if "masters" in kind:
        model, alone = model.bfloat16(), alone.bfloat16()
    make: Any = torch.optim.RAdam if kind == "masters, own step" else torch.optim.SGD
    options = {} if kind in ("masters, own step", "DGC") else {"momentum": 0.9}
    optimizers = [make(m.parameters(), 0.1, **options) for m in (model, alone)]
    if kind == "fuse":
        pycomm.fuse(optimizers[0])
    elif "masters" in kind:
        pycomm.master_weights(optimizers[0])
        pycomm.master_weights(optimizers[1])
    with attached(optimizers[0], model, **EMPTY[kind]) as reducer:
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            empty_loss(model, step, rank).backward()
            sum((empty_loss(alone, step, r) / size for r in range(size)), torch.zeros(())).backward()
            for optimizer in optimizers:
                optimizer.step()
        optimizers[0].load_state_dict(optimizers[0].state_dict())
        reducer.load_state_dict(reducer.state_dict())
    assert all(p.isfinite().all() for p in model.parameters())
    if kind in ("dense", "TopK", "fuse", "shard", "shard parts"):
        require_equal(model, alone, 1e-5)
