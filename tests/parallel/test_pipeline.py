"""Tests of pipelines on real ranks: equal to one process, with skips and data parallelism; what is refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pycomm
from pycomm.parallel import Pipeline, cut
from pycomm.schedule import pipeline as tables
from tests.backend.worlds import on_world
from tests.models import mean_square, perceptron
from tests.parallel.test_cut import Shortcut
from tests.ranks import SLOWER
from tests.schedule.pipeline.mutations import mutations

WIDTH = 4
EXACT: Any = {"rtol": 0, "atol": 1e-12}


def layers(count: int, width: int = WIDTH) -> list[nn.Module]:
    """Layers of uneven work, the same on all ranks."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for number in range(count):
        inner = width * (1 + number % 3)
        made.append(perceptron(width, inner, width, seed=None))
    return made


def batch(size: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()
    return x, y


def same_gradients(pipeline: Pipeline, whole: Sequence[nn.Module] | nn.Sequential) -> None:
    for number, module in pipeline.stages.items():
        expected = [param.grad for param in whole[number].parameters()]
        torch.testing.assert_close([param.grad for param in module.parameters()], expected, **EXACT)


@pytest.mark.parametrize("name", tables.names())
@on_world(2)
def test_every_schedule_equals_one_process(name: str) -> None:
    for microbatches in (1, 2, 5):
        table = tables.by_name(name, 2, microbatches)
        stages = layers(table.num_stages)
        whole = copy.deepcopy(nn.Sequential(*stages))
        x, y = batch(2 * microbatches)
        loss = mean_square(whole(x), y)
        loss.backward()
        read = tables.from_csv(tables.to_csv(table))  # as a file of torch's would be
        pipeline = Pipeline(stages, None, read, loss=mean_square)
        mean = pipeline.step(x, target=y)
        same_gradients(pipeline, whole)
        assert (mean is not None) == (table.num_stages - 1 in pipeline.stages)
        if mean is not None:
            torch.testing.assert_close(mean, loss.detach(), **EXACT)
        out = pipeline.evaluate(x)
        if mean is not None:
            torch.testing.assert_close(out, whole(x).detach(), **EXACT)


@on_world(2)
def test_repr() -> None:
    pipeline = Pipeline(layers(2), None, "one_f_one_b", microbatches=4, loss=mean_square)
    (number,) = pipeline.stages
    size = sum(p.nbytes for p in pipeline.module.parameters())
    what = f"one_f_one_b, 2 stages on 2 ranks, 4 microbatches, this rank has stage {number}, 4 parameters of {size} B"
    assert repr(pipeline) == f"Pipeline({what})"


@on_world(4)
def test_a_skip_passes_the_stages_between() -> None:
    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return torch.tanh(y), {"early": y}

    class Last(nn.Linear):
        def forward(self, x: torch.Tensor, early: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * early

    torch.manual_seed(0)
    stages = [kind(WIDTH, WIDTH).double() for kind in (First, nn.Linear, nn.Linear, Last)]
    whole = copy.deepcopy(stages)
    x, y = batch(6)
    passed, early = whole[0](x)
    mean_square(whole[3](whole[2](whole[1](passed)), **early), y).backward()
    for name in ("gpipe", "one_f_one_b", "zero_bubble_h1"):
        pipeline = Pipeline(stages, None, name, microbatches=3, loss=mean_square, skips=[("early", 0, 3)])
        pipeline.module.zero_grad()
        pipeline.step(x, target=y)
        same_gradients(pipeline, whole)


@on_world(2)
def test_a_traced_model_with_a_shortcut_runs() -> None:
    torch.manual_seed(0)
    model = Shortcut().double()
    whole = copy.deepcopy(model)
    x, y = batch(8)
    mean_square(whole(x), y).backward()
    stages = cut(model, [["a"], ["b"], ["c"], ["d"]], x[:2])
    pipeline = Pipeline(stages, None, "interleaved", microbatches=4, loss=mean_square)
    pipeline.step(x, target=y)
    expected = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(param.grad, expected[name].grad, **EXACT)
    assert sum(param.grad is not None for param in model.parameters()) == 4


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
@on_world(4)
def test_two_replicas_of_two_stages_equal_one_process(name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = layers(2)
    whole = copy.deepcopy(nn.Sequential(*stages))
    pipeline = Pipeline(stages, mesh, name, microbatches=2, loss=mean_square)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.1, momentum=0.9)
    reducer = pycomm.attach(optimizer, pipeline.module, process_group=mesh["dp"])
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(8, seed=step)
        reference.zero_grad()
        mean_square(whole(x), y).backward()
        reference.step()
        half = slice(0, 4) if mesh["dp"].get_local_rank() == 0 else slice(4, 8)
        optimizer.zero_grad()
        pipeline.step(x[half], target=y[half])
        optimizer.step()
    for number, module in pipeline.stages.items():
        torch.testing.assert_close(list(module.parameters()), list(whole[number].parameters()), **EXACT)
    x, y = batch(4)
    with pytest.raises(ValueError, match="zero_grad"):
        pipeline.step(x, target=y)
    reducer.detach()


@on_world(2)
def test_wrong_pipelines_are_refused_on_every_rank() -> None:
    def refused(told: str, stages: Any, *arguments: Any, kind: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=told):
            Pipeline(stages, None, *arguments, **options)

    a, b, c = layers(3)
    rank = dist.get_rank()
    refused("2 stages", [a, b, c], microbatches=2)
    refused("no module for stage", {9: a}, microbatches=2)
    refused("stage 1 has no parameters", [a, nn.Tanh()], microbatches=2)
    refused("is used by stage 0 and by stage 1", [a, a], microbatches=2)
    refused("stage 1 is str", [a, "b"], microbatches=2, kind=TypeError)
    refused("loss is 5, wanted a function", [a, b], microbatches=2, loss=5, kind=TypeError)
    refused("microbatches is missing", [a, b])
    refused("microbatches", [a, b], microbatches=0)
    refused("schedule|name", [a, b], "fastest", microbatches=2)
    refused("schedule is NoneType", [a, b], None, microbatches=2, kind=TypeError)
    refused("is for 3 ranks, the group has 2", [a, b], tables.gpipe(3, 2))
    refused("stage 1 to stage 0", [a, b], microbatches=2, skips=[("t", 1, 0)])
    refused("on by stage 0 and by stage 1", layers(4), tables.zero_bubble_v(2, 2), skips=[("t", 0, 2), ("t", 1, 2)])
    refused("differ on how to make this pipeline", [a, b], microbatches=2 + rank)
    refused("loss: True", [a, b], microbatches=2, loss=mean_square if rank else None)
    for wrong in mutations(tables.one_f_one_b(2, 3), 3, seed=0):
        refused("", [a, b], wrong)
    # One rank's mistake is everyone's error.
    refused(
        "no parameters" if rank else "rank 1 could not make this pipeline",
        [a, nn.Tanh() if rank else b],
        microbatches=2,
    )


@on_world(2)
def test_wrong_batches_are_refused() -> None:
    pipeline = Pipeline(layers(2), None, microbatches=3, loss=mean_square)
    x, y = batch(4)
    with pytest.raises(ValueError, match="batch of 4, wanted one that divides into 3 microbatches"):
        pipeline.step(x, target=y)
    with pytest.raises(ValueError, match="missing on the rank with the (first|last) stage"):
        pipeline.step()
    whole, target = batch(6)
    # One rank's mistake is everyone's error, and the next batch is taken.
    with pytest.raises(ValueError, match="has a batch of 4" if dist.get_rank() else "rank 1 could not take this batch"):
        pipeline.step(whole, target=y if dist.get_rank() else target)
    pipeline.step(whole, target=target)
    with pytest.raises(RuntimeError, match="no loss"):
        Pipeline(layers(2), None, microbatches=3).step(x, target=y)
    with pytest.raises(ValueError, match="dict, wanted a tensor|could not take this batch"):
        pipeline.step(whole, target={} if dist.get_rank() else target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs has a batch of 6, target one of 3"):
        pipeline.step(whole, target=target[:3])


class Failing(nn.Linear):
    """Stage that fails where it is told to: with ``fails`` in forward or in backward."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise ValueError("this stage fails")
        y = super().forward(x)
        if self.fails == "backward" and y.requires_grad:
            y.register_hook(lambda _: 1 / 0)
        return y


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "let a pipeline's stage raise",
    "That rank gets the error, the others a `CommError`; the next step works.",
)
@pytest.mark.parametrize(("failing", "where"), [(0, "forward"), (1, "forward"), (2, "forward"), (2, "backward")])
@on_world(3, timeout=40)
def test_all_hear_of_a_stage_that_fails_and_the_next_step_works(failing: int, where: str) -> None:
    torch.manual_seed(0)
    stages = [Failing(WIDTH, WIDTH).double() for _ in range(3)]
    whole = copy.deepcopy(nn.Sequential(*stages))
    pipeline = Pipeline(stages, None, microbatches=3, loss=mean_square)
    x, y = batch(6)
    mean_square(whole(x), y).backward()
    pipeline.step(x, target=y)
    stages[failing].fails = where
    rank, start = dist.get_rank(), time.monotonic()
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError, ZeroDivisionError)) as caught:  # torch wraps the first kind
            pipeline.step(x, target=y)
        assert (rank == failing) != isinstance(caught.value, pycomm.CommError)
        assert rank == failing or f"rank {failing}: its step of the pipeline failed: " in str(caught.value)
        same_gradients(pipeline, whole)  # as they were before
    if where == "forward":
        with pytest.raises(
            (ValueError, RuntimeError), match="Stage|stage fails" if rank == failing else "this stage fails"
        ):
            pipeline.evaluate(x)
    stages[failing].fails = ""
    other = Pipeline(stages, None, microbatches=2, loss=mean_square)  # a new one is made as well
    for each in (pipeline, other):
        pipeline.module.zero_grad()
        each.step(x, target=y)
        same_gradients(pipeline, whole)
    assert time.monotonic() - start < 10.0 * SLOWER, "waited for a timeout"


@on_world(2)
def test_steps_add_up_and_batches_may_change() -> None:
    stages = layers(2)
    whole = copy.deepcopy(nn.Sequential(*stages))
    pipeline = Pipeline(stages, None, microbatches=2, loss=mean_square)
    for size in (8, 8, 4, 12):
        x, y = batch(size, seed=size)
        mean_square(whole(x), y).backward()
        pipeline.step(x, target=y)
        out = pipeline.evaluate(x[:2])
        if out is not None:
            torch.testing.assert_close(out, whole(x[:2]).detach(), **EXACT)
    same_gradients(pipeline, whole)


@on_world(2)
def test_the_first_look_at_shapes_leaves_no_trace() -> None:
    torch.manual_seed(0)
    norms = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double() for _ in range(2)]
    whole = copy.deepcopy(nn.Sequential(*norms))
    pipeline = Pipeline(norms, None, microbatches=2, loss=mean_square)
    for step in range(2):
        x, y = batch(8, seed=step)
        for part in x.chunk(2):
            whole(part)
        pipeline.step(x, target=y)
    for number, module in pipeline.stages.items():
        torch.testing.assert_close(dict(module.named_buffers()), dict(whole[number].named_buffers()), **EXACT)


@on_world(2)
def test_an_embedding_in_a_later_stage_sees_indices() -> None:
    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), {"index": (x > 0).sum(1)}

    class Last(nn.Embedding):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(index) * x

    torch.manual_seed(0)
    stages = [First(WIDTH, WIDTH).double(), Last(WIDTH + 1, WIDTH).double()]
    whole = copy.deepcopy(stages)
    x, y = batch(4)
    passed, skipped = whole[0](x)
    mean_square(whole[1](passed, **skipped), y).backward()
    pipeline = Pipeline(stages, None, microbatches=2, loss=mean_square, skips=[("index", 0, 1)])
    pipeline.step(x, target=y)
    same_gradients(pipeline, whole)


@on_world(2)
def test_norms_are_of_all_stages_also_where_one_is_frozen() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stages = layers(2)
    stages[0].requires_grad_(False)
    whole = copy.deepcopy(nn.Sequential(*stages))
    x, y = batch(4)
    mean_square(whole(x), y).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    pipeline = Pipeline(stages, mesh, microbatches=2, loss=mean_square)
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
    reducer = pycomm.attach(optimizer, pipeline.module, process_group=mesh["dp"])
    pipeline.step(x, target=y)
    torch.testing.assert_close(reducer.clip_grad_norm(1.0), expected, **EXACT)
    reducer.detach()
