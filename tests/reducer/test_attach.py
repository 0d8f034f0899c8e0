"""attach: gradients are the average when backward returns, whatever the model and the loop look like."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, over, rank_and_size
from tests.reducer.models import average_gradients, batch_of, close, loss_of, losses_at, make_model


def train(options: dict[str, Any], steps: int = 4, set_to_none: bool = True) -> None:
    rank, _ = rank_and_size()
    model = make_model(seed=rank)  # made equal by attach
    reference = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, **options):
        for step in range(steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            wanted = average_gradients(reference, losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
            for name, p in reference.named_parameters():
                p.grad = wanted[name]
            optimizer.step()
            other.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(1, 2, 3)
def test_gradients_are_averages(set_to_none: bool) -> None:
    train({}, 4, set_to_none)


@pytest.mark.parametrize("algorithm", ["native", "ring", "circulant", "hierarchical(1,3)"])
@pytest.mark.parametrize("compression", [None, pycomm.FP16()])
@on_ranks(3)
def test_by_a_schedule(algorithm: str, compression: Any) -> None:
    """Three ranks sum in another order; float16 is within its precision of the mean."""
    rank, _ = rank_and_size()
    model, reference = make_model(seed=0, dtype=torch.float32), make_model(seed=0, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, algorithm=algorithm, compression=compression, bucket_mb=0.005):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            wanted = average_gradients(reference, losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name], 3e-3)
        assert_replicas_equal(model)


@on_ranks(2)
def test_many_buckets() -> None:
    train({"bucket_mb": 0.001})


@pytest.mark.parametrize("transport", ["tcp", "torch"])
@on_ranks(2)
def test_transports_between_hosts(transport: str) -> None:
    with over(transport):
        train({})


@on_ranks(2)
def test_named_parameters_and_sums() -> None:
    rank, _ = rank_and_size()
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[4].parameters()}], lr=0.1
    )
    with attached(optimizer, model.named_parameters(), average=False):
        loss_of(model, rank, 0).backward()
        own = average_gradients(model, [partial(loss_of, rank=rank, step=0)])
        close(model[2].weight.grad, own["2.weight"])  # not the optimizer's: untouched
        # Middle layers differ between ranks here (only the optimizer's parameters are made equal), so compare the sums.
        local = own["0.weight"].clone()
        dist.all_reduce(local)
        close(model[0].weight.grad, local)


class Branches(nn.Module):
    """Uses parameters or not, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, take: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if take else x


@on_ranks(2, 3)
def test_unused_parameters() -> None:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model) as reducer:
        for step in range(4):
            optimizer.zero_grad()
            take = step % 2 == 0 and rank == 0
            x = torch.full((2, 4), rank + 1.0)
            own = torch.autograd.grad(model(x, take).sum(), list(model.parameters()), allow_unused=True)
            model(x, take).sum().backward()
            assert model.never.weight.grad is None
            if step % 2 == 0:
                grad = torch.zeros(4, 4) if own[2] is None else own[2].clone()
                dist.all_reduce(grad)
                close(model.sometimes.weight.grad, grad / size, 1e-6)
            else:
                assert model.sometimes.weight.grad is None
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


class NoBiasGradient(torch.autograd.Function):
    """A linear layer whose backward may make no gradient for the bias, or for no parameter at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, without: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.without = without
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = None if ctx.without == "both" else grad.t() @ x
        return grad @ weight, of_weight, grad.sum(0) if ctx.without == "" else None, None


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"compression": pycomm.TopK(0.5)}], ids=str)
@on_ranks(2)
def test_a_backward_that_makes_no_gradient(options: dict[str, Any]) -> None:
    """As if the parameter had not been used: on some ranks or all, from the beginning or from some step on."""
    rank, size = rank_and_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    withouts = [("bias", "bias"), ("", ""), ("", "bias"), ("", "both"), ("bias", "bias"), ("", "")]
    with attached(optimizer, model, **options) as reducer:
        for step, without in enumerate(withouts):
            optimizer.zero_grad()
            total = torch.zeros(3, dtype=torch.float64)
            with reducer.paused():  # makes none either, and leaves nothing
                NoBiasGradient.apply(torch.ones(2, 4).double(), *model[1].parameters(), "both").sum().backward()
            for part in range(options.get("accumulate", 1)):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + 3 * part + rank)).double()
                out = NoBiasGradient.apply(model[0](x), model[1].weight, model[1].bias, without[rank])
                total += 0 if without[rank] else torch.full((3,), 8.0).double()
                out.sum().backward()
            dist.all_reduce(total)
            if without == ("bias", "bias"):
                assert model[1].bias.grad is None
            elif "compression" not in options:
                close(model[1].bias.grad, total / size)
            optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("module_known", [True, False])
@on_ranks(2)
def test_frozen_and_later_unfrozen(module_known: bool) -> None:
    rank, _ = rank_and_size()
    model = make_model(seed=rank)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    with attached(optimizer, model if module_known else model.named_parameters()) as reducer:
        for step in range(5):
            if step == 2:
                model[0].requires_grad_(True)
                if module_known:  # nothing that was known takes part any more
                    for layer in (model[2], model[4]):
                        layer.requires_grad_(False)
            optimizer.zero_grad()
            reference = copy.deepcopy(model).requires_grad_(True)
            loss_of(model, rank, step).backward()
            wanted = average_gradients(reference, losses_at(step))
            for name, p in model.named_parameters():
                if p.requires_grad:
                    close(p.grad, wanted[name])
            optimizer.step()
        assert_replicas_equal(model)
        assert reducer.stats()["num_buckets"] == 2


@on_ranks(2)
def test_add_param_group() -> None:
    rank, _ = rank_and_size()
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model):
        loss_of(model, rank, 0).backward()
        optimizer.step()
        torch.manual_seed(rank + 50)
        model.append(nn.Linear(5, 5, dtype=torch.float64))
        optimizer.add_param_group({"params": model[5].parameters(), "lr": 0.5})
        for step in range(1, 4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step > 1:
                wanted = average_gradients(copy.deepcopy(model), losses_at(step))
                for name, p in model.named_parameters():
                    close(p.grad, wanted[name])
            optimizer.step()
        assert_replicas_equal(model)


@on_ranks(2)
def test_closures() -> None:
    rank, _ = rank_and_size()
    model, plain = make_model(), make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    alone = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value / dist.get_world_size()

    def closure_alone() -> torch.Tensor:
        alone.zero_grad()
        loss = torch.stack([loss(plain) for loss in losses_at(0)]).mean()
        loss.backward()
        return loss

    with attached(optimizer, model):
        optimizer.step(closure)
        alone.step(closure_alone)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close(p.data, q.data, 1e-9)
        assert_replicas_equal(model)


@on_ranks(2)
def test_views_copies_and_detach() -> None:
    rank, _ = rank_and_size()
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with attached(optimizer, model) as reducer:
        pointers = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            assert all(p.grad is None for p in model.parameters())
            loss_of(model, rank, step).backward()
            pointers.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            scheduler.step()
        assert pointers[0] == pointers[1] == pointers[2], "gradients come back to their bucket"
        spans = sorted((p.grad.data_ptr(), p.grad.nbytes) for p in model.parameters() if p.grad is not None)
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans)), "side by side"

        twin = copy.deepcopy(optimizer)
        assert type(twin) is torch.optim.Adam
        restored = pickle.loads(pickle.dumps(optimizer))
        assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        clone = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        with reducer.paused():
            loss_of(clone, rank, 0).backward()  # a copy has nothing of the original's
        assert reducer.stats()["steps"] == 3
        optimizer.zero_grad()
        loss_of(model, rank, 9).backward()
        averaged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for p, grad in zip(model.parameters(), averaged, strict=True):
        close(p.grad, grad)  # detached: kept, in ordinary memory
    assert isinstance(optimizer, torch.optim.Adam)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    own = average_gradients(model, [partial(loss_of, rank=rank, step=1)])
    for name, p in model.named_parameters():
        close(p.grad, own[name], 1e-6)
    with pytest.raises(RuntimeError, match="detached"):
        reducer.flush()
    reducer.detach()


@on_ranks(2)
def test_memory_formats_and_mixed_dtypes() -> None:
    """channels_last, expanded-from-half and several dtypes in one model."""
    rank, size = rank_and_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)
    head = nn.Linear(4, 2).to(torch.bfloat16)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    with attached(optimizer, both):
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                out = model(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))
                return head(out.to(torch.bfloat16)).float().pow(2).sum()

            own = torch.autograd.grad(loss(), list(both.parameters()))
            loss().backward()
            for p, grad in zip(both.parameters(), own, strict=True):
                wanted = grad.float().clone()
                dist.all_reduce(wanted)
                assert p.grad is not None
                assert p.grad.dtype == p.dtype
                assert p.grad.stride() == p.stride()
                torch.testing.assert_close(p.grad.float(), (wanted / size).to(p.dtype).float(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_starts_from_rank_0() -> None:
    rank, _ = rank_and_size()
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    both = nn.ModuleList([model, frozen])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5 + rank / 10, 0.9))
    if rank == 0:  # resumed from a checkpoint there, fresh elsewhere
        for _ in range(3):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with attached(optimizer, both):
        assert_replicas_equal(both)
        values: list[Any] = [model[1].running_mean.tolist(), model[1].num_batches_tracked.item()]
        values += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]]
        for p in model.parameters():
            state = optimizer.state[p]
            values += [state["step"].item(), state["exp_avg"].tolist(), state["exp_avg_sq"].dtype]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, values)
        assert everyone[0] == everyone[1]
        assert values[1] == 3
        assert values[2] == 0.1


@on_ranks(2)
def test_only_backward_of_the_model_counts() -> None:
    """Forward passes without backward, and backward passes of other models, are no business of ours."""
    rank, _ = rank_and_size()
    model, other = make_model(), make_model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model) as reducer:
        with torch.no_grad():
            if rank == 0:
                model(batch_of(0, 0)[0])
        if rank == 0:
            loss_of(other, 0, 0).backward()
            torch.autograd.grad(loss_of(model, 0, 0), list(model.parameters()))
        optimizer.step()  # as distributed checkpointing does to create state
        assert reducer.stats()["steps"] == 0
        loss_of(model, rank, 0).backward()
        assert reducer.stats()["steps"] == 1


@on_ranks(1)
def test_one_rank() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, accumulate=4, compression=pycomm.FP16()) as reducer:
        for step in range(3):
            loss_of(model, 0, step).backward()
        reducer.flush()
        assert reducer.stats()["bytes_sent"] == 0
        assert reducer.stats()["registered_bytes"] == 0  # nothing is on a GPU
        optimizer.step()


@pytest.mark.parametrize("announced", [True, False])
@on_ranks(2)
def test_training_goes_on_after_a_new_parameter_was_refused(announced: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    survive = None if announced else pycomm.Survive()  # then ranks look for new parameters after backward
    with attached(optimizer, model.named_parameters(), survive=survive):
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                optimizer.add_param_group({"params": [torch.zeros(3, dtype=torch.complex64, requires_grad=True)]})
                with pytest.raises((TypeError, ValueError), match="complex64"):
                    loss_of(model, dist.get_rank(), step).backward()
                optimizer.param_groups.pop()
                optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
        assert_replicas_equal(model)
