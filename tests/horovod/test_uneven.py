"""Ranks that have different numbers of batches: join(), and steps without a backward pass of this rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.horovod.training import assert_equal_models, batch_of, loss_of, make_model, sgd
from tests.horovod.worlds import grad_of, horovod
from tests.on_ranks import on_ranks


def shared_gradients(model: nn.Module, ranks: list[int], size: int, step: int) -> list[torch.Tensor]:
    """Return the gradients of the losses of ``ranks``, added up and divided by ``size``."""
    loss = torch.stack([loss_of(model, batch_of(rank, step)) for rank in ranks]).sum() / size
    return list(torch.autograd.grad(loss, list(model.parameters())))


def set_gradients(model: nn.Module, grads: list[torch.Tensor]) -> None:
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()


def train_with_fewer(model: nn.Module, batches: list[int], scale: float = 1.0) -> None:
    """Train alone as ranks with so many ``batches`` do: those that have none contribute zeros."""
    optimizer = sgd(model)
    for step in range(max(batches)):
        having = [rank for rank, count in enumerate(batches) if step < count]
        set_gradients(model, [scale * g for g in shared_gradients(model, having, len(batches), step)])
        optimizer.step()


@on_ranks(2, 3, timeout=40)
def test_ranks_that_have_joined_contribute_zeros_to_attached_optimizers() -> None:
    with horovod() as hvd:
        rank, size = hvd.rank(), hvd.size()
        batches = [3, 5, 4][:size]
        for op in (hvd.Average, hvd.Sum):
            model = make_model(seed=0)
            optimizer = sgd(model)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
            train(model, optimizer, rank, range(batches[rank]))
            assert hvd.join() == 1
            hvd.broadcast_parameters(model.state_dict(), root_rank=1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            wanted = make_model(seed=0)
            train_with_fewer(wanted, batches, scale=1.0 if op == hvd.Average else size)
            assert_equal_models(model, wanted)
            train(model, optimizer, rank, range(5, 7))  # all go on together
            everyones = hvd.allgather_object([p.detach() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(everyones[0], everyones[-1], strict=True))


@on_ranks(2, timeout=40)
def test_join_serves_several_optimizers_and_named_operations() -> None:
    with horovod() as hvd:
        first, second = make_model(seed=0), make_model(seed=1)
        for model in (first, second):
            model.optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        if hvd.rank() == 0:
            assert hvd.join() == 1
        else:
            for step in range(3):
                for model in (second, first) if step % 2 else (first, second):
                    train(model, model.optimizer, 1, range(step, step + 1))
                    assert hvd.allreduce(torch.ones(2), name="metric").tolist() == [0.5, 0.5]
            assert hvd.join() == 1
            for model, seed in ((first, 0), (second, 1)):
                wanted = make_model(seed)
                train_with_fewer(wanted, [0, 3])
                assert_equal_models(model, wanted)


@on_ranks(2, timeout=40)
def test_join_with_compression_windows_and_steps_that_are_left_out() -> None:
    with horovod() as hvd:
        for arguments in ({"compression": pycomm.TopK(0.2)}, {"backward_passes_per_step": 2}, {}):
            model = make_model().float()
            optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
            passes = 2 if "backward_passes_per_step" in arguments else 1
            for step in range(3 if hvd.rank() == 0 else 6):
                optimizer.zero_grad()
                for _ in range(1 if step == 4 else passes):
                    nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3)).backward()
                if step == 3 and not arguments:
                    continue  # as a loss scaler does after an overflow
                optimizer.step()
            assert hvd.join() == 1


@on_ranks(2, timeout=40)
def test_replicas_are_compared_among_ranks_that_have_not_joined() -> None:
    with horovod() as hvd:
        model = make_model(seed=0)
        optimizer = sgd(model)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(model, optimizer, hvd.rank(), range(3 * hvd.rank()))  # compared in the second, which rank 0 is behind
        assert hvd.join() == 1
        wanted = make_model(seed=0)
        if hvd.rank() == 1:
            train_with_fewer(wanted, [0, 3])
        assert_equal_models(model, wanted)  # rank 0's are what they were


@on_ranks(2, timeout=40)
def test_an_error_of_the_others_ends_join() -> None:
    hvd = pycomm.horovod
    hvd.init()
    model = make_model(seed=0)
    optimizer = sgd(model)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            hvd.join()
    else:
        next(model.parameters()).register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with pytest.raises(RuntimeError, match="removed by another hook"):
            loss_of(model, batch_of(1, 0)).backward()
    hvd.shutdown()


@on_ranks(2, timeout=40)
def test_gradients_set_by_hand_are_reduced_by_step() -> None:
    with horovod() as hvd:
        for arguments, scale in (({}, 0.5), ({"op": hvd.Sum}, 1.0), ({"backward_passes_per_step": 2}, 0.5)):
            model, wanted = make_model(seed=0), make_model(seed=0)
            optimizer, plain = sgd(model), sgd(wanted)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
            for step in range(3):
                set_gradients(model, shared_gradients(model, [hvd.rank()], 1, step))
                optimizer.step()
                set_gradients(wanted, [scale * 2 * g for g in shared_gradients(wanted, [0, 1], 2, step)])
                plain.step()
            assert_equal_models(model, wanted)


@on_ranks(2, timeout=40)
def test_a_rank_that_steps_without_a_backward_takes_part() -> None:
    with horovod() as hvd:
        for passes in (1, 2):
            model, wanted = make_model(seed=0), make_model(seed=0)
            optimizer: Any = hvd.DistributedOptimizer(
                sgd(model), model.named_parameters(), backward_passes_per_step=passes
            )
            plain = sgd(wanted)
            for step in range(4):
                optimizer.zero_grad()
                if step != 2 or hvd.rank() == 0:
                    for _ in range(passes):
                        (loss_of(model, batch_of(hvd.rank(), step)) / passes).backward()
                optimizer.step()
                set_gradients(wanted, shared_gradients(wanted, [0, 1] if step != 2 else [0], 2, step))
                plain.step()
            assert_equal_models(model, wanted)
            optimizer.zero_grad()
            optimizer.step()  # nobody has anything
            assert all(p.grad is None for p in model.parameters())


@on_ranks(2, timeout=40)
def test_gradients_set_after_backward_are_refused() -> None:
    with horovod() as hvd:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
        model = nn.ModuleList(layers)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        layers[0](torch.ones(1, 2)).sum().backward()
        layers[1].weight.grad = torch.ones(2, 2)
        with pytest.raises(RuntimeError, match=r"gradient of '1.weight' has not been averaged"):
            optimizer.step()
        layers[1].weight.grad = None
        grad_of(layers[0].weight).mul_(0.5)  # what has been averaged may be changed
        optimizer.step()
