"""``pycomm plan model``: how to train a model, of a Python file, on a number of devices."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycomm import schedule
from pycomm.descriptions import size_text
from pycomm.parallel.auto import styles_of
from pycomm.parallel.planning.candidates import Device, Task, measure_device
from pycomm.parallel.planning.choose import Option, Ranking, choose
from pycomm.parallel.planning.profile import in_a_line, make_without_memory, profile
from pycomm.tools.cli.plan.report import require_free, time_text
from pycomm.tools.cli.table import table
from pycomm.untrusted import naming, one_line

_INPUT = re.compile(r"(\d+(?:x\d+)*)?(?::(\w+))?")
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Source:
    """Functions of the user's file.

    Attributes:
        make_model: returns the model. make_batch: returns the model's arguments for a number of samples.
        loss: maps the model's output to a scalar; ``None`` if the file has none.
    """

    make_model: Callable[[], Any]
    make_batch: Callable[[int], Any]
    loss: Callable[[Any], Any] | None


def load_source(text: str, given_input: str | None) -> Source:
    """Import the file of ``FILE.py:make_model``, and find its functions.

    The file may have ``make_batch(samples)``, unless there is a ``given_input``, and ``loss(output)``.
    """
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise ValueError(f"the model is {text!r}, wanted FILE.py:FUNCTION, such as train.py:make_model")
    module = _imported(Path(path))
    make_model = _function(module, path, name)
    if given_input is not None:
        make_batch = batches_of(given_input)
    elif hasattr(module, "make_batch"):
        make_batch = _function(module, path, "make_batch")
    else:
        raise ValueError(
            f"the model's input is not known: {path} has no make_batch(samples), and --input is missing, "
            "such as --input 3x224x224, or --input 512:int64"
        )
    loss = _function(module, path, "loss") if hasattr(module, "loss") else None
    return Source(_quiet(make_model), _quiet(make_batch), None if loss is None else _quiet(loss))


def batches_of(text: str) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return a function that makes zeros of the shapes in ``text`` for a number of samples.

    ``text`` has the shape of one sample of each argument, separated by commas: ``3x224x224,512:int64``.
    """
    made: list[tuple[tuple[int, ...], torch.dtype]] = []
    for word in text.split(","):
        match = _INPUT.fullmatch(word.strip())
        dtype = getattr(torch, (match[2] if match and match[2] else "float32"), None)
        if match is None or not word.strip() or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--input has {word!r}, wanted the shape of one sample, such as 3x224x224 or 512:int64")
        shape = tuple(map(int, match[1].split("x"))) if match[1] else ()
        if 0 in shape or len(shape) > _MOST_DIMENSIONS or any(size >= 1 << 31 for size in shape):
            raise ValueError(f"--input has {word!r}, wanted up to {_MOST_DIMENSIONS} sizes from 1 to 2**31")
        made.append((shape, dtype))
    return lambda samples: tuple(torch.zeros(samples, *shape, dtype=dtype) for shape, dtype in made)


def _imported(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"the model names the file {path}, which is not there")
    spec = importlib.util.spec_from_file_location("_pycomm_planned_model", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"the model names the file {path}, wanted a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)  # as for a script
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ValueError(f"{path} cannot be imported: {in_a_line(error)}") from error
    finally:
        sys.path.remove(beside)
    return module


def _function(module: Any, path: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{path} has no {name}")
    if not callable(found):
        raise ValueError(f"{name} in {path} is a {type(found).__name__}, wanted a function")
    function: Callable[..., Any] = found
    return function


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its prints sent to stderr: stdout is for the plan."""

    def quiet(*arguments: Any) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments)

    return quiet


_MOST_ROWS = 12


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return the exit code, 1 if nothing fits."""
    if arguments.memory_bandwidth is not None and arguments.flops is None:
        raise ValueError("--memory-bandwidth requires --flops: without it both are measured here")
    if arguments.write is not None:
        require_free(arguments.write, "--write", arguments)
    try:
        return 0 if plan_model(arguments) else 1
    except TypeError as error:  # the user's file has an object of another type
        raise ValueError(str(error)) from error


def plan_model(arguments: argparse.Namespace) -> bool:
    """Print the best plan and its alternatives; return whether any fits."""
    network = schedule.load(arguments.network).with_hosts_of(arguments.per_host)
    source = load_source(arguments.model, arguments.input)
    model = make_without_memory(source.make_model)
    measured = arguments.flops is None
    device = measure_device() if measured else Device(arguments.flops, arguments.memory_bandwidth or math.inf)
    task = Task(
        devices=arguments.devices,
        memory=arguments.memory,
        batch=arguments.batch,
        device=device,
        network=network,
        optimizer=arguments.optimizer,
        overlap=arguments.overlap,
        cores=arguments.cores,
    )
    ranking = choose(
        task,
        model,
        lambda split: profile(source.make_model, source.make_batch, source.loss, split),
        lambda devices: styles_of(model, devices),
    )
    _print_choice(ranking, task)
    _print_device(task, measured)
    _print_options(ranking, task)
    _print_refusals(ranking)
    if ranking.options and arguments.write is not None:
        with naming(arguments.write):
            arguments.write.write_text(ranking.options[0].plan().to_json())
        print(f"\nplan written to {arguments.write}: pycomm.parallel.split(model, mesh, {str(arguments.write)!r})")
    return bool(ranking.options)


def _print_choice(ranking: Ranking, task: Task) -> None:
    if not ranking.options:
        least = ranking.least
        wanted = "" if math.isinf(least) else f": {size_text(least - task.memory)} too much, however it is divided"
        print(f"chosen: nothing, as the model does not fit on {task.devices} x {size_text(task.memory)}{wanted}\n")
        return
    option = ranking.options[0]
    times = option.price.times
    print(f"chosen: {option.name}\n")
    print(f"a step of {task.batch} samples takes {time_text(option.seconds)}, of which")
    for what, seconds in (("passes", times.passes), ("averaging", option.averaging), ("optimizer", times.update)):
        print(f"  {what:10} {time_text(seconds)}")
    _print_memory(option)


def _print_memory(option: Option) -> None:
    print("\nmemory of a device")
    header = ["layers", "together", "parameters", "gradients", "optimizer", "activations", "buckets", "working"]
    rows = []
    for layers, memory in zip(option.price.stages, option.price.memory, strict=True):
        first, last = layers[0].name or "the model", layers[-1].modules[-1]
        parts = [memory.total, memory.parameters, memory.gradients, memory.state]
        parts += (memory.activations, memory.buffers, memory.working)
        rows.append([first if len(layers) == 1 else f"{first} to {last}", *map(size_text, parts)])
    _print(header, rows, [])


def _print_device(task: Task, measured: bool) -> None:
    how = "measured here (give --flops for other devices)" if measured else "as given"
    bandwidth = f", {size_text(task.device.bandwidth)}/s of memory" if math.isfinite(task.device.bandwidth) else ""
    print(f"\ndevice: {task.device.flops / 1e9:.4g} GFLOP/s{bandwidth}, {how}; network {one_line(task.network.name)}")


def _print_options(ranking: Ranking, task: Task) -> None:
    """Print the best option of each mesh, fastest first."""
    best: dict[str, Option] = {}
    counts: dict[str, int] = {}
    for option in ranking.options:
        best.setdefault(option.candidate.name, option)
        counts[option.candidate.name] = counts.get(option.candidate.name, 0) + 1
    if not best:
        return
    print(f"\nwhat fits, the best for each mesh, of {len(ranking.options)}")
    rows, notes = [], []
    fastest = ranking.options[0].seconds
    for name, option in list(best.items())[:_MOST_ROWS]:
        times = f"{option.seconds / fastest:.2f}" if fastest > 0 else ""
        rows.append([option.name, time_text(option.seconds), times, size_text(option.price.largest)])
        notes.append("" if counts[name] == 1 else f"{counts[name] - 1} more on this mesh")
    _print(["", "step", "x best", "fullest device"], rows, notes)
    if len(best) > _MOST_ROWS:
        print(f"  ... and {len(best) - _MOST_ROWS} meshes more")


def _print_refusals(ranking: Ranking) -> None:
    if not ranking.refusals:
        return
    print("\nwhat was refused")
    rows, notes = [], []
    for each in ranking.refusals:
        rows.append([each.what, str(each.count)])
        enough = "" if math.isnan(each.needed) else f": requires at least {size_text(each.needed)} per device"
        notes.append(each.reason + enough)
    _print(["", "ways"], rows, notes)


def _print(header: list[str], rows: list[list[str]], notes: list[str]) -> None:
    """Print a table with a note after each row."""
    lines = table(header, rows).splitlines()
    behind = ["", "", *notes] if notes else [""] * len(lines)
    for line, note in zip(lines, behind, strict=True):
        print(f"  {line}   {note}".rstrip())
