"""One thing averages a parameter: ``attach``, or ``local_sgd`` and its relatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import pycomm
from pycomm.optim.attached import refuse_second_average
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached
from tests.reducer.models import loss_of, make_model, sgd

CALLS: dict[str, Any] = {
    "local_sgd()": lambda *what: pycomm.local_sgd(*what, every=2, timeout=30),
    "gossip()": lambda *what: pycomm.gossip(*what, timeout=30),
    "parameter_server()": lambda *what: pycomm.parameter_server(*what, timeout=30),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_an_attached_optimizer_is_refused(call: str) -> None:
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        with pytest.raises(ValueError, match=r"'0.weight' is attached.*detach\(\) its Reducer before \w+\(\)"):
            CALLS[call](optimizer, model)
        loss_of(model, dist.get_rank(), 0).backward()  # nothing was left behind
        optimizer.step()


@on_ranks(2)
def test_on_one_rank_alone_it_is_an_error_of_all() -> None:
    rank, model = dist.get_rank(), make_model()
    other = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        mine = (optimizer, model) if rank == 1 else (sgd(other), other)
        quoted = "parameter '0.weight' is attached" if rank == 1 else "rank 1 could not attach: parameter '0.weight' is"
        with pytest.raises(ValueError, match=quoted):
            CALLS["local_sgd()"](*mine)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "parameter_server()"])
@on_ranks(2)
def test_attach_is_refused_while_another_averages(call: str) -> None:
    model = make_model()
    optimizer = sgd(model)
    handle = CALLS[call](optimizer, model)
    with pytest.raises(ValueError, match=r"'0.weight' is averaged by \w+\(\) already: .* or close\(\) its .* attach"):
        pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
    with pytest.raises(ValueError, match=r"'0.weight' is averaged by \w+\(\) already: .* before local_sgd\(\)"):
        CALLS["local_sgd()"](optimizer, model)
    handle.detach()
    with attached(optimizer, model):
        pass


@on_ranks(2)
def test_attach_is_refused_while_a_parameter_server_trains() -> None:
    """By the worker, so that all ranks have an error."""
    model = make_model()
    optimizer = sgd(model)
    handle = pycomm.parameter_server(optimizer, model, timeout=30)
    if handle.is_worker:
        with pytest.raises(ValueError, match=r"is averaged by parameter_server\(\) already: .* before local"):
            refuse_second_average({"0.weight": next(model.parameters())}, "local_sgd()")
    handle.close()
    refuse_second_average({"0.weight": next(model.parameters())}, "local_sgd()")
