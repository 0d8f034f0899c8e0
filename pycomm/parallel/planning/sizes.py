"""Layouts by layer sizes alone: which devices hold each layer, and which layers are cut over devices.

Of the layouts that fit, the one that communicates the least is chosen. Without times this can only be a rule:

1. All layers on every device (data parallelism) send gradients once a step, behind the backward pass.
2. Whole layers on different devices (inter-operator) send one activation per boundary and microbatch, and wait.
3. Layers cut over devices (intra-operator) send activations within every cut layer, in both directions, and wait.

So layers are cut over as few devices as possible, over one if they fit; then the fewest stages are taken. The remaining
devices hold replicas. In a stage of several devices, the largest layers are cut, as few as possible. The others are
replicated on the stage's devices if they fit; otherwise each is placed on one of these devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pycomm import checks

_MOST_LAYERS = 256
_MOST_DEVICES = 1 << 16
_PROBES = 100  # of the largest stage; a float has 53 bits


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on the same devices.

    Attributes:
        layers: numbers of the layers, from 1.
        cut: those of them that are split over the stage's devices.
        placed: for each other layer, the only device of the stage that holds it, from 0; empty if they are
            replicated on all of them.
        loads: bytes on each device.
    """

    layers: tuple[int, ...]
    cut: tuple[int, ...]
    placed: dict[int, int]
    loads: tuple[float, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of all layers on ``replicas`` groups of devices.

    Attributes:
        width: number of devices that hold each stage.
        spare: number of devices that hold nothing.
    """

    stages: tuple[Stage, ...]
    width: int
    replicas: int
    spare: int

    @property
    def largest(self) -> float:
        """Bytes on the fullest device."""
        return max(load for stage in self.stages for load in stage.loads)

    @property
    def cut(self) -> tuple[int, ...]:
        """Numbers of the layers that are split over devices."""
        return tuple(sorted(layer for stage in self.stages for layer in stage.cut))

    @property
    def name(self) -> str:
        """The layout in a few words."""
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        if len(self.stages) == 1 and self.width == 1:
            return f"data parallelism{copies}" if copies else "one device"
        stages = f"inter-operator, {len(self.stages)} stages"
        if self.width == 1:
            return stages + copies
        over = f"intra-operator split of {_layers(self.cut)}"
        if len(self.stages) > 1:
            return f"hybrid, {len(self.stages)} stages of {self.width} devices, {over}{copies}"
        return over + copies


@dataclass(frozen=True)
class ConsideredLayout:
    """Layout that was considered.

    Attributes:
        reason: why it is not chosen; empty for the chosen one.
        fits: whether every device has enough memory.
    """

    layout: Layout
    fits: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """Layouts in the order of preference.

    Attributes:
        chosen: the first that fits, ``None`` if none does.
        missing: bytes that all devices together lack, 0 if a layout fits.
    """

    chosen: Layout | None
    candidates: tuple[ConsideredLayout, ...]
    missing: float


def place(sizes: Sequence[float], devices: int, memory: float) -> Choice:
    """Choose the layout of layers of ``sizes`` bytes on ``devices`` devices with room for ``memory`` bytes each.

    A size includes whatever the caller counts, such as parameters and activations. See the module for the rule.
    """
    sizes = [_size(f"size of layer {number}", size) for number, size in enumerate(sizes, start=1)]
    if not 1 <= len(sizes) <= _MOST_LAYERS:
        raise ValueError(f"there are {len(sizes)} layers, wanted from 1 to {_MOST_LAYERS}")
    memory = _size("memory", memory)
    checks.integer("devices", devices, 1, _MOST_DEVICES)
    layouts = _layouts(sizes, devices, memory)
    fitting = [layout for layout in layouts if layout.largest <= memory]
    chosen = min(fitting, key=_preference, default=None)
    ordered = sorted(layouts, key=lambda layout: (layout is not chosen, layout not in fitting, _preference(layout)))
    candidates = tuple(
        ConsideredLayout(each, each in fitting, "" if each is chosen else _reason(each, chosen, memory))
        for each in ordered
    )
    return Choice(chosen, candidates, 0.0 if chosen else max(0.0, math.fsum(sizes) - devices * memory))


def _size(name: str, value: float) -> float:
    value = checks.positive(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, wanted a finite number of bytes")
    return value


def _preference(layout: Layout) -> tuple[int, int]:
    return layout.width, len(layout.stages)


def _layouts(sizes: Sequence[float], devices: int, memory: float) -> list[Layout]:
    """Return one layout of every possible kind, one that fits if the kind has any."""
    widest = max(sizes) / memory
    kinds = [_shaped(sizes, devices, memory, 1, 1), _pipeline(sizes, devices, memory)]
    total = math.fsum(sizes) / memory
    if devices > 1:
        kinds.append(_shaped(sizes, devices, memory, _fewest_idle(devices, min(devices, max(2, math.ceil(total)))), 1))
        kinds.append(_shaped(sizes, devices, memory, devices, 1))
    if devices > 3 and len(sizes) > 1:
        kinds.append(_hybrid(sizes, devices, memory, max(2, math.ceil(widest))))
    found = [kind for kind in kinds if kind is not None]
    return [layout for number, layout in enumerate(found) if layout not in found[:number]]


def _fewest_idle(devices: int, least: int, most: int | None = None) -> int:
    """Return the size of groups, from ``least`` to ``most``, that leaves the fewest of ``devices`` idle."""
    return min(range(least, (devices if most is None else most) + 1), key=lambda size: (devices % size, size))


def _pipeline(sizes: Sequence[float], devices: int, memory: float) -> Layout | None:
    """Return stages of whole layers: the fewest that fit, or the most possible if none fit."""
    most = min(devices, len(sizes))
    if most < 2:
        return None
    fewest = _stages_within(sizes, memory)
    number = most if fewest is None or fewest > most else _fewest_idle(devices, max(2, fewest), most)
    return _shaped(sizes, devices, memory, 1, number)


def _hybrid(sizes: Sequence[float], devices: int, memory: float, least: int) -> Layout | None:
    """Return stages of the fewest devices each, at least ``least``, that fit; two halves of all if none fit."""
    for width in range(least, devices // 2 + 1):
        most = min(devices // width, len(sizes))
        stages = _stages_within(sizes, width * memory)
        if stages is not None and stages <= most:
            number = min(range(max(2, stages), most + 1), key=lambda n: (devices % (n * width), n))
            return _shaped(sizes, devices, memory, width, number)
    return _shaped(sizes, devices, memory, devices // 2, 2)


def _shaped(sizes: Sequence[float], devices: int, memory: float, width: int, number: int) -> Layout:
    """Return ``number`` balanced stages on ``width`` devices each, and replicas of them on the others."""
    stages, first = [], 1
    for count in balanced(sizes, number):
        layers = range(first, first + count)
        stages.append(_stage({layer: sizes[layer - 1] for layer in layers}, width, memory))
        first += count
    replicas, spare = divmod(devices, width * number)
    return Layout(tuple(stages), width, replicas, spare)


def _stage(sizes: dict[int, float], width: int, memory: float) -> Stage:
    """Return a stage with the fewest cut layers that fits; with all layers cut if none fits."""
    layers = tuple(sizes)
    if width == 1:
        return Stage(layers, (), {}, (math.fsum(sizes.values()),))
    largest_first = sorted(layers, key=lambda layer: (-sizes[layer], layer))
    for count in range(1, len(layers) + 1):
        cut, whole = largest_first[:count], largest_first[count:]
        share = math.fsum(sizes[layer] for layer in cut) / width
        together = share + math.fsum(sizes[layer] for layer in whole)
        if together <= memory or not whole:
            return Stage(layers, tuple(sorted(cut)), {}, (together,) * width)
        placed, loads = _spread(whole, sizes, [share] * width)
        if max(loads) <= memory:
            return Stage(layers, tuple(sorted(cut)), placed, tuple(loads))
    raise AssertionError("a stage with all layers cut is returned above")


def _spread(whole: Sequence[int], sizes: dict[int, float], loads: list[float]) -> tuple[dict[int, int], list[float]]:
    """Place layers, the largest first, each on the device with the least load; return the places and the loads."""
    placed = {}
    least = [(load, device) for device, load in enumerate(loads)]
    for layer in whole:
        load, device = least[0]
        placed[layer] = device
        loads[device] = load + sizes[layer]
        heapq.heapreplace(least, (loads[device], device))
    return placed, loads


def _stages_within(sizes: Sequence[float], room: float) -> int | None:
    """Return the fewest stages of consecutive layers of at most ``room`` each; ``None`` if a layer is larger."""
    if max(sizes) > room:
        return None
    return len(_filled(sizes, room))


def _filled(sizes: Sequence[float], room: float) -> list[int]:
    """Return how many layers each stage takes if it takes as many as fit into ``room``, at least one."""
    counts: list[int] = []
    load = math.inf
    for size in sizes:
        if load + size > room:
            counts.append(0)
            load = 0.0
        counts[-1] += 1
        load += size
    return counts


def balanced(sizes: Sequence[float], number: int) -> list[int]:
    """Return how many consecutive layers each of ``number`` stages takes, for the smallest possible largest stage.

    Every stage takes at least one. Raises ValueError if there are fewer layers than stages.
    """
    if not 1 <= number <= len(sizes):
        raise ValueError(f"number is {number}, wanted from 1 to {len(sizes)} stages of {len(sizes)} layers")
    low, high = max(sizes), math.fsum(sizes) * (1 + 1e-9)
    for _ in range(_PROBES):
        middle = (low + high) / 2
        if len(_filled(sizes, middle)) <= number:
            high = middle
        else:
            low = middle
    counts = _filled(sizes, low) if len(_filled(sizes, low)) <= number else _filled(sizes, high)
    # Fewer stages than asked for: cutting one that has two layers makes none larger.
    while len(counts) < number:
        longest = counts.index(max(counts))
        counts[longest : longest + 1] = [counts[longest] - counts[longest] // 2, counts[longest] // 2]
    return counts


def _reason(layout: Layout, chosen: Layout | None, memory: float) -> str:
    if layout.largest > memory:
        return "does not fit"
    assert chosen is not None, "this layout fits, so one is chosen"
    if layout.width > chosen.width:
        finer = "cuts no layer" if chosen.width == 1 else f"cuts them over {chosen.width}"
        return f"cuts layers over {layout.width} devices where the choice {finer}"
    return f"needs {len(layout.stages)} stages where the choice needs {len(chosen.stages)}"


def _layers(numbers: Sequence[int]) -> str:
    """Write numbers of layers in words: "layer 1", "layers 1, 3 to 5"."""
    if not numbers:
        return "no layer"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"
