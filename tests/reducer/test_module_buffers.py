"""Buffers that are made equal in each reduction: compared before they are sent, and written as graphs allow."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.collectives.communicator import Communicator
from pycomm.training.reducer import BufferSync
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import attached, over_tcp
from tests.reducer.models import close, loss_of, make_model, sgd


class Masked(nn.Module):
    """Model with a buffer that its loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.register_buffer("before", torch.ones(2))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


def _set(model: Any, value: Any) -> None:
    model.mask = value


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "size": (
        lambda m: _set(m, torch.ones(16)),
        "'mask: [16] torch.float32' on rank 1, 'mask: [8] torch.float32' on rank 0",
    ),
    "dtype": (lambda m: _set(m, torch.ones(8).int()), "'mask: [8] torch.int32' on rank 1"),
    "none": (lambda m: _set(m, None), "buffer 1 is 'nothing' on rank 1, 'mask: [8] torch.float32' on rank 0"),
    "one more": (lambda m: m.body.register_buffer("late", torch.ones(1)), "'body.late: [1] torch.float32' on rank 1"),
    "sparse": (lambda m: _set(m, torch.eye(8).to_sparse()), "'mask: [8, 8] torch.float32, sparse, 8 values, contents "),
    "expanded": (
        lambda m: _set(m, torch.ones(1).expand(8)),
        "'mask: [8] torch.float32, 1 elements in memory' on rank 1",
    ),
    "resized in place": (lambda m: m.mask.resize_(4), "'mask: [4] torch.float32' on rank 1"),
}


def change(kinds: list[str], mode: str, guilty: list[int], over: bool) -> list[str]:
    rank = dist.get_rank()
    found: list[str] = []
    with over_tcp(over):
        for kind in kinds:
            model = Masked()
            optimizer = sgd(model)
            with attached(optimizer, model, buffers=mode):
                for step in range(3):
                    if step == 1 and rank in guilty:
                        CHANGES[kind][0](model)
                    optimizer.zero_grad()
                    try:
                        loss_of(model, rank, step).backward()
                    except ValueError as error:
                        found.append(str(error))
                        break
                    optimizer.step()
            with attached(optimizer, model.named_parameters()):  # nothing is left behind
                loss_of(model, rank, 0).backward()
    return found


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "change a buffer's size on one rank, with `buffers=`",
    "`ValueError` everywhere in backward.",
)
@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize(
    ("over", "kinds"),
    [(False, [*CHANGES]), (True, ["size", "none"])],
    ids=["shared memory", "torch.distributed"],
)
@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_a_buffer_that_changes_on_one_rank_is_named_on_all(
    two_ranks: RankPool, kinds: list[str], mode: str, over: bool
) -> None:
    first, second = two_ranks.run(change, kinds, mode, [1], over)
    assert first == second
    for kind, message in zip(kinds, first, strict=True):
        assert message.startswith("the ranks disagree: buffer")
        assert CHANGES[kind][1] in message
    assert two_ranks.run(change, kinds, mode, [0, 1], over) == [[], []]  # all alike: taken


@pytest.mark.parametrize("mode", ["broadcast", "average"])
@on_ranks(2)
def test_contents_that_cannot_be_sent_are_compared_in_each_step(mode: str) -> None:
    rank = dist.get_rank()
    model: Any = Masked()
    model.mask = torch.eye(3).to_sparse()
    optimizer = sgd(model)
    with attached(optimizer, model, buffers=mode):
        loss_of(model, rank, 0).backward()
        optimizer.step()
        model.mask = torch.eye(3).to_sparse() * (1 + rank)
        with pytest.raises(ValueError, match="buffer 1 is 'mask: .*, contents .* on rank 1"):
            loss_of(model, rank, 1).backward()


@on_ranks(2)
def test_expanded_buffers_are_averaged_once() -> None:
    rank = dist.get_rank()
    model: Any = Masked()
    model.mask = torch.arange(3.0).expand(4, 3)
    with attached(sgd(model), model, buffers="average"):
        model.mask[0].add_(rank)
        loss_of(model, rank, 0).backward()
        assert model.mask.tolist() == [[0.5, 1.5, 2.5]] * 4
        assert model.mask.stride() == (0, 1)


class Constant(nn.Module):
    """Model with a table, of any dtype, that never changes, and running statistics."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.norm = make_model(), nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).to(dtype).triu(1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.body(x).float()).to(x.dtype)


@pytest.mark.parametrize("over", [False, True], ids=["shared memory", "torch.distributed"])
@on_ranks(3)
def test_buffers_that_are_equal_on_all_ranks_are_not_written(over: bool) -> None:
    """(x + x + x) / 3 is not x for 15 % of all numbers."""
    rank = dist.get_rank()
    with over_tcp(over):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            model: Any = Constant(dtype)
            before, versions = model.table.clone(), (model.table._version, model.mask._version)
            optimizer = sgd(model)
            with attached(optimizer, model, buffers="average"):
                for step in range(4):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()
            assert torch.equal(model.table, before)
            assert (model.table._version, model.mask._version) == versions
            everyones: list[Any] = [None] * 3
            dist.all_gather_object(everyones, model.norm.running_mean)
            assert all(torch.equal(each, everyones[0]) for each in everyones)
            assert everyones[0].abs().sum() > 0.0


@on_ranks(3)
def test_statistics_are_the_mean_over_the_ranks() -> None:
    rank = dist.get_rank()
    model: Any = Masked()
    with attached(sgd(model), model, buffers="average"):
        own = torch.randn(8, generator=torch.Generator().manual_seed(rank))
        model.mask.copy_(own)
        everyones = [torch.empty(8) for _ in range(3)]
        dist.all_gather(everyones, own)
        loss_of(model, rank, 0).backward()
        torch.testing.assert_close(model.mask.double(), torch.stack(everyones).double().mean(0), rtol=1e-6, atol=1e-7)


@on_ranks(2, fresh=True)
def test_hosts_need_not_compare_buffers_each_time() -> None:
    rank = dist.get_rank()
    model: Any = Masked()
    with Communicator(None, 5.0) as communicator, pytest.MonkeyPatch.context() as patch:
        sync = BufferSync(model, "average", communicator, interval=4)
        found, gather = itertools.count(), communicator.channel.all_gather_number
        patch.setattr(communicator.channel, "all_gather_number", lambda mine: (next(found), gather(mine))[1])

        def meetings(numbers: range, size: int) -> int:
            before = next(found)
            for number in numbers:
                model.mask = torch.full((size,), float(number + rank))
                sync.run()
                assert model.mask.tolist() == [number + 0.5] * size
            return next(found) - before - 1

        assert meetings(range(11), 8) == 5  # the first, and those after 1, 2, 4 and 8 others
        assert meetings(range(11, 16), 9) == 2  # their sizes have changed, and one after 12
        model.mask = torch.ones(10) if rank == 1 else model.mask
        with pytest.raises((ValueError, pycomm.CommError)):
            sync.run()


@on_ranks(2)
def test_ignored_buffers_stay() -> None:
    rank = dist.get_rank()
    model: Any = Masked()
    model.mask = torch.ones(3 + rank)
    with attached(sgd(model), model, buffers="broadcast", ignore=["mask"], check_replicas=1):
        for step in range(3):
            model.mask = torch.full((3 + rank + step,), float(rank))
            model.before.fill_(rank)
            loss_of(model, rank, step).backward()
            assert model.mask.tolist() == [rank] * (3 + rank + step)
            assert model.before.tolist() == [0, 0]


def normed(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 6), nn.Unflatten(1, (3, 2)), kind(3), nn.Flatten(), nn.Linear(6, 1)).double()


@pytest.mark.parametrize("mode", ["broadcast", "average"])
@on_ranks(2)
def test_two_graphs_with_statistics(mode: str) -> None:
    """Two forwards before two backwards, in training mode: the second graph is whole."""
    rank = dist.get_rank()
    for kind in (nn.BatchNorm1d, nn.InstanceNorm1d):
        net = normed(lambda n, kind=kind: kind(n, track_running_stats=True))  # type: ignore[arg-type]
        alone = copy.deepcopy(net)
        with attached(sgd(net), net, buffers=mode):
            passes = [net(_rows(step, rank)) for step in (1, 2)]
            passes[0].sum().backward()
            passes[1].square().sum().backward()
            for r in range(2):
                a, b = alone(_rows(1, r)), alone(_rows(2, r))
                ((a.sum() + b.square().sum()) / 2).backward()
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                assert q.grad is not None
                close(p.grad, q.grad, 1e-9)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, [b.tolist() for b in net.buffers()])
        assert both[0] == both[1]


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


class Scaled(nn.Module):
    """Model whose backward needs its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 1).double()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) * self.scale


@on_ranks(2)
def test_two_graphs_with_a_buffer_that_backward_needs() -> None:
    """Constant: nothing is written. Changed: an error, where the gradients would be of another value."""
    rank = dist.get_rank()
    for mode in ("broadcast", "average"):
        model: Any = Scaled()
        with attached(sgd(model), model, buffers=mode):
            passes = [model(_rows(step, rank)) for step in (1, 2)]
            for each in passes:
                each.sum().backward()
        with attached(sgd(model), model, buffers=mode):
            model.zero_grad()
            model.scale.fill_(1.0 + rank)
            passes = [model(_rows(step, rank)) for step in (1, 2)]
            passes[0].sum().backward()
            assert model.scale.item() == (1.0 if mode == "broadcast" else 1.5)
            if rank == 1 or mode == "average":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    passes[1].sum().backward()


@on_ranks(2)
def test_statistics_that_backward_uses_are_not_written_unseen() -> None:
    """Normalizations in evaluation mode normalize by their buffers."""
    rank = dist.get_rank()
    net = normed(nn.BatchNorm1d)
    net[2].eval()
    with attached(sgd(net), net, buffers="broadcast"):
        passes = [net(_rows(step, rank)) for step in (1, 2)]
        for each in passes:
            each.sum().backward()  # equal on all ranks: nothing is written
        net.zero_grad()
        net[2].running_var.fill_(1.0 + rank)  # type: ignore[operator]
        passes = [net(_rows(step, rank)) for step in (1, 2)]
        passes[0].sum().backward()
        if rank == 1:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                passes[1].sum().backward()


@on_ranks(2)
def test_buffers_that_differ_at_attach_are_named() -> None:
    model: Any = Masked()
    model.mask = torch.ones(8 * (dist.get_rank() + 1))
    for mode in ("local", "broadcast"):
        with pytest.raises(ValueError, match=r"'mask: \[16\] torch.float32' on rank 1, .*Tuning\(ignore="):
            pycomm.attach(sgd(model), model, buffers=mode)
