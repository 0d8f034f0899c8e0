"""Routes of tensors between the stages of a pipeline, skip connections among them.

torch's runtime passes the outputs of a stage to the next one only. A tensor for a later stage, such as one from stage 0
to stage 3, therefore travels through the stages between, which pass it on unchanged, and so does its gradient. Each hop
is a message, as :func:`pycomm.schedule.pipeline.verify` and ``simulate`` count it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
        arguments: those of ``incoming`` that its module takes by position.
        keywords: those that it takes by keyword.
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
                raise ValueError(f"stage {stage} takes {value[1]!r}, which no stage before it gives")
            if given.get(value, -1) >= stage:
                raise ValueError(f"stage {stage} takes {value[1]!r}, which only stage {given[value]} gives")
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
    """Return the routes of stages that pass one tensor from each to the next, and ``skips`` besides."""
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
            raise ValueError(f"tensor {name!r} is given by stage {first} and by stage {source}, wanted one of them")
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
        """Return what the module has given, by name."""
        outputs = self._route.outputs
        skips = [value for value in outputs if value[1] != "output"]
        if outputs and outputs[0][1] == "output" and skips:
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
                raise TypeError(f"stage {self._stage} returned {_kind(result)}, wanted (output, {{name: tensor}})")
            wanted, got = {value[1] for value in skips}, set(result[1])
            if wanted != got:
                raise ValueError(f"stage {self._stage} gives {sorted(map(str, got))}, wanted {sorted(wanted)}")
            return {outputs[0]: result[0], **{value: result[1][value[1]] for value in skips}}
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(outputs):
            raise ValueError(f"stage {self._stage} returned {len(values)} tensors, wanted {len(outputs)}")
        return dict(zip(outputs, values, strict=True))


def _kind(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
