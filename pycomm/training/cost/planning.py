"""Planning: whether compression is worthwhile, from measurements on this machine and a described network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pycomm.compression import DGC, FP8, FP16, ChunkTopK, Compression, Int4, Int8, NoCompression, PowerSGD
from pycomm.compression.base import Operation
from pycomm.schedule import rank_algorithms, simulate
from pycomm.schedule.algorithms.circulant import circulant_all_gather
from pycomm.schedule.algorithms.direct import direct_all_gather, direct_reduce_scatter
from pycomm.schedule.network import Network
from pycomm.training.cost.pricing import Costs, rehearse

METHODS: Mapping[str, Compression] = {
    "dense": NoCompression(),
    "fp16": FP16(),
    "fp8": FP8(),
    "int8": Int8(),
    "int4": Int4(),
    "powersgd(4)": PowerSGD(4),
    "chunktopk(64)": ChunkTopK(64),
    "dgc(1%)": DGC(0.01),
    "dgc(0.1%)": DGC(0.001),
}
_TURNS = 5
_WIDTH = 1000  # of the matrices that stand for a model
_MOST_BYTES = 25e6  # to measure with; more takes proportionally longer
_FACTORS = tuple(2.0**i for i in range(-14, 11, 2))  # of the bandwidth, at which a break-even is searched


@dataclass(frozen=True)
class Priced:
    """Price of one reduction of all gradients by one method.

    Attributes:
        local: seconds of compressing and decompressing, measured here: the median.
        low, high: the least and the most of it.
        link: seconds of communication on the network, simulated.
        sent_bytes: bytes that a rank hands to the transport.
        break_even: bandwidth of one rank's link, in bytes per second, below which the method is faster
            than dense; 0: never, inf: always.
    """

    local: float
    link: float
    sent_bytes: float
    break_even: float
    low: float = math.nan
    high: float = math.nan

    def seconds(self) -> float:
        """Return the time of computation and communication, one after the other."""
        return self.local + self.link


class SimulatedLink:
    """Link whose times come from the fastest simulated schedules on ``network``."""

    def __init__(self, num_ranks: int, network: Network) -> None:
        self._num_ranks, self._network = num_ranks, network
        self._known: dict[tuple[Operation, float], float] = {}
        self._algorithms: dict[Operation, str] = {}

    def seconds(self, operation: Operation, factor: float = 1.0) -> float:
        """Return how long ``operation`` takes with the network's bandwidth times ``factor``."""
        key = operation, factor
        if key not in self._known:
            self._known[key] = self._price(operation, _with_bandwidth(self._network, factor))
        return self._known[key]

    def _price(self, operation: Operation, network: Network) -> float:
        size = float(operation.num_bytes)
        if self._num_ranks == 1 or size == 0:
            return 0.0
        if operation.kind == "all_reduce":
            # The fastest algorithm is searched once: at other bandwidths it remains close to the fastest.
            name = self._algorithms.get(operation)
            ranking = rank_algorithms(self._num_ranks, network, [size], None if name is None else [name])
            self._algorithms[operation], seconds = ranking.at(size)[0]
            return seconds
        count, per_host = self._num_ranks, per_host_of(network, self._num_ranks)
        within, between = replace(network, per_host=None), replace(network, per_host=1)
        if operation.kind == "reduce_on_host":
            return float(simulate(direct_reduce_scatter(per_host), size, within))
        if operation.kind == "all_to_all":  # which sends the messages of an all-gather
            lane = count // operation.lanes
            return float(simulate(direct_all_gather(lane), size, network if operation.lanes == 1 else between))
        if per_host > 1:  # each rank sends to one of each other host; then the ranks of a host exchange
            lane = simulate(direct_all_gather(count // per_host), size * count / per_host, between)
            return float(lane + simulate(direct_all_gather(per_host), size * count, within))
        schedules = direct_all_gather(count), circulant_all_gather(count)
        return float(min(simulate(each, size * count, network) for each in schedules))


def price(num_ranks: int, nbytes: float, network: Network, dtype: torch.dtype = torch.float32) -> dict[str, Priced]:
    """Price each of ``METHODS`` for ``nbytes`` of gradients, on the CPU, with torch's number of threads.

    The methods take turns, so that other load of the machine affects all equally.
    """
    link = SimulatedLink(num_ranks, replace(network, measured={}))
    per_host = per_host_of(network, num_ranks)
    turns = [
        {name: _costs(method, num_ranks, nbytes, per_host, dtype) for name, method in METHODS.items()}
        for _ in range(_TURNS)
    ]
    costs, local = turns[-1], {name: sorted(turn[name].local for turn in turns) for name in METHODS}
    for name, cost in costs.items():
        cost.local = statistics.median(local[name])
    scaled = network.within_host if network.per_host is None else network.between_hosts
    bandwidth = 1.0 / max(scaled.beta, 1e-30)
    priced = {}
    for name, cost in costs.items():
        seconds = sum(link.seconds(operation) for operation in cost.operations)
        even = bandwidth * _break_even(cost, costs["dense"], link) if name != "dense" else math.nan
        priced[name] = Priced(cost.local, seconds, cost.num_bytes(num_ranks), even, local[name][0], local[name][-1])
    return priced


def per_host_of(network: Network, num_ranks: int) -> int:
    """Return how many ranks share a host, if there are several hosts of equally many; otherwise 1."""
    per_host = network.per_host or 1
    return per_host if per_host < num_ranks and num_ranks % per_host == 0 else 1


def _costs(method: Compression, num_ranks: int, nbytes: float, per_host: int, dtype: torch.dtype) -> Costs:
    each = _WIDTH * _WIDTH * dtype.itemsize
    params = [torch.empty(_WIDTH, _WIDTH, dtype=dtype) for _ in range(max(1, round(min(nbytes, _MOST_BYTES) / each)))]
    return rehearse(method, params, num_ranks, per_host, repeats=1).scaled(nbytes / (len(params) * each))


def _break_even(cost: Costs, dense: Costs, link: SimulatedLink) -> float:
    """Return the bandwidth, as a multiple of the network's, below which ``cost`` takes less than ``dense``."""

    def gain(factor: float) -> float:
        seconds = [
            each.local + sum(link.seconds(operation, factor) for operation in each.operations) for each in (dense, cost)
        ]
        return seconds[0] - seconds[1]

    gains = [gain(factor) for factor in _FACTORS]
    if gains[-1] > 0:
        return math.inf
    pays = [i for i, value in enumerate(gains) if value > 0]
    if not pays:
        return 0.0
    low = pays[-1]
    # Between two factors the gain is about linear in the time per byte.
    first, second = 1 / _FACTORS[low], 1 / _FACTORS[low + 1]
    share = gains[low] / (gains[low] - gains[low + 1])
    return 1 / (first + share * (second - first))


def _with_bandwidth(network: Network, factor: float) -> Network:
    """Return ``network`` with its links, those between hosts if there are several, ``factor`` times as fast."""
    if network.per_host is None:
        return replace(network, within_host=replace(network.within_host, beta=network.within_host.beta / factor))
    return replace(network, between_hosts=replace(network.between_hosts, beta=network.between_hosts.beta / factor))
