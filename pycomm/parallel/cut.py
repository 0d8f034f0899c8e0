"""Cuts of a model into the stages of a pipeline, and routes of tensors between them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Routes of tensors between the stages of a pipeline, skip connections among them.
#
# torch's runtime passes the outputs of a stage to the next one only. A tensor for a later stage, such as one from stage
# 0 to stage 3, therefore travels through the stages between, which pass it on unchanged, and so does its gradient. Each
# hop is a message, as :func:`pycomm.schedule.pipeline.verify` and ``simulate`` count it.

Skip = tuple[str, int, int]
"""Skip connection: the name of a tensor, the stage that gives it, and one that takes it."""

Value = tuple[int, str]
"""Name of a tensor between stages: the stage that gives it (-1 for an input of the model), and its name there."""


@dataclass(frozen=True)
class Route:
    """Route of one stage's tensors.

    Attributes:
        incoming: values that the stage receives from the one before it, in order.
        outgoing: values that it sends to the one after it, in order; empty for the last stage.
        arguments: values in ``incoming`` that its module takes by position.
        keywords: values that it takes by keyword.
        outputs: names of what its module returns; empty if that is the result of the whole model.
    """

    incoming: tuple[Value, ...]
    outgoing: tuple[Value, ...]
    arguments: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]
    outputs: tuple[Value, ...]


def routes(
    inputs: Sequence[Value], takes: Sequence[Sequence[tuple[str | None, Value]]], gives: Sequence[Sequence[Value]]
) -> list[Route]:
    """Return the route of every stage.

    Args:
        inputs: the inputs of the whole model, which the first stage receives.
        takes: for each stage, the values that its module takes, each with its keyword, or ``None`` by position.
        gives: for each stage, the values that its module returns.
    """
    given: dict[Value, int] = {}
    for stage, values in enumerate(gives):
        for value in values:
            given[value] = stage
    last: dict[Value, int] = {}
    for stage, taken in enumerate(takes):
        for _, value in taken:
            if value[0] != -1 and value not in given:
                raise ValueError(f"stage {stage} takes {value[1]!r}, which no earlier stage passes on")
            if given.get(value, -1) >= stage:
                raise ValueError(f"stage {stage} takes {value[1]!r}, which only stage {given[value]} passes on")
            last[value] = stage
    order = sorted(last, key=lambda value: (given.get(value, -1), value[1]))
    made = []
    for stage, taken in enumerate(takes):
        incoming = [v for v in order if given.get(v, -1) < stage and last[v] >= stage]
        outgoing = [v for v in order if given.get(v, -1) <= stage and last[v] > stage]
        if stage == 0:  # the inputs as they come, used or not
            incoming = list(inputs)
        made.append(
            Route(
                tuple(incoming),
                tuple(outgoing),
                tuple(value for keyword, value in taken if keyword is None),
                tuple((keyword, value) for keyword, value in taken if keyword is not None),
                tuple(gives[stage]) if stage + 1 < len(takes) else (),
            )
        )
    return made


def chain(num_stages: int, skips: Iterable[Skip]) -> list[Route]:
    """Return the routes of stages that pass one tensor from each to the next, and also ``skips``."""
    takes: list[list[tuple[str | None, Value]]] = [[(None, (stage - 1, "output"))] for stage in range(num_stages)]
    gives: list[list[Value]] = [[(stage, "output")] for stage in range(num_stages)]
    source_of: dict[str, int] = {}
    for name, source, target in skips:
        if not 0 <= source < target < num_stages:
            raise ValueError(
                f"skip {name!r} goes from stage {source} to stage {target}, wanted a later one of {num_stages} stages"
            )
        first = source_of.setdefault(name, source)
        if first != source:
            raise ValueError(f"tensor {name!r} is passed on by stage {first} and by stage {source}, wanted one of them")
        if (source, name) not in gives[source]:
            gives[source].append((source, name))
        takes[target].append((name, (source, name)))
    return routes([(-1, "output")], takes, gives)


class Routed(nn.Module):
    """Stage that selects its module's inputs from the tensors that pass through, and adds the module's outputs.

    Args:
        module: the stage's own module. If it gives skips, it returns ``(output, {name: tensor})``.
        route: where the tensors go.
        stage: its number, for messages.
        mode: of a traced module, the mode in which it was traced, if that matters: whether it trains.
    """

    def __init__(self, module: nn.Module, route: Route, stage: int, mode: bool | None = None) -> None:
        super().__init__()
        self.module, self._route, self._stage, self._mode = module, route, stage, mode

    def train(self, mode: bool = True) -> Routed:
        """Set the mode of the module."""
        if self._mode is not None and mode != self._mode:
            modes = ("evaluation", "training")
            raise RuntimeError(
                f"stage {self._stage} was traced for {modes[self._mode]}, which fixes what dropout and batch norms do: "
                f"cut the model again after {'train' if mode else 'eval'}(), or make it an nn.Sequential"
            )
        super().train(mode)
        return self

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Run the module; return the tensors for the next stage, or the result if this is the last one."""
        route = self._route
        passing = dict(zip(route.incoming, tensors, strict=True))
        arguments = [passing[value] for value in route.arguments]
        result = self.module(*arguments, **{name: passing[value] for name, value in route.keywords})
        if not route.outgoing:
            return result
        given = self._named(result)
        # Pass on copies: torch detaches a stage's outputs in place, which fails for inputs and views.
        out = tuple(given[v] if v in given else passing[v].clone() for v in route.outgoing)
        return out if len(out) > 1 else out[0]

    def _named(self, result: Any) -> dict[Value, torch.Tensor]:
        """Return the tensors that the module has returned, by name."""
        outputs = self._route.outputs
        skips = [value for value in outputs if value[1] != "output"]
        if outputs and outputs[0][1] == "output" and skips:
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
                raise TypeError(f"stage {self._stage} returned {_kind(result)}, wanted (output, {{name: tensor}})")
            wanted, got = {value[1] for value in skips}, set(result[1])
            if wanted != got:
                raise ValueError(f"stage {self._stage} returned {sorted(map(str, got))}, wanted {sorted(wanted)}")
            return {outputs[0]: result[0], **{value: result[1][value[1]] for value in skips}}
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(outputs):
            raise ValueError(f"stage {self._stage} returned {len(values)} tensors, wanted {len(outputs)}")
        return dict(zip(outputs, values, strict=True))


def _kind(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


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
        example: inputs of one microbatch, for a model that is not an ``nn.Sequential``. Tracing fixes the behavior of
            dropout and batch norms in the model's present mode, training or evaluation. With such modules, a later
            ``train()`` or ``eval()`` to the other mode raises a RuntimeError.

    Returns:
        A module per stage. Cut from an ``nn.Sequential``, their parameters keep the names from the model.

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
            f"model is {type(model).__name__}, not nn.Sequential: the order in which it runs its modules is known only "
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
            raise ValueError(
                f"stage {number} has no parameters, wanted at least one in each stage: join it to a neighbor"
            )
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
            except AttributeError:
                raise ValueError(f"stage {number} has a module {name!r}, which is not in the model") from None
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
            raise ValueError(f"stage {number} has a module {unknown!r}, which is not in the model")
    _require_untied(model)
    begins = {names[0]: SplitPoint.BEGINNING for names in stages[1:]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export's own
            pipe: Any = pipeline(model, example, split_spec=begins)
    except Exception as error:  # tracing runs the model's own code
        raise ValueError(f"model {type(model).__name__} cannot be traced: {error}") from error
    if pipe.num_stages != len(stages):
        raise ValueError(f"tracing cut the model into {pipe.num_stages} stages, wanted {len(stages)}")
    made = routes(*_flow(pipe.split_gm.graph))
    mode = model.training if any(isinstance(module, _OTHERWISE_IN_TRAINING) for module in model.modules()) else None
    return [Routed(pipe.get_stage_module(number), route, number, mode) for number, route in enumerate(made)]


def _require_untied(model: nn.Module) -> None:
    """Raise ValueError if a parameter has two names: torch's tracing makes two parameters of it."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise ValueError(f"parameter {name!r} is the same as {first!r}: stages cannot share it, so untie the two")


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
