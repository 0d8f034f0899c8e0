"""What is each rank's own stays: ``ignore``, and parameters that differ before the first broadcast."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import attached, grouped, make_equal, warnings_noted
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd


class Experts(nn.Module):
    """A trunk that ranks have in common, and experts of which each rank has its own, of its own width."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.trunk = make_model()
        torch.manual_seed(100 + dist.get_rank())
        self.experts = nn.ModuleList([nn.Linear(12, width), nn.BatchNorm1d(width)]).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.trunk(x) + self.experts[1](self.experts[0](x)).sum(1, keepdim=True)


WAYS: dict[str, Callable[[Experts], Any]] = {
    "a pattern": lambda m: ["experts.*"],
    "names": lambda m: [n for n, _ in [*m.named_parameters(), *m.named_buffers()] if n.startswith("experts")],
    "a module": lambda m: [m.experts],
    "a list of modules": lambda m: m.experts,
    "a generator": lambda m: (t for t in [*m.experts.parameters(), *m.experts.buffers()]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", [True, False], ids=["in the optimizer", "in another"])
@on_ranks(2)
def test_it_takes_no_part_in_anything(way: str, inside: bool) -> None:
    """Neither sent nor averaged, hashed or warned of; of another width on each rank. The trunk is averaged."""
    rank = dist.get_rank()
    model = Experts(5 + rank)
    plain = copy.deepcopy(model)  # whose experts see the same, and whose trunk gets the mean
    params = list(model.parameters() if inside else model.trunk.parameters())
    optimizer, reference = torch.optim.Adam(params, lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    other = torch.optim.Adam(model.experts.parameters(), lr=0.01)
    said: list[str] = []
    with warnings_noted(said):
        with attached(optimizer, model, ignore=WAYS[way](model), buffers="broadcast", check_replicas=1) as reducer:
            assert not any(name.startswith("experts") for name in reducer.named_parameters())
            for step in range(4):
                for each in (optimizer, reference, other):
                    each.zero_grad()
                loss_of(model, rank, step).backward()
                loss_of(plain, rank, step).backward()
                for p in plain.trunk.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert q.grad is not None
                    close(p.grad, q.grad)
                for each in (optimizer, reference, *([] if inside else [other])):
                    each.step()
            for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
                close(a, b, 1e-9)
    assert said == []


@on_ranks(2)
def test_state_of_ignored_parameters_stays() -> None:
    rank = dist.get_rank()
    model = Experts(4 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = torch.full((4 + rank, 12), 3.0 + rank, dtype=torch.float64)
    optimizer.state[model.experts[0].weight]["momentum_buffer"] = own  # type: ignore[index]
    if rank == 0:
        optimizer.state[model.trunk[0].bias]["momentum_buffer"] = torch.ones(40, dtype=torch.float64)
    with attached(optimizer, model, ignore=["experts.*"]):
        assert optimizer.state[model.experts[0].weight]["momentum_buffer"] is own  # type: ignore[index]
        assert float(own[0, 0]) == 3.0 + rank
        assert torch.equal(optimizer.state[model.trunk[0].bias]["momentum_buffer"], torch.ones(40).double())


@on_ranks(2)
def test_ignored_parameters_may_be_added_and_replaced_on_one_rank() -> None:
    rank = dist.get_rank()
    model = Experts()
    optimizer = sgd(model.trunk)
    with attached(optimizer, model, ignore=["experts.*"], check_replicas=1):
        for step in range(4):
            if step == 1 and rank == 1:
                optimizer.param_groups[0]["params"] += list(model.experts.parameters())
            if step == 2 and rank == 0:
                model.experts[0] = nn.Linear(12, 5).double()
                optimizer.param_groups[0]["params"] += list(model.experts[0].parameters())
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()


def mistaken(how: str, guilty: list[int]) -> str:
    model = Experts()
    optimizer: torch.optim.Optimizer = sgd(model)
    is_guilty = dist.get_rank() in guilty
    wrong: dict[str, dict[str, Any]] = {
        "no such name": {"ignore": ["experts.*", "expert.*"]},
        "a module's name": {"ignore": ["experts"]},
        "another's parameter": {"ignore": [nn.Parameter(torch.ones(3))]},
        "everything": {"ignore": ["*"]},
        "all that is trained": {"ignore": [model.trunk, "experts.*"]},
        "a text": {"ignore": "experts.*"},
        "a tensor": {"ignore": model.trunk[0].weight},
        "a number": {"ignore": 3},
        "numbers": {"ignore": [3]},
        "an empty module": {"ignore": [nn.Tanh()]},
        "with a scaler": {"ignore": ["experts.*"], "loss_scaler": pycomm.LossScaler()},
    }
    options = wrong[how] if is_guilty else {"ignore": ["experts.*"]}
    with pytest.raises((TypeError, ValueError)) as caught:
        pycomm.attach(optimizer, model, **grouped(timeout=20, **options))
    with attached(optimizer, model, ignore=["experts.*"]):
        pass
    return f"{type(caught.value).__name__}: {caught.value}"


MISTAKES = {
    "no such name": "ValueError: ignore has 'expert.*', which matches none of the 13 parameters and buffers, 'trunk.0",
    "a module's name": "ValueError: ignore has 'experts', which matches no parameter or buffer: for all of that module",
    "another's parameter": "ValueError: ignore has a tensor of shape [3], which is not among the model's",
    "everything": "ValueError: ignore=['*'] leaves no parameter of the optimizer to average",
    "all that is trained": "leaves no parameter of the optimizer to average",
    "a text": "TypeError: ignore is 'experts.*', wanted a list of names, patterns, parameters or modules",
    "a tensor": "TypeError: ignore is a Parameter, wanted a list of names, patterns, parameters or modules",
    "a number": "TypeError: ignore is a int, wanted a list of names",
    "numbers": "TypeError: ignore has 3, wanted names of parameters, patterns such as 'experts.*'",
    "an empty module": "ValueError: ignore has a Tanh without parameters and buffers",
    "with a scaler": "ValueError: ignore has 'experts.0.weight', which the attached optimizer steps; this cannot be",
}


@pytest.mark.parametrize("how", MISTAKES)
def test_mistakes_are_errors_on_every_rank(two_ranks: RankPool, how: str) -> None:
    for message in two_ranks.run(mistaken, how, [0, 1]):
        assert MISTAKES[how] in message
    innocent, guilty = two_ranks.run(mistaken, how, [1])
    assert innocent == f"ValueError: rank 1 could not attach: {guilty.split(': ', 1)[1]}"


@on_ranks(2)
def test_patterns_must_be_equal() -> None:
    model = Experts()
    here, there = (re.escape(f"tuning=Tuning(ignore=('{pattern}',))") for pattern in ("experts.0.*", "experts.*"))
    with pytest.raises(ValueError, match=f'"{here}" on rank 1, "{there}" on rank 0'):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(ignore=[["experts.*"], ["experts.0.*"]][dist.get_rank()]))


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`parameters of the module that this optimizer does not have differ between the ranks`",
    "They are not overwritten. Experts: `Tuning(ignore=[...])`. Others: attach them, or use one seed.",
)
@on_ranks(2)
def test_parameters_that_differ_outside_stay_and_are_named_once() -> None:
    rank = dist.get_rank()
    model = Experts()
    model.trunk[4].requires_grad_(False)
    with torch.no_grad():
        model.trunk[4].weight.fill_(rank)
        model.trunk[0].weight.add_(rank)
    optimizer = sgd(model.trunk[2])
    before = [p.detach().clone() for p in model.experts.parameters()]
    said: list[str] = []
    with warnings_noted(said), attached(optimizer, model):
        pass
    assert len(said) == 1
    assert (
        "differ between the ranks: 'trunk.0.weight', 'experts.0.weight', 'experts.0.bias'. Each rank keeps" in said[0]
    )
    assert "tuning=pycomm.Tuning(ignore=[names or patterns])" in said[0]
    assert "build the model from the same seed on all ranks" in said[0]
    for p, was in zip(model.experts.parameters(), before, strict=True):
        assert torch.equal(p, was)
    assert float(model.trunk[4].weight.detach().sum()) == 0  # frozen: rank 0's
    for cure in (lambda: make_equal(model), lambda: None):
        cure()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with attached(optimizer, model):
                pass


@on_ranks(2)
def test_the_warning_names_the_callers_line() -> None:
    model = Experts()
    with pytest.warns(RuntimeWarning, match="differ between the ranks") as caught:
        pycomm.attach(sgd(model.trunk), model).detach()
    assert caught[0].filename == __file__


@on_ranks(2)
def test_other_shapes_outside_are_an_error_that_says_how() -> None:
    model = Experts(5 + dist.get_rank())
    with pytest.raises(ValueError, match=r"'experts.0.weight: \[6, 12\] .* on rank 1, .*\[5, 12\].*Tuning\(ignore="):
        pycomm.attach(sgd(model.trunk), model)


@on_ranks(2)
def test_a_second_attach_makes_its_own_equal() -> None:
    rank = dist.get_rank()
    model = Experts()
    said: list[str] = []
    with warnings_noted(said), attached(sgd(model.trunk), model), attached(sgd(model.experts), model):
        weight: torch.Tensor = model.get_parameter("experts.0.weight").detach()
        both = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(both, weight)
        assert torch.equal(both[0], both[1])
        loss_of(model, rank, 0).backward()
    assert len(said) == 1


def saving(folder: str, ranks: int) -> Any:
    rank = dist.get_rank()
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, ignore=["experts.*"]) as reducer:
        loss_of(model, rank, 0).backward()
        optimizer.step()
        pycomm.save(folder, reducer).wait()
        saved = {name: t.clone() for name, t in model.state_dict().items()}
        momentum = optimizer.state[model.experts[0].weight]["momentum_buffer"].clone()  # type: ignore[index]
        loss_of(model, rank, 1).backward()
        optimizer.step()
        pycomm.load(folder, reducer)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
        assert torch.equal(optimizer.state[model.experts[0].weight]["momentum_buffer"], momentum)  # type: ignore[index]
    return None


def loading(folder: str) -> str:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, ignore=["experts.*"]) as reducer:
        with pytest.raises(ValueError, match="each rank has saved model values of its own.* 2 ranks in all") as caught:
            pycomm.load(folder, reducer)
    return str(caught.value)


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "load ignored values into another number of ranks",
    "Error. Use the same number, or drop `ignore`.",
)
def test_checkpoints_have_each_ranks_own(rank_pools: Any, tmp_path: Path) -> None:
    rank_pools(2).run(saving, str(tmp_path), 2)
    for message in rank_pools(3).run(loading, str(tmp_path)):
        assert message.endswith("there are 3 here, wanted as many")


@on_ranks(2)
def test_gradients_of_the_trunk_are_of_all_ranks() -> None:
    """Names alone, without the module: ignored ones are none of the optimizer's business either."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model.named_parameters(), ignore=["4.*"]):
        loss_of(model, rank, 0).backward()
        wanted = average_gradients(make_model(), losses_at(0))
        mine = average_gradients(make_model(), [losses_at(0)[rank]])
        for name, p in model.named_parameters():
            close(p.grad, (mine if name.startswith("4.") else wanted)[name])
