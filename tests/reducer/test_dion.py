"""Dion over ranks against the paper's algorithm in one process, which has every rank's samples."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.optim.stepping import assert_equal, assert_near, snapshot
from tests.reducer.attaching import attached, own_state

LR, RANK, MOMENTUM, DECAY = 0.05, 3, 0.9, 0.02


def made(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Sequential, pycomm.Dion]:
    torch.manual_seed(11)
    conv = nn.Conv2d(2, 4, 3)
    layers = [conv, nn.Flatten(), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 20), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(20, 2, bias=False), nn.Linear(2, 3)).to(dtype)  # of rank 2: below RANK
    groups = pycomm.muon_groups(model, adamw={"lr": 0.01})
    return model, pycomm.Dion(groups, lr=LR, rank=RANK, momentum=MOMENTUM, weight_decay=DECAY, **options)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 2, 4, 4, generator=generator).to(dtype), torch.randn(3, 3, generator=generator).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def alone(first: dict[str, torch.Tensor], steps: int) -> nn.Sequential:
    """Algorithm 1 of the paper on the mean gradient, from the given Q of each matrix; AdamW for the others."""
    model, _ = made()
    matrices = {name: p for name, p in model.named_parameters() if name in first}
    others = [p for name, p in model.named_parameters() if name not in first]
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=DECAY, betas=(0.9, 0.95))
    momenta = {name: torch.zeros(p.shape[0], p[0].numel(), dtype=p.dtype) for name, p in matrices.items()}
    qs = {name: q.clone() for name, q in first.items()}
    for step in range(steps):
        model.zero_grad()
        for rank in range(dist.get_world_size()):
            (loss_of(model, rank, step) / dist.get_world_size()).backward()
        adamw.step()
        for name, w in matrices.items():
            assert w.grad is not None
            b = momenta[name] + w.grad.flatten(1)
            p = torch.linalg.qr(b @ qs[name]).Q
            r = b.T @ p
            momenta[name] = b - (1 - MOMENTUM) * p @ r.T
            qs[name] = r / r.norm(dim=0)
            rows, columns = b.shape
            w.data -= LR * DECAY * w + LR * (rows / columns) ** 0.5 * (p @ qs[name].T).view_as(w)
    return model


def matrices_of(optimizer: pycomm.Dion) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]


def qs_of(reducer: pycomm.Reducer) -> dict[str, torch.Tensor]:
    return {name: entry["q"].clone() for name, entry in own_state(reducer).items()}


def gathered(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    flat = torch.cat([t.detach().flatten() for t in tensors])
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, flat)
    return everyones


@on_ranks(2, 4)
def test_equals_the_algorithm_in_one_process() -> None:
    model, optimizer = made()
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)
    first = qs_of(reducer)
    assert len(first) == len(matrices_of(optimizer)) == 4
    train(model, optimizer, range(25))
    assert_near(list(model.parameters()), list(alone(first, 25).parameters()), 1e-8)
    parameters, residuals = (
        gathered(tensors)
        for tensors in (model.parameters(), [entry["residual"] for entry in own_state(reducer).values()])
    )
    assert_equal(parameters, [parameters[0]] * len(parameters))
    assert not torch.equal(residuals[0], residuals[1])
    reducer.detach()


@on_ranks(2)
def test_bytes() -> None:
    """(m + n) * rank numbers per matrix, the others as they are, and flags that ride along with each message."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 40), nn.Linear(40, 2))
    optimizer = pycomm.Dion(pycomm.muon_groups(model, adamw={"lr": 0.01}), rank=8)
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)
    sent = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 300)).square().mean().backward()
        optimizer.step()
        sent.append(reducer.stats()["bytes_sent"])
    factors = 4 * 8 * (300 + 500) + 4 * 8 * (500 + 40)
    dense = 4 * (500 + 40 + 2 * 40 + 2)
    assert sent[2] - sent[1] == sent[1] - sent[0]
    assert factors + dense <= sent[1] - sent[0] < factors + dense + 2048
    reducer.detach()


@on_ranks(2)
def test_resumes(tmp_path: Path) -> None:
    model, optimizer = made()
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)
    train(model, optimizer, range(4))
    pycomm.save(tmp_path, reducer).wait()
    train(model, optimizer, range(4, 8))
    reducer.detach()
    again, optimizer = made(seed=0)
    reducer = pycomm.attach(optimizer, again, compression=optimizer.factors)
    pycomm.load(tmp_path, reducer)
    train(again, optimizer, range(4, 8))
    assert_equal(list(again.parameters()), list(model.parameters()))
    reducer.detach()


@on_ranks(2)
def test_an_overflow_on_one_rank_leaves_no_trace() -> None:
    model, optimizer = made(torch.float32)
    scaler = pycomm.LossScaler(init_scale=256.0)
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors, loss_scaler=scaler)

    def step(number: int, factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(factor * loss_of(model, dist.get_rank(), number)).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(3):
        step(number)
    before = snapshot([*model.parameters(), *(t for entry in own_state(reducer).values() for t in entry.values())])
    step(3, torch.inf if dist.get_rank() == 1 else 1.0)
    after = [*model.parameters(), *(t for entry in own_state(reducer).values() for t in entry.values())]
    assert_equal(after, before)
    step(4)
    everyones = gathered(model.parameters())
    assert torch.equal(*everyones)
    assert not torch.equal(before[0], next(model.parameters()))
    reducer.detach()


@on_ranks(2)
def test_the_loss_scale_and_its_size_change_nothing() -> None:
    ends = []
    for scale in (1.0, 1024.0):
        model, optimizer = made()
        scaler = pycomm.LossScaler(init_scale=scale)
        reducer = pycomm.attach(optimizer, model, compression=optimizer.factors, loss_scaler=scaler)
        for number in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, dist.get_rank(), number)).backward()
            scaler.step(optimizer)
            scaler.update()
        reducer.detach()
        ends.append(list(model.parameters()))
    assert_near(ends[0], ends[1], 1e-9)


@on_ranks(2)
def test_what_does_not_go() -> None:
    model, optimizer = made()
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="the gradients of these matrices are no factors"):
        optimizer.step()
    optimizer.zero_grad()
    other = made()[1]
    with pytest.raises(ValueError, match="compression is the factors of another optimizer than this Dion"):
        pycomm.attach(optimizer, model, compression=other.factors)
    with pytest.raises(ValueError, match="compression is the factors of another optimizer than this SGD"):
        pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=other.factors)
    reducer = pycomm.attach(optimizer, model)
    loss_of(model, dist.get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match="the gradients of these matrices are no factors"):
        optimizer.step()
    reducer.detach()
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)
    loss_of(model, dist.get_rank(), 1).backward()
    with pytest.raises(RuntimeError, match=r"finds directions of DionFactors\(rank=3.*\) in .grad, wanted averages"):
        reducer.clip_grad_norm(1.0)
    reducer.detach()
    turned = nn.Linear(6, 5)
    turned.weight = nn.Parameter(torch.randn(6, 5).t())
    optimizer = pycomm.Dion([turned.weight], rank=2)
    with pytest.raises(ValueError, match=r"a matrix of shape \[5, 6\] has strides \[1, 5\], wanted rows"):
        pycomm.attach(optimizer, [("weight", turned.weight)], compression=optimizer.factors)


@on_ranks(2)
def test_a_momentum_that_changes_is_refused() -> None:
    model, optimizer = made()
    with attached(optimizer, model, compression=optimizer.factors):
        train(model, optimizer, range(1))
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(ValueError, match="momentum of a group of matrices is 0.5, and its factors have"):
            train(model, optimizer, range(1, 2))


@on_ranks(2)
def test_sums_are_refused() -> None:
    model, optimizer = made()
    with pytest.raises(ValueError, match=r"average=False does not go with compression=DionFactors\(rank=3"):
        pycomm.attach(optimizer, model, compression=optimizer.factors, average=False)
    pycomm.attach(optimizer, model, compression=optimizer.factors).detach()


@on_ranks(2)
def test_a_rank_without_a_batch_makes_no_step_longer() -> None:
    model, optimizer = made()
    reducer = pycomm.attach(optimizer, model, compression=optimizer.factors)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    bias: Any = model[3].bias
    (wanted,) = torch.autograd.grad(loss_of(model, 0, 2), [bias])
    if dist.get_rank() == 1:
        reducer.skip_batch()
    else:
        loss_of(model, 0, 2).backward()
    assert bias.grad is not None
    assert_near([bias.grad], [wanted], 1e-12)
    for p in matrices_of(optimizer):
        assert p.grad is not None
        rank = min(RANK, p.shape[0], p[0].numel())
        assert_near([p.grad.norm()], [torch.tensor(rank**0.5)], 1e-6)
    optimizer.step()
    everyones = gathered(model.parameters())
    assert torch.equal(*everyones)
    reducer.detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": 0}, "rank is 0, wanted an integer >= 1"),
        ({"rank": 2, "momentum": 1.0}, "momentum is 1"),
        ({"rank": 2, "seed": -1}, "seed is -1, wanted an integer >= 0"),
        ({"rank": 2, "lr": -1.0}, "lr is -1.0, wanted a number that is not negative"),
    ],
)
def test_bad_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pycomm.Dion([nn.Parameter(torch.randn(4, 3))], **options)


def test_all_groups_share_their_rank_and_copies_keep_it() -> None:
    with pytest.raises(ValueError, match="rank of a group is 4, wanted that of all groups, 2"):
        pycomm.Dion([{"params": [nn.Parameter(torch.randn(4, 3))], "rank": 4}], rank=2)
    optimizer = made(seed=5)[1]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.factors == optimizer.factors
        assert other.factors.optimizer is other
