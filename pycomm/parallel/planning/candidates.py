"""Candidates: possible splits of a training task over a number of devices."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from pycomm import checks
from pycomm.schedule import NETWORKS, Network
from pycomm.schedule.network import DEFAULT_NETWORK

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
