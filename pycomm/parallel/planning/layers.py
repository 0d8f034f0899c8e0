"""Layers of a model for the planner: bytes and work of each, and their growth with the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Part:
    """Quantity of a layer whose operators are split over devices.

    Attributes:
        whole: part that every device has in full.
        split: part that is divided among the devices.
    """

    whole: float = 0.0
    split: float = 0.0

    def over(self, devices: int) -> float:
        """Return what one of ``devices`` devices has."""
        return self.whole + self.split / devices

    @property
    def total(self) -> float:
        """What a single device has."""
        return self.whole + self.split

    def __add__(self, other: Part) -> Part:
        return Part(self.whole + other.whole, self.split + other.split)

    def map(self, function: Callable[[float, float], float], other: Part) -> Part:
        """Return ``function`` of both quantities, part by part."""
        return Part(function(self.whole, other.whole), function(self.split, other.split))


@dataclass(frozen=True)
class Layer:
    """Consecutive modules that stay together, for one microbatch.

    Attributes:
        modules: their names in the model, in the order in which they run; the first is called by the model.
        count: number of elements of parameters.
        parameters: bytes of parameters; trainable: of those that have a gradient.
        activations: bytes saved for the backward pass, in storages that no earlier layer saves.
        output: bytes passed to the next layer.
        keeps_output: whether ``activations`` include the output; output_kept: whether those of a later layer do.
        forward, backward: work, in FLOPs; in seconds if it was measured.
        inside: whether an unsplit layer lies between two split ones, so that its work is divided, too.
        reduced_forward, reduced_backward: bytes of each tensor that the devices of a split sum in that pass.
    """

    modules: tuple[str, ...]
    count: Part = Part()
    parameters: Part = Part()
    trainable: Part = Part()
    activations: Part = Part()
    output: float = 0.0
    keeps_output: bool = False
    output_kept: bool = False
    forward: Part = Part()
    backward: Part = Part()
    inside: bool = False
    reduced_forward: tuple[float, ...] = ()
    reduced_backward: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Name of the first module."""
        return self.modules[0]


@dataclass(frozen=True)
class Profile:
    """Layers of a model for two sizes of a microbatch; for other sizes, all quantities are linear.

    Attributes:
        sizes: the two numbers of samples, the smaller first.
        layers: the layers for each.
        split: style of each module that is split over devices, by name.
        measured: whether work is in seconds.
    """

    sizes: tuple[int, int]
    layers: tuple[tuple[Layer, ...], tuple[Layer, ...]]
    split: dict[str, str]
    measured: bool = False

    def at(self, samples: int) -> tuple[Layer, ...]:
        """Return the layers for a microbatch of ``samples`` samples."""
        share = (samples - self.sizes[0]) / (self.sizes[1] - self.sizes[0])
        return tuple(_between(small, large, share) for small, large in zip(*self.layers, strict=True))


def _between(small: Layer, large: Layer, share: float) -> Layer:
    def line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    changes: dict[str, object] = {}
    for each in fields(Layer):
        a, b = getattr(small, each.name), getattr(large, each.name)
        if isinstance(a, Part):
            changes[each.name] = a.map(line, b)
        elif isinstance(a, float):
            changes[each.name] = line(a, b)
        elif each.name.startswith("reduced"):
            changes[each.name] = tuple(line(x, y) for x, y in zip(a, b, strict=True))
    return replace(small, **changes)  # type: ignore[arg-type]


def with_seconds(profile: Profile, samples: int, seconds: Sequence[tuple[float, float]]) -> Profile:
    """Return ``profile`` with measured work: seconds of the forward and backward pass of each layer.

    The seconds are of a microbatch of ``samples`` samples, and scale with its size. The devices divide the same share
    of the seconds as of the FLOPs.
    """

    def measured(layer: Layer, taken: tuple[float, float], size: int) -> Layer:
        works = []
        for work, time in zip((layer.forward, layer.backward), taken, strict=True):
            divided = work.split / work.total if work.total > 0 else float(layer.inside)
            works.append(Part(time * (1 - divided), time * divided))
        scale = size / samples
        forward, backward = (Part(scale * work.whole, scale * work.split) for work in works)
        return replace(layer, forward=forward, backward=backward)

    first, second = (
        tuple(measured(layer, taken, size) for layer, taken in zip(layers, seconds, strict=True))
        for layers, size in zip(profile.layers, profile.sizes, strict=True)
    )
    return replace(profile, layers=(first, second), measured=True)
