"""``pycomm plan layers``: places layers of given sizes on devices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from pycomm.descriptions import size_text
from pycomm.parallel.planning.sizes import Choice, Layout, Stage, place
from pycomm.tools.cli.table import table

_MOST_LINES = 16  # of one layout's stages


def run(arguments: argparse.Namespace) -> int:
    """Print the layout; return the exit code, 1 if the layers do not fit."""
    return 0 if print_layers(arguments.sizes, arguments.devices, arguments.memory) else 1


def print_layers(sizes: Sequence[float], devices: int, memory: float) -> bool:
    """Print a layout of layers of ``sizes`` bytes on devices of ``memory`` bytes; return whether one fits."""
    choice = place(sizes, devices, memory)
    total = math.fsum(sizes)
    if choice.chosen is None:
        each, wanted = size_text(total / devices), math.ceil(total / memory)
        print(
            f"chosen: nothing, as {size_text(total)} do not fit on {devices} x {size_text(memory)}: "
            f"{size_text(choice.missing)} too much\n"
            f"\nEven cut evenly, the layers take {each} per device. Wanted {wanted} devices of {size_text(memory)}, "
            f"or {devices} of {each}."
        )
    else:
        print(f"chosen: {choice.chosen.name}\n\n{_why(choice.chosen, sizes, memory)}")
        _print_layout(choice.chosen, memory)
    _print_candidates(choice, memory)
    return choice.chosen is not None


def _why(layout: Layout, sizes: Sequence[float], memory: float) -> str:
    """Say why no simpler layout is possible."""
    total, room = size_text(math.fsum(sizes)), size_text(memory)
    if layout.width == 1 and len(layout.stages) == 1:
        return f"All layers together, {total}, fit on one device of {room}."
    large = [number for number, size in enumerate(sizes, start=1) if size > memory]
    text = f"All layers together, {total}, do not fit on one device of {room}"
    if layout.width == 1:
        return f"{text}, but each layer does by itself."
    if large:
        of = size_text(sizes[large[0] - 1])
        others = f", and {len(large) - 1} more do not either" if len(large) > 1 else ""
        return f"{text}, nor does layer {large[0]}, {of}, by itself{others}."
    return f"{text}; each layer does by itself, but not in stages of whole layers on so few devices."


def _print_layout(layout: Layout, memory: float) -> None:
    lines = [line for number, stage in enumerate(layout.stages) for line in _stage_lines(layout, stage, number)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} lines more"]
    for line in lines:
        print(f"  {line}")
    group = layout.width * len(layout.stages)
    if layout.replicas > 1:
        each = "1 device" if group == 1 else f"{group} devices"
        print(f"  {layout.replicas} times, for {layout.replicas} parts of the batch: {each} each")
    if layout.spare:
        print(f"  {layout.spare} device{'s are' if layout.spare > 1 else ' is'} left over")
    print(f"The fullest device holds {size_text(layout.largest)} of {size_text(memory)}.")


def _stage_lines(layout: Layout, stage: Stage, number: int) -> list[str]:
    """Say what the stage's devices hold; devices that hold the same share a line."""
    first = 1 + number * layout.width
    held: dict[tuple[str, float], list[int]] = {}
    for device, load in enumerate(stage.loads):
        whole = [layer for layer in stage.layers if layer not in stage.cut]
        if stage.placed:
            whole = [layer for layer in whole if stage.placed[layer] == device]
        parts = [f"1/{layout.width} of layer {layer}" for layer in stage.cut]
        held.setdefault((", ".join([*parts, *(f"layer {layer}" for layer in whole)]), load), []).append(first + device)
    return [f"{_devices(devices)}: {what} ({size_text(load)})" for (what, load), devices in held.items()]


def _devices(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    if len(numbers) == 2:
        return f"devices {numbers[0]} and {numbers[1]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"devices {numbers[0]} to {numbers[-1]}"
    return f"devices {', '.join(map(str, numbers))}"


def _print_candidates(choice: Choice, memory: float) -> None:
    print("\nall that was considered")
    rows, reasons = [], ["", ""]  # beside the header's lines
    for each in choice.candidates:
        over = size_text(each.layout.largest - memory)
        reasons.append((each.reason or "chosen") + ("" if each.fits else f": {over} too much"))
        devices = each.layout.width * len(each.layout.stages)
        rows.append([each.layout.name, str(devices), size_text(each.layout.largest)])
    lines = table(["layout", "devices\nper replica", "bytes on\nthe fullest"], rows).splitlines()
    for line, reason in zip(lines, ["", *reasons], strict=True):
        print(f"  {line}   {reason}".rstrip())
