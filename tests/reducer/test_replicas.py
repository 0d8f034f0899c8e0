"""Replicas are compared; buffers kept equal if asked; parameters that nobody averages are named."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reductions.replicas import RollingHash
from tests.on_ranks import Pools, on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, grouped, warnings_noted
from tests.reducer.models import Normed, average_gradients, close, loss_of, losses_at, make_model, sgd


def drift(where: str, at: int, options: dict[str, Any], compression: Any) -> tuple[int, str]:
    """Rank 1 changes something by itself after ``at`` steps."""
    rank = dist.get_rank()
    model = make_model(dtype=torch.float32)
    optimizer = sgd(model)
    steps = 0

    def change() -> None:
        if where == "lr":
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            flat = model.get_parameter(where).detach().view(-1).view(torch.int32).numpy()
            flat[3] ^= 1  # the last bit, as a fault would: no version counter changes

    def run() -> None:
        nonlocal steps
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            steps += 1
            if steps == at and rank == 1:
                change()

    with attached(optimizer, model, compression=compression, **options):
        with pytest.raises(RuntimeError, match="the replicas differ") as raised:
            run()
    return steps, str(raised.value)


@pytest.mark.parametrize(
    "compression", [None, pycomm.FP16(), pycomm.TopK(0.1), pycomm.PowerSGD(1), pycomm.TopK(1.0)], ids=repr
)
def test_a_last_bit_is_found(two_ranks: RankPool, compression: Any) -> None:
    for steps, says in two_ranks.run(drift, "2.weight", 5, {"check_replicas": 4}, compression):
        assert steps == 5
        assert "the replicas differ after 5 reductions: parameter '" in says
        assert "the largest difference is" in says


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`the replicas differ after ... reductions: parameter ...`",
    "One rank wrote parameters, used another rate, or stepped on local gradients. Attach again to make replicas equal.",
)
def test_the_parameter_and_the_rank_are_named(rank_pools: Pools) -> None:
    for steps, says in rank_pools(2).run(drift, "2.weight", 5, {"check_replicas": 1}, None):
        assert steps == 5
        assert "parameter '2.weight' differs between rank 0 and rank 1; the largest" in says
        assert "One of ranks 0, 1 is wrong, no majority says which. Only 1 of their elements differs" in says
    for steps, says in rank_pools(3).run(drift, "lr", 3, {"check_replicas": 2, "per_rank": ("lr",)}, None):
        assert steps == 4  # the rate that was changed after the third step was used in the fourth
        assert "parameter '0.weight' on rank 1 differs from the other ranks (6 parameters differ)" in says
        assert "a learning rate" in says


@on_ranks(2)
def test_a_parameter_in_another_memory_order_is_named() -> None:
    model = nn.Conv2d(3, 4, 2, bias=False)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    optimizer = sgd(model)

    def train() -> None:
        for _ in range(2):
            model(torch.ones(1, 3, 4, 4)).sum().backward()
            optimizer.step()

    with attached(optimizer, model, check_replicas=1):
        with torch.no_grad():
            model.weight.add_(0.5 * dist.get_rank())
        with pytest.raises(RuntimeError, match="'weight' differs .* the largest difference is 0.5"):
            train()


def test_what_is_set_up_differently_shows_after_one_step(two_ranks: RankPool) -> None:
    for steps, says in two_ranks.run(drift, "0.bias", 1, {}, None):  # as it is by default
        assert steps == 1
        assert "the replicas differ after 1 reductions: parameter '0.bias' differs between rank 0 and rank 1" in says


@pytest.mark.behavior(
    "Ranks that differ",
    "write to a parameter, or load a model, on one rank",
    "Error in the next reduction if the model is small or all parameters changed; otherwise within 64.",
)
@pytest.mark.parametrize("writes", ["everything", "one element"])
@on_ranks(2, 3)
def test_each_reduction_compares_a_part(writes: str) -> None:
    """A difference in all parameters is seen at once; one in an element when its part has its turn."""
    rank, model = dist.get_rank(), make_wide_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    num_parts = -(-sum(p.nbytes for p in model.parameters()) // 2**16)
    written, steps = 33, 0

    def write() -> None:
        if writes == "everything":
            for p in model.parameters():
                p.detach().mul_(1.001)
        else:
            model[1].weight.detach()[17, 200] += 1e-3

    def run() -> None:
        nonlocal steps
        for step in range(written + num_parts):
            optimizer.zero_grad()
            x = torch.randn(4, 300, generator=torch.Generator().manual_seed(3 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            steps += 1
            if rank == 1 and steps == written:
                write()

    assert 10 < num_parts < 32  # the next comparison of all parameters comes later
    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match="the replicas differ after .* reductions: parameter '.*weight'"):
            run()
    assert steps == written if writes == "everything" else written < steps


def make_wide_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300))


@on_ranks(2)
def test_not_looked_where_not_asked() -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, check_replicas=0):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if rank == 1:
                model[0].weight.data += 1.0
    with pytest.raises(ValueError, match="check_replicas is -1, wanted at least 0"):
        pycomm.attach(optimizer, model, tuning=pycomm.Tuning(check_replicas=-1))
    with pytest.raises(
        ValueError, match="the ranks disagree: setting 7 is 'tuning=Tuning.check_replicas=6.' on rank 1"
    ):
        pycomm.attach(optimizer, model, tuning=pycomm.Tuning(check_replicas=5 + rank))


def other_processors(factor: float) -> list[str]:
    """Ranks that say they have another processor: last bits are a warning, once; more is an error."""
    rank = dist.get_rank()
    model = make_model(dtype=torch.float32)
    optimizer = sgd(model)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycomm.training.reductions.differences._processor", lambda: f"processor {rank}")
        with attached(optimizer, model, check_replicas=2):
            for step in range(9):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                with warnings_noted(said):
                    optimizer.step()
                if rank == 1:
                    with torch.no_grad():
                        model[0].weight.mul_(factor)
    return said


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "train on processors that round differently",
    "Warning up to 0.001 of the largest magnitude, then error.",
)
def test_last_bits_of_other_processors_are_a_warning(two_ranks: RankPool) -> None:
    for said in two_ranks.run(other_processors, 1.0 + 2.0**-20):
        assert len(said) == 1
        assert "the ranks' processors (processor 0, processor 1) round differently" in said[0].lower()
        assert "the largest difference is" in said[0]
    for error in two_ranks.errors(other_processors, 1.1):
        assert "the replicas differ after 1 reductions: parameter '0.weight'" in str(error)


@on_ranks(2)
def test_no_false_alarm() -> None:
    """Nothing is found where nothing is wrong: several dtypes, frozen parameters, channels_last, empty ones."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Conv2d(2, 3, 3), nn.Linear(3, 2).bfloat16()])
    model[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of half-precision parameters
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(check_replicas=1, timeout=30))
    for step in range(6):
        if step == 3:
            model[0].bias.requires_grad_(True)
        optimizer.zero_grad()
        x = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        model[1](model[0](x).flatten(1).bfloat16()).float().pow(2).sum().backward()
        optimizer.step()
    assert_replicas_equal(model)
    reducer.detach()


class Flagged(Normed):
    """Model with a buffer that has no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False]))


def buffers(how: str) -> tuple[list[str], dict[str, list[float]], int]:
    rank = dist.get_rank()
    model: Any = Flagged()
    optimizer = sgd(model)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pycomm").addHandler(handler)
    own: Any = nn.BatchNorm1d(5)
    with attached(optimizer, model, buffers=how, check_replicas=2) as reducer:
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank)) + rank
            with torch.no_grad():
                own.load_state_dict(model.norm.state_dict())
                own(model.body(x))  # what this rank alone comes to from here
            model(x).pow(2).mean().backward()
            wanted = own.running_mean.clone()
            if how == "broadcast":
                dist.broadcast(wanted, 0)
            elif how == "average":
                dist.all_reduce(wanted)
                wanted /= dist.get_world_size()
            torch.testing.assert_close(model.norm.running_mean, wanted)
            assert int(model.norm.num_batches_tracked) == step + 1
            optimizer.step()
        steps = reducer.stats()["steps"]
    logging.getLogger("pycomm").removeHandler(handler)
    return logged, {name: b.double().tolist() for name, b in model.named_buffers()}, steps


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`buffer ... differs between the ranks: each rank keeps its own`",
    'Normal for BatchNorm. Before one rank evaluates for all: `buffers="broadcast"` or `"average"`.',
)
def test_buffers(two_ranks: RankPool) -> None:
    (noted, first, _), (again, second, _) = two_ranks.run(buffers, "local")
    assert first != second
    assert (len(noted), again) == (1, [])
    assert "buffer 'norm.running_mean', and 1 more, differs between the ranks" in noted[0]
    for how in ("broadcast", "average"):
        (noted, first, steps), (_, second, _) = two_ranks.run(buffers, how)
        assert first == second
        assert noted == []
        assert steps == 5


@on_ranks(2)
def test_bad_buffers() -> None:
    model = Flagged()
    with pytest.raises(ValueError, match="buffers is 'sum', wanted one of local, broadcast, average"):
        pycomm.attach(sgd(model), model, buffers="sum")
    with pytest.raises(ValueError, match="buffers='average' requires the module itself"):
        pycomm.attach(sgd(model), model.named_parameters(), buffers="average")


def part_of_the_model(how: str) -> list[str]:
    """The optimizer has the head; gradients of the body are each rank's own."""
    rank = dist.get_rank()
    model = make_model()
    if how == "frozen":
        model[:4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    said: list[str] = []
    options: dict[str, Any] = {"all_parameters": True} if how == "all" else {}
    reducers = [pycomm.attach(optimizer, model, **grouped(timeout=30, **options))]
    if how == "two attaches":
        reducers.append(
            pycomm.attach(torch.optim.Adam(model[:4].parameters()), model, tuning=pycomm.Tuning(timeout=30))
        )
    for step in range(3):
        model.zero_grad()
        with warnings_noted(said):
            loss_of(model, rank, step).backward()
        if how in ("all", "two attaches"):
            wanted = average_gradients(model, losses_at(step))
            for name, p in model.named_parameters():
                close(p.grad, wanted[name])
        if how == "all":
            norm = torch.stack([g.norm() for g in wanted.values()]).norm()
            close(reducers[0].clip_grad_norm(0.01), norm, 1e-9)
        optimizer.step()
    for reducer in reducers:
        reducer.detach()
    return said


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`these parameters of the module get gradients, but are no parameters of the optimizer`",
    "Attach their optimizer, freeze them, or set `Tuning(all_parameters=True)`. If they are local: "
    "`Tuning(ignore=[...])`.",
)
def test_gradients_that_nobody_averages_are_named(two_ranks: RankPool) -> None:
    for said in two_ranks.run(part_of_the_model, "a part"):
        assert len(said) == 1
        assert "'2.bias', '2.weight', '0.bias', '0.weight'" in said[0] or "'0.weight'" in said[0]
        assert "all_parameters=True" in said[0]
    for how in ("frozen", "two attaches", "all"):
        assert two_ranks.run(part_of_the_model, how) == [[], []]


def test_all_parameters_are_read_in_parts_of_few_tensors() -> None:
    """Of many small tensors a reduction reads some only, since each takes time."""
    named = [(str(i), torch.full((8, 8), float(i))) for i in range(160)] + [("long", torch.arange(100_000.0))]
    rolling, values = RollingHash(), []
    for number in range(64):
        tensors = rolling.part_of(named, number)
        assert len(tensors) <= 32
        values += [tensor.flatten() for tensor in tensors]
    read = set(torch.cat(values).view(torch.float32).tolist())
    assert read == set(map(float, range(100_000)))


@on_ranks(2)
def test_a_step_of_one_rank_before_training_changes_no_verdict() -> None:
    """As distributed checkpointing makes one, to create the optimizer's state."""
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        if dist.get_rank() == 0:
            optimizer.step()

        def drift(step: int) -> None:
            loss_of(model, dist.get_rank(), step).backward()
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param -= 0.1 * (1 + dist.get_rank()) * param.grad
                    param.grad = None

        for step in range(4):
            drift(step)
        with pytest.raises(RuntimeError, match="the replicas differ after 4 reductions"):
            drift(4)
