"""Prices: the memory of every device and the seconds of a step, for one candidate.

Memory of a device: its part of the parameters, gradients and optimizer state; activations saved for backward, for every
microbatch that the pipeline has in flight; gradient buckets; buffers for the messages of all microbatches, which
torch's runtime allocates at once; and one layer's activation gradients. With one microbatch, activations are freed
while gradients are allocated: only the peak of their sum counts.

Time of a step: a simulation of the pipeline's table with the stages' work, the all-reduces of split operators, and the
messages between stages; then the exposed part of the gradients' averaging, and the optimizer's step, which reads and
writes every number once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from pycomm.compression.base import Operation
from pycomm.parallel.planning.candidates import OPTIMIZERS, Candidate, Device, Layer, Task
from pycomm.schedule import Network, Ranking, pipeline, rank_algorithms
from pycomm.schedule.choose import SIZES
from pycomm.training.cost.planning import SimulatedLink, per_host_of

Floats = npt.NDArray[np.float64]

_PASSES = {"sgd": 3, "momentum": 5, "lars": 6, "rmsprop": 5, "adagrad": 5, "adam": 7, "adamw": 7, "lamb": 9}
"""How often an optimizer's step reads or writes a number per parameter: weights, gradients and states."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; see the module."""

    parameters: float
    gradients: float
    state: float
    activations: float
    buffers: float
    working: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.state + self.activations + self.buffers + self.working


@dataclass(frozen=True)
class Times:
    """Seconds of a step: forward and backward passes with their waits, exposed averaging, the optimizer's step."""

    passes: float
    averaging: float
    update: float

    @property
    def total(self) -> float:
        return self.passes + self.averaging + self.update


@dataclass(frozen=True)
class Price:
    """Price of a candidate.

    Attributes:
        stages: layers of each stage.
        memory: of a device of each stage.
        gradient_bytes: bytes that a device averages over the replicas in a step, on the stage with the most.
    """

    candidate: Candidate
    stages: tuple[tuple[Layer, ...], ...]
    memory: tuple[Memory, ...]
    times: Times
    gradient_bytes: float

    @property
    def largest(self) -> float:
        """Bytes of the fullest device."""
        return max(memory.total for memory in self.memory)


class Links:
    """Communication times on a network, for groups of devices that are ``stride`` ranks apart."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._groups = cache(self._group)
        self._rankings = cache(self._ranking)

    def all_reduce(self, ranks: int, stride: int, nbytes: float) -> float:
        """Return the seconds of the fastest all-reduce of ``nbytes``."""
        return 0.0 if ranks == 1 or nbytes == 0 else self._rankings(ranks, stride).at(nbytes)[0][1]

    def operation(self, ranks: int, stride: int, operation: Operation) -> float:
        """Return the seconds of any collective."""
        return self._groups(ranks, stride).seconds(operation)

    def per_host(self, ranks: int, stride: int) -> int:
        """Return how many ranks of such a group share a host, if several hosts have equally many; else 1."""
        return per_host_of(self._network_of(stride), ranks)

    def message(self, first: int, stride: int, nbytes: float) -> float:
        """Return the seconds of messages of ``nbytes`` from ranks ``first`` to ``first + stride - 1``, each to the
        rank ``stride`` above it.
        """
        src = np.arange(first, first + stride)
        kind = int(self._network.links(src, src + stride).max())
        link = (self._network.within_host, self._network.between_hosts)[kind]
        return link.alpha + link.beta * nbytes

    def _network_of(self, stride: int) -> Network:
        """Return the network for a group whose ranks are ``stride`` apart."""
        per_host = self._network.per_host
        return self._network.with_hosts_of(None if per_host is None else max(1, per_host // stride))

    def _group(self, ranks: int, stride: int) -> SimulatedLink:
        return SimulatedLink(ranks, self._network_of(stride))

    def _ranking(self, ranks: int, stride: int) -> Ranking:
        return rank_algorithms(ranks, self._network_of(stride), (0.0, *SIZES))  # one pass for all sizes


class Rows:
    """Quantities of a model's layers as arrays, with operators split over ``tp`` devices."""

    def __init__(self, layers: Sequence[Layer], tp: int, device: Device, measured: bool, links: Links) -> None:
        self.layers = tuple(layers)
        speed = 1.0 if measured else device.flops

        def row(name: str) -> Floats:
            return np.array([getattr(layer, name).over(tp) for layer in layers])

        self.parameters, self.trainable, self.kept = (row(name) for name in ("parameters", "trainable", "activations"))
        self.forward, self.backward = row("forward") / speed, row("backward") / speed
        for number, layer in enumerate(layers):
            self.forward[number] += sum(links.all_reduce(tp, 1, nbytes) for nbytes in layer.reduced_forward)
            self.backward[number] += sum(links.all_reduce(tp, 1, nbytes) for nbytes in layer.reduced_backward)
        self.output = np.array([layer.output for layer in layers])
        self.input = np.concatenate([[0.0], self.output[:-1]])
        # torch keeps a stage's output until the backward pass, even if no layer needs it. A stage's input stays in the
        # receive buffer, even while a layer saves it.
        kept = np.array([layer.output_kept for layer in layers])
        self.received = -self.input * np.concatenate([[False], kept[:-1]])
        self.sent = self.output * ~np.array([layer.keeps_output for layer in layers])
        self.sent[-1] = 0.0

    @cached_property
    def trained(self) -> npt.NDArray[np.bool_]:
        """``[layers, layers]``: whether a layer from the first index to the second has trainable parameters."""
        return np.asarray(sums(self.trainable) > 0)


class Pricer:
    """Prices candidates for one task; shared parts are computed once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.links = Links(task.network)

    def price(self, candidate: Candidate, rows: Rows) -> Price | float:
        """Return the price; if the candidate does not fit, the least bytes that its fullest device requires."""
        memory = self._stage_bytes(candidate, rows)
        costs = np.broadcast_to(self._stage_seconds(candidate, rows), memory.shape)
        allowed = np.broadcast_to(rows.trained, memory.shape)
        cuts = cheapest_cut(costs, allowed & (memory <= self.task.memory))
        if cuts is None:
            cuts = cheapest_cut(memory, allowed)
            if cuts is None:
                return float("inf")
            ends = [*cuts[1:], len(rows.layers)]
            return float(max(memory[n, a, b - 1] for n, (a, b) in enumerate(zip(cuts, ends, strict=True))))
        return self.of_stages(candidate, rows, cuts)

    def of_stages(self, candidate: Candidate, rows: Rows, cuts: Sequence[int]) -> Price:
        """Return the price with stages that begin at the layers ``cuts``, whether they fit or not."""
        ranges = [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(rows.layers)], strict=True)]
        memory = tuple(self.memory(candidate, rows, number, part) for number, part in enumerate(ranges))
        gradients = max(float(rows.trainable[part].sum()) for part in ranges)
        exchange = self.links.all_reduce(candidate.dp, candidate.tp, gradients)
        divided = candidate.dp if candidate.sharded_optimizer else 1
        passes = _PASSES[self.task.optimizer] * gradients
        crowd = 1.0 if self.task.cores is None else max(1.0, self.task.devices / self.task.cores)
        times = Times(
            passes=self._passes(candidate, rows, ranges),
            averaging=exchange * (1 - self.task.overlap),
            update=passes / divided / self.task.device.bandwidth * crowd,
        )
        return Price(candidate, tuple(rows.layers[part] for part in ranges), memory, times, gradients)

    def memory(self, candidate: Candidate, rows: Rows, stage: int, part: slice) -> Memory:
        """Return the memory of a device of one stage, the layers of ``part``."""
        trainable = float(rows.trainable[part].sum())
        states = OPTIMIZERS[self.task.optimizer] / (candidate.dp if candidate.sharded_optimizer else 1)
        one = float(self._kept(candidate, rows)[part.start, part.stop - 1])
        kept = one * min(candidate.pp - stage, candidate.microbatches)
        kept += float(rows.kept[part].max()) if candidate.recompute else 0.0
        messages = float(self._messages(candidate, rows, stage)[part.start, part.stop - 1])
        gradients = trainable
        if _frees_while_computing(candidate):
            swept = float(sweeps(rows.kept, rows.trainable)[part.start, part.stop - 1])
            gradients = swept - float(rows.kept[part].sum())
        return Memory(
            parameters=float(rows.parameters[part].sum()),
            gradients=gradients,
            state=states * trainable,
            activations=kept,
            buffers=(trainable if candidate.dp > 1 else 0.0) + messages,
            working=float((rows.input + rows.output)[part].max()),
        )

    def _kept(self, candidate: Candidate, rows: Rows) -> Floats:
        """Return ``[layers, layers]``: bytes saved per microbatch by a stage of these layers."""
        if candidate.recompute:
            return np.asarray(sums(rows.input) + (rows.output[None, :] if candidate.pp > 1 else 0.0))
        ends = rows.sent[None, :] if candidate.pp > 1 else 0.0
        return np.asarray(sums(rows.kept) + rows.received[:, None] + ends)

    def _messages(self, candidate: Candidate, rows: Rows, stage: int) -> Floats:
        """Return ``[layers, layers]``: bytes of the stage's receive buffers for activations and gradients."""
        given = rows.input[:, None] if stage > 0 else 0.0
        back = rows.output[None, :] if stage < candidate.pp - 1 else 0.0
        count = len(rows.layers)
        return candidate.microbatches * (np.zeros((count, count)) + given + back)

    def _stage_bytes(self, candidate: Candidate, rows: Rows) -> Floats:
        """Return ``[stages, layers, layers]``: the bytes of a device with these layers as that stage."""
        states = OPTIMIZERS[self.task.optimizer] / (candidate.dp if candidate.sharded_optimizer else 1)
        per_trainable = states + (1 if candidate.dp > 1 else 0)
        fixed = sums(rows.parameters + per_trainable * rows.trainable) + maxima(rows.input + rows.output)
        if _frees_while_computing(candidate):
            fixed = fixed + sweeps(rows.kept, rows.trainable) - sums(rows.kept)
        else:
            fixed = fixed + sums(rows.trainable)
        if candidate.recompute:
            fixed = fixed + maxima(rows.kept)
        under_way = np.minimum(candidate.pp - np.arange(candidate.pp), candidate.microbatches)
        messages = np.stack([self._messages(candidate, rows, stage) for stage in range(candidate.pp)])
        return np.asarray(fixed[None] + messages + under_way[:, None, None] * self._kept(candidate, rows)[None])

    def _stage_seconds(self, candidate: Candidate, rows: Rows) -> Floats:
        again = rows.forward if candidate.recompute else 0.0
        return sums(rows.forward + rows.backward + again)[None]

    def _passes(self, candidate: Candidate, rows: Rows, ranges: Sequence[slice]) -> float:
        forward = np.array([rows.forward[part].sum() for part in ranges])
        backward = np.array([rows.backward[part].sum() for part in ranges])
        if candidate.recompute:
            backward = backward + forward
        beside = candidate.dp * candidate.tp  # devices that compute one stage at the same time
        cores = self.task.cores
        if cores is not None and beside > cores:
            forward, backward = forward * beside / cores, backward * beside / cores
        if candidate.pp == 1:
            return float(candidate.microbatches * (forward[0] + backward[0]))
        transfer = [
            self.links.message(stage * beside, beside, float(rows.output[part.stop - 1]))
            for stage, part in enumerate(ranges[:-1])
        ]
        table = _table(candidate.pp, candidate.microbatches)
        each = None if cores is None else max(1, cores // beside)
        found = pipeline.simulate(table, forward=forward, backward=backward, transfer=transfer, cores=each)
        return float(found.seconds)


def _frees_while_computing(candidate: Candidate) -> bool:
    """Return whether activations are freed while gradients are allocated: the only microbatch saved them."""
    return candidate.microbatches == 1 and not candidate.recompute


@cache
def _table(ranks: int, microbatches: int) -> pipeline.Pipeline:
    return pipeline.one_f_one_b(ranks, microbatches)


# Cuts of a row of layers that balance time under a limit of memory.


def cheapest_cut(costs: Floats, allowed: npt.NDArray[np.bool_]) -> list[int] | None:
    """Return where to cut layers into stages so that the most expensive stage is as cheap as possible.

    Args:
        costs: ``[stages, layers, layers]``: cost of a stage from the layer of the second index to that of the
            third, both included.
        allowed: the same shape: whether there may be such a stage.

    Returns:
        The first layer of each stage; ``None`` if no cut has only stages that are allowed.
    """
    stages, layers, _ = costs.shape
    # best[n]: the least cost of the most expensive stage, if the stages so far hold the first n layers.
    best = np.full(layers + 1, np.inf)
    best[0] = -np.inf
    origins = []
    first, last = np.meshgrid(np.arange(layers), np.arange(layers), indexing="ij")
    for stage in range(stages):
        usable = np.where(allowed[stage] & (first <= last), costs[stage], np.inf)
        ends = np.maximum(best[:layers, None], usable)
        origin = ends.argmin(0)
        best = np.concatenate([[np.inf], ends[origin, np.arange(layers)]])
        origins.append(origin)
    if not np.isfinite(best[layers]):
        return None
    cuts, end = [], layers
    for origin in reversed(origins):
        end = int(origin[end - 1])
        cuts.append(end)
    return cuts[::-1]


def sums(values: Floats) -> Floats:
    """Return ``[layers, layers]``: the sum of ``values`` from the first index to the second, both included."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, 1:] - total[:-1, None])


def maxima(values: Floats) -> Floats:
    """Return ``[layers, layers]``: the largest of ``values`` from the first index to the second; 0 below."""
    count = len(values)
    rows = np.where(np.arange(count)[None, :] >= np.arange(count)[:, None], values[None, :], 0.0)
    return np.asarray(np.maximum.accumulate(rows, axis=1))


def sweeps(kept: Floats, gradients: Floats) -> Floats:
    """Return ``[layers, layers]``: peak bytes of activations and gradients in a backward pass through these layers.

    At a layer's turn there are the activations of it and of earlier layers, and the gradients of it and of later
    layers: a layer's activations are freed once its gradients exist.
    """
    count = len(kept)
    together = sums(kept)
    most = np.zeros((count, count))
    for last in range(count):
        before = np.where(np.arange(count) < last, most[:, last - 1], 0.0)
        most[:, last] = np.maximum(before, together[:, last]) + gradients[last]
    return np.triu(most)
