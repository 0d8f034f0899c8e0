"""pycomm.ddp gives the gradients that attach gives, whatever DistributedDataParallel does with its buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.ddp.wrapping import OutOfOrder, attached_steps, residuals_of, step, wrapped
from tests.on_ranks import on_ranks
from tests.reducer.attaching import over_tcp
from tests.reducer.models import average_gradients, batch_of, close, loss_of, losses_at, make_model

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph and views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}
SAME = [pycomm.FP16(), pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.OneBit()]
"""Methods whose result does not depend on the order of parameters in a bucket."""
OTHERS = [pycomm.Int8(), pycomm.PowerSGD(1), pycomm.RandomK(0.1), pycomm.Auto(0.1)]


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2, 3)
def test_without_compression_gradients_are_exact_means(options: str) -> None:
    with wrapped(OutOfOrder(), None, **OPTIONS[options]) as (model, handle):
        for number in range(3):
            wanted = average_gradients(OutOfOrder(), losses_at(number))
            for name, grad in step(model, number).items():
                close(grad, wanted[name])
        assert handle.stats()["steps"] == 3
        assert handle.stats()["num_buckets"] > 1
        size = sum(p.nbytes for p in model.parameters())
        assert 3 * size <= handle.stats()["bytes_sent"] <= 3.01 * size


NEW = [
    *(pycomm.FP8(), pycomm.FP8("e5m2", block=64), pycomm.Int4(), pycomm.Int8(block=64)),
    *(pycomm.FP16(sum="float32"), pycomm.BF16(sum="float32")),
    *(pycomm.ChunkTopK(64, decay=1.0), pycomm.ChunkTopK(8, 64, 4, decay=1.0)),
]
"""Methods whose messages are added up in parts, and top-k by chunks."""


@pytest.mark.parametrize("method", SAME, ids=repr)
@on_ranks(2)
def test_gradients_are_those_of_attach(method: Any) -> None:
    wanted = attached_steps(make_model(), method, range(3))
    with wrapped(make_model(), method) as (model, _):
        for number in range(3):
            for name, grad in step(model, number).items():
                close(grad, wanted[number][name], 1e-9)


@pytest.mark.parametrize("method", [*OTHERS, *NEW], ids=repr)
@on_ranks(2, 3)
def test_what_was_received_and_what_is_left_add_up(method: Any) -> None:
    with wrapped(make_model(), method) as (model, handle):
        total = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        wanted = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        for number in range(3):
            for name, grad in step(model, number).items():
                total[name] += grad
            for name, grad in average_gradients(make_model(), losses_at(number)).items():
                wanted[name] += grad
        left = residuals_of(handle)
        for name, tensor in total.items():
            close(tensor + left.get(name, 0.0), wanted[name], lost_by(method))
        if lost_by(method) <= 1e-7:
            assert max(float(tensor.abs().max()) for tensor in left.values()) > 0
            everyones = [torch.empty_like(total["0.weight"]) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, total["0.weight"])
            assert all(torch.equal(other, everyones[0]) for other in everyones)


def lost_by(method: Any) -> float:
    """Relative error of three sums: scales are in float32; half types, which Auto may take, keep no residual."""
    if isinstance(method, pycomm.BF16):
        return 2e-2
    return 2e-3 if isinstance(method, pycomm.Auto | pycomm.FP16) else 1e-7


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("over_hosts", [False, True], ids=["shared memory", "tcp"])
@on_ranks(2)
def test_nothing_is_lost_when_buckets_are_made_anew(options: str, over_hosts: bool) -> None:
    """What has been received and what is left add up to all gradients, over DistributedDataParallel's rebuild."""
    with over_tcp(over_hosts), wrapped(OutOfOrder(), pycomm.TopK(0.05), **OPTIONS[options]) as (model, handle):
        orders = [names_of(handle)]
        sums = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        wanted = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        for number in range(4):
            for name, grad in step(model, number).items():
                sums[name] += grad
            for name, grad in average_gradients(OutOfOrder(), losses_at(number)).items():
                wanted[name] += grad
            orders.append(names_of(handle))
        left = residuals_of(handle)
        for name, total in sums.items():
            close(total + left.get(name, torch.zeros_like(total)), wanted[name], 1e-10)
        assert left["middle.weight"].abs().max() > 0
        assert (orders[0] != orders[-1]) == (options != "unused"), "unused parameters keep the first order"


def names_of(handle: Any) -> list[list[str]]:
    return [handle._registration.exchanges[index].names for index in range(len(handle._registration.exchanges))]


@on_ranks(2)
def test_rebuilt_buckets_keep_momentum_and_power_iteration() -> None:
    """State that is more than a residual moves with its parameter, too."""
    for method, key in ((pycomm.DGC(0.05), "velocity"), (pycomm.PowerSGD(2), "q")):
        wanted = attached_steps(OutOfOrder(), method, range(1), bucket_mb=1)
        with wrapped(OutOfOrder(), method) as (model, handle):
            first = step(model, 0)
            before = handle.state_dict()["ranks"][str(dist.get_rank())]
            number_before = names_of(handle)
            model(batch_of(0, 0)[0])  # a forward with gradients: buckets are made anew in it
            after = handle.state_dict()["ranks"][str(dist.get_rank())]
            assert all(torch.equal(after[name][key], entry[key]) for name, entry in before.items() if key in entry)
            assert any(key in entry for entry in before.values())
            step(model, 1)
            assert names_of(handle) != number_before
            if key == "velocity":
                for name, grad in first.items():
                    close(grad, wanted[0][name], 1e-9)


@on_ranks(2)
def test_no_sync_sends_nothing_and_touches_no_state() -> None:
    with wrapped(make_model(), pycomm.TopK(0.1)) as (model, handle):
        step(model, 0)
        state, sent = handle.state_dict(), handle.stats()["bytes_sent"]
        rank = str(dist.get_rank())
        model.zero_grad()
        with model.no_sync():
            loss_of(model, dist.get_rank(), 1).backward()
            loss_of(model, dist.get_rank(), 2).backward()
        assert handle.stats()["bytes_sent"] == sent
        for name, entry in handle.state_dict()["ranks"][rank].items():
            assert torch.equal(entry["residual"], state["ranks"][rank][name]["residual"])
        before = residuals_of(handle)
        loss_of(model, dist.get_rank(), 3).backward()
        left = residuals_of(handle)
        wanted = [average_gradients(make_model(), losses_at(number)) for number in (1, 2, 3)]
        for name, p in model.module.named_parameters():
            total = wanted[0][name] + wanted[1][name] + wanted[2][name]
            close(p.grad + left.get(name, 0.0), total + before.get(name, 0.0), 1e-10)


@on_ranks(2)
def test_several_forwards_before_one_backward() -> None:
    with wrapped(make_model(), None) as (model, handle):
        model.zero_grad()
        (loss_of(model, dist.get_rank(), 0) + loss_of(model, dist.get_rank(), 1)).backward()
        first, second = (average_gradients(make_model(), losses_at(number)) for number in (0, 1))
        for name, p in model.module.named_parameters():
            close(p.grad, first[name] + second[name])
        assert handle.stats()["steps"] == 1


@on_ranks(2)
def test_parameters_that_no_rank_uses_keep_gradient_and_residual() -> None:
    def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        x, y = batch_of(rank, number)
        spare = number == 0 or (number == 2 and rank == 1)
        return ((model(x, spare) - y) ** 2).mean()

    with wrapped(OutOfOrder(), pycomm.TopK(0.05), find_unused_parameters=True) as (model, handle):
        step(model, 0, loss)
        before = residuals_of(handle)
        assert "spare.weight" not in step(model, 1, loss), "no gradient where no rank had one"
        between = residuals_of(handle)
        assert torch.equal(between["spare.weight"], before["spare.weight"])
        assert not torch.equal(between["middle.weight"], before["middle.weight"])
        grads = step(model, 2, loss)
        left = residuals_of(handle)
        assert grads["spare.weight"].abs().max() > 0, "what another rank used is received, with what was left"
        assert not torch.equal(left["spare.weight"], between["spare.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_half_precision_models(dtype: torch.dtype) -> None:
    wanted = average_gradients(make_model(dtype=dtype).double(), losses_at(0))
    with wrapped(make_model(dtype=dtype), None) as (model, _):
        for name, grad in step(model, 0).items():
            assert grad.dtype == dtype
            close(grad.double(), wanted[name], 0.03)
    with wrapped(make_model(dtype=dtype), pycomm.TopK(0.2)) as (model, handle):
        step(model, 0)
        state = handle.state_dict()["ranks"][str(dist.get_rank())]
        assert {entry["residual"].dtype for entry in state.values()} == {torch.float32}


@on_ranks(2)
def test_autocast() -> None:
    model_ = make_model(dtype=torch.float32)
    with wrapped(model_, pycomm.TopK(0.2)) as (model, _):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, dist.get_rank(), 0)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model_.parameters()])
        everyone = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(everyone, flat)
        assert torch.equal(*everyone)
