"""attach and what one backward pass can be: shared parameters, checkpointed pieces, several passes per step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pycomm.training.reducer.buckets import Slot
from pycomm.training.reducer.engine import Engine
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, rank_and_size
from tests.reducer.models import average_gradients, batch_of, close, loss_of, losses_at, make_model, sgd


class Tied(nn.Module):
    """One matrix in two roles, and twice inside checkpointed pieces if asked."""

    def __init__(self, checkpointed: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(12, 12, bias=False, dtype=torch.float64)
        self.head = nn.Linear(12, 5, dtype=torch.float64)
        self.spare = nn.Linear(3, 3, dtype=torch.float64)  # never used
        self.run = partial(checkpoint, use_reentrant=reentrant) if checkpointed else (lambda f, x: f(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        for _ in range(3):
            x = self.run(lambda y: torch.tanh(self.matrix(y)), x)
        return self.run(self.head, x)


@pytest.mark.parametrize(("checkpointed", "reentrant"), [(False, False), (True, False), (True, True)])
@on_ranks(2)
def test_shared_parameters_and_checkpointing(checkpointed: bool, reentrant: bool) -> None:
    rank, _size = rank_and_size()
    model, plain = Tied(checkpointed, reentrant), Tied(False, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, bucket_mb=0.0001) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())
            loss_of(model, rank, step).backward()
            wanted = average_gradients(plain, losses_at(step))
            close(model.matrix.weight.grad, wanted["matrix.weight"])
            close(model.head.weight.grad, wanted["head.weight"])
            assert model.spare.weight.grad is None
            optimizer.step()
            assert reducer.stats()["steps"] == step + 1
        assert_replicas_equal(model)


@on_ranks(2)
def test_most_gradients_of_many_are_only_counted() -> None:
    """Each of them counts; in Python, the first one of a pass is dealt with, and those that complete buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))).double()
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))).double()
    plain.load_state_dict(model.state_dict())
    rank, size = rank_and_size()
    taken: list[Slot] = []
    take = Engine.take

    def note_and_take(engine: Engine, slot: Slot) -> None:
        taken.append(slot)
        take(engine, slot)

    with pytest.MonkeyPatch.context() as patch, attached(sgd(model), model, bucket_mb=0.008) as reducer:
        patch.setattr(Engine, "take", note_and_take)
        for step in range(4):
            taken.clear()
            model.zero_grad()
            (model(torch.ones(2, 8).double()).sum() * (rank + step)).backward()
            plain.zero_grad()
            (plain(torch.ones(2, 8).double()).sum() * (step + (size - 1) / 2)).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert q.grad is not None
                close(p.grad, q.grad)
            num_buckets = reducer.stats()["num_buckets"]
            assert len(taken) == 80 if step == 0 else len(taken) <= 1 + 2 * num_buckets
            assert 1 < num_buckets < 10


@on_ranks(2)
def test_checkpoints_in_checkpoints() -> None:
    rank, _ = rank_and_size()
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[2:], x, use_reentrant=True)

    with attached(optimizer, model, bucket_mb=0.001):
        for step in range(3):
            x, y = batch_of(rank, step)
            out = checkpoint(lambda z: inner(model[:2](z)), x.requires_grad_(True), use_reentrant=True)
            ((out - y) ** 2).mean().backward()
            wanted = average_gradients(plain, losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_accumulation_windows(set_to_none: bool) -> None:
    rank, _size = rank_and_size()
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, accumulate=3) as reducer:
        step = 0
        for window in (3, 3, 2, 3, 1):  # the ragged ones are flushed
            optimizer.zero_grad(set_to_none=set_to_none)
            plain.load_state_dict(model.state_dict())
            total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
            for _ in range(window):
                (loss_of(model, rank, step) / window).backward()
                for name, grad in average_gradients(plain, losses_at(step)).items():
                    total[name] += grad / window
                step += 1
            if window < 3:
                with pytest.raises(RuntimeError, match=rf"step\(\) after {window} of 3 backward passes"):
                    optimizer.step()
                reducer.flush()
            reducer.flush()  # nothing waits: nothing happens
            for name, p in model.named_parameters():
                close(p.grad, total[name])
            optimizer.step()
        assert reducer.stats()["steps"] == 5
        assert_replicas_equal(model)


@on_ranks(2)
def test_flush_with_ranks_that_had_nothing() -> None:
    """One rank had a batch more than the other at the end of an epoch."""
    rank, size = rank_and_size()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, accumulate=2) as reducer:
        wanted = average_gradients(make_model(), [partial(loss_of, rank=0, step=0)])
        if rank == 0:
            loss_of(model, 0, 0).backward()
        reducer.flush()
        for name, p in model.named_parameters():
            close(p.grad, wanted[name] / size)
