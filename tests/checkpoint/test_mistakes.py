"""Mistakes are errors that say what was wrong, on every rank, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import pycomm
from pycomm.training.checkpoint.folder import numbers_in, unfinished
from tests.checkpoint.training import Training, training
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import grouped


def attached(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> pycomm.Reducer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    return pycomm.attach(optimizer, model, **grouped(timeout=30, **options))


@pytest.mark.behavior(
    "Checkpoints",
    "load into another model, optimizer or method",
    "`ValueError` everywhere; nothing is changed. If masters are missing, load before `master_weights`.",
)
@on_ranks(2)
def test_another_model(tmp_path: Path) -> None:
    reducer = attached(nn.Linear(4, 3))
    pycomm.save(tmp_path, reducer).wait()
    reducer.detach()
    others: list[tuple[nn.Module, str]] = [
        (nn.Linear(4, 5), r"parameter 'weight' was \[3, 4\] torch.float32, and is \[5, 4\]"),
        (nn.Linear(4, 3).double(), "parameter 'weight' was .* torch.float32, and is .* torch.float64"),
        (nn.Linear(4, 3, bias=False), "has the parameter 'bias', which is not here"),
        (nn.Sequential(nn.Linear(4, 3)), "has no parameter '0.bias'"),
    ]
    for model, says in others:
        reducer = attached(model)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=says):
            pycomm.load(tmp_path, reducer)
        assert all(map(torch.equal, before, model.parameters()))
        reducer.detach()


@pytest.mark.behavior(
    "Checkpoints",
    "load into another model, optimizer or method",
    "`ValueError` everywhere; nothing is changed. If masters are missing, load before `master_weights`.",
)
@on_ranks(2)
def test_another_optimizer_or_compression(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).half()
    reducer = attached(model)
    pycomm.save(tmp_path, reducer).wait()
    reducer.detach()

    def refused(optimizer: torch.optim.Optimizer, says: str, **options: Any) -> None:
        reducer = attached(model, optimizer, **options)
        with pytest.raises(ValueError, match=says):
            pycomm.load(tmp_path, reducer)
        reducer.detach()

    sgd = torch.optim.SGD
    refused(
        torch.optim.Adam(model.parameters()), "saved with a torch.optim.sgd.SGD, and the optimizer here is a .*Adam"
    )
    refused(sgd([{"params": [p]} for p in model.parameters()], lr=1), r"parameter groups of \[2\] .* \[1, 1\] here")
    refused(sgd(list(model.parameters())[::-1], lr=1), "parameter 0 of the optimizer was 'weight', and is 'bias'")
    refused(
        sgd(model.parameters(), lr=1),
        "from compression NoCompression, wanted TopK",
        compression=pycomm.TopK(0.1),
    )
    with_masters = sgd(model.parameters(), lr=1)
    pycomm.master_weights(with_masters)
    refused(with_masters, "saved without pycomm.master_weights, and the optimizer here is with")
    scaler = pycomm.LossScaler()
    refused(sgd(model.parameters(), lr=1), "saved without loss_scaler, and attach was given one", loss_scaler=scaler)


@on_ranks(2)
def test_one_ranks_mistake_beside_state_that_is_gathered(tmp_path: Path) -> None:
    with on_hosts("ab"), training("adamw", shard="optimizer") as run:
        run.step()
        keep, says = (0, "keep is 0") if dist.get_rank() == 1 else (1, "rank 1 could not save a checkpoint: keep is 0")
        with pytest.raises(ValueError, match=says):
            pycomm.save(tmp_path, run.reducer, keep=keep, **run.more)
        run.step()
        pycomm.save(tmp_path, run.reducer, **run.more).wait()
        wanted = run.digest()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(run.scheduler, "load_state_dict", lambda state: state["none"])
            with pytest.raises(ValueError, match="scheduler rejects the saved state"):
                pycomm.load(tmp_path, run.reducer, **run.more)
        assert run.digest() == wanted
        run.step()


@on_ranks(2)
def test_other_names(tmp_path: Path) -> None:
    with training() as run:
        pycomm.save(tmp_path, run.reducer, step=1, **run.more).wait()
        with pytest.raises(ValueError, match="the checkpoint has the object with state 'data', which is not here"):
            pycomm.load(tmp_path, run.reducer, scheduler=run.scheduler)
        with pytest.raises(ValueError, match="the checkpoint has no object with state 'sampler'"):
            pycomm.load(tmp_path, run.reducer, sampler=nn.Linear(1, 1), **run.more)
        with pytest.raises(TypeError, match="step is a int, wanted an object with state_dict"):
            pycomm.load(tmp_path, run.reducer, step=0, **run.more)


class Refuses:
    """Loads only what was saved by its own rank."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["value"] == 13:
            raise ValueError("thirteen")
        self.value = state["value"]


@on_ranks(2)
def test_one_rank_cannot_load(tmp_path: Path) -> None:
    """Then none has: what had been restored is as it was."""
    with training("adamw", "topk") as run:
        one, other = Refuses(), Refuses()
        one.value, other.value = 1, 13 if dist.get_rank() == 1 else 2
        pycomm.save(tmp_path, run.reducer, one=one, other=other, **run.more).wait()
        run.steps(2)
        one.value = other.value = 7
        before = run.digest()
        with pytest.raises(
            ValueError, match="thirteen" if dist.get_rank() == 1 else "rank 1 could not load .*thirteen"
        ):
            pycomm.load(tmp_path, run.reducer, one=one, other=other, **run.more)
        assert (one.value, other.value) == (7, 7)
        assert run.digest() == before


@on_ranks(2)
def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with training() as run:
        for value, says in (
            (object(), "thing is a builtins.object, wanted"),
            ({"a": [1, {2}]}, r"thing\['a'\]\[1\] is a builtins.set, wanted"),
            (torch.ones(2).to_sparse(), "thing is a Tensor with layout torch.sparse_coo, wanted a dense"),
            (torch.ones(2, device="meta"), "thing is on device meta"),
        ):
            with pytest.raises(TypeError, match=says):
                pycomm.save(tmp_path, run.reducer, thing=value)
        with pytest.raises(TypeError, match="rank 1 could not save a checkpoint: thing|thing is a builtins.object"):
            pycomm.save(tmp_path, run.reducer, thing=object() if dist.get_rank() == 1 else 1)
        with pytest.raises(ValueError, match="keep is 0, wanted"):
            pycomm.save(tmp_path, run.reducer, keep=0)
        with pytest.raises(
            ValueError, match="the ranks disagree: value .* is 'plain/b' on rank 1, 'plain/a' on rank 0"
        ):
            pycomm.save(tmp_path, run.reducer, **{"ab"[dist.get_rank()]: 1})
        run.optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
        with pytest.raises(ValueError, match=r"the ranks disagree: value .*\['lr'\]: 1.1. on rank 1"):
            pycomm.save(tmp_path, run.reducer)
        assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_out_of_order(tmp_path: Path) -> None:
    with training(accumulate=2) as run:
        run.model(torch.ones(2, 12)).sum().backward()
        for call in (pycomm.save, pycomm.load):
            with pytest.raises(RuntimeError, match="inside an accumulation window"):
                call(tmp_path, run.reducer)
    for call in (pycomm.save, pycomm.load):
        with pytest.raises(RuntimeError, match="this Reducer is detached"):
            call(tmp_path, run.reducer)


@pytest.mark.behavior("Checkpoints", "save a model with DTensors", "`TypeError`.")
@on_ranks(2)
def test_parts_of_parameters_are_refused(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh["tp"], [Replicate()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = pycomm.LossScaler()
    reducer = pycomm.attach(
        optimizer, model, process_group=mesh["dp"], tuning=pycomm.Tuning(timeout=30), loss_scaler=scaler
    )
    with pytest.raises(TypeError, match="'weight' is a DTensor, of which each rank has a part"):
        pycomm.save(tmp_path, reducer)
    with pytest.raises(TypeError, match="'weight' is a DTensor, of which each rank has a part"):
        pycomm.load(tmp_path, reducer)
    reducer.detach()


def test_a_state_with_functions_keeps_this_processs_own(one_rank_group: None, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["penalty"] = penalty = lambda x: x
    reducer = attached(model, optimizer)
    pycomm.save(tmp_path, reducer).wait()
    pycomm.load(tmp_path, reducer)
    assert optimizer.param_groups[0]["penalty"] is penalty
    del optimizer.param_groups[0]["penalty"]
    with pytest.raises(ValueError, match=r"\['penalty'\] was a builtins.function, which is not saved"):
        pycomm.load(tmp_path, reducer)
    reducer.detach()


def test_training_is_of_use(one_rank_group: None) -> None:
    with training() as run:
        before = run.digest()
        run.step()
        assert run.digest() != before
        assert isinstance(run, Training)


@pytest.mark.behavior(
    "Checkpoints",
    "save after replicas have drifted apart",
    "Error everywhere, unless `check_replicas=0`; nothing is written.",
)
@pytest.mark.parametrize("check_replicas", [1000, 0])
@on_ranks(2)
def test_parameters_that_have_drifted_apart(tmp_path: Path, check_replicas: int) -> None:
    """Since the last reduction that compared them; a checkpoint would be of none of the ranks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reducer = attached(model, check_replicas=check_replicas)
    for step in range(6):  # they are compared in the fifth, and would be in the ninth
        reducer.optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        reducer.optimizer.step()
        if step == 4:
            pycomm.save(tmp_path, reducer).wait()
    if dist.get_rank() == 1:
        model.weight.data += 1
    if check_replicas:
        with pytest.raises(RuntimeError, match="the replicas differ after 6 reductions: parameter 'weight' differs"):
            pycomm.save(tmp_path, reducer)
    else:
        pycomm.save(tmp_path, reducer).wait()
    dist.barrier()
    assert len(list(tmp_path.glob("checkpoint-*"))) == (1 if check_replicas else 2)
    assert not list(tmp_path.glob(f"{unfinished(tmp_path, '').name}*"))
    reducer.detach()


def test_names_with_too_many_digits_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("00000003", "123456789", "9" * 244):
        (tmp_path / f"checkpoint-{name}").mkdir()
    assert numbers_in(tmp_path) == [3, 123456789]
