"""Times of a model's layers on this machine, taken in whole steps: caches and the allocator are as in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pycomm.parallel.planning.profile import Loss, scalar, tensors_in, units


class _Marks:
    """Moments of one step: when each layer begins forward, and when its output's gradient is there."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        known = units(model)
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise ValueError(f"names has {unknown!r}, which is no layer of the model")
        self._hooks = []
        for name in names:
            self._hooks.append(known[name].register_forward_pre_hook(self._entering(name)))
            self._hooks.append(known[name].register_forward_hook(self._leaving(name)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self.forward.setdefault(name, time.perf_counter())

        return enter

    def _leaving(self, name: str) -> Any:
        def arrive(_: torch.Tensor) -> None:
            self.backward.setdefault(name, time.perf_counter())

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in tensors_in(output)[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(arrive)  # type: ignore[no-untyped-call]

        return leave


def time_layers(
    model: nn.Module, inputs: tuple[Any, ...], names: Sequence[str], loss: Loss | None = None, steps: int = 5
) -> list[tuple[float, float]]:
    """Return the seconds of the forward and the backward pass of each layer: medians over ``steps``.

    Args:
        model: the model, on this machine's CPU. inputs: its arguments for one microbatch.
        names: the first module of each layer, in the order in which they run, as in a profile.
        loss: takes the model's output and returns a scalar; by default the sum of its elements.

    Raises:
        ValueError: a name is no layer of the model, or one that it does not run.
    """
    found = []
    for step in range(steps + 1):
        marks = _Marks(model, names)
        model.zero_grad()
        output = model(*inputs)
        total = scalar(output, loss)
        middle = time.perf_counter()
        total.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        marks.close()
        missing = next((name for name in names if name not in marks.forward), None)
        if missing is not None:
            raise ValueError(f"names has {missing!r}, which the model does not run")
        if step > 0:  # the first allocates
            found.append(_durations(marks, names, middle, end))
    return [
        (statistics.median(step[i][0] for step in found), statistics.median(step[i][1] for step in found))
        for i in range(len(names))
    ]


def _durations(marks: _Marks, names: Sequence[str], middle: float, end: float) -> list[tuple[float, float]]:
    """Return how long each layer took: until the next one begins; backward, until the one before it does."""
    begins = [marks.forward[name] for name in names]
    forward = [after - before for before, after in zip(begins, [*begins[1:], middle], strict=True)]
    # Layers without a gradient of their output, such as those before any parameter, take no time.
    gradients = [marks.backward.get(name, end) for name in names]
    gradients[-1] = middle  # the loss belongs to the last layer
    ends = [end, *gradients[:-1]]
    return [(f, max(0.0, over - start)) for f, start, over in zip(forward, gradients, ends, strict=True)]
