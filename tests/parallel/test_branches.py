"""Tests of models split by branch: a detector's heads, and AlexNet's halves, equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import parallel
from tests.backend.worlds import on_world

D = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def classes() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def boxes() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (2, 2)))


class Detector(nn.Module):
    """Trunk with two heads, on one process (without a ``group``) or on two."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        makes = [classes, boxes]
        self.heads: Any = (
            nn.ModuleList([make() for make in makes]) if group is None else parallel.Branches(makes, group)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x).tanh()
        alone = isinstance(self.heads, nn.ModuleList)
        label, box = [head(hidden) for head in self.heads] if alone else self.heads(hidden)
        return label.logsumexp(1).mean() + (box * label.mean()).square().mean()


def half(exchange: Callable[[], nn.Module]) -> nn.Module:
    """Return one half of a small AlexNet, which sees the other half's channels in its third convolution."""
    return nn.Sequential(
        *(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()),
        exchange(),
        *(nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Flatten(), exchange(), nn.Linear(2 * 2 * 9, 4)),
    )


class TwoHalves(nn.Module):
    """Both halves of the small AlexNet in one process, layer by layer."""

    def __init__(self, combine: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList([half(nn.Identity), half(nn.Identity)])
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x, x
        for left, right in zip(*self.halves, strict=True):
            a, b = (torch.cat([a, b], 1),) * 2 if isinstance(left, nn.Identity) else (left(a), right(b))
        return a + b if self.combine == "sum" else torch.cat([a, b], -1)


def train(model: nn.Module, x: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return losses and the gradients of the input of four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = x.clone().requires_grad_()
    found: list[torch.Tensor] = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        found += [loss.detach(), gradient]
        optimizer.step()
    return found


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@on_world(2)
def test_the_heads_of_a_detector() -> None:
    reference, model = Detector().to(D), Detector(dist.group.WORLD).to(D)
    found, wanted = (train(each, random(6, 4), lambda loss: loss) for each in (model, reference))
    close(found, wanted)
    close(model.trunk.weight, reference.trunk.weight)
    rank = str(dist.get_rank())
    assert list(model.heads.own) == [rank]
    for mine, other in zip(model.heads.own[rank].parameters(), reference.heads[int(rank)].parameters(), strict=True):
        close(mine, other)


@pytest.mark.parametrize("combine", ["sum", "concatenate"])
@on_world(2)
def test_the_halves_of_alexnet(combine: str) -> None:
    torch.manual_seed(0)
    model = parallel.Branches([lambda: half(parallel.Exchange)] * 2, combine=combine).to(D)
    reference = TwoHalves(combine).to(D)
    found, wanted = (train(each, random(3, 2, 6, 6), lambda y: y.sin().sum()) for each in (model, reference))
    close(found, wanted)
    rank = dist.get_rank()
    for mine, other in zip(model.own.parameters(), reference.halves[rank].parameters(), strict=True):
        close(mine, other)


@on_world(2)
def test_branches_with_losses_of_their_own() -> None:
    torch.manual_seed(0)
    model = parallel.Branches([classes, boxes], combine="own").to(D)
    torch.manual_seed(0)
    both = [classes().to(D), boxes().to(D)]
    x, y = random(3, 5).requires_grad_(), random(3, 5).requires_grad_()
    model(x).square().sum().backward()
    torch.stack([branch(y).square().sum() for branch in both]).sum().backward()
    close(x.grad, y.grad)


@on_world(4)
def test_branches_and_replicas_together() -> None:
    mesh, rank = parallel.mesh(dp=2, tp=2), dist.get_rank()
    reference, model = Detector().to(D), Detector(mesh["tp"]).to(D)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (reference, model)]
    reducer = pycomm.attach(optimizers[1], model, process_group=mesh["dp"])
    for step in range(3):
        data = random(2, 4, 4, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([reference(half) for half in data]).mean().backward()
        model(data[rank // 2]).backward()
        for optimizer in optimizers:
            optimizer.step()
    close(model.trunk.weight, reference.trunk.weight)
    own = str(rank % 2)
    for mine, other in zip(model.heads.own[own].parameters(), reference.heads[int(own)].parameters(), strict=True):
        close(mine, other)
    reducer.detach()


@on_world(2)
def test_wrong_arguments_are_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"make_branches": [classes]}, "has 1 branches, wanted one for each of 2 ranks"),
        ({"make_branches": [1, 2]}, "not a sequence of functions"),
        ({"combine": "product"}, "combine is 'product'"),
        ({"dim": "last"}, "dim is 'last'"),
    ]
    for arguments, told in wrong:
        given: dict[str, Any] = {"make_branches": [classes, boxes], **(arguments if rank else {})}
        with pytest.raises((TypeError, ValueError), match=told if rank else "rank 1 could not make these branches: "):
            parallel.Branches(**given)
    with pytest.raises(ValueError, match="make these branches: rank 0 has .combine = 'list'., rank 1 .combine = 'sum'"):
        parallel.Branches([classes, boxes], combine="sum" if rank else "list")
    for combine in ("sum", "concatenate"):
        with pytest.raises(ValueError, match=r"branch 0 has the shape \[.*\], branch 1 \["):
            parallel.Branches([classes, boxes], combine=combine)(torch.ones(2, 5))
    for combine in ("list", "sum"):
        unfit = parallel.Branches([nn.Identity, lambda: nn.LSTM(5, 2)], combine=combine)
        with pytest.raises(
            (TypeError, ValueError), match="returned a tuple" if rank else "rank 1 could not compute its branch: a"
        ):
            unfit(torch.ones(2, 5))
