"""Where the time of reductions goes, and what compression leaves out."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import pycomm
from pycomm.collectives.recorder import TRACE_FOLDER
from pycomm.collectives.recorder.traces import STEP
from pycomm.training.reducer.statistics import INTERVAL
from tests.on_ranks import on_ranks
from tests.reducer.attaching import grouped
from tests.reducer.models import loss_of, make_model, sgd


class Training:
    def __init__(self, **options: Any) -> None:
        self.rank, self.model = dist.get_rank(), make_model(dtype=torch.float32)
        self.optimizer = sgd(self.model)
        self.reducer = pycomm.attach(self.optimizer, self.model, **grouped(**options))
        self.steps = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.rank, self.steps).backward()
        self.steps += 1

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


@pytest.mark.parametrize("options", [{}, {"on_failure": "shrink"}, {"shard": "optimizer"}], ids=str)
@on_ranks(2)
def test_seconds_are_counted(options: dict[str, Any]) -> None:
    training = Training(**options)
    for _ in range(3):
        training.step()
    stats = training.reducer.stats()
    assert all(stats[f"{name}_seconds"] > 0 for name in ("pack", "wire", "unpack", "wait"))
    assert 0.0 <= stats["hidden_share"] <= 1.0
    assert stats["unpack_seconds"] <= stats["wait_seconds"]  # of which it is a part
    training.reducer.detach()
    assert training.reducer.stats()["pack_seconds"] == pytest.approx(stats["pack_seconds"])


@on_ranks(2)
def test_what_compression_leaves_out_is_measured() -> None:
    training = Training(compression=pycomm.TopK(0.25))
    reducer = training.reducer
    training.step()
    stats = reducer.stats()
    left = _squares(reducer)
    assert left > 0.0
    assert stats["residual_norm"] == pytest.approx(math.sqrt(left), rel=1e-5)
    assert "compression_error" not in stats  # nobody had asked before
    training.backward()
    stats = reducer.stats()
    assert 0.0 < stats["compression_error"] < 1.0
    gradients = sum(p.numel() * 4 for p in training.model.parameters())
    assert stats["compression_ratio"] == pytest.approx(2 * gradients / stats["bytes_sent"])
    reducer.detach()


def _squares(reducer: pycomm.Reducer) -> float:
    [own] = reducer.state_dict()["ranks"].values()
    return sum(float(entry["residual"].double().square().sum()) for entry in own.values())


@on_ranks(2)
def test_the_error_is_relative_to_all_there_was_to_send() -> None:
    """With one step from nothing, what there was to send is the gradient's contribution to the average."""
    training = Training(compression=pycomm.TopK(0.25))
    training.reducer.stats()  # asks for the next step to be measured
    model = make_model(dtype=torch.float32)
    loss_of(model, training.rank, 0).backward()
    compressed = [p.grad for p in model.parameters() if p.dim() > 1 and p.grad is not None]
    there_was = math.sqrt(sum(float((grad.double() / 2).square().sum()) for grad in compressed))
    training.backward()
    stats = training.reducer.stats()
    assert stats["compression_error"] == pytest.approx(math.sqrt(_squares(training.reducer)) / there_was, rel=1e-5)
    training.reducer.detach()


@on_ranks(2)
def test_gradients_are_read_for_figures_now_and_then_however_often_one_asks() -> None:
    training = Training(compression=pycomm.TopK(0.25))
    reducer = training.reducer
    norms, read, errors = [], [], []
    for _ in range(2 * INTERVAL + 2):
        norms.append(math.sqrt(_squares(reducer)))
        stats = reducer.stats()
        read.append(stats["residual_norm"])
        errors.append(stats.get("compression_error"))
        training.step()
    assert len({*norms[1:]}) == len(norms) - 1  # so that each tells when it was read
    for looked_at in range(0, len(read), INTERVAL):
        wanted = pytest.approx(norms[looked_at], rel=1e-5)
        assert all(found == wanted for found in read[looked_at : looked_at + INTERVAL])
    ends = [i for i in range(1, len(errors)) if errors[i] != errors[i - 1]]
    assert ends == [1, INTERVAL + 1, 2 * INTERVAL + 1]  # the step after each look
    reducer.load_state_dict(reducer.state_dict())
    assert reducer.stats()["residual_norm"] == pytest.approx(math.sqrt(_squares(reducer)), rel=1e-5)
    reducer.detach()


@on_ranks(2)
def test_a_step_that_is_not_finite_has_no_error_of_compression() -> None:
    training = Training(compression=pycomm.TopK(0.25), check_replicas=0)
    training.reducer.stats()  # asks for the next step to be measured
    training.backward()
    error = training.reducer.stats()["compression_error"]
    for _ in range(INTERVAL):
        training.step()
    training.reducer.stats()  # asks again
    training.optimizer.zero_grad()
    (loss_of(training.model, training.rank, 0) * math.nan).backward()
    assert training.reducer.stats()["compression_error"] == error
    training.reducer.detach()


@on_ranks(2)
def test_profilers_show_ranges() -> None:
    training = Training()
    training.step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        training.step()
    assert {"pycomm::wait", "pycomm::unpack"} <= {event.key for event in prof.key_averages()}
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as prof:
        training.step()
    names = {event.key for event in prof.key_averages()}
    assert {"pycomm::wait", "pycomm::unpack", "pycomm::pack bucket 1", "pycomm::wire bucket 1"} <= names
    training.reducer.detach()


@contextlib.contextmanager
def tracing(place: Path, step: str) -> Iterator[None]:
    """Have what is attached inside trace that step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRACE_FOLDER, str(place))
        patch.setenv(STEP, step)
        yield


@on_ranks(2)
def test_one_step_is_traced(tmp_path: Path) -> None:
    wrong = pytest.raises(ValueError, match=f"{STEP} is '0', wanted a positive number")
    with tracing(tmp_path / "trace", "0"), wrong:
        Training()
    with tracing(tmp_path / "trace", "3"):
        training = Training(bucket_mb=1e-3)
        for _ in range(5):
            training.step()
    dist.barrier()
    content = json.loads((tmp_path / "trace" / f"rank{training.rank}.json").read_text())
    assert (content["rank"], content["size"], content["step"]) == (training.rank, 2, 3)
    spans = {(span["lane"], span["name"]): span for span in content["spans"]}
    on_training = ["between steps", "forward", "backward", "wait", "unpack", "before step", "optimizer.step"]
    assert [span["name"] for span in content["spans"] if span["lane"] == "training"] == on_training
    buckets = len(training.reducer._engine.table.buckets)
    assert buckets > 1
    for number in range(1, buckets + 1):
        job = spans["communication", f"bucket {number}"]
        wire = spans["wire", f"all_reduce, bucket {number}"]
        assert job["began"] <= wire["began"] <= wire["ended"] <= job["ended"]
        assert job["began"] >= spans["training", "backward"]["began"]
    assert all(span["began"] <= span["ended"] for span in content["spans"])
    training.reducer.detach()


@on_ranks(2)
def test_a_step_that_the_optimizer_leaves_out_is_traced_too(tmp_path: Path) -> None:
    with tracing(tmp_path / "trace", "2"):
        training = Training()
        training.step()
        training.backward()  # as GradScaler, where the gradients are not finite
        training.step()
    content = json.loads((tmp_path / "trace" / f"rank{training.rank}.json").read_text())
    names = [span["name"] for span in content["spans"] if span["lane"] == "training"]
    assert names == ["between steps", "forward", "backward", "wait", "unpack"]
    training.reducer.detach()


@on_ranks(2)
def test_every_optimizer_writes_its_own_trace(tmp_path: Path) -> None:
    with tracing(tmp_path / "trace", "1"):
        pair = [Training(), Training()]
        for training in pair:
            training.step()
    rank = pair[0].rank
    names = (f"rank{rank}.json", f"rank{rank}-2.json")
    contents = [json.loads((tmp_path / "trace" / name).read_text()) for name in names]
    assert [content["optimizer"] for content in contents] == [1, 2]
    assert contents[0]["spans"] != contents[1]["spans"]
    for training in pair:
        training.reducer.detach()


@on_ranks(2)
def test_every_pass_of_a_step_is_traced(tmp_path: Path) -> None:
    with tracing(tmp_path / "trace", "2"):
        training = Training(accumulate=2)
        for _ in range(3):
            for number in range(2):
                if number == 0:
                    training.optimizer.zero_grad()
                loss_of(training.model, training.rank, number).backward()
            training.optimizer.step()
    content = json.loads((tmp_path / "trace" / f"rank{training.rank}.json").read_text())
    spans = [span for span in content["spans"] if span["lane"] == "training"]
    passes = ["between steps", "forward", "backward", "between passes", "forward", "backward"]
    names = [*passes, "wait", "unpack", "before step", "optimizer.step"]
    assert [span["name"] for span in spans] == names
    for earlier, later in itertools.pairwise(span for span in spans if span["name"] in ("forward", "backward")):
        assert earlier["ended"] <= later["began"], "they take turns"
    training.reducer.detach()


@on_ranks(3)
def test_files_have_the_numbers_of_all_ranks(tmp_path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        with tracing(tmp_path, "1"):
            training = Training(process_group=group)
            training.step()
        training.reducer.detach()
        dist.destroy_process_group(group)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank1.json", "rank2.json"]


@on_ranks(2)
def test_a_trace_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with tracing(tmp_path / "file" / "trace", "1"):
        training = Training()
        for _ in range(2):
            training.step()
    training.reducer.detach()
