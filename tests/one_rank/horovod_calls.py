"""Calls of Horovod's interface."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import pycomm.horovod as hvd
from tests.horovod.worlds import horovod
from tests.one_rank.backend_calls import EXPANDED, freed, ones
from tests.one_rank.calls import Call, Make
from tests.one_rank.parallel_calls import NO_ARRAYS, NO_COUNTS, Awkward


@contextmanager
def horovods_world() -> Iterator[None]:
    """Have Horovod initialized, over the default group that there is."""
    with horovod():
        yield


def itself() -> list[Any]:
    """Return a list that contains itself."""
    made: list[Any] = [1]
    made.append(made)
    return made


def deep() -> list[Any]:
    """Return a list of many levels."""
    made: list[Any] = []
    for _ in range(400):
        made = [made]
    return made


UNPACKABLE: tuple[Make, ...] = (
    itself,
    deep,
    object,
    Awkward,
    lambda: {Awkward(): 1},
    lambda: [lambda: None],
    lambda: {"a": (1, {2: [torch.eye(4).to_sparse()]})},
    lambda: torch.ones(4, device="meta"),
    lambda: [10**5000],
    freed,
)
UNFIT: tuple[Make, ...] = (
    *NO_ARRAYS,
    Awkward,
    lambda: torch.nested.nested_tensor([ones(2), ones(3)]),
    freed,
)
UNFIT_LISTS: tuple[Make, ...] = (*UNFIT[:4], list, lambda: [None], lambda: [ones(), "x"], lambda: [ones()] * 3, ones)
NO_OPS: tuple[Make, ...] = (lambda: "sum", lambda: 99, lambda: 2.5, Awkward, lambda: hvd.Min)
NO_FACTORS: tuple[Make, ...] = (lambda: "1", lambda: math.nan, lambda: math.inf, Awkward, lambda: 2.0)
NO_SETS: tuple[Make, ...] = (lambda: None, lambda: 5, Awkward, lambda: hvd.ProcessSet([0]))
NO_NAMES: tuple[Make, ...] = (lambda: 5, lambda: ["x"], Awkward)


class Raising:
    """Compression that raises."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Any:
        raise ArithmeticError("nothing can be compressed")

    decompress = compress


def call(run: Callable[..., Any], right: Callable[[], Mapping[str, Any]], **wrong: tuple[Make, ...]) -> Call:
    return Call(run, right, wrong, horovods_world)


def one(**more: Any) -> Callable[[], Mapping[str, Any]]:
    """Return a function that makes the arguments of an operation on one tensor."""
    return lambda: {"tensor": ones(), "name": None, "process_set": hvd.global_process_set, **more}


def several(**more: Any) -> Callable[[], Mapping[str, Any]]:
    """Return a function that makes the arguments of an operation on several tensors."""
    return lambda: {"tensors": [ones(), ones()], "name": None, "process_set": hvd.global_process_set, **more}


def ended(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that begins an operation and waits for its end."""
    return lambda **given: hvd.synchronize(begin(**given))


REDUCTION: dict[str, tuple[Make, ...]] = {
    "op": NO_OPS,
    "prescale_factor": NO_FACTORS,
    "postscale_factor": NO_FACTORS,
    "process_set": NO_SETS,
    "name": NO_NAMES,
}
FACTORS = {"op": hvd.Sum, "prescale_factor": 1.0, "postscale_factor": 1.0}


def optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    made = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1, momentum=0.9)
    made.param_groups[0]["params"][0].grad = torch.ones(2, 4)
    made.step()
    return made


def spoilt_state() -> torch.optim.Optimizer:
    made = optimizer()
    made.state[made.param_groups[0]["params"][0]]["loop"] = itself()
    return made


def wrapped(**given: Any) -> None:
    """Let DistributedOptimizer wrap what it is given, and let it end again."""
    made: Any = hvd.DistributedOptimizer(**given)
    made._horovod.remove()


def batch_norm(x: Any) -> Any:
    return hvd.SyncBatchNorm(4)(x)


_NUMBERS = itertools.count()


def broadcast_unpackable(obj: Any, number: int) -> None:
    """Broadcast an object of each rank in turn. What is no root's counts for nothing: so all of them are, once each."""
    for root in range(hvd.size()):
        hvd.broadcast_object([number] if obj is None else obj, root)


def new_set(ranks: Any) -> None:
    hvd.remove_process_set(hvd.add_process_set(ranks))


def without_set(process_set: Any) -> None:
    made = hvd.add_process_set([0])
    try:
        hvd.remove_process_set(made if process_set is None else process_set)
    finally:
        if made.process_set_id is not None:
            hvd.remove_process_set(made)


@contextmanager
def not_initialized() -> Iterator[None]:
    """Have Horovod not initialized."""
    yield


def initialized(**given: Any) -> None:
    hvd.init(**given)
    hvd.barrier()
    hvd.shutdown()


CALLS: dict[str, Call] = {
    "hvd.init": Call(
        initialized,
        lambda: {"comm": None, "process_sets": None},
        {
            "process_sets": (lambda: 5, lambda: "x", lambda: [5], lambda: [hvd.ProcessSet([0])], Awkward),
            "comm": (lambda: 5, lambda: [0], Awkward),
        },
        not_initialized,
    ),
    "hvd.allreduce": call(
        hvd.allreduce,
        one(**FACTORS, compression=hvd.Compression.none),
        tensor=UNFIT,
        compression=(lambda: None, lambda: 5, lambda: Raising),
        **REDUCTION,
    ),
    "hvd.allreduce with a gradient": call(
        lambda tensor, **given: hvd.allreduce(tensor, **given),
        lambda: {"tensor": ones().requires_grad_(), "op": hvd.Sum},
        tensor=UNFIT[:4],
        op=NO_OPS,
    ),
    "hvd.allreduce_": call(hvd.allreduce_, one(**FACTORS), tensor=(*UNFIT, EXPANDED), **REDUCTION),
    "hvd.allreduce_async": call(ended(hvd.allreduce_async), one(**FACTORS), tensor=UNFIT, **REDUCTION),
    "hvd.grouped_allreduce": call(hvd.grouped_allreduce, several(**FACTORS), tensors=UNFIT_LISTS, **REDUCTION),
    "hvd.sparse_allreduce_async": call(
        ended(hvd.sparse_allreduce_async),
        lambda: {"tensor": torch.eye(4).to_sparse(), "name": "sparse", "op": hvd.Sum},
        tensor=(*UNFIT[:4], ones, lambda: torch.eye(5).to_sparse()),
        op=NO_OPS[:4],
    ),
    "hvd.allgather": call(
        hvd.allgather, one(), tensor=(*UNFIT, lambda: torch.tensor(1.0)), name=NO_NAMES, process_set=NO_SETS
    ),
    "hvd.grouped_allgather": call(hvd.grouped_allgather, several(), tensors=UNFIT_LISTS, process_set=NO_SETS),
    "hvd.broadcast": call(
        hvd.broadcast, one(root_rank=0), tensor=UNFIT, root_rank=(*NO_COUNTS, lambda: 1), process_set=NO_SETS
    ),
    "hvd.broadcast_": call(
        hvd.broadcast_, one(root_rank=0), tensor=(*UNFIT, EXPANDED), root_rank=(*NO_COUNTS, lambda: 1)
    ),
    "hvd.alltoall": call(
        hvd.alltoall,
        lambda: {"tensor": ones(6, 4), "splits": None},
        tensor=(*UNFIT, lambda: torch.tensor(1.0), lambda: ones(5, 4)),
        splits=(lambda: 5, lambda: "x", Awkward, lambda: [1], lambda: [-1] * hvd.size(), lambda: [2**70] * hvd.size()),
    ),
    "hvd.reducescatter": call(hvd.reducescatter, one(**FACTORS), tensor=UNFIT, **REDUCTION),
    "hvd.grouped_reducescatter": call(hvd.grouped_reducescatter, several(**FACTORS), tensors=UNFIT_LISTS, op=NO_OPS),
    "hvd.barrier": call(hvd.barrier, lambda: {"process_set": hvd.global_process_set}, process_set=NO_SETS),
    "hvd.join": call(hvd.join, lambda: {"device": -1}, device=(lambda: "cpu", lambda: None, Awkward)),
    "hvd.broadcast_object": call(
        hvd.broadcast_object,
        lambda: {"obj": [1, "a"], "root_rank": 0, "name": "o", "process_set": hvd.global_process_set},
        root_rank=(*NO_COUNTS, lambda: 1),
        process_set=NO_SETS,
    ),
    "hvd.broadcast_object of what cannot be packed": call(
        broadcast_unpackable, lambda: {"obj": None, "number": next(_NUMBERS)}, obj=UNPACKABLE
    ),
    "hvd.allgather_object": call(
        hvd.allgather_object, lambda: {"obj": [1, "a"], "name": None}, obj=UNPACKABLE, name=NO_NAMES
    ),
    "hvd.broadcast_parameters": call(
        hvd.broadcast_parameters,
        lambda: {"params": nn.Linear(4, 4).state_dict(), "root_rank": 0, "process_set": hvd.global_process_set},
        params=(
            lambda: None,
            lambda: 5,
            lambda: nn.Linear(4, 4),
            lambda: {1: ones()},
            lambda: {"weight": ones()},
            lambda: nn.Linear(4, 5).state_dict(),
            lambda: {"weight": torch.eye(4).to_sparse(), "bias": ones(4)},
            lambda: {"a": ones(), 2: ones()},
            dict,
        ),
        root_rank=(*NO_COUNTS, lambda: 1),
        process_set=NO_SETS,
    ),
    "hvd.broadcast_optimizer_state": call(
        hvd.broadcast_optimizer_state,
        lambda: {"optimizer": optimizer(), "root_rank": 0},
        optimizer=(lambda: None, lambda: 5, lambda: torch.optim.SGD(nn.Linear(3, 3, bias=False).parameters(), lr=0.1)),
        root_rank=(*NO_COUNTS, lambda: 1),
    ),
    "hvd.DistributedOptimizer": call(
        wrapped,
        lambda: {
            "optimizer": optimizer(),
            "named_parameters": None,
            "compression": hvd.Compression.none,
            "backward_passes_per_step": 1,
            "op": hvd.Average,
            "gradient_predivide_factor": 1.0,
            "groups": None,
            "sparse_as_dense": False,
            "process_set": hvd.global_process_set,
        },
        optimizer=(lambda: None, lambda: 5, lambda: torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)),
        named_parameters=(lambda: 5, lambda: nn.Linear(4, 2), lambda: [("a", ones())], lambda: [1], Awkward),
        compression=(lambda: 5, lambda: "none", lambda: Raising, lambda: hvd.Compression.fp16),
        backward_passes_per_step=(*NO_COUNTS, lambda: 0, lambda: 2),
        op=(*NO_OPS, lambda: hvd.Adasum),
        gradient_predivide_factor=(lambda: "1", lambda: -1.0, Awkward),
        groups=(lambda: "1", lambda: -1, lambda: [5], lambda: [[5]], Awkward),
        process_set=NO_SETS[:3],
        unknown=(lambda: 5,),
    ),
    "hvd.SyncBatchNorm": call(
        batch_norm, lambda: {"x": ones()}, x=(*UNFIT[:6], UNFIT[6], lambda: ones(4), lambda: ones(4, 5))
    ),
    "hvd.add_process_set": call(
        new_set,
        lambda: {"ranks": [0]},
        ranks=(lambda: None, lambda: 5, lambda: [99], lambda: ["x"], lambda: [1], Awkward),
    ),
    "hvd.remove_process_set": call(
        without_set, lambda: {"process_set": None}, process_set=(lambda: 5, lambda: hvd.ProcessSet([1]), Awkward)
    ),
}
