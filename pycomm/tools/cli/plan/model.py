"""``pycomm plan model``: how to train a model on a number of devices."""

from __future__ import annotations

import argparse
import math

from pycomm import schedule
from pycomm.descriptions import size_text
from pycomm.parallel.auto import styles_of
from pycomm.parallel.planning.candidates import Device, Task, measure_device
from pycomm.parallel.planning.choose import Option, Ranking, choose
from pycomm.parallel.planning.profile import make_without_memory, profile
from pycomm.tools.cli.plan.report import require_free, time_text
from pycomm.tools.cli.plan.sources import load_source
from pycomm.tools.cli.table import table
from pycomm.untrusted import naming, one_line

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
