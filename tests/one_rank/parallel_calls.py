"""Models split over ranks: layers, pipelines, meshes, and the collectives beneath them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pycomm import parallel
from pycomm.parallel import functional
from pycomm.schedule import pipeline as tables
from tests.models import mean_square
from tests.one_rank.backend_calls import call, ones, size
from tests.one_rank.calls import Call, Make, kept

META: Make = lambda: torch.ones(4, 4, device="meta")  # noqa: E731
NO_ARRAYS: tuple[Make, ...] = (
    lambda: None,
    lambda: "x",
    META,
    lambda: torch.eye(4).to_sparse(),
    lambda: torch.eye(4).to_sparse_csr(),
    lambda: torch.ones(4, 4, dtype=torch.float64),
    lambda: torch.quantize_per_tensor(ones(), 1.0, 0, torch.qint8),
)
NESTED: Make = lambda: torch.nested.nested_tensor([ones(2), ones(3)])  # noqa: E731
UNFIT: tuple[Make, ...] = (*NO_ARRAYS, NESTED, lambda: torch.ones([1] * 13 + [4]))
NO_COUNTS: tuple[Make, ...] = (
    lambda: None,
    lambda: "4",
    lambda: 2.5,
    lambda: math.nan,
    lambda: -1,
    lambda: 2**70,
    lambda: True,
    lambda: Awkward(),
)


class Awkward:
    """Object of which nothing can be asked."""

    def _raise(self, *_: object) -> Any:
        raise LookupError("ask me nothing")

    __repr__ = __index__ = __float__ = __bool__ = __len__ = __iter__ = __eq__ = __getitem__ = _raise
    __hash__ = object.__hash__


class Text(str):
    """Text that is not printed, compared or hashed."""

    def _raise(self, *_: object) -> Any:
        raise LookupError("ask me nothing")

    __repr__ = __str__ = __eq__ = __len__ = __format__ = __iter__ = __contains__ = _raise
    __hash__ = str.__hash__


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def refusing() -> nn.Module:
    raise LookupError("no module today")


class Refusing(nn.Linear):
    """Linear whose forward raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("this layer computes nothing")


def experts(**given: Any) -> parallel.Experts:
    return parallel.Experts(**{"make_expert": linear, "experts": 2 * size(), "width": 4, **given})


def branches(**given: Any) -> parallel.Branches:
    return parallel.Branches(**{"make_branches": [linear] * size(), **given})


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [linear() for _ in range(size())]


def pipeline(**given: Any) -> parallel.Pipeline:
    return parallel.Pipeline(**{"stages": stages(), "microbatches": 2, "loss": mean_square, **given})


def layer(name: str, make: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the arguments of a layer's forward; the layer is the same each time."""
    return lambda: {"layer": kept(name, make), "x": ones()}


def forward(layer: Callable[[Any], Any], x: Any) -> Any:
    return layer(x)


def spoilt(layer: nn.Module) -> nn.Module:
    """Return the layer, of which this rank's part raises."""
    own: Any = layer.own
    own[next(iter(own))] = Refusing(4, 4)
    return layer


def collective(**more: Any) -> Callable[[], Mapping[str, Any]]:
    """Return a function that makes the arguments of a collective of :mod:`pycomm.parallel.functional`."""
    return lambda: {"x": ones(2 * size(), 4), "group": None, **more}


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (size(),), mesh_dim_names=("tp",))


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4 * size()), nn.ReLU(), nn.Linear(4 * size(), 4))


STYLES = {"0": "columns", "2": "rows"}
WRONG_GROUPS: tuple[Make, ...] = (lambda: 5, lambda: "tp")

CALLS: dict[str, Call] = {
    "Experts": call(
        parallel.Experts,
        lambda: {
            "make_expert": linear,
            "experts": 2 * size(),
            "width": 4,
            "group": None,
            "top_k": 2,
            "capacity_factor": 1.25,
            "average": True,
        },
        make_expert=(lambda: 5, lambda: refusing, lambda: lambda: 5),
        experts=(*NO_COUNTS, lambda: 2 * size() + 1, lambda: size()),
        width=(*NO_COUNTS, lambda: 5),
        top_k=(*NO_COUNTS, lambda: 3, lambda: 100),
        capacity_factor=(
            lambda: math.nan,
            lambda: "1.25",
            lambda: math.inf,
            lambda: -1.0,
            lambda: 10**400,
            lambda: True,
            lambda: None,
            lambda: 2.0,
        ),
        average=(lambda: 1, lambda: None, lambda: False),
        group=WRONG_GROUPS,
    ),
    "Experts' forward": call(
        forward,
        layer("experts", experts),
        x=(*UNFIT, lambda: ones(4, 5), lambda: torch.tensor(1.0), lambda: ones().int()),
    ),
    "an expert that raises": call(
        lambda spoil: forward(spoilt(experts()) if spoil else experts(), ones()),
        lambda: {"spoil": False},
        spoil=(lambda: True,),
    ),
    "Branches": call(
        parallel.Branches,
        lambda: {"make_branches": [linear] * size(), "group": None, "combine": "concatenate", "dim": 0},
        make_branches=(
            lambda: 5,
            lambda: [linear],
            lambda: [1] * size(),
            lambda: [refusing] * size(),
            lambda: [int] * size(),
        ),
        combine=(lambda: "product", lambda: 5, lambda: None, list, lambda: "sum"),
        dim=(lambda: 2**70, lambda: -(2**70), lambda: "last", lambda: 1.0, lambda: math.nan, lambda: None, lambda: 1),
        group=WRONG_GROUPS,
    ),
    **{
        f"Branches' forward, {combine!r}": call(
            forward,
            layer(combine, partial(branches, combine=combine)),
            x=(*UNFIT[:1], *UNFIT[2:6], lambda: ones(4, 5), lambda: ones().requires_grad_(), lambda: ones(2, 4)),
        )
        for combine in ("list", "concatenate", "sum", "own")
    },
    "a branch that raises": call(
        lambda spoil: forward(spoilt(branches(combine="own")) if spoil else branches(combine="own"), ones()),
        lambda: {"spoil": False},
        spoil=(lambda: True,),
    ),
    "a branch of 13 dimensions": call(
        lambda shape: parallel.Branches([lambda: nn.Unflatten(1, shape)] * size())(ones(3, 4)),
        lambda: {"shape": [2, 2]},
        shape=(lambda: [1] * 12 + [4], lambda: [1] * 20 + [4]),
    ),
    "Exchange": call(forward, layer("exchange", parallel.Exchange), x=UNFIT),
    "Pipeline": call(
        parallel.Pipeline,
        lambda: {
            "stages": stages(),
            "mesh": None,
            "schedule": "one_f_one_b",
            "microbatches": 2,
            "loss": mean_square,
            "skips": (),
        },
        stages=(
            lambda: None,
            lambda: 5,
            list,
            dict,
            lambda: ["x"] * size(),
            lambda: [linear()],
            lambda: [linear()] * size(),
            lambda: [nn.Tanh() for _ in range(size())],
        ),
        mesh=WRONG_GROUPS,
        schedule=(lambda: "fastest", lambda: None, lambda: 5, lambda: tables.gpipe(size() + 1, 2), lambda: "gpipe"),
        microbatches=(*NO_COUNTS, lambda: 0, lambda: 3),
        loss=(lambda: 5, lambda: "mse", lambda: None),
        skips=(lambda: 5, lambda: [1], lambda: [("t", 1, 0)], lambda: [("t", 0, 2**70)], lambda: None),
    ),
    "Pipeline.step": call(
        lambda pipeline, inputs, target: pipeline.step(inputs, target=target),
        lambda: {"pipeline": kept("pipeline", pipeline), "inputs": ones(), "target": ones()},
        inputs=(*UNFIT[:6], lambda: ones(3, 4), lambda: ones(2, 4), lambda: torch.tensor(1.0)),
        target=(META, *UNFIT[3:6], lambda: ones(3, 4), lambda: ones(2, 4), lambda: torch.tensor(1.0)),
    ),
    "Pipeline.evaluate": call(
        lambda pipeline, inputs: pipeline.evaluate(inputs),
        lambda: {"pipeline": kept("pipeline", pipeline), "inputs": ones()},
        inputs=(*UNFIT[:6], lambda: ones(3, 4)),
    ),
    "split": call(
        parallel.split,
        lambda: {"model": two_layers(), "mesh": whole_mesh(), "plan": STYLES},
        model=(lambda: None, lambda: 5, linear, lambda: nn.Sequential(linear(), nn.ReLU(), linear())),
        mesh=(lambda: None, lambda: 5, lambda: "tp"),
        plan=(
            lambda: {0: "columns"},
            lambda: {"0": 5},
            lambda: {"7": "rows"},
            lambda: 5,
            lambda: None,
            lambda: "/nonexistent/plan",
            lambda: {"0": "columns"},
        ),
    ),
    "forward of a split model": call(
        forward,
        lambda: {"layer": kept("split", lambda: parallel.split(two_layers(), whole_mesh(), STYLES)), "x": ones()},
        x=(lambda: "x", lambda: ones(4, 5), lambda: ones().double(), lambda: torch.eye(4).to_sparse_csr()),
    ),
    "mesh": call(
        parallel.mesh,
        lambda: {"pp": None, "dp": size(), "tp": None, "device_type": "cpu", "tp_between_hosts": False},
        dp=(*NO_COUNTS, lambda: size() + 1),
        tp=(lambda: "1", lambda: 0, lambda: size()),
        device_type=(lambda: "tpu", lambda: 5),
        tp_between_hosts=(lambda: 1, lambda: None),
    ),
    "group_over": call(
        lambda mesh, dimension: parallel.group_over(mesh, dimension),
        lambda: {"mesh": whole_mesh(), "dimension": "tp"},
        mesh=(lambda: None, lambda: 5),
        dimension=(lambda: "dp", lambda: 5),
    ),
    "functional.all_reduce": call(
        functional.all_reduce,
        collective(op="sum"),
        x=UNFIT,
        op=(lambda: "product", lambda: 5, lambda: "mean"),
        group=WRONG_GROUPS,
    ),
    "functional.all_gather": call(
        functional.all_gather,
        collective(dim=0),
        x=UNFIT,
        dim=(lambda: 2**70, lambda: "0", lambda: 2, lambda: 1),
        group=WRONG_GROUPS,
    ),
    "functional.reduce_scatter": call(
        functional.reduce_scatter,
        collective(dim=0, sizes=None),
        x=UNFIT,
        dim=(lambda: 2**70, lambda: "0", lambda: 2, lambda: 1),
        group=WRONG_GROUPS,
        sizes=(lambda: 5, lambda: [1], lambda: [-1] * size(), lambda: [2**70] * size(), lambda: [1.5] * size()),
    ),
    "functional.all_to_all": call(
        functional.all_to_all,
        collective(sizes=None),
        x=(*UNFIT, lambda: torch.tensor(1.0)),
        group=WRONG_GROUPS,
        sizes=(lambda: 5, lambda: [1], lambda: [-1] * size(), lambda: [2**70] * size(), lambda: [1.5] * size()),
    ),
    "functional.broadcast": call(
        functional.broadcast,
        collective(src=0),
        x=UNFIT,
        src=(*NO_COUNTS, lambda: size(), lambda: 1),
        group=WRONG_GROUPS,
    ),
    "functional.reduce": call(
        functional.reduce,
        collective(dst=0),
        x=UNFIT,
        dst=(*NO_COUNTS, lambda: size(), lambda: 1),
        group=WRONG_GROUPS,
    ),
    "functional.reduce_from_group": call(functional.reduce_from_group, collective(), x=UNFIT),
    "functional.gather_from_group": call(
        functional.gather_from_group,
        collective(dim=0),
        x=UNFIT,
        dim=(lambda: 2**70, lambda: "0", lambda: 2),
    ),
}
