"""Candidates: possible splits of a training task over devices. Layers of a model: bytes and work of each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from pycomm import checks
from pycomm.schedule import NETWORKS, Network
from pycomm.schedule.network import DEFAULT_NETWORK


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
        for work, spent in zip((layer.forward, layer.backward), taken, strict=True):
            divided = work.split / work.total if work.total > 0 else float(layer.inside)
            works.append(Part(spent * (1 - divided), spent * divided))
        scale = size / samples
        forward, backward = (Part(scale * work.whole, scale * work.split) for work in works)
        return replace(layer, forward=forward, backward=backward)

    first, second = (
        tuple(measured(layer, taken, size) for layer, taken in zip(layers, seconds, strict=True))
        for layers, size in zip(profile.layers, profile.sizes, strict=True)
    )
    return replace(profile, layers=(first, second), measured=True)


OPTIMIZERS = {"sgd": 0, "momentum": 1, "lars": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""State elements per parameter, by optimizer; ``momentum`` is SGD with momentum."""

_MOST_MICROBATCHES = 256
_WIDTH = 1024
_BYTES = 1 << 27  # more than caches hold
_REPEATS = 7


@dataclass(frozen=True)
class Device:
    """Speed of one device.

    Attributes:
        flops: FLOPs per second; not used for work that was measured in seconds.
        bandwidth: bytes per second of its memory; ``inf``: the optimizer's step takes no time.
    """

    flops: float
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            checks.positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task and its devices.

    Attributes:
        devices: number of devices; all are used. memory: bytes of each.
        batch: samples of a step, over all devices.
        device: its speed.
        network: the network between the devices.
        optimizer: one of ``OPTIMIZERS``.
        overlap: fraction of gradient averaging that the backward pass hides.
        cores: how many devices can compute at once, if they share the cores of one host; ``None`` for all.
    """

    devices: int
    memory: float
    batch: int
    device: Device
    network: Network = field(default_factory=lambda: NETWORKS[DEFAULT_NETWORK])
    optimizer: str = "adam"
    overlap: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        checks.integer("devices", self.devices, 1, 1 << 16)
        checks.integer("batch", self.batch, 1)
        checks.positive("memory", self.memory)
        checks.bounded("overlap", self.overlap, "from 0 to 1", lambda share: 0 <= share <= 1)
        if self.cores is not None:
            checks.integer("cores", self.cores, 1)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}, wanted one of {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to split a task: ``pp`` stages, each on ``dp`` x ``tp`` devices.

    Attributes:
        microbatches: number of parts that a replica's batch is cut into.
        recompute: whether only the layers' inputs are saved for the backward pass, and the rest is recomputed.
        sharded_optimizer: whether each of the ``dp`` replicas keeps a part of the optimizer's state.
    """

    pp: int
    tp: int
    dp: int
    microbatches: int = 1
    recompute: bool = False
    sharded_optimizer: bool = False

    @property
    def name(self) -> str:
        """The mesh in words: "dp=4, tp=2"; "one device"."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return sizes or "one device"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh that are not 1."""
        return {name: size for name, size in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp)) if size > 1}


def meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (pp, tp, dp) with the product ``devices``."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for pp in divisors:
        for tp in divisors:
            if devices // pp % tp == 0:
                yield pp, tp, devices // pp // tp


def candidates(pp: int, tp: int, dp: int, batch: int) -> list[Candidate]:
    """Return all candidates on one mesh for ``batch`` samples a step; none if ``dp`` does not divide ``batch``."""
    if batch % dp:
        return []
    own = batch // dp
    parts = [count for count in range(1, min(own, _MOST_MICROBATCHES) + 1) if own % count == 0]
    return [
        Candidate(pp, tp, dp, count, recompute, sharded)
        for count in parts
        for recompute in (False, True)
        for sharded in ((False, True) if dp > 1 else (False,))
    ]


def measure_device() -> Device:
    """Measure float32 matrix products and copies on this machine, with torch's number of threads. Takes a second.

    Most operations of a model are slower than products of large matrices.
    """
    a, b = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    product = torch.empty(_WIDTH, _WIDTH)
    seconds = _median(lambda: torch.mm(a, b, out=product))
    source, target = torch.ones(_BYTES // 4), torch.ones(_BYTES // 4)
    copy = _median(lambda: target.copy_(source))
    return Device(2.0 * _WIDTH**3 / seconds, 2.0 * _BYTES / copy)


def _median(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
