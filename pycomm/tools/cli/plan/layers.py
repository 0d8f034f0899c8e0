"""``pycomm plan layers``: says which devices hold each of the layers of given sizes, and which layers are cut.

Of the layouts that fit, the one that communicates the least is chosen. Without times this can only be a rule:

1. All layers on every device (data parallelism) send gradients once a step, behind the backward pass.
2. Whole layers on different devices (inter-operator) send one activation per boundary and microbatch, and wait.
3. Layers cut over devices (intra-operator) send activations within every cut layer, in both directions, and wait.

So layers are cut over as few devices as possible, over one if they fit; then the fewest stages are taken. The remaining
devices hold replicas. In a stage of several devices, the largest layers are cut, as few as possible. The others are
replicated on the stage's devices if they fit; otherwise each is placed on one of these devices.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pycomm import checks
from pycomm.descriptions import size_text
from pycomm.tools.cli.table import table

_MOST_LAYERS, _MOST_DEVICES = 256, 1 << 16
_PROBES = 100  # of the largest stage; a float has 53 bits
_MOST_LINES = 16  # of one layout's stages


class Stage(NamedTuple):
    """Consecutive layers on the same devices.

    Attributes:
        layers: numbers of the layers, from 1. cut: the ones that are split over the stage's devices.
        placed: for each other layer, the only device of the stage that holds it, from 0; empty if they are
            replicated on all of them.
        loads: bytes on each device.
    """

    layers: tuple[int, ...]
    cut: tuple[int, ...]
    placed: dict[int, int]
    loads: tuple[float, ...]


class Placement(NamedTuple):
    """All layers on ``replicas`` groups of devices; ``width`` devices hold each stage, ``spare`` ones nothing."""

    stages: tuple[Stage, ...]
    width: int
    replicas: int
    spare: int

    @property
    def largest(self) -> float:
        """Bytes on the fullest device."""
        return max(load for stage in self.stages for load in stage.loads)

    @property
    def name(self) -> str:
        """The layout in a few words."""
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        count = len(self.stages)
        if self.width == 1:
            alone = "data parallelism" if copies else "one device"
            return (alone if count == 1 else f"inter-operator, {count} stages") + copies
        over = f"intra-operator split of {_numbered('layer', [layer for stage in self.stages for layer in stage.cut])}"
        return (f"hybrid, {count} stages of {self.width} devices, " if count > 1 else "") + over + copies


def run(arguments: argparse.Namespace) -> int:
    """Print the layout that is chosen and all that was considered; return the exit code, 1 if none fits."""
    sizes, devices, memory = arguments.sizes, arguments.devices, arguments.memory
    chosen, candidates = place(sizes, devices, memory)
    if chosen is None:
        total = math.fsum(sizes)
        each, room, over = size_text(total / devices), size_text(memory), size_text(max(0.0, total - devices * memory))
        print(f"chosen: nothing, as {size_text(total)} do not fit on {devices} x {room}: {over} too much\n")
        wanted = f"Wanted {math.ceil(total / memory)} devices of {room}, or {devices} of {each}."
        print(f"Even cut evenly, the layers take {each} per device. {wanted}")
    else:
        print(f"chosen: {chosen.name}\n\n{_why(chosen, sizes, memory)}")
        _print_layout(chosen, memory)
    print("\nall that was considered")
    rows = [(x.name, str(x.width * len(x.stages)), size_text(x.largest)) for x, _ in candidates]
    reasons = ["", "", "", *(reason or "chosen" for _, reason in candidates)]  # beside the header's lines
    lines = table(["layout", "devices\nper replica", "bytes on\nthe fullest"], rows).splitlines()
    for line, reason in zip(lines, reasons, strict=True):
        print(f"  {line}   {reason}".rstrip())
    return 0 if chosen else 1


def place(sizes: Sequence[float], devices: int, memory: float) -> tuple[Placement | None, list[tuple[Placement, str]]]:
    """Choose the layout of layers of ``sizes`` bytes on ``devices`` devices with room for ``memory`` bytes each.

    Returns the layout, ``None`` if none fits; and all that were considered, in the order of preference, with why they
    are not chosen. A size includes whatever the caller counts, such as parameters and activations.
    """
    if not 1 <= len(sizes) <= _MOST_LAYERS:
        raise ValueError(f"there are {len(sizes)} layers, wanted from 1 to {_MOST_LAYERS}")
    checks.integer("devices", devices, 1, _MOST_DEVICES)
    layouts = sorted(_layouts(sizes, devices, memory), key=lambda x: (x.largest > memory, x.width, len(x.stages)))
    chosen = layouts[0] if layouts[0].largest <= memory else None
    return chosen, [(each, "" if each is chosen else _reason(each, chosen, memory)) for each in layouts]


def _layouts(sizes: Sequence[float], devices: int, memory: float) -> list[Placement]:
    """Return one layout of every possible kind, one that fits if the kind has any."""
    kinds = [(1, 1)]  # devices of a stage, and stages
    most = min(devices, len(sizes))
    if most > 1:  # the fewest stages of whole layers that fit, or the most possible if none fit
        fewest = _stages_within(sizes, memory)
        kinds.append((1, most if fewest > most else _fewest_idle(devices, max(2, int(fewest)), most)))
    if devices > 1:
        least = max(2, math.ceil(math.fsum(sizes) / memory))
        kinds += [(_fewest_idle(devices, min(devices, least), devices), 1), (devices, 1)]
    if devices > 3 and len(sizes) > 1:
        kinds.append(_hybrid(sizes, devices, memory))
    return [_shaped(sizes, devices, memory, *kind) for kind in dict.fromkeys(kinds)]


def _hybrid(sizes: Sequence[float], devices: int, memory: float) -> tuple[int, int]:
    """Return the fewest devices of each stage that fit, at least two, and stages; two halves of all if none fit."""
    for width in range(max(2, math.ceil(max(sizes) / memory)), devices // 2 + 1):
        most, fewest = min(devices // width, len(sizes)), _stages_within(sizes, width * memory)
        if fewest <= most:
            return width, min(range(max(2, int(fewest)), most + 1), key=lambda n: (devices % (n * width), n))
    return devices // 2, 2


def _fewest_idle(devices: int, least: int, most: int) -> int:
    """Return the size of groups, from ``least`` to ``most``, that leaves the fewest of ``devices`` idle."""
    return min(range(least, most + 1), key=lambda size: (devices % size, size))


def _shaped(sizes: Sequence[float], devices: int, memory: float, width: int, number: int) -> Placement:
    """Return ``number`` balanced stages on ``width`` devices each, and replicas of them on the others."""
    stages, first = [], 1
    for count in balanced(sizes, number):
        stages.append(_stage({layer: sizes[layer - 1] for layer in range(first, first + count)}, width, memory))
        first += count
    return Placement(tuple(stages), width, *divmod(devices, width * number))


def _stage(sizes: dict[int, float], width: int, memory: float) -> Stage:
    """Return a stage with the fewest cut layers that fits; with all layers cut if none fits."""
    layers, largest_first = tuple(sizes), sorted(sizes, key=lambda layer: (-sizes[layer], layer))
    for count in range(width > 1, len(layers) + 1):
        cut, whole = tuple(sorted(largest_first[:count])), largest_first[count:]
        share = math.fsum(sizes[layer] for layer in cut) / width
        together = share + math.fsum(sizes[layer] for layer in whole)
        if width == 1 or together <= memory or not whole:
            return Stage(layers, cut, {}, (together,) * width)
        placed: dict[int, int] = {}  # the largest first, each on the device with the least load
        loads = [(share, device) for device in range(width)]
        for layer in whole:
            load, placed[layer] = loads[0]
            heapq.heapreplace(loads, (load + sizes[layer], placed[layer]))
        if max(loads)[0] <= memory:
            return Stage(layers, cut, placed, tuple(load for load, _ in sorted(loads, key=lambda pair: pair[1])))
    raise AssertionError("a stage with all layers cut is returned above")


def _stages_within(sizes: Sequence[float], room: float) -> float:
    """Return the fewest stages of consecutive layers of at most ``room`` each; infinity if a layer is larger."""
    return math.inf if max(sizes) > room else len(_filled(sizes, room))


def _filled(sizes: Sequence[float], room: float) -> list[int]:
    """Return how many layers each stage takes if it takes as many as fit into ``room``, at least one."""
    counts, load = list[int](), math.inf
    for size in sizes:
        if load + size > room:
            counts, load = [*counts, 0], 0.0
        counts[-1] += 1
        load += size
    return counts


def balanced(sizes: Sequence[float], number: int) -> list[int]:
    """Return how many consecutive layers each of ``number`` stages takes, for the smallest possible largest stage."""
    low, high = math.nextafter(max(sizes), 0.0), math.fsum(sizes) * (1 + 1e-9)
    for _ in range(_PROBES):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(sizes, middle)) <= number else (middle, high)
    counts = _filled(sizes, high)
    while len(counts) < number:  # cutting a stage that has two layers makes none larger
        longest = counts.index(max(counts))
        counts[longest : longest + 1] = [counts[longest] - counts[longest] // 2, counts[longest] // 2]
    return counts


def _reason(layout: Placement, chosen: Placement | None, memory: float) -> str:
    if chosen is None or layout.largest > memory:
        return f"does not fit: {size_text(layout.largest - memory)} too much"
    if layout.width > chosen.width:
        finer = "cuts no layer" if chosen.width == 1 else f"cuts them over {chosen.width}"
        return f"cuts layers over {layout.width} devices where the choice {finer}"
    return f"needs {len(layout.stages)} stages where the choice needs {len(chosen.stages)}"


def _why(layout: Placement, sizes: Sequence[float], memory: float) -> str:
    """Say why no simpler layout is possible."""
    total, room = size_text(math.fsum(sizes)), size_text(memory)
    if layout.width == 1 and len(layout.stages) == 1:
        return f"All layers together, {total}, fit on one device of {room}."
    large = [number for number, size in enumerate(sizes, start=1) if size > memory]
    text = f"All layers together, {total}, do not fit on one device of {room}"
    if layout.width == 1:
        return f"{text}, but each single layer does."
    if large:
        return f"{text}, nor does layer {large[0]} alone, {size_text(sizes[large[0] - 1])}."
    return f"{text}; each single layer does, but not in stages of whole layers on so few devices."


def _print_layout(layout: Placement, memory: float) -> None:
    lines = [line for number, stage in enumerate(layout.stages) for line in _stage_lines(layout, stage, number)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} lines more"]
    group = layout.width * len(layout.stages)
    if layout.replicas > 1:
        each = "1 device" if group == 1 else f"{group} devices"
        lines.append(f"{layout.replicas} times, for {layout.replicas} parts of the batch: {each} each")
    if layout.spare:
        lines.append(f"{layout.spare} device{'s are' if layout.spare > 1 else ' is'} left over")
    print(*(f"  {line}" for line in lines), sep="\n")
    print(f"The fullest device holds {size_text(layout.largest)} of {size_text(memory)}.")


def _stage_lines(layout: Placement, stage: Stage, number: int) -> list[str]:
    """Say what the stage's devices hold; devices that hold the same share a line."""
    held: dict[tuple[str, float], list[int]] = {}
    for device, load in enumerate(stage.loads):
        whole = [x for x in stage.layers if x not in stage.cut and stage.placed.get(x, device) == device]
        parts = [*(f"1/{layout.width} of layer {x}" for x in stage.cut), *(f"layer {x}" for x in whole)]
        held.setdefault((", ".join(parts), load), []).append(1 + number * layout.width + device)
    return [f"{_numbered('device', found)}: {what} ({size_text(load)})" for (what, load), found in held.items()]


def _numbered(word: str, numbers: Sequence[int]) -> str:
    """Write numbers in words: "layer 1", "layers 1, 3 to 5"."""
    consecutive = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in consecutive]
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
