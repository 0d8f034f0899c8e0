"""Requests of one rank that all ranks obey: a veto of a step, a step without a batch, a stop."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import pycomm
from pycomm.collectives.recorder import dump
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, logged, over_tcp, own_state
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

METHODS = [None, pycomm.FP16(), pycomm.TopK(0.5), pycomm.DGC(0.5, momentum=0.9), pycomm.PowerSGD(2)]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, reducer: Any) -> list[torch.Tensor]:
    """Everything that a step changes."""
    tensors = [p.detach().clone() for p in model.parameters()]
    tensors += [t.clone() for e in optimizer.state.values() for t in e.values() if isinstance(t, torch.Tensor)]
    return tensors + [t.clone() for entry in own_state(reducer).values() for t in entry.values()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# A veto


@pytest.mark.behavior(
    "Passes and steps", "call `veto_step()` on any rank before or during backward", "All ranks discard the step."
)
@pytest.mark.pairwise
@pytest.mark.parametrize("when", ["before", "during", "first of two passes"])
@pytest.mark.parametrize("compression", METHODS, ids=repr)
@on_ranks(2, 3)
def test_a_vetoed_step_leaves_no_trace(compression: Any, when: str) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    passes = 2 if when == "first of two passes" else 1
    with attached(optimizer, model, compression=compression, accumulate=passes, bucket_mb=0.001) as reducer:
        for step in range(5):
            before = state_of(model, optimizer, reducer)
            optimizer.zero_grad()
            for i in range(passes):
                asks = rank == 1 and step == 2 and i == 0
                if asks and when != "during":
                    reducer.veto_step("bad data")
                loss = loss_of(model, rank, step)
                if asks and when == "during":
                    loss.register_hook(lambda _: reducer.veto_step("bad data"))
                (loss * float("nan") if asks else loss).backward()
            assert reducer.is_vetoed == (step == 2)
            assert all((p.grad is None) == (step == 2) for p in model.parameters())
            optimizer.step()
            if step == 2:
                assert_same(state_of(model, optimizer, reducer), before)
        stats = reducer.stats()
        assert (stats["vetoed_steps"], stats["last_veto"]) == (1, "rank 1 (bad data)")
        assert stats["nonfinite_steps"] == 0
        assert_replicas_equal(model)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shard", [None, "optimizer"])
@on_ranks(2)
def test_a_veto_with_a_scaler(own: bool, shard: str | None) -> None:
    rank, model = dist.get_rank(), make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler: Any = pycomm.LossScaler(2.0**10) if own else torch.amp.GradScaler("cpu", 2.0**10)
    with attached(optimizer, model, loss_scaler=scaler, shard=shard) as reducer:
        for step in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            if rank == 0 and step == 2:
                reducer.veto_step()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)) == (step == 2)
        assert scaler.get_scale() == (2.0**10 if own else 2.0**9)
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Passes and steps", "call `veto_step()` after backward", "Error. After `step()`, it applies to the next step."
)
@on_ranks(2)
def test_a_veto_that_comes_too_late() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"veto_step\(\) after backward\(\)"):
            reducer.veto_step()
        optimizer.step()
        assert_replicas_equal(model)


@on_ranks(2)
def test_a_veto_after_a_step_is_of_the_next_one() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with logged() as said, attached(optimizer, model) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert reducer.is_vetoed == (step == 1)
            optimizer.step()
            if rank == 1 and step == 0:
                reducer.veto_step()
        assert_replicas_equal(model)
    assert any("the next step" in text for text in said) == (rank == 1)


@pytest.mark.parametrize("first", ["overflow", "veto"])
@pytest.mark.parametrize("scaler", ["given", "own", "not given"])
@on_ranks(2)
def test_a_veto_after_a_step_that_the_scaler_has_skipped(first: str, scaler: str) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    scales: Any = pycomm.LossScaler(2.0**8) if scaler == "own" else torch.amp.GradScaler("cpu", init_scale=256.0)
    with attached(optimizer, model, loss_scaler=None if scaler == "not given" else scales) as reducer:
        for step in range(5):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if step == 1 and rank == 1:
                loss = loss * (float("inf") if first == "overflow" else 1.0)
            if rank == 1 and (step == 2 or (step, first) == (1, "veto")):
                reducer.veto_step()
            scales.scale(loss).backward()
            scales.step(optimizer)
            scales.update()
            assert all(map(torch.equal, before, model.parameters())) == (step in (1, 2))
        assert reducer.stats()["vetoed_steps"] == 1 + (first == "veto")
        assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["veto", "skipped by all", "unscaled"])
@on_ranks(2)
def test_a_step_that_is_left_out_with_a_scaler_that_attach_was_not_given(how: str) -> None:
    """It may be the first one; GradScaler refuses steps without gradients otherwise, and still does so by mistake."""
    rank, model = dist.get_rank(), make_model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    with attached(optimizer, model) as reducer:
        for step in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            is_left_out = step in (0, 2)
            if is_left_out and how == "skipped by all":
                reducer.skip_batch()
            else:
                if is_left_out and rank == 1:
                    reducer.veto_step()
                scaler.scale(loss_of(model, rank, step)).backward()
            if how == "unscaled" and not is_left_out:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 256.0
            assert all(map(torch.equal, before, model.parameters())) == is_left_out
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)


@pytest.mark.behavior("Passes and steps", "call `veto_step()` with `shard`", "Requires `loss_scaler=`, as on GPUs.")
@on_ranks(2)
def test_what_does_not_go_with_a_veto() -> None:
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(optimizer, model, shard="optimizer") as reducer:
        with pytest.raises(ValueError, match=r"veto_step\(\).*shard"):
            reducer.veto_step()


# A step without a batch


@pytest.mark.behavior(
    "Passes and steps", "call `skip_batch()` on a rank without a batch", "The mean is over the other ranks."
)
@pytest.mark.parametrize("compression", [None, pycomm.FP16(), pycomm.TopK(1.0)], ids=repr)
@pytest.mark.parametrize("absent", [[1], [0, 1]])
@on_ranks(3)
def test_the_mean_is_that_of_the_ranks_with_a_batch(absent: list[int], compression: Any) -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=compression) as reducer:
        for step in range(4):
            plain.load_state_dict(model.state_dict())
            there = [loss for r, loss in enumerate(losses_at(step)) if step != 2 or r not in absent]
            wanted = average_gradients(plain, there)
            optimizer.zero_grad()
            if step == 2 and rank in absent:
                loss_of(model, rank, step)  # it has seen that its loss is not finite
                reducer.skip_batch()
            else:
                loss_of(model, rank, step).backward()
            for name, param in model.named_parameters():
                close(param.grad, wanted[name], 1e-3 if isinstance(compression, pycomm.FP16) else 1e-9)
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2)
def test_with_weights_by_samples(over_hosts: bool) -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with over_tcp(over_hosts), attached(optimizer, model) as reducer:
        for step in range(4):
            plain.load_state_dict(model.state_dict())
            counts = [5, 0 if step == 2 else 3]
            grads = [torch.autograd.grad(loss(plain), list(plain.parameters())) for loss in losses_at(step)]
            optimizer.zero_grad()
            if counts[rank] == 0:
                reducer.skip_batch()
            else:
                reducer.set_weight(counts[rank])
                loss_of(model, rank, step).backward()
            for i, param in enumerate(model.parameters()):
                close(param.grad, (counts[0] * grads[0][i] + counts[1] * grads[1][i]) / sum(counts), 1e-9)
            optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("way", ["skip_batch()", "flush()"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_mb": 1e-4},
        {"compression": pycomm.TopK(1.0)},
        {"shard": "optimizer"},
    ],
    ids=str,
)
@pytest.mark.parametrize("absent", [[1], [0, 2]])
@pytest.mark.parametrize("first", [0, 2])
@on_ranks(3)
def test_without_a_batch_in_the_first_weighted_step(
    first: int, absent: list[int], options: dict[str, Any], way: str
) -> None:
    """The ranks that have none have never called set_weight(), and the steps before were not weighted."""
    first_weights(first, absent, options, way)


@pytest.mark.parametrize("hosts", ["abc", "aab"])
@on_ranks(3)
def test_without_a_batch_in_the_first_weighted_step_between_hosts(hosts: str) -> None:
    with on_hosts(hosts):
        first_weights(1, [1], {"bucket_mb": 1e-4}, "skip_batch()")


def first_weights(first: int, absent: list[int], options: dict[str, Any], way: str) -> None:
    rank, size, model, plain = dist.get_rank(), dist.get_world_size(), make_model(), make_model()
    optimizer, failed = sgd(model), list[str]()
    with pytest.MonkeyPatch.context() as patch, attached(optimizer, model, **options) as reducer:
        patch.setattr(dump, "dump_failure", lambda _, why: failed.append(why))
        for step in range(first + 3):
            plain.load_state_dict(model.state_dict())
            counts = [0 if step == first and r in absent else 5 + r if step >= first else 1 for r in range(size)]
            grads = [torch.autograd.grad(loss(plain), list(plain.parameters())) for loss in losses_at(step)]
            optimizer.zero_grad()
            if counts[rank] == 0:
                reducer.skip_batch() if "skip" in way else reducer.flush()
            else:
                if step >= first:
                    reducer.set_weight(counts[rank])
                loss_of(model, rank, step).backward()
            for i, param in enumerate(model.parameters()):
                if "shard" not in options:
                    parts = [count * grad[i] for count, grad in zip(counts, grads, strict=True)]
                    close(param.grad, torch.stack(parts).sum(0) / sum(counts), 1e-9)
            optimizer.step()
        assert reducer.stats()["steps"] == first + 3
        assert_replicas_equal(model)
    assert failed == []  # no alarm


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
@on_ranks(2)
def test_no_rank_has_a_batch(compression: Any, weights: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=compression) as reducer:
        for step in range(5):
            before = state_of(model, optimizer, reducer)
            optimizer.zero_grad()
            if step in (2, 3):
                reducer.skip_batch()
                assert all(p.grad is None for p in model.parameters())
                optimizer.step()
                assert_same(state_of(model, optimizer, reducer), before)
                continue
            if weights:
                reducer.set_weight(4 + rank)
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert_replicas_equal(model)


@on_ranks(2)
def test_a_window_half_full() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=2) as reducer:
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"skip_batch\(\) after 1 of 2 backward passes.*flush\(\)"):
            reducer.skip_batch()
        reducer.flush()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:  # a whole window without a batch
            reducer.skip_batch()
        else:
            loss_of(model, rank, 1).backward()
            loss_of(model, rank, 2).backward()
        optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Passes and steps", "call `skip_batch()` with `survive`", "Requires `set_weight` before each backward, as on GPUs."
)
@pytest.mark.parametrize("options", [{"on_failure": "shrink"}], ids=str)
@on_ranks(2)
def test_what_requires_weights_to_skip(options: dict[str, Any]) -> None:
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(optimizer, model, **options) as reducer:
        with pytest.raises(ValueError, match=r"skip_batch\(\) with .* requires reducer.set_weight"):
            reducer.skip_batch()


# A stop


@pytest.mark.parametrize("over_hosts", [False, True])
@on_ranks(2, 3)
def test_all_ranks_hear_of_a_stop_at_the_same_step(over_hosts: bool) -> None:
    rank, size, model = dist.get_rank(), dist.get_world_size(), make_model()
    optimizer = sgd(model)
    with over_tcp(over_hosts), attached(optimizer, model) as reducer:
        assert not reducer.stop_requested
        heard = -1
        for step in range(6):
            if rank == size - 1 and step == 3:
                reducer.request_stop("time is up")
                assert not reducer.stop_requested
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if reducer.stop_requested and heard < 0:
                heard = step
            optimizer.step()
        assert heard == 3
        assert (reducer.stop_requested.rank, reducer.stop_requested.reason) == (size - 1, "time is up")
        assert_replicas_equal(model)


@on_ranks(2)
def test_two_ranks_ask_for_a_stop() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        reducer.request_stop(f"of rank {rank}")
        loss_of(model, rank, 0).backward()
        assert reducer.stop_requested.reason == "of rank 0"
        optimizer.step()


@on_ranks(2)
def test_a_signal_stops_all_ranks_together() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    before = signal.getsignal(signal.SIGUSR1)
    with attached(optimizer, model) as reducer:
        with pycomm.stop_on_signal(reducer, signal.SIGUSR1):
            steps = 0
            while not reducer.stop_requested:
                if rank == 1 and steps == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                optimizer.zero_grad()
                loss_of(model, rank, steps).backward()
                optimizer.step()
                steps += 1
        assert steps == 3
        assert "SIGUSR1" in reducer.stop_requested.reason
        assert reducer.stop_requested.rank == 1
    assert signal.getsignal(signal.SIGUSR1) == before


@on_ranks(2)
def test_what_is_no_signal_is_refused() -> None:
    model = make_model()
    with attached(sgd(model), model) as reducer:
        with pytest.raises(ValueError, match="signals"):
            pycomm.stop_on_signal(reducer)
        with pytest.raises(TypeError, match="reducer is a str"):
            pycomm.stop_on_signal("reducer", signal.SIGUSR1)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_stop_asked_for_while_ranks_save(tmp_path: Any) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        loss_of(model, rank, 0).backward()
        optimizer.step()
        if rank == 1:
            reducer.request_stop("while saving")
        pycomm.save(tmp_path, reducer).wait()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        assert reducer.stop_requested.reason == "while saving"
        optimizer.step()


def test_one_process() -> None:
    model = make_model()
    optimizer = sgd(model)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with attached(optimizer, model) as reducer:
            loss_of(model, 0, 0).backward()
            reducer.skip_batch()
            assert all(p.grad is None for p in model.parameters())
            before = [p.detach().clone() for p in model.parameters()]
            reducer.veto_step()
            loss_of(model, 0, 0).backward()
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            reducer.request_stop("done")
            loss_of(model, 0, 0).backward()
            assert reducer.stop_requested.reason == "done"
    finally:
        dist.destroy_process_group()
