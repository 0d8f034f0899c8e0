"""Tests of layers of experts: equal to one process that has all experts and all ranks' tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import parallel
from tests.backend.worlds import on_world

D = torch.float64
WIDTH, FEATURES = 4, 3


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, FEATURES))


def make_layer(group: Any = None, **settings: Any) -> parallel.Experts:
    torch.manual_seed(0)
    layer = parallel.Experts(make_expert, 6, WIDTH, group, **settings).to(D)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.randn(6, WIDTH, dtype=D, generator=generator))
    return layer


def tokens_of(rank: int) -> torch.Tensor:
    """Return this rank's tokens: another number of them on each, and none on the last of three."""
    return torch.randn((5, 3, 0)[rank], 2, WIDTH, dtype=D, generator=torch.Generator().manual_seed(10 + rank))


class Reference:
    """All experts in one process, token by token, as the papers write it."""

    def __init__(self, top_k: int, factor: float | None) -> None:
        torch.manual_seed(0)
        nn.Linear(WIDTH, 6, bias=False)  # the layer's gate takes random numbers before the experts do
        self.experts = [make_expert().to(D) for _ in range(6)]
        self.gate = torch.randn(6, WIDTH, dtype=D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        self.top_k, self.factor = top_k, factor
        self.dropped = 0

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = (tokens @ self.gate.t()).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        number = len(tokens)
        capacity = math.inf if self.factor is None else math.ceil(self.factor * number * self.top_k / 6)
        taken = [0] * 6
        out = [torch.zeros(FEATURES, dtype=D) for _ in range(number)]
        for choice in range(self.top_k):
            for token in range(number):
                expert = int(chosen[token, choice])
                taken[expert] += 1
                if taken[expert] <= capacity:
                    out[token] = out[token] + weights[token, choice] * self.experts[expert](tokens[token])
                else:
                    self.dropped += 1
        first = torch.bincount(chosen[:, 0], minlength=6) / number
        return torch.stack(out), 6 * (first * probabilities.mean(0)).sum()


@pytest.mark.parametrize(("top_k", "factor"), [(2, None), (2, 1.0), (1, 0.5), (3, 1.25)])
@on_world(2, 3)
def test_experts_equal_one_process(top_k: int, factor: float | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reference = Reference(top_k, factor)
    everything = [tokens_of(p).flatten(0, 1).requires_grad_() for p in range(size)]
    wanted, auxiliary = reference(torch.cat(everything))
    pull = torch.randn(wanted.shape, dtype=D, generator=torch.Generator().manual_seed(3))
    ((wanted * pull).sum() / size + 0.1 * auxiliary).backward()  # the mean of the ranks' losses

    layer = make_layer(top_k=top_k, capacity_factor=factor)
    x: Any = tokens_of(rank).requires_grad_()
    found = layer(x)
    lengths = [len(each) for each in everything]
    mine = pull.split(lengths)[rank].view_as(found.output)
    ((found.output * mine).sum() + 0.1 * found.auxiliary_loss).backward()

    def close(a: Any, b: Any) -> None:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

    close(found.output.flatten(0, 1), wanted.split(lengths)[rank])
    mean = found.auxiliary_loss.detach().clone()
    dropped = torch.tensor(found.dropped)
    gate: Any = layer.gate.weight.grad
    for each in (mean, dropped, gate):
        dist.all_reduce(each)
    close(mean / size, auxiliary)
    assert dropped.item() == reference.dropped
    assert factor is None or reference.dropped > 0
    close(gate / size, reference.gate.grad)
    close(x.grad.flatten(0, 1) / size, everything[rank].grad)
    assert list(layer.own) == [str(e) for e in range(rank * 6 // size, (rank + 1) * 6 // size)]
    for number, expert in layer.own.items():
        for a, b in zip(expert.parameters(), reference.experts[int(number)].parameters(), strict=True):
            grad = torch.zeros_like(b) if b.grad is None else b.grad
            close(a.grad, grad)


@on_world(2)
def test_without_averages_gradients_are_of_the_sum() -> None:
    layers = [make_layer(average=average) for average in (True, False)]
    x = tokens_of(0)
    for layer in layers:
        layer(x).output.sum().backward()
    for a, b in zip(layers[0].own.parameters(), layers[1].own.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad * dist.get_world_size(), b.grad, rtol=1e-13, atol=0)


class Model(nn.Module):
    """Dense layers around a layer of experts."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = make_layer(group, capacity_factor=None)
        self.after = nn.Linear(FEATURES, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.experts(self.before(x))
        return self.after(found.output).square().mean() + 0.1 * found.auxiliary_loss


@on_world(4)
def test_experts_and_replicas_together() -> None:
    """Four ranks as 2 x 2 train what one rank trains, on all data."""
    mesh = parallel.mesh(dp=2, ep=2)
    alone, rank = dist.new_group([dist.get_rank()], use_local_synchronization=True), dist.get_rank()
    reference, model = (Model(group).to(D) for group in (alone, mesh["ep"]))
    dense, experts = parallel.parameters_by_group(model)
    assert len(dense) == 5
    assert len(experts) == 3 * 4
    optimizers = [torch.optim.SGD([param for _, param in part], lr=0.1, momentum=0.9) for part in (dense, experts)]
    everyone = parallel.group_over(mesh, "dp", "ep")
    reducers = [
        pycomm.attach(optimizers[0], dense, process_group=everyone),
        pycomm.attach(optimizers[1], experts, process_group=mesh["dp"]),
    ]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        data = torch.randn(4, 6, WIDTH, dtype=D, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        # Each pair of ranks balances its own tokens.
        torch.stack([reference(data[p : p + 2]) for p in (0, 2)]).mean().backward()
        plain.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(data[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, wanted[name], rtol=1e-12, atol=1e-12)
    for reducer in reducers:
        reducer.detach()


@on_world(2)
def test_wrong_arguments_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"experts": 3}, "experts is 3, which 2 ranks cannot share evenly"),
        ({"width": 0}, "width is 0"),
        ({"top_k": 5}, "top_k is 5, wanted at most the 4 experts"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
        ({"average": 1}, "average is 1"),
    ]
    for arguments, told in wrong:
        given = {"experts": 4, "width": 2, **(arguments if rank else {})}
        with pytest.raises((TypeError, ValueError), match=told if rank else "rank 1 could not (make|send)"):
            parallel.Experts(lambda: nn.Linear(2, 2), **given)
    with pytest.raises(ValueError, match="the ranks differ on how to .*: rank 0 has 'top_k = 1', rank 1 'top_k = 2'"):
        parallel.Experts(lambda: nn.Linear(2, 2), 4, 2, top_k=1 + rank)
    layer = parallel.Experts(lambda: nn.Linear(2, 2), 4, 2)
    for x, told in ((torch.ones(3, 3), r"x has the shape \[3, 3\]"), (torch.ones(3, 2).long(), "x is a torch.int64")):
        with pytest.raises((TypeError, ValueError), match=told if rank else "rank 1 could not (make|send)"):
            layer(x if rank else torch.ones(3, 2))
    assert layer(torch.ones(2, 2)).output.shape == (2, 2)
