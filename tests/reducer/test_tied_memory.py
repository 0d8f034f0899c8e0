"""Two tensors in one memory: parameters tied by .data, views of one, a parameter and a buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size


class Pair(nn.Module):
    """Two layers with one weight: ``how`` says by what."""

    def __init__(self, how: str = "data") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.double()
        if how == "object":
            self.other.weight = self.one.weight
        elif how == "data":
            self.other.weight.data = self.one.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.norm(self.one(x.to(self.one.weight.dtype)))))


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.to(next(model.parameters()).dtype)).square().mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)


def require_tied(model: Pair) -> None:
    assert model.one.weight.data_ptr() == model.other.weight.data_ptr()


def require_equal(model: nn.Module, wanted: nn.Module, rtol: float = 1e-12) -> None:
    for (name, tensor), other in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=rtol, atol=1e-14, msg=name)


@pytest.mark.parametrize("buffers", ["local", "broadcast", "average"])
@on_ranks(2, 3)
def test_gradients_are_averaged_and_ties_stay(buffers: str) -> None:
    """SGD takes the same steps as with one parameter object; a buffer in a parameter's memory stays the parameter's."""

    def run(how: str) -> Pair:
        model = Pair(how)
        if how == "data":
            model.register_buffer("shown", model.one.bias.data)
            model.register_buffer("mean", model.norm.running_mean.data)  # type: ignore[union-attr]
        else:
            model.register_buffer("shown", torch.zeros(0))
            model.register_buffer("mean", torch.zeros(0))
        optimizer = sgd(model)
        with attached(optimizer, model, buffers=buffers):
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        return model

    model, wanted = run("data"), run("object")
    require_tied(model)
    assert torch.equal(model.shown, model.one.bias)  # type: ignore[arg-type]
    assert torch.equal(model.mean, model.norm.running_mean)  # type: ignore[arg-type]
    del model.shown, model.mean, wanted.shown, wanted.mean
    require_equal(model, wanted)
    assert_replicas_equal(model)


def _tied_parameters(model: Pair) -> None:
    model.other.weight.data = model.one.weight.data.t()


def _a_part(model: Pair) -> None:
    model.other.bias.data = model.one.weight.data[2]


def _a_frozen_parameter(model: Pair) -> None:
    model.other.weight.data = model.one.weight.data
    model.other.weight.requires_grad_(False)


def _a_buffer(model: Pair) -> None:
    model.register_buffer("shown", model.one.weight.data[:, 1])


def _a_parameter_of_another_optimizer(model: Pair) -> None:
    model.apart = nn.Parameter(model.one.weight.data.view(-1)[3:7])


TIES: dict[Callable[[Pair], None], tuple[str, str]] = {
    _tied_parameters: ("one.weight", "other.weight"),
    _a_part: ("one.weight", "other.bias"),
    _a_frozen_parameter: ("one.weight", "other.weight"),
    _a_buffer: ("one.weight", "shown"),
    _a_parameter_of_another_optimizer: ("one.weight", "apart"),
}


def refusal(names: tuple[str, str], call: str) -> str:
    return rf"'{names[0]}' and '{names[1]}' are two tensors in the same memory .* and {call} .* would separate them"


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "tie parameters by `.data` with `shard=`",
    "`ValueError` everywhere. Without `shard=`, they stay tied.",
)
@pytest.mark.parametrize("tie", list(TIES))
@pytest.mark.parametrize("ranks", ["all ranks", "one rank"])
@on_ranks(2)
def test_a_sharded_step_refuses_them_by_name(tie: Callable[[Pair], None], ranks: str) -> None:
    model = Pair("not tied")
    optimizer = sgd(model)
    if ranks == "all ranks" or dist.get_rank() == 1:
        tie(model)
    else:
        copied = copy.deepcopy(model)
        tie(copied)
        for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
            if not hasattr(model, name.partition(".")[0]):
                made = tensor.detach().clone()
                is_buffer = not isinstance(tensor, nn.Parameter)
                model.register_buffer(name, made) if is_buffer else setattr(model, name, nn.Parameter(made))
        model.other.weight.requires_grad_(copied.other.weight.requires_grad)
    with pytest.raises(ValueError, match=refusal(TIES[tie], "shard=")):
        pycomm.attach(optimizer, model, shard="optimizer", tuning=pycomm.Tuning(timeout=30))


@on_ranks(2)
def test_a_sharded_step_refuses_ties_to_other_reducers_and_new_parameters() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight.data = one.weight.data
    with (
        attached(torch.optim.SGD(other.parameters(), 0.1), other),
        pytest.raises(ValueError, match="'weight' and 'weight' are two tensors in the same memory"),
    ):
        pycomm.attach(torch.optim.SGD(one.parameters(), 0.1), one, shard="optimizer", tuning=pycomm.Tuning(timeout=30))

    model = Pair("not tied")
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "other.weight"], 0.1)
    model.other.weight.requires_grad_(False)
    with attached(optimizer, model, shard="optimizer"):
        loss_of(model, 0).backward()
        optimizer.step()
        model.other.weight.data = model.one.weight.data
        optimizer.add_param_group({"params": [model.other.weight.requires_grad_()]})
        optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"'o\w+.weight' and 'o\w+.weight' are two tensors in the same memory"):
            loss_of(model, 1).backward()


class Apart(nn.Module):
    """Tensors that share a storage, or lie between each other, and have no element in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        flat = torch.randn(64, dtype=torch.float64)
        self.first, self.second = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:32].view(4, 4))
        self.register_buffer("even", flat[32::2])
        self.frozen = nn.Parameter(flat[33::2], requires_grad=False)
        self.lstm = nn.LSTM(4, 4, 2).double()
        self.again = self.first  # one object with two names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x @ self.first @ self.second @ self.again)[0]
        return out


@on_ranks(2)
def test_one_storage_is_not_one_memory() -> None:
    rank, size = rank_and_size()
    model, alone = Apart(), Apart()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (model, alone)]
    with attached(optimizers[0], model, shard="optimizer"):
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            sum((loss_of(alone, step, r) / size for r in range(size)), torch.zeros(())).backward()
            for optimizer in optimizers:
                optimizer.step()
        require_equal(model, alone, 1e-9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 5) -> nn.Module:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
    return model


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.01),
    "LARS": lambda params: pycomm.LARS(params, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("tie", [_tied_parameters, _a_part])
def test_fused_steps_are_those_of_torch(kind: str, tie: Callable[[Pair], None]) -> None:
    models = [Pair("not tied"), Pair("not tied")]
    for model in models:
        tie(model)
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    pycomm.fuse(optimizers[0])
    require_equal(steps(models[0], optimizers[0]), steps(models[1], optimizers[1]), 1e-9)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "its own step"])
@pytest.mark.parametrize("tie", [_tied_parameters, _a_part])
def test_masters_are_tied_as_their_parameters(kind: str, tie: Callable[[Pair], None]) -> None:
    """The masters take the steps of a float32 model that is tied so, and go through a checkpoint."""
    make = OPTIMIZERS.get(kind, lambda params: torch.optim.RAdam(params, 0.01))
    wide = Pair("not tied").bfloat16().float()
    tie(wide)
    model = Pair("not tied").bfloat16()
    tie(model)
    optimizers = [make(wide.parameters()), make(model.parameters())]
    handle = pycomm.master_weights(optimizers[1])
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        for p, q in zip(wide.parameters(), model.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for p, master, q in zip(wide.parameters(), handle.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(master, p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(q, master.bfloat16())


@pytest.mark.parametrize("kind", ["mean", "Nesterov", "Elastic", "delay", "TopK", "gossip"])
@on_ranks(2)
def test_ranks_that_meet_meet_once(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "Nesterov": {"outer": pycomm.Nesterov()},
        "Elastic": {"outer": pycomm.Elastic()},
        "delay": {"delay": 1, "fragments": 2},
        "TopK": {"compression": pycomm.TopK(0.3)},
    }

    def run(how: str) -> Pair:
        model = Pair(how)
        optimizer = sgd(model)
        if kind == "gossip":
            handle: Any = pycomm.gossip(optimizer, model, topology="ring", timeout=30)
        else:
            handle = pycomm.local_sgd(optimizer, model, every=2, timeout=30, **options.get(kind, {}))
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        handle.detach()
        return model

    model = run("data")
    require_tied(model)
    require_equal(model, run("object"))


@on_ranks(2)
def test_ranks_that_meet_refuse_a_part_in_common() -> None:
    model = Pair("not tied")
    both = torch.randn(20, dtype=torch.float64)
    model.one.weight.data, model.other.weight.data = both[:16].view(4, 4), both[4:].view(4, 4)
    calls: list[Any] = [pycomm.local_sgd, pycomm.gossip]
    for call in calls:
        with pytest.raises(ValueError, match=refusal(("one.weight", "other.weight"), rf"{call.__name__}\(\)")):
            call(sgd(model), model, every=2, timeout=30)


@on_ranks(2)
def test_servers_refuse_them() -> None:
    model = Pair()
    with pytest.raises(ValueError, match=refusal(("one.weight", "other.weight"), r"parameter_server\(\)")):
        pycomm.parameter_server(sgd(model), model, timeout=30)
