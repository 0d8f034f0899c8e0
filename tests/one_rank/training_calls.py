"""Calls of training scripts: attach and what belongs to it, communicators, ranks that meet seldom, checkpoints."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import schedule
from tests.one_rank.backend_calls import EXPANDED, freed, ones, size
from tests.one_rank.calls import Call, Make, kept
from tests.one_rank.parallel_calls import NO_ARRAYS, NO_COUNTS, Awkward, Text

TIMEOUT = 30.0
UNFIT: tuple[Make, ...] = (
    *NO_ARRAYS,
    Awkward,
    lambda: np.array([object()]),
    freed,
    lambda: ones(2),
)
NO_TIMEOUTS: tuple[Make, ...] = (lambda: -1, lambda: "30", lambda: math.nan, lambda: 10**400, Awkward)
NO_GROUPS: tuple[Make, ...] = (lambda: 5, lambda: "dp")


@contextmanager
def on_gloo() -> Iterator[None]:
    """Use the default group that the ranks have."""
    yield


def call(run: Callable[..., Any], right: Callable[[], Mapping[str, Any]], **wrong: tuple[Make, ...]) -> Call:
    return Call(run, right, wrong, on_gloo)


def communicator() -> pycomm.Communicator:
    made: pycomm.Communicator = kept("communicator", lambda: pycomm.Communicator(timeout=TIMEOUT))
    return made


def on_one(name: str, right: Callable[[], Mapping[str, Any]], **wrong: tuple[Make, ...]) -> Call:
    """Return a collective of one communicator, which is made once."""

    def run(is_async: bool = False, **given: Any) -> None:
        work = getattr(communicator(), name)(**given, **({"async_op": True} if is_async else {}))
        if is_async:
            work.wait()

    return call(run, right, **wrong)


def opened(**given: Any) -> None:
    pycomm.Communicator(**given).close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def training() -> dict[str, Any]:
    made = model()
    return {"optimizer": torch.optim.SGD(made.parameters(), lr=0.1), "model": made}


def attached(optimizer: Any, model: Any, **given: Any) -> None:
    pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=TIMEOUT), **given).detach()


def attached_by_tuning(**given: Any) -> None:
    attached_with = {**training(), "tuning": pycomm.Tuning(timeout=TIMEOUT, **given)}
    pycomm.attach(**attached_with).detach()


def ended(start: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that starts another way of averaging, and ends it."""
    return lambda optimizer, model, **given: start(optimizer, model, timeout=TIMEOUT, **given).detach()


def served(optimizer: Any, model: Any, **given: Any) -> None:
    pycomm.parameter_server(optimizer, model, timeout=TIMEOUT, **given).close()


def registered(model: Any, **given: Any) -> None:
    pycomm.ddp.register(model, timeout=TIMEOUT, **given).remove()


NO_OPTIMIZERS: tuple[Make, ...] = (
    lambda: None,
    lambda: 5,
    lambda: torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1),
)
NO_MODELS: tuple[Make, ...] = (lambda: None, lambda: 5, lambda: nn.Linear(3, 3), Awkward)


class Stateless:
    """Object without state."""


def reducer() -> pycomm.Reducer:
    made: pycomm.Reducer = kept(
        "reducer", lambda: pycomm.attach(*training().values(), tuning=pycomm.Tuning(timeout=TIMEOUT))
    )
    return made


def saved(path: Any, **given: Any) -> None:
    pycomm.save(path, reducer(), **given).wait()


def loaded(path: Any, **given: Any) -> None:
    pycomm.load(path, reducer(), **given)


def folder() -> str:
    """Return a directory for checkpoints, the same on all ranks, in which there is one."""

    def make() -> tuple[str, Any]:
        owned = tempfile.TemporaryDirectory(prefix="one_rank_") if dist.get_rank() == 0 else None  # gone with the rest
        path = [owned.name if owned else ""]
        dist.broadcast_object_list(path, 0)
        saved(path[0])
        return path[0], owned

    return str(kept("folder", make)[0])


CALLS: dict[str, Call] = {
    "Communicator": call(
        opened,
        lambda: {"process_group": None, "timeout": TIMEOUT, "transport": "auto", "network": None},
        process_group=NO_GROUPS,
        timeout=NO_TIMEOUTS,
        transport=(lambda: "tcp", lambda: 5, lambda: "torch", Awkward),
        network=(lambda: 5, lambda: "nowhere", Awkward),
    ),
    "Communicator.all_reduce": on_one(
        "all_reduce",
        lambda: {"x": ones(), "op": "sum", "algorithm": "auto"},
        x=UNFIT,
        op=(lambda: Text("median"), lambda: "median", lambda: 5, lambda: "max", Awkward),
        algorithm=(lambda: "magic", lambda: 5, lambda: "ring", lambda: schedule.ring(size() + 1), Awkward),
    ),
    "Communicator.all_reduce, async": on_one("all_reduce", lambda: {"x": ones(), "is_async": True}, x=UNFIT),
    "Communicator.reduce": on_one(
        "reduce",
        lambda: {"x": ones(), "dst": 0, "op": "sum"},
        x=UNFIT,
        dst=(*NO_COUNTS, lambda: size(), lambda: 1),
        op=(lambda: "median", lambda: "max"),
    ),
    "Communicator.reduce_scatter": on_one(
        "reduce_scatter", lambda: {"out": ones(), "x": ones(4 * size(), 4)}, out=(*UNFIT, EXPANDED), x=UNFIT
    ),
    "Communicator.all_gather": on_one(
        "all_gather", lambda: {"out": ones(4 * size(), 4), "x": ones()}, out=UNFIT, x=UNFIT
    ),
    "Communicator.all_to_all": on_one(
        "all_to_all",
        lambda: {"out": ones(2 * size(), 4), "x": ones(2 * size(), 4)},
        out=UNFIT,
        x=(*UNFIT, lambda: ones(2 * size() + 1, 4)),
    ),
    "Communicator.broadcast": on_one(
        "broadcast", lambda: {"x": ones(), "src": 0}, x=UNFIT, src=(*NO_COUNTS, lambda: size(), lambda: 1)
    ),
    "attach": call(
        attached,
        lambda: {
            **training(),
            "accumulate": 1,
            "average": True,
            "compression": None,
            "process_group": None,
            "buffers": "local",
            "loss_scaler": None,
            "survive": None,
            "shard": None,
        },
        optimizer=(*NO_OPTIMIZERS, Awkward),
        model=NO_MODELS,
        accumulate=(*NO_COUNTS[:6], lambda: 2),
        average=(lambda: 5, lambda: None, lambda: False),
        compression=(lambda: 5, lambda: "zip", lambda: pycomm.TopK, lambda: pycomm.FP16()),
        process_group=NO_GROUPS,
        buffers=(lambda: 5, lambda: "all", lambda: "average"),
        loss_scaler=(lambda: 5, pycomm.LossScaler),
        survive=(lambda: 5, lambda: "shrink", pycomm.Survive, lambda: pycomm.Survive(2), Awkward),
        shard=(lambda: 5, lambda: "gradients", lambda: "optimizer", lambda: pycomm.Sharding("optimizer")),
    ),
    "attach, tuning": call(
        lambda tuning: pycomm.attach(*training().values(), tuning=tuning).detach(),
        lambda: {"tuning": pycomm.Tuning(timeout=TIMEOUT)},
        tuning=(lambda: 5, lambda: {"bucket_mb": 1}, lambda: pycomm.Tuning(bucket_mb=1, timeout=TIMEOUT), Awkward),
    ),
    "attach, fields of tuning": call(
        attached_by_tuning,
        lambda: {
            "bucket_mb": 25,
            "algorithm": "auto",
            "ignore": (),
            "per_rank": (),
            "check_replicas": 1000,
            "all_parameters": False,
        },
        bucket_mb=(lambda: 12,),
        algorithm=(lambda: "magic", lambda: "ring"),
        ignore=(lambda: 5, lambda: ["nothing.*"], lambda: [5], lambda: ["optimizer state"], Awkward),
        per_rank=(lambda: ["lr"],),
        check_replicas=(lambda: 10,),
        all_parameters=(lambda: True,),
    ),
    "attach, with a wrong timeout": call(
        lambda timeout: pycomm.attach(*training().values(), tuning=pycomm.Tuning(timeout=timeout)).detach(),
        lambda: {"timeout": TIMEOUT},
        timeout=NO_TIMEOUTS,
    ),
    "local_sgd": call(
        ended(pycomm.local_sgd),
        lambda: {**training(), "every": 2, "process_group": None, "outer": None, "compression": None, "join": None},
        optimizer=(*NO_OPTIMIZERS, Awkward),
        model=NO_MODELS,
        every=(*NO_COUNTS, lambda: 0, lambda: 3),
        outer=(lambda: 5, lambda: "nesterov", pycomm.Nesterov, pycomm.Elastic, lambda: pycomm.Elastic(2.0), Awkward),
        compression=(lambda: 5, lambda: "zip", pycomm.FP16),
        process_group=NO_GROUPS,
        join=(lambda: 5, Awkward),
    ),
    "gossip": call(
        ended(pycomm.gossip),
        lambda: {**training(), "topology": "ring", "every": 1, "seed": 0, "per_rank": (), "process_group": None},
        optimizer=(*NO_OPTIMIZERS, Awkward),
        model=NO_MODELS,
        per_rank=(lambda: 5, lambda: "lr", lambda: [5], lambda: ["lr"]),
        topology=(lambda: "star", lambda: 5, lambda: [[1.0]], lambda: "exponential", Awkward),
        every=(*NO_COUNTS, lambda: 0, lambda: 2),
        process_group=NO_GROUPS,
    ),
    "save": call(
        saved,
        lambda: {"path": folder(), "keep": 2, "step": 1},
        path=(lambda: None, lambda: 5, Awkward),
        keep=(*NO_COUNTS, lambda: 0),
        step=(Awkward, object, lambda: torch.eye(4).to_sparse()),
        more=(lambda: 1,),
    ),
    "load": call(
        loaded,
        lambda: {"path": folder()},
        path=(lambda: None, lambda: 5, lambda: "/nowhere", Awkward),
        more=(lambda: 5, model),
    ),
    "ddp.register": call(
        registered,
        lambda: {
            "model": nn.parallel.DistributedDataParallel(model()),
            "compression": None,
            "loss_scaler": None,
            "optimizer": None,
            "algorithm": "auto",
            "per_rank": (),
            "check_replicas": 1000,
        },
        check_replicas=(lambda: -1, lambda: "often", lambda: 10),
        model=(lambda: None, lambda: 5, Awkward),
        compression=(lambda: 5, lambda: "zip", lambda: pycomm.TopK, pycomm.FP16),
        loss_scaler=(lambda: 5, Awkward, pycomm.LossScaler),
        optimizer=(lambda: 5, Awkward),
        algorithm=(lambda: 5, lambda: "magic", Awkward),
        per_rank=(lambda: 5, lambda: "lr", lambda: [5], lambda: ["lr"], Awkward),
    ),
    "parameter_server": call(
        served,
        lambda: {
            **training(),
            "servers": 1,
            "mode": "async",
            "compression": None,
            "checkpoint": None,
        },
        optimizer=(*NO_OPTIMIZERS, Awkward),
        model=NO_MODELS,
        servers=(*NO_COUNTS, lambda: 0, lambda: 2),
        mode=(
            *(lambda: None, lambda: 5, lambda: "asp", lambda: "ssp", lambda: "sync", Awkward),
            *(lambda: pycomm.StaleSynchronous(2), lambda: pycomm.Sync(quorum=2), lambda: pycomm.Sync(1)),
            lambda: pycomm.Async("lr"),
        ),
        compression=(lambda: 5, lambda: pycomm.TopK, lambda: pycomm.TopK(0.1), Awkward),
        checkpoint=(lambda: 5, lambda: "/proc/nowhere", lambda: Path(__file__), Awkward),
    ),
}
