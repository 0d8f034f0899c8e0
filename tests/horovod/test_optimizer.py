"""DistributedOptimizer: every argument, against one process with the batches of all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from pycomm.horovod.execution import combine
from pycomm.horovod.process_sets import world
from tests.ddp.test_gradients import NEW, lost_by
from tests.ddp.wrapping import residuals_of
from tests.horovod.training import (
    assert_equal_models,
    batch_of,
    loss_of,
    make_model,
    mean_loss,
    reference,
    sgd,
    trained,
)
from tests.horovod.worlds import grad_of, horovod
from tests.on_ranks import on_ranks
from tests.reducer.models import close
from tests.reducer.test_around_torch import proxy_of


class Halving:
    """A compression of a user's own, without loss."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
        return tensor * ctx


WAYS: tuple[dict[str, Any], ...] = ({}, {"compression": Halving})
"""Arguments by which gradients go in buckets, and by name."""


@on_ranks(2)
def test_arguments_that_leave_the_average_what_it_is() -> None:
    with horovod() as hvd:
        wanted = reference(sgd, hvd.size())
        every: tuple[dict[str, Any], ...] = (
            {},
            {"compression": hvd.Compression.none, "gradient_predivide_factor": 2.0},
            {"groups": 2},
            {"compression": Halving},  # one by one, by name
            {"compression": Halving, "groups": 2},
            {"sparse_as_dense": True},
            {"op": hvd.Average, "process_set": hvd.global_process_set},
        )
        for arguments in every:
            assert_equal_models(trained(sgd, **arguments), wanted)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            assert_equal_models(trained(sgd, num_groups=1), wanted)


@pytest.mark.parametrize("how", ["accelerate", "fabric"])
@on_ranks(2)
def test_trainers_proxies(how: str) -> None:
    """What was given comes back, with Horovod's methods; the optimizer inside it is the one that is wrapped."""
    with horovod() as hvd:
        for arguments in WAYS:
            model = make_model(seed=hvd.rank())
            inner = sgd(model)
            proxy = proxy_of(inner, how)
            optimizer: Any = hvd.DistributedOptimizer(proxy, model.named_parameters(), **arguments)
            assert optimizer is proxy
            with pytest.raises(ValueError, match="has been passed to DistributedOptimizer before"):
                hvd.DistributedOptimizer(inner, model.named_parameters())
            hvd.broadcast_optimizer_state(optimizer, 0)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            assert_equal_models(model, reference(sgd, 2))


@on_ranks(2)
def test_reductions() -> None:
    with horovod() as hvd:
        assert_equal_models(trained(sgd, op=hvd.Sum), reference(sgd, 2, scale=1.0))
        for op, reduce in ((hvd.Max, torch.maximum), (hvd.Min, torch.minimum), (hvd.Product, torch.mul)):
            model = trained(sgd, steps=1, op=op)
            grads = []
            for rank in range(2):
                other = make_model(seed=0)
                loss_of(other, batch_of(rank, 0)).backward()
                grads.append([p.grad for p in other.parameters()])
            for p, start, a, b in zip(model.parameters(), make_model(seed=0).parameters(), *grads, strict=True):
                assert torch.allclose(p, start - 0.1 * reduce(a, b))


@on_ranks(2)
def test_adasum_combines_what_steps_change() -> None:
    with horovod() as hvd:
        model = trained(sgd, steps=1, op=hvd.Adasum)
        changes: list[list[torch.Tensor]] = []
        for rank in range(2):
            other = make_model(seed=0)
            optimizer = sgd(other)
            loss_of(other, batch_of(rank, 0)).backward()
            optimizer.step()
            changes.append(
                [p.detach() - q.detach() for p, q in zip(other.parameters(), make_model(0).parameters(), strict=True)]
            )
        for p, start, *each in zip(model.parameters(), make_model(seed=0).parameters(), *changes, strict=True):
            assert torch.allclose(p, start + combine(each))


@on_ranks(2)
def test_several_passes_per_step() -> None:
    with horovod() as hvd:
        for arguments in WAYS:
            assert_equal_models(trained(sgd, passes=3, **arguments), reference(sgd, 2, passes=3))
            assert_equal_models(trained(sgd, passes=3, early=2, **arguments), reference(sgd, 2, passes=3, early=2))
            model = make_model(seed=0)
            optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
            optimizer.set_backward_passes_per_step(2)
            for step in range(4):
                optimizer.zero_grad()
                for i in range(2):
                    loss_of(model, batch_of(hvd.rank(), 2 * step + i)).backward()
                optimizer.step()
            assert_equal_models(model, reference(sgd, 2, passes=2))


@on_ranks(2)
def test_methods_of_pycomm() -> None:
    with horovod() as hvd:
        model = make_model().float()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=pycomm.TopK(0.2))
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            x, y = batch_of(hvd.rank(), 0)
            loss = nn.functional.mse_loss(model(x.float()), y.float())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]
        optimizer.set_backward_passes_per_step(2)  # what has not been sent yet is kept
        everyones = hvd.allgather_object([p.detach() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*everyones, strict=True))
        half = make_model().float()
        kept = hvd.DistributedOptimizer(sgd(half), half.named_parameters(), compression=hvd.Compression.fp16)
        loss_of(half, tuple(x.float() for x in batch_of(hvd.rank(), 0))).backward()  # type: ignore[arg-type]
        grads = hvd.allgather_object([p.grad for p in half.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert kept.state_dict()["param_groups"]


@pytest.mark.parametrize("method", NEW, ids=repr)
@on_ranks(3)
def test_sums_in_parts(method: Any) -> None:
    """What all received, and what is left, is what came, over a change of the window too."""
    with horovod() as hvd:
        model = make_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=method)
        names = [name for name, _ in model.named_parameters()]
        received, came = ({name: torch.zeros(()) for name in names} for _ in range(2))
        for step in range(4):
            optimizer.zero_grad()
            alone = torch.autograd.grad(mean_loss(model, range(3), step), list(model.parameters()))
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            optimizer.step()
            for (name, p), grad in zip(model.named_parameters(), alone, strict=True):
                received[name], came[name] = received[name] + grad_of(p), came[name] + grad
        (reducer,) = world().attached
        left = residuals_of(reducer)
        for name in names:
            close(received[name] + left.get(name, 0.0), came[name], lost_by(method))
        everyones = hvd.allgather_object(received)
        assert all(torch.equal(other[name], received[name]) for other in everyones for name in names)


@on_ranks(2)
def test_sparse_gradients() -> None:
    with horovod() as hvd:
        tokens = torch.tensor([[1, 2, 4], [4, 0, 4]])

        def lines(model: nn.Module, which: int) -> torch.Tensor:
            return (model(tokens[which]) * (which + 1)).pow(2).sum()

        for as_dense in (False, True):
            for kind in (torch.optim.SGD, torch.optim.SparseAdam):
                torch.manual_seed(0)
                model = nn.Embedding(6, 3, sparse=True)
                wanted = copy.deepcopy(model)
                optimizer = kind(list(model.parameters()), lr=0.1)
                hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=as_dense)
                other = kind(list(wanted.parameters()), lr=0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    if step < 2 or hvd.rank() == 0:  # in the last step rank 1 has nothing
                        lines(model, hvd.rank()).backward()
                    optimizer.step()
                    other.zero_grad()
                    (torch.stack([lines(wanted, r) for r in range(2 if step < 2 else 1)]).sum() / 2).backward()
                    other.step()
                assert model.weight.grad is not None
                assert model.weight.grad.is_sparse
                assert torch.allclose(model.weight, wanted.weight, rtol=1e-4, atol=1e-5), (as_dense, kind)


@on_ranks(2)
def test_it_remains_the_same_object() -> None:
    with horovod() as hvd:
        model = make_model()
        optimizer: Any = sgd(model)
        loss_of(model, batch_of(0, 0)).backward()
        optimizer.step()
        momentum = optimizer.state[next(model.parameters())]["momentum_buffer"]
        optimizer.zero_grad()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        made = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        assert made is optimizer
        assert type(made) is torch.optim.SGD
        assert made.state[next(model.parameters())]["momentum_buffer"] is momentum
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch_of(hvd.rank(), 1)).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        copied = pickle.loads(pickle.dumps(optimizer))
        assert not hasattr(copied, "synchronize")
        assert optimizer.state_dict().keys() == torch.optim.SGD(model.parameters()).state_dict().keys()
        with pytest.raises(ValueError, match="has been passed to DistributedOptimizer before"):
            hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@on_ranks(2)
def test_closures_see_reduced_gradients() -> None:
    with horovod() as hvd:
        for arguments in WAYS:
            model = make_model(seed=0)
            optimizer: Any = sgd(model)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
            for step in range(4):

                def closure(step: int = step, model: nn.Module = model, optimizer: Any = optimizer) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(model, batch_of(hvd.rank(), step))
                    loss.backward()
                    return loss

                assert optimizer.step(closure) is not None
            assert_equal_models(model, reference(sgd, 2))


@on_ranks(2)
def test_synchronize_clip_and_step() -> None:
    with horovod() as hvd:
        for arguments in WAYS:
            model = make_model(seed=0)
            optimizer: Any = sgd(model)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
            loss_of(model, batch_of(hvd.rank(), 0)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), 1)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with pytest.warns(UserWarning, match=r"step\(\) called without optimizer.skip_synchronize\(\)"):
                optimizer.step()
            other = make_model(seed=0)
            plain = sgd(other)
            for step in range(2):
                plain.zero_grad()
                mean_loss(other, [0, 1], step).backward()
                nn.utils.clip_grad_norm_(other.parameters(), 0.01)
                plain.step()
            assert_equal_models(model, other)


@on_ranks(2)
def test_parameters_that_a_rank_does_not_use() -> None:
    with horovod() as hvd:
        for arguments in WAYS:
            model = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
            before = [p.detach().clone() for p in model.parameters()]
            model[hvd.rank()](torch.ones(1, 3)).sum().backward()
            optimizer.step()
            after = list(model.parameters())
            for used in range(2):
                assert torch.allclose(after[used], before[used] - 0.5)
            assert torch.equal(after[2], before[2])


@on_ranks(2)
def test_gradient_hooks_of_ones_own() -> None:
    with horovod() as hvd:
        model = make_model(seed=0)
        optimizer = sgd(model)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        first = next(model.parameters())
        first.register_hook(lambda grad: grad * 3)
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        other = make_model(seed=0)
        next(other.parameters()).register_hook(lambda grad: grad * 3)
        mean_loss(other, [0, 1], 0).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(grad_of(p), grad_of(q))


@on_ranks(3)
def test_of_a_process_set() -> None:
    with horovod() as hvd:
        some = hvd.add_process_set([0, 2])
        model = make_model(seed=0)
        optimizer: Any = sgd(model)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=some)
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        optimizer.synchronize()
        ranks = [0, 2] if hvd.rank() != 1 else [1]
        other = make_model(seed=0)
        mean_loss(other, ranks, 0).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(grad_of(p), grad_of(q))
        with optimizer.skip_synchronize():
            optimizer.step()


@on_ranks(2)
def test_arguments_that_are_refused() -> None:
    with horovod() as hvd:
        model = make_model()
        named = list(model.named_parameters())
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"average_gradients": True}, TypeError, "has no argument 'average_gradients'"),
            ({"named_parameters": model}, TypeError, "named_parameters is a Sequential"),
            ({"named_parameters": model.parameters()}, ValueError, "wanted pairs"),
            ({"named_parameters": named[:1]}, ValueError, "leaves out the optimizer's parameter 0.1"),
            ({"named_parameters": [*named, named[0]]}, ValueError, "'0.weight' more than once"),
            ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step is 0"),
            ({"backward_passes_per_step": 1.5}, TypeError, "backward_passes_per_step is 1.5"),
            ({"op": "mean"}, ValueError, "op is 'mean', wanted one of"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "works with Average only"),
            ({"gradient_predivide_factor": 0}, ValueError, "wanted a positive number"),
            ({"groups": -1}, ValueError, "groups is -1"),
            ({"groups": [["x"]]}, ValueError, "groups has a str"),
            ({"groups": [[named[0][1]], [named[0][1]]]}, ValueError, "groups has a parameter twice"),
            ({"groups": "two"}, TypeError, "groups is a str"),
            ({"compression": 16}, TypeError, "compression is 16"),
            ({"compression": pycomm.TopK(0.1), "op": hvd.Max}, ValueError, "requires op=Average or Sum"),
            ({"process_set": 3}, TypeError, "process_set is a int"),
        ]
        for arguments, kind, message in refused:
            with pytest.raises(kind, match=message):
                hvd.DistributedOptimizer(sgd(model), **arguments)
        with pytest.raises(TypeError, match="optimizer is a Sequential"):
            hvd.DistributedOptimizer(model)
        hvd.DistributedOptimizer(sgd(model), named)  # nothing was left behind


@on_ranks(2)
def test_batch_norm_over_all_ranks() -> None:
    with horovod() as hvd:
        for shape, momentum in (((3 + hvd.rank(), 2, 5), 0.1), ((4, 2), None)):
            torch.manual_seed(0)
            sizes = [3, 4] if len(shape) == 3 else [4, 4]
            whole = torch.randn(sum(sizes), *shape[1:]).double() * 3 + 5
            mine = whole.split(sizes)[hvd.rank()].clone().requires_grad_()
            norm = hvd.SyncBatchNorm(2, momentum=momentum).double()
            plain = nn.BatchNorm1d(2, momentum=momentum).double()
            everything = whole.clone().requires_grad_()
            weights = torch.randn_like(whole)
            for _ in range(2):
                made, wanted = norm(mine), plain(everything)
                assert torch.allclose(made, wanted.split(sizes)[hvd.rank()])
            for name, value in plain.named_buffers():
                assert torch.allclose(dict(norm.named_buffers())[name], value), name
            assert norm.num_batches_tracked == plain.num_batches_tracked
            (made * weights.split(sizes)[hvd.rank()]).sum().backward()
            (wanted * weights).sum().backward()
            assert torch.allclose(grad_of(mine), grad_of(everything).split(sizes)[hvd.rank()])
            assert torch.allclose(hvd.allreduce(grad_of(norm.weight), op=hvd.Sum), grad_of(plain.weight))
            assert torch.allclose(hvd.allreduce(grad_of(norm.bias), op=hvd.Sum), grad_of(plain.bias))
            norm.eval()
            assert torch.allclose(norm(mine), plain.eval()(mine))
        with pytest.raises(ValueError, match="input has 1 dimensions"):
            hvd.SyncBatchNorm(2)(torch.ones(2))


def _drifting(hvd: Any, which: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Do on rank 1 what makes the ranks differ."""
    layer: Any = list(model.children())[2]
    if hvd.rank() == 1 and which == "rate":
        optimizer.param_groups[0]["lr"] *= 1.5
    elif hvd.rank() == 1 and which == "frozen":
        layer.requires_grad_(False)
    elif hvd.rank() == 1 and which == "written":
        layer.weight.data.add_(0.01)
    elif hvd.rank() == 1 and which == "left out":
        optimizer.zero_grad()


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "let ranks differ under `hvd` with `Min`, `Max`, sparse gradients or your own compression",
    "`ValueError` everywhere in the same step; for writes, at the next comparison. `Adasum` permits other numbers.",
)
@pytest.mark.parametrize(
    ("how", "which", "message"),
    [
        (1, "rate", r"group0.lr=0.15\S* .*on rank 1, .*group0.lr=0.1 .*on rank 0"),
        (1, "left out", r"zero_grads=2 .*on rank 1, .*zero_grads=1 .*on rank 0"),
        (1, "frozen", r"trainable=2/4 .*on rank 1, .*trainable=4/4 .*on rank 0"),
        (1, "written", r"gradient.2.weight: .* 2.weight=\w+ .*on rank 1"),
        (2, "left out", r"zero_grads=2 .*on rank 1, .*zero_grads=1 .*on rank 0"),
        (2, "written", r"2.weight=\w+ .*on rank 1"),
    ],
)
@on_ranks(2)
def test_ranks_that_differ_are_named_where_gradients_go_one_by_one(how: int, which: str, message: str) -> None:
    with horovod() as hvd:
        ways: tuple[dict[str, Any], ...] = ({}, {"sparse_as_dense": True}, {"op": hvd.Adasum})
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **ways[how])

        def train() -> None:
            for step in range(9):
                optimizer.zero_grad()
                if step == 3:
                    _drifting(hvd, which, optimizer, model)
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizer.step()

        with pytest.raises(ValueError, match=message):
            train()


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod", "add parameters to `hvd`'s optimizer", "`ValueError` at the next step."
)
@pytest.mark.parametrize("how", [1, 2])
@on_ranks(2)
def test_parameters_that_nothing_averages_are_an_error(how: int) -> None:
    with horovod() as hvd:
        ways: tuple[dict[str, Any], ...] = ({}, {"sparse_as_dense": True}, {"op": hvd.Adasum})
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **ways[how])
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 5).double())]})
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        with pytest.raises(ValueError, match=r"has 1 parameters that are not averaged, the first of shape \[2, 5\]"):
            optimizer.step()


@on_ranks(2)
def test_numbers_that_all_ranks_change_alike_are_no_difference() -> None:
    with horovod() as hvd:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), op=hvd.Max)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=12)
        for step in range(8 + 3 * hvd.rank()):  # rank 0 joins first, after one more zero_grad()
            optimizer.zero_grad()
            if step < 8:
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizer.step()
                schedule.step()
        hvd.join()
        next(model.children()).requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), 9)).backward()
        optimizer.step()
