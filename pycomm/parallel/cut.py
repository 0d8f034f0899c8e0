"""Cuts of a model into the stages of a pipeline."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pycomm.parallel.routes import Routed, Value, routes

_OTHERWISE_IN_TRAINING = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def cut(
    model: nn.Module, stages: Sequence[Sequence[str]], example: torch.Tensor | tuple[torch.Tensor, ...] | None = None
) -> list[nn.Module]:
    """Cut ``model`` into stages. They share its parameters, and in sequence compute the same as the model.

    An ``nn.Sequential``, also a nested one, is cut by its structure: the stages consist of the model's own modules. Any
    other model is traced by ``torch.export`` with ``example``. A tensor for a later stage than the next (a skip
    connection) is passed through the stages between.

    Args:
        model: the model.
        stages: for each stage, the names of its modules, such as ``[["embedding", "blocks.0"], ["blocks.1", "head"]]``.
            Of a traced model only the first name of each stage counts: there the stage begins.
        example: inputs of one microbatch, for a model that is not an ``nn.Sequential``. Tracing fixes the behaviour of
            dropout and batch norms in the model's present mode, training or evaluation. With such modules, a later
            ``train()`` or ``eval()`` to the other mode raises a RuntimeError.

    Returns:
        A module per stage. In those of an ``nn.Sequential`` parameters have the names that they have in the model.

    Raises:
        ValueError: a name is unknown, is missing, or is not where the model runs it; a parameter is used by two
            stages; the model cannot be traced, or ``example`` is missing.
    """
    if not stages or any(not stage for stage in stages):
        raise ValueError(f"stages is {[list(stage) for stage in stages]}, wanted one or more names for each")
    if isinstance(model, nn.Sequential):
        made = _by_structure(model, stages)
    elif example is not None:
        made = _by_tracing(model, stages, example if isinstance(example, tuple) else (example,))
    else:
        raise ValueError(
            f"model is {type(model).__name__}, no nn.Sequential: the order in which it runs its modules is known only "
            "from tracing it, for which cut() requires an example, the inputs of one microbatch"
        )
    require_parameters_apart(dict(enumerate(made)))
    return made


def require_parameters_apart(stages: Mapping[int, nn.Module]) -> None:
    """Raise ValueError if a stage has no parameters, or shares one with another."""
    owners: dict[int, int] = {}
    for number, module in stages.items():
        named = list(module.named_parameters())
        if not named:
            raise ValueError(f"stage {number} has no parameters, wanted some in each stage: join it to a neighbour")
        for name, parameter in named:
            other = owners.setdefault(id(parameter), number)
            if other != number:
                raise ValueError(
                    f"parameter {name!r} is used by stage {other} and by stage {number}: each rank would have a copy "
                    "of its own, with a part of the gradient"
                )


def _leaves(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of the modules in the order in which they run, with nested containers expanded."""
    if not isinstance(module, nn.Sequential):
        yield prefix
        return
    for name, child in module.named_children():
        yield from _leaves(child, f"{prefix}.{name}" if prefix else name)


def _by_structure(model: nn.Sequential, stages: Sequence[Sequence[str]]) -> list[nn.Module]:
    order = list(_leaves(model, ""))
    position = 0
    cut_up: list[nn.Module] = []
    for number, names in enumerate(stages):
        mine: list[str] = []
        for name in names:
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise ValueError(f"stage {number} has a module {name!r}, which the model has not") from error
            mine += _leaves(module, name)
        run = order[position : position + len(mine)]
        if mine != run:
            wrong, wanted = next(((a, b) for a, b in zip(mine, run, strict=False) if a != b), (mine[-1], "no more"))
            raise ValueError(f"stage {number} has {wrong!r} where the model runs {wanted!r}")
        position += len(mine)
        cut_up.append(_nested(model, mine))
    if position < len(order):
        raise ValueError(f"module {order[position]!r} is in no stage")
    return cut_up


def _nested(model: nn.Sequential, names: Sequence[str]) -> nn.Sequential:
    """Return a Sequential of the modules ``names``, nested as in ``model``, so that names stay the same."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for first in dict.fromkeys(name.split(".")[0] for name in names):
        child = model.get_submodule(first)
        inside = [name.split(".", 1)[1] for name in names if name.startswith(f"{first}.")]
        children[first] = _nested(child, inside) if isinstance(child, nn.Sequential) and inside else child
    return nn.Sequential(children)


def _by_tracing(
    model: nn.Module, stages: Sequence[Sequence[str]], example: tuple[torch.Tensor, ...]
) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint, pipeline

    known = dict(model.named_modules())
    for number, names in enumerate(stages):
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise ValueError(f"stage {number} has a module {unknown!r}, which the model has not")
    _require_untied(model)
    begins = {names[0]: SplitPoint.BEGINNING for names in stages[1:]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export's own
            pipe: Any = pipeline(model, example, split_spec=begins)
    except Exception as error:  # tracing runs the model's own code
        raise ValueError(f"model {type(model).__name__} cannot be traced: {error}") from error
    if pipe.num_stages != len(stages):
        raise ValueError(f"the model came apart into {pipe.num_stages} stages, wanted {len(stages)}")
    made = routes(*_flow(pipe.split_gm.graph))
    mode = model.training if any(isinstance(module, _OTHERWISE_IN_TRAINING) for module in model.modules()) else None
    return [Routed(pipe.get_stage_module(number), route, number, mode) for number, route in enumerate(made)]


def _require_untied(model: nn.Module) -> None:
    """Raise ValueError if a parameter has two names: torch's tracing makes two parameters of it."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ValueError(f"parameter {name!r} is {first!r}, too: stages could not share it, untie them")


def _flow(graph: Any) -> tuple[list[Value], list[list[tuple[str | None, Value]]], list[list[Value]]]:
    """Return the inputs of a traced model, and the inputs and outputs of each stage."""
    value_of: dict[Any, Value] = {}
    inputs: list[Value] = []
    takes: list[list[tuple[str | None, Value]]] = []
    gives: list[list[Value]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value_of[node] = (-1, f"{len(inputs):03d}")
            inputs.append(value_of[node])
        elif node.op == "call_module":
            stage = len(takes)
            takes.append(
                [(None, value_of[argument]) for argument in node.args]
                + [(name, value_of[argument]) for name, argument in node.kwargs.items()]
            )
            parts = [user for user in node.users if user.op == "call_function"]
            count = 1 + max((part.args[1] for part in parts), default=0)
            gives.append([(stage, f"{index:03d}") for index in range(count)])
            value_of[node] = (stage, "000")
        elif node.op == "call_function":  # getitem: one of several outputs
            value_of[node] = (value_of[node.args[0]][0], f"{node.args[1]:03d}")
    return inputs, takes, gives
