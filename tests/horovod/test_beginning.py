"""What DistributedOptimizer makes of ranks that begin differently, and of parameters that are frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.horovod.test_optimizer import Halving
from tests.horovod.training import batch_of, loss_of, make_model, sgd
from tests.horovod.worlds import grad_of, horovod
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_parameters_and_state_are_the_first_ranks_without_a_broadcast() -> None:
    with horovod() as hvd:
        ways: tuple[dict[str, Any], ...] = ({}, {"compression": Halving}, {"op": hvd.Max}, {"op": hvd.Adasum})
        for arguments in ways:
            model = make_model(seed=hvd.rank())
            first = next(model.parameters())
            optimizer = sgd(model)
            if hvd.rank() == 0:
                optimizer.param_groups[0]["lr"] = 0.25
                loss_of(model, batch_of(0, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
            momentum = optimizer.state[first]["momentum_buffer"] if hvd.rank() == 0 else torch.empty(0)
            hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **arguments)
            assert all(p.grad is None for p in model.parameters())
            for name, p in model.named_parameters():
                assert torch.equal(p, hvd.broadcast(wanted[name], 0)), (arguments, name)
            found = optimizer.state[first]["momentum_buffer"]
            assert torch.equal(found, hvd.broadcast_object(momentum, 0))
            assert optimizer.param_groups[0]["lr"] == 0.25


@on_ranks(2)
def test_named_parameters_that_are_not_the_optimizers_too() -> None:
    with horovod() as hvd:
        model = make_model(seed=hvd.rank())
        optimizer = torch.optim.SGD(list(model.parameters())[2:], lr=0.1)
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for p in model.parameters():
            both = hvd.allgather(p.detach().reshape(1, -1))
            assert torch.equal(both[0], both[1])


@on_ranks(2)
def test_frozen_parameters_of_a_model_with_a_sparse_embedding() -> None:
    with horovod() as hvd:
        embedding = nn.Embedding(10, 4, sparse=True)
        frozen = nn.Embedding.from_pretrained(torch.ones(10, 4), sparse=True)
        head = nn.Linear(4, 2)
        head.bias.requires_grad_(False)
        model = nn.ModuleList([embedding, frozen, head])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=2)
        before = head.bias.detach().clone()
        for step in range(3):
            if step == 2:
                head.bias.requires_grad_()
            optimizer.zero_grad()
            ids = torch.tensor([hvd.rank(), 5])
            head(embedding(ids) + frozen(ids)).sum().backward()
            optimizer.step()
            assert torch.equal(head.bias, before) == (step < 2)
            for p in model.parameters():
                both = hvd.allgather(p.detach().reshape(1, -1))
                assert torch.equal(both[0], both[1])
        assert torch.equal(frozen.weight, torch.ones(10, 4))
        assert torch.equal(head.bias, before - 2.0)  # the mean of what both add up over two rows


@on_ranks(2)
def test_sums_are_not_summed_again() -> None:
    """A second backward() over other parameters, in one step: refused, as each pass is a reduction."""
    with horovod() as hvd:
        one, other = nn.Linear(3, 1), nn.Linear(3, 1)
        model = nn.ModuleList([one, other])
        for passes, op in ((1, hvd.Average), (2, hvd.Sum), (1, hvd.Sum)):
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op, backward_passes_per_step=passes)
            optimizer.zero_grad()
            one(torch.ones(1, 3)).sum().backward()
            if passes == 1 and op == hvd.Sum:
                with pytest.raises(RuntimeError, match=r"'0.weight' is the sum .* and would be summed again"):
                    other(torch.ones(1, 3)).sum().backward()
            else:
                other(torch.ones(1, 3)).sum().backward()
                optimizer.synchronize()
                for layer in (one, other):
                    assert torch.equal(grad_of(layer.weight), torch.full((1, 3), 1.0 if op == hvd.Average else 2.0))
            optimizer._horovod.remove()


@on_ranks(2)
def test_residuals_follow_the_scale_of_the_loss() -> None:
    with horovod() as hvd:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        compression = pycomm.TopK(0.25)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, loss_scaler=scaler)
        scaler.scale(model(torch.ones(1, 8)).sum()).backward()
        state = optimizer._horovod._averaging.reducer.state_dict()  # type: ignore[attr-defined]
        text = str(state)
        assert "1024" not in text, "residuals are those of unscaled gradients"
