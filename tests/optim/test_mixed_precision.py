"""float16 and bfloat16 models on several ranks: masters, loss scaling, underflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.models import perceptron
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size, warnings_noted

METHODS = {
    "dense": None,
    "FP16": pycomm.FP16(),
    "DGC": pycomm.DGC(0.5),
    "TopK": pycomm.TopK(0.5),
    "PowerSGD": pycomm.PowerSGD(2),
}


def model_of(seed: int, dtype: torch.dtype) -> Any:
    return perceptron(8, 24, 3, seed=seed, dtype=dtype)


def loss_of(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 8, generator=generator)
    target = torch.stack([x[:, :4].sum(1), x[:, 4:].prod(1), x[:, 0] * x[:, 1]], 1)
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), target) * factor


def train_with_masters(compression: Any, dtype: torch.dtype, generic: bool) -> None:
    rank, _ = rank_and_size()
    model = model_of(rank, dtype)  # made equal by attach
    make = torch.optim.Adagrad if generic else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05)
    masters = pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(2.0**12)
    with attached(optimizer, model, compression=compression, loss_scaler=scaler):
        start = [m.detach().clone() for m in masters.parameters()]
        for step in range(6):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, rank, step))
            (loss * torch.inf if step == 3 and rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                assert torch.equal(param, master.to(dtype))
        assert scaler.get_scale() == 2.0**11
        assert any(not torch.equal(a, b) for a, b in zip(start, masters.parameters(), strict=True))
        assert_replicas_equal(nn.ParameterList([nn.Parameter(m) for m in masters.parameters()]))
        assert all(m.dtype == torch.float32 for m in masters.parameters())


@pytest.mark.pairwise
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_masters_stay_equal_on_all_ranks(two_ranks: RankPool, method: str, dtype: torch.dtype, generic: bool) -> None:
    if generic and method == "DGC":
        pytest.skip("DGC goes with SGD")
    two_ranks.run(train_with_masters, METHODS[method], dtype, generic)


@on_ranks(2)
def test_attach_copies_masters() -> None:
    """Masters hold more than the model's parameters: attach copies both."""
    rank, _ = rank_and_size()
    p = nn.Parameter(torch.full((5,), 1.0, dtype=torch.float16))
    optimizer = torch.optim.SGD([p], lr=1.0)
    masters = pycomm.master_weights(optimizer)
    with torch.no_grad():
        masters.parameters()[0].fill_(1.0 + (rank + 1) * 2.0**-14)  # rounds to 1 in float16
    with attached(optimizer, [("p", p)]):
        pass
    assert (masters.parameters()[0] == 1.0 + 2.0**-14).all()
    assert (p == 1.0).all()


def final_loss(dtype: torch.dtype, scaled: bool) -> tuple[float, float]:
    """The loss after training on gradients so small that float16 has no room; the share of them that became 0."""
    tiny = 2.0**-21
    rank, _ = rank_and_size()
    model = model_of(0, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / tiny, momentum=0.9)
    if dtype == torch.float16:
        pycomm.master_weights(optimizer)
    scaler = pycomm.LossScaler(enabled=scaled)
    lost = total = 0
    with attached(optimizer, model, loss_scaler=scaler):
        for step in range(400):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step, tiny)).backward()
            for p in model.parameters():
                assert p.grad is not None
                lost, total = lost + int((p.grad == 0).sum()), total + p.numel()
            scaler.step(optimizer)
            if scaled:
                scaler.update()
    with torch.no_grad():
        losses = [float(loss_of(model, 9, 10_000 + i)) for i in range(50)]
    return sum(losses) / len(losses), lost / total


def test_scaling_saves_what_would_underflow(two_ranks: RankPool) -> None:
    wanted, _ = two_ranks.run(final_loss, torch.float32, False)[0]
    unscaled, lost = two_ranks.run(final_loss, torch.float16, False)[0]
    scaled, lost_scaled = two_ranks.run(final_loss, torch.float16, True)[0]
    print(f"float32 {wanted:.4f}, float16 scaled {scaled:.4f}, unscaled {unscaled:.4f}: {lost:.0%} lost")
    assert lost > 0.2
    assert lost_scaled < 0.01
    assert scaled == pytest.approx(wanted, rel=0.01)
    assert unscaled > 1.1 * wanted


def warnings_of_attach(dtype: torch.dtype, with_masters: bool) -> list[str]:
    model = model_of(0, torch.float32)
    model[2].to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    if with_masters:
        pycomm.master_weights(optimizer)
    found: list[str] = []
    for _ in range(2):
        with warnings_noted(found), attached(optimizer, model):
            pass
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_warns_once_of_lost_updates(two_ranks: RankPool, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for found in two_ranks.run(warnings_of_attach, dtype, False):
        assert len(found) == 1
        assert found[0].startswith(f"Adam updates parameter '2.weight' in {name}: updates below about")
        assert "pycomm.master_weights(optimizer)" in found[0]
    assert two_ranks.run(warnings_of_attach, dtype, True) == [[], []]
    assert two_ranks.run(warnings_of_attach, torch.float64, False) == [[], []]


@on_ranks(2)
def test_resume() -> None:
    """A checkpoint of model, optimizer, scaler and reducer, taken in the middle, continues to the bit."""
    rank, _ = rank_and_size()

    def begin() -> Any:
        model = model_of(0, torch.float16)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        pycomm.master_weights(optimizer)
        scaler = pycomm.LossScaler(2.0**10, growth_interval=3)
        return model, optimizer, scaler

    def steps(numbers: range, model: nn.Module, optimizer: Any, scaler: Any) -> None:
        for step in numbers:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()

    def copy(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree.clone()
        return {k: copy(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    parts = begin()
    with attached(parts[1], parts[0], compression=pycomm.TopK(0.3), loss_scaler=parts[2]) as reducer:
        steps(range(5), *parts)
        saved = [copy(part.state_dict()) for part in (*parts, reducer)]
        steps(range(5, 9), *parts)
    again = begin()
    with attached(again[1], again[0], compression=pycomm.TopK(0.3), loss_scaler=again[2]) as reducer:
        for part, state in zip((*again, reducer), saved, strict=True):
            part.load_state_dict(state)
        steps(range(5, 9), *again)
    for a, b in zip(parts[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
    for key, entry in parts[1].state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, again[1].state_dict()["state"][key][name])
    dist.barrier()
