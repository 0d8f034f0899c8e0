"""A training that is loaded goes on to the bit as the one that was saved: in new processes, and while it is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from tests.checkpoint.training import seed, training
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import logged

CASES = [
    ("sgd", "dense"),
    ("adamw", "dense"),
    ("lamb", "dense"),
    ("half", "dense"),
    ("fused", "topk"),
    ("adamw", "topk"),
    ("sgd", "dgc"),
    ("masters", "topk"),
    ("masters", "dense"),
    ("sgd", "powersgd"),
    ("sgd", "onebit"),
    ("sgd", "qsgd"),
]


def save_and_go_on(folder: str, *case: str) -> str:
    seed(100 + torch.distributed.get_rank())
    with training(*case) as run:
        run.steps(10)
        saved = pycomm.save(folder, run.reducer, step=10, **run.more)
        run.steps(10)  # while it is written
        saved.wait()
        return run.digest()


def load_and_go_on(folder: str, *case: str) -> str:
    seed(3)
    with training(*case) as run:
        run.steps(3)  # of whatever
        run.losses.clear()
        assert pycomm.load(folder, run.reducer, **run.more) == {"step": 10}
        run.steps(10)
        return run.digest()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_goes_on_to_the_bit(case: tuple[str, ...], rank_pools: Pools, new_ranks: Pools, tmp_path: Path) -> None:
    wanted = rank_pools(2).run(save_and_go_on, str(tmp_path), *case)
    assert new_ranks(2).run(load_and_go_on, str(tmp_path), *case) == wanted
    assert wanted[0] != wanted[1], "the ranks' own state is not in the digest"


@on_ranks(2)
def test_a_checkpoint_is_named_after_its_step(tmp_path: Path) -> None:
    """And a later one has the larger number all the same, since the largest is loaded."""
    with training("sgd", "dense") as run, logged() as lines:

        def name_of(**more: Any) -> str:
            return pycomm.save(tmp_path, run.reducer, keep=9, **more, **run.more).wait().name

        assert [name_of(step=step) for step in (0, 7, 2500)] == [f"checkpoint-{step:08d}" for step in (0, 7, 2500)]
        assert [name_of(), name_of(step="end"), name_of(step=True)] == [f"checkpoint-0000250{i}" for i in (1, 2, 3)]
        assert lines == []
        assert name_of(step=2503) == "checkpoint-00002504"  # the same step once more, or one after a rollback
        assert pycomm.load(tmp_path, run.reducer, **run.more) == {"step": 2503}
        what = f"the checkpoint of step 2503 is number 2504, as {tmp_path} has number 2503"
        assert [line for line in lines if what in line] == lines
        assert len(lines) == (torch.distributed.get_rank() == 0)


@on_ranks(1, 2)
def test_plain_values_come_back(tmp_path: Path) -> None:
    me = torch.distributed.get_rank()
    plain: dict[str, Any] = {
        "step": 2**70 + me,
        "name": "é\ud800",
        "numbers": (1.5, float("inf"), None, True, [me]),
        "by_key": {1: "one", None: 2, "x": {"y": b"\x00\xff"}},
        "counts": Counter(a=3),
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3).T + me,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "array": np.arange(4, dtype=">f8").reshape(2, 2),
        "number": np.float32(0.1),
        "dtype": torch.float16,
    }
    with training() as run:
        pycomm.save(tmp_path, run.reducer, **plain)
        found = pycomm.load(tmp_path, run.reducer)
    assert found.keys() == plain.keys()
    for name in ("tensor", "scalar", "nothing"):
        value = found.pop(name)
        assert value.dtype == plain[name].dtype
        assert torch.equal(value, plain.pop(name))
    array = found.pop("array")
    assert array.dtype == plain["array"].dtype
    assert (array == plain.pop("array")).all()
    assert type(found["counts"]) is Counter
    assert type(found["numbers"]) is tuple
    assert found == plain


@on_ranks(2)
def test_saves_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    with training("adamw", "topk") as run:
        run.steps(2)
        wanted = run.digest()
        pycomm.save(tmp_path, run.reducer, **run.more)
        with torch.no_grad():
            for tensor in (*run.model.parameters(), *run.model.buffers()):
                tensor.zero_()
        run.steps(3)
        run.losses = run.losses[:2]
        pycomm.load(tmp_path, run.reducer, **run.more)
        assert run.digest() == wanted


@on_ranks(2)
def test_named_parameters_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reducer = pycomm.attach(optimizer, model.named_parameters(), tuning=pycomm.Tuning(timeout=30))
    pycomm.save(tmp_path, reducer).wait()
    wanted = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    pycomm.load(tmp_path, reducer)
    assert torch.equal(model.weight, wanted)
    assert not optimizer.state[model.weight]
    reducer.detach()


@on_ranks(2)
def test_what_all_ranks_have_is_written_once(tmp_path: Path) -> None:
    """Each rank writes a share of it."""
    with training("adamw") as run:
        average = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))  # not attached
        with torch.no_grad():
            for param in average.parameters():
                param.fill_(1.0)
        run.steps(1)
        path = pycomm.save(tmp_path, run.reducer, average=average).wait()
        sizes = [sum(f.stat().st_size for f in path.glob(f"rank-{r}/shared/*")) for r in range(2)]
        held = sum(t.nbytes for t in (*run.model.parameters(), *average.parameters()))
        held += sum(t.nbytes for entry in run.optimizer.state.values() for t in entry.values())
        assert held < sum(sizes) < held + 60_000
        assert min(sizes) > 0.3 * sum(sizes)
        with torch.no_grad():
            next(average.parameters()).zero_()
        pycomm.load(tmp_path, run.reducer, average=average)
        assert all(bool((param == 1.0).all()) for param in average.parameters())


@on_ranks(2)
def test_channels_last_and_views(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
    model(torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    optimizer.step()
    wanted = [t.detach().clone() for t in (model.weight, optimizer.state[model.weight]["momentum_buffer"])]
    pycomm.save(tmp_path, reducer, part=torch.arange(100.0)[10:20], wide=torch.ones(1).expand(5))
    with torch.no_grad():
        model.weight.zero_()
    found = pycomm.load(tmp_path, reducer)
    assert torch.equal(model.weight, wanted[0])
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(momentum, wanted[1])
    assert momentum.stride() == wanted[1].stride()
    assert torch.equal(found["part"], torch.arange(10.0, 20.0))
    assert torch.equal(found["wide"], torch.ones(5))
    reducer.detach()
