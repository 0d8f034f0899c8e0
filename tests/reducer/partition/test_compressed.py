"""Sharded steps with compression: of gradients, which go to their owners, and of parameters, which come from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.compression.test_methods import leaves_no_trace
from tests.compression.test_two_hop import counted_bytes
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.partition import test_same_steps as whole
from tests.reducer.partition.stepping import OPTIMIZERS, Weights, assert_same, backward, gradients_of, rank, values_of
from tests.reducer.partition.test_spread import assert_same_as_alone, hosts

ALIGNED = [pycomm.Int8(block=64), pycomm.Int4(block=64), pycomm.FP8(block=64), pycomm.FP8("e5m2", block=64)]
"""Methods whose blocks fill shares, which begin at multiples of 64: so blocks are the same without shares."""
GATHERS = [pycomm.Int8(), pycomm.FP8(), pycomm.Int4(block=64)]


@pytest.mark.parametrize("method", ALIGNED, ids=repr)
@on_ranks(2)
def test_two_hosts_have_the_bits_of_a_step_alone(method: Any) -> None:
    """Among two hosts messages are gathered without shares: rounded once, as with them."""
    for body in (whole.few_steps, whole.new_parameters, whole.kept_gradients, whole.missing_gradients):
        assert_same_as_alone("Adam", body, "own gradients", compression=method)
    assert_same_as_alone("LAMB", whole.few_steps, "own gradients", compression=method)


@on_ranks(2)
def test_ranks_of_one_host_have_the_bits_of_a_step_alone() -> None:
    for method in ALIGNED:
        wanted = whole.trained(OPTIMIZERS["Adam"], whole.few_steps, compression=method)
        for kind in ("optimizer", "parameters"):
            assert_same(whole.trained(OPTIMIZERS["Adam"], whole.few_steps, compression=method, shard=kind), wanted)


@pytest.mark.parametrize(
    "method", [pycomm.TopK(0.1), pycomm.PowerSGD(1), pycomm.Int8(), pycomm.ChunkTopK(64, decay=1.0)], ids=repr
)
@on_ranks(3)
def test_whole_averages_by_any_method(method: Any) -> None:
    assert_same_as_alone("Adam", whole.few_steps, "all gradients", compression=method)


@on_ranks(2, 3)
def test_momentum_correction() -> None:
    assert_same_as_alone("plain SGD", whole.few_steps, "all gradients", compression=pycomm.DGC(0.1))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "onebit", "qsgd", "terngrad"])
@pytest.mark.parametrize("layout", ["ab", "abc", "aabb", "aa"])
def test_an_overflow_leaves_no_trace(rank_pools: Pools, layout: str, name: str) -> None:
    rank_pools(len(layout)).run(overflow_on, layout, name)


def overflow_on(layout: str, name: str) -> None:
    with on_hosts(layout):
        leaves_no_trace(name, [(0, 0), (1, 2), (1, 5)], None, {"shard": "optimizer"})
        leaves_no_trace(name, [(1, 1)], 1024.0, {"shard": "optimizer"})


@pytest.mark.parametrize("method", [pycomm.OneBit(), pycomm.QSGD(7), pycomm.FP8(), pycomm.Int4()], ids=repr)
@on_ranks(2, 4)
def test_whole_parameters_of_any_optimizer(method: Any) -> None:
    """Owners of unequal shares, some of which have nothing of a bucket; after the trial, in which all have all."""
    model = Weights()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Adamax(matrices, lr=0.01)
    with hosts(), attached(optimizer, matrices_of(model), shard="optimizer", compression=method, bucket_mb=0.005) as r:
        for number in range(8):
            optimizer.zero_grad()
            backward(matrices, [g for g in gradients_of(rank(), number) if g.dim() == 2])
            optimizer.step()
        assert r.stats()["step_shares"]
        assert_replicas_equal(nn.ParameterList(matrices))


def matrices_of(model: Weights) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2]


# Changes of parameters in few bits.


def stepped(optimizer: torch.optim.Optimizer, model: Weights, begin: int, end: int) -> None:
    for number in range(begin, end):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(rank(), number))
        optimizer.step()


def exact_values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters with what has not been sent of them."""
    params, state = values_of(optimizer)
    return [p + state.get(i, {}).get("unsent", torch.zeros(())) for i, p in enumerate(params)]


def close_to(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gather", GATHERS, ids=repr)
@pytest.mark.parametrize("name", ["plain SGD", "Adam"])
@on_ranks(2, 3, 4)
def test_what_ranks_have_and_what_is_unsent_is_what_an_exact_step_gives(name: str, gather: Any) -> None:
    """Gradients do not depend on parameters here, so that the exact ones are those of a run without rounding."""
    with hosts():
        wanted = whole.trained(OPTIMIZERS[name], whole.few_steps, shard="optimizer")[0]
        model = Weights()
        optimizer = OPTIMIZERS[name](model.parameters())
        with attached(optimizer, model, bucket_mb=0.005, shard=pycomm.Sharding("optimizer", gather=gather)):
            stepped(optimizer, model, 0, 4)
            assert_replicas_equal(model)
            params, state = values_of(optimizer)
            unsent = [entry["unsent"] for entry in state.values() if "unsent" in entry]
            assert any(bool(each.any()) for each in unsent)
            # Steps of Adam have a length of 0.01, those of SGD one of 0.1 times a gradient of at most 5.
            levels = {pycomm.Int8: 254, pycomm.FP8: 16, pycomm.Int4: 14}[type(gather)]
            most = 0.02 if name == "Adam" else 0.5
            assert max(float(each.abs().max()) for each in unsent) <= 1.5 * most / levels
            assert not all(torch.equal(p, other) for p, other in zip(params, wanted, strict=True))
            close_to(exact_values(optimizer), wanted)
    close_to([p.detach() for p in model.parameters()], wanted)  # detached, it steps exact parameters alone
    assert all("unsent" not in entry for entry in optimizer.state.values())
    assert_replicas_equal(model)


@on_ranks(3)
def test_checkpoints_have_what_is_unsent(tmp_path: Path) -> None:
    """Ranks go on with the same bits."""
    gather = pycomm.Sharding("optimizer", gather=pycomm.Int8())
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    with hosts(), attached(optimizer, model, shard=gather) as reducer:
        stepped(optimizer, model, 0, 3)
        pycomm.save(tmp_path / "saved", reducer).wait()
        stepped(optimizer, model, 3, 5)
        wanted = values_of(optimizer)
    other = Weights()
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    with hosts(), attached(optimizer, other, shard=gather) as reducer:
        stepped(optimizer, other, 7, 9)
        pycomm.load(tmp_path / "saved", reducer)
        stepped(optimizer, other, 3, 5)
        assert_same(values_of(optimizer), wanted)


def saved_with_what_is_unsent(path: str) -> list[torch.Tensor]:
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    shard = pycomm.Sharding("optimizer", gather=pycomm.Int4(block=64))
    with hosts(), attached(optimizer, model, shard=shard) as reducer:
        stepped(optimizer, model, 0, 3)
        pycomm.save(path, reducer).wait()
        exact = exact_values(optimizer)
        assert not all(torch.equal(p, other) for p, other in zip(model.parameters(), exact, strict=True))
    return exact


def loaded_with_what_is_unsent(path: str, exact: list[torch.Tensor]) -> None:
    model = Weights()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    shard = pycomm.Sharding("optimizer", gather=pycomm.Int4(block=64))
    with hosts(), attached(optimizer, model, shard=shard) as reducer:
        pycomm.load(path, reducer)
        optimizer.param_groups[0]["lr"] = 0.0
        stepped(optimizer, model, 0, 1)
        close_to(exact_values(optimizer), exact)


@pytest.mark.parametrize("size", [2, 4])
def test_other_numbers_of_ranks_take_what_is_unsent(rank_pools: Pools, tmp_path: Path, size: int) -> None:
    exact = rank_pools(3).run(saved_with_what_is_unsent, str(tmp_path / "saved"))[0]
    rank_pools(size).run(loaded_with_what_is_unsent, str(tmp_path / "saved"), exact)


@on_ranks(2)
def test_parameters_that_a_script_writes_to_are_what_it_has_written() -> None:
    model = Weights()
    optimizer = OPTIMIZERS["plain SGD"](model.parameters())
    with hosts(), attached(optimizer, model, shard=pycomm.Sharding("optimizer", gather=pycomm.Int4())):
        stepped(optimizer, model, 0, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer.param_groups[0]["lr"] = 0.0
        stepped(optimizer, model, 3, 4)
        assert all(not p.any() for p in model.parameters())


@on_ranks(3)
def test_any_optimizer_sends_changes() -> None:
    model = Weights()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    with hosts(), attached(optimizer, model, shard=pycomm.Sharding("optimizer", gather=pycomm.FP8())):
        stepped(optimizer, model, 0, 8)
        assert_replicas_equal(model)
    wanted = Weights()
    optimizer = torch.optim.Adamax(wanted.parameters(), lr=0.01)
    with hosts(), attached(optimizer, wanted):
        stepped(optimizer, wanted, 0, 8)
    close_to([p.detach() for p in model.parameters()], [p.detach() for p in wanted.parameters()])


@on_ranks(2)
def test_masters_travel_as_they_are() -> None:
    body = whole.half_steps(torch.bfloat16, 5.0)
    found = []
    for gather in (None, pycomm.Int8()):
        options = {"loss_scaler": pycomm.LossScaler(2.0**4), "shard": pycomm.Sharding("optimizer", gather=gather)}
        with hosts():
            found.append(whole.trained(OPTIMIZERS["Adam"], body, torch.bfloat16, **options))
    assert_same(found[1], found[0])


def bytes_of_steps(layout: str, compression: Any, gather: Any) -> float:
    p = nn.Parameter(torch.zeros(1000, 1000))
    optimizer = torch.optim.SGD([p], lr=0.1)
    shard = pycomm.Sharding("optimizer", gather=gather)
    with on_hosts(layout), attached(optimizer, [("p", p)], compression=compression, shard=shard, check_replicas=0):
        for _ in range(2):
            with counted_bytes() as sent:
                optimizer.zero_grad()
                loss: Any = (p * torch.randn(1000, 1000)).sum()
                loss.backward()
                optimizer.step()
                p.sum()
    return sent[0] / p.numel()


@pytest.mark.parametrize("layout", ["ab", "abc", "abcd", "aabb"])
def test_bytes_of_both_halves(rank_pools: Pools, layout: str) -> None:
    """(P - 1) / P of the gradients' messages, and as many of the changes'; of L ranks a host, each has a lane."""
    num_hosts, per_host = len(set(layout)), len(layout) // len(set(layout))
    int8, fp8, share = 1 + 4 / 256, 1 + 4 / 128, (num_hosts - 1) / num_hosts / per_host
    for compression, gather, each in ((pycomm.Int8(), None, int8 + 4), (pycomm.Int8(), pycomm.FP8(), int8 + fp8)):
        counted = rank_pools(len(layout)).run(bytes_of_steps, layout, compression, gather)
        assert counted == pytest.approx([share * each] * len(layout), rel=0.02)


@on_ranks(2)
def test_settings_must_be_equal() -> None:
    p = nn.Parameter(torch.zeros(30, 10))
    shard = pycomm.Sharding("optimizer", gather=pycomm.Int8() if dist.get_rank() else None)
    with hosts(), pytest.raises(ValueError, match="shard=Sharding"):
        pycomm.attach(torch.optim.SGD([p], lr=0.1), [("p", p)], shard=shard)


@pytest.mark.parametrize(
    ("gather", "error", "says"),
    [
        ("int8", TypeError, r"gather is 'int8', wanted pycomm.FP8\(\), pycomm.Int8\(\), pycomm.Int4\(\) or None"),
        (pycomm.OneBit(), TypeError, r"gather is OneBit\(\), wanted"),
        (pycomm.Int8(error_feedback=False), ValueError, "wanted error_feedback=True"),
    ],
)
def test_forms_that_changes_cannot_have(gather: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        pycomm.Sharding("optimizer", gather=gather)


def test_no_parameters_travel_on_one_host() -> None:
    for kind, grads in (("parameters", "part"), ("optimizer", "local")):
        with pytest.raises(ValueError, match="no parameters travel there"):
            pycomm.Sharding(kind, grads, gather=pycomm.Int8())
    assert repr(pycomm.Sharding("optimizer", gather=pycomm.FP8())).endswith("error_feedback=True))")
