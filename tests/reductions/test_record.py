"""A field that is added to the table is compared by all engines, which raise its error with the ranks' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.descriptions import values_text
from pycomm.training.reductions import fields
from pycomm.training.reductions.fields import Details, Field, Source
from tests.on_ranks import on_ranks
from tests.reducer.models import loss_of, make_model, sgd


class Flavor(Field):
    """Attribute ``flavor`` of the module."""

    name, form = "flavor", str

    @classmethod
    def of(cls, source: Source) -> Field | None:
        module: Any = source.module()
        return None if module is None else cls(lambda: getattr(module, "module", module).flavor, source)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        if len(set(by_rank.values())) > 1:
            raise ValueError(f"the flavors differ: {values_text(by_rank)}")


def flavored(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[int], None]:
    """Return a step of the training loop."""

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), number).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("way", ["attach", "ddp", "local_sgd", "gossip"])
@on_ranks(2)
def test_ranks_that_change_it_differently_raise_its_error(way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "FIELDS", [*fields.FIELDS, Flavor])
        model: Any = make_model()
        model.flavor = "sweet"
        trained, optimizer = model, sgd(model)
        if way == "ddp":
            trained = DistributedDataParallel(model)
            pycomm.ddp.register(trained, timeout=30)
        elif way == "attach":
            pycomm.attach(optimizer, model)
        else:
            getattr(pycomm, way)(optimizer, model, every=1, timeout=30)
        step = flavored(optimizer, trained)
        step(0)
        if dist.get_rank() == 1:
            model.flavor = "sour"
        with pytest.raises(ValueError, match="the flavors differ: sweet on rank 0, sour on rank 1"):
            step(1)


@on_ranks(2)
def test_a_worker_that_changes_it_raises_its_error_before_a_push() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "FIELDS", [*fields.FIELDS, Flavor])
        model: Any = make_model()
        model.flavor = "sweet"
        server = pycomm.parameter_server(sgd(model), model, servers=1, timeout=30)
        if server.is_worker:
            server.pull()
            loss_of(model, 0, 0).backward()
            model.flavor = "sour"
            with pytest.raises(ValueError, match="the flavors differ: sweet on rank 0, sour on rank 1"):
                server.push()
        server.close()


@on_ranks(2)
def test_processes_that_meet_a_server_with_different_ones_raise_its_error() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "FIELDS", [*fields.FIELDS, Flavor])
        model: Any = make_model()
        model.flavor = "sour" if dist.get_rank() else "sweet"
        with pytest.raises(ValueError, match="the flavors differ: sweet on rank 0, sour on rank 1"):
            pycomm.parameter_server(sgd(model), model, servers=1, timeout=30)
