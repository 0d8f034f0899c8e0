"""Whole steps of attach with the emulated kernels, in a graph: the kernels' own capture, and all that lies between.

Torch's operations and collectives are those of CPU memory; every kernel gets the same memory as a GPU's.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import EMULATED
from tests.reducer.recorded import RecordedStep
from tests.reducer.test_gpu_path import METHODS
from tests.reducer.test_graphs import require_same, train

pytestmark = pytest.mark.skipif(not EMULATED, reason="wants the emulator: .ci/sanitize")

if EMULATED:
    from tests.emulator.arrays import DeviceArray
    from tests.emulator.graphs import VALID, capture

STREAM = 9


def moved(value: Any, move: Callable[[Any], Any]) -> Any:
    """Return ``value`` with every array in it moved."""
    if isinstance(value, list | tuple):
        return type(value)(moved(each, move) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, kernels.EntryLayout | kernels.Quantization):
        fields = {field.name: moved(getattr(value, field.name), move) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    return move(value)


def to_device(value: Any) -> Any:
    return DeviceArray(value, 0, STREAM) if isinstance(value, torch.Tensor) else value


def to_host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceArray) else value


@contextmanager
def emulated_kernels() -> Iterator[None]:
    def emulated(kernel: Callable[..., Any]) -> Callable[..., Any]:
        temporary = {}
        if "scratch" in inspect.signature(kernel).parameters:
            temporary["scratch"] = kernels.Scratch()  # what torch would take from the graph's own pool

        @functools.wraps(kernel)
        def run(*args: Any, **options: Any) -> Any:
            options = temporary | options
            there = moved(args, to_device), {name: moved(value, to_device) for name, value in options.items()}
            return moved(kernel(*there[0], **there[1]), to_host)

        return run

    with pytest.MonkeyPatch.context() as context:
        for name, function in inspect.getmembers(kernels, inspect.isfunction):
            context.setattr(kernels, name, emulated(function))
        yield


def captured(kernel: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Run ``kernel`` as the launch of a graph of its own."""
    with capture(STREAM) as graph:
        result = kernel(*args, **options)
    assert graph.state == VALID
    graph.launch()

    def again(*_: Any) -> None:
        graph.launch()

    return result, functools.partial(again, args, options, result)  # whose memory the graph knows


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_does_what_its_step_did(one_rank_group: None, method: str) -> None:
    with emulated_kernels():
        wanted = train(METHODS[method], torch.float32, None)
        got = train(METHODS[method], torch.float32, RecordedStep(captured))
    require_same(got, wanted)
