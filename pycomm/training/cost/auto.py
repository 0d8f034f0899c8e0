"""Automatic compression: for each bucket the method that is fastest on the link at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from weakref import WeakKeyDictionary

import torch

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression import (
    DGC,
    FP8,
    FP16,
    Compression,
    NoCompression,
    PowerSGD,
)
from pycomm.compression.base import Exchange, Flag, Operation, Scaling, State
from pycomm.compression.codec import BaseCodec
from pycomm.compression.feedback import CodecExchange, CodecMethod, StatefulMethod, check_ratio
from pycomm.compression.sparse.codec import WholeCodec
from pycomm.training.cost.pricing import CLEARLY_FASTER, Costs, MeasuredLink, agreed, measure_link, rehearse

_INTERVAL = 200
"""Number of reductions after which the link is measured again."""


class _LinkMonitor:
    """Monitor of one communicator's link, which it measures at the same reductions on all ranks.

    Attributes:
        link: the last measurement.
        round: number of repeated measurements.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._device = device
        self.link = measure_link(communicator, device)
        self.round = 0
        self._num_buckets = 0
        self._num_ticks = 0

    def join(self) -> None:
        """Count one more bucket."""
        self._num_buckets += 1

    def tick(self, communicator: Communicator) -> None:
        """Count the beginning of one bucket's reduction, and measure again after every interval."""
        self._num_ticks += 1
        if self._num_ticks % (_INTERVAL * self._num_buckets) == 0:
            self.link = measure_link(communicator, self._device)
            self.round += 1


_monitors: WeakKeyDictionary[Communicator, _LinkMonitor] = WeakKeyDictionary()
"""Monitors hold no reference to their communicators, so these can be freed."""


class AutoExchange:
    """Exchange of one bucket by the method that is fastest on the monitored link.

    Dense and half gradients have exchanges of their own, without state. The other methods are codecs of one
    exchange and share its residual, so switching between them loses nothing. Before a switch to a method
    without state, the residual is sent whole.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, config: Auto, costs: dict[str, Costs]) -> None:
        self._bucket, self._communicator, self._config = bucket, communicator, config
        self._costs = costs
        self._monitor = _monitors[communicator]
        self._monitor.join()
        self._round = self._monitor.round
        self._stateless: dict[str, Exchange] = {}
        self._codecs: dict[str, BaseCodec] = {}
        self._stateful: CodecExchange | None = None
        self._holds_residual = False
        self.method = cheapest(costs, self._monitor.link, None)
        self._now: Exchange = self._exchange_of(self.method)

    def _exchange_of(self, method: str) -> Exchange:
        if method in STATELESS and not self._holds_residual and self._config.momentum == 0.0:
            if method not in self._stateless:
                self._stateless[method] = _MAKERS[method](self._bucket, self._communicator)
            return self._stateless[method]
        stateful = self._stateful_exchange()
        stateful.codec = self._codec_of("dense" if method in STATELESS else method)
        self._holds_residual = True
        return stateful

    def _stateful_exchange(self) -> CodecExchange:
        if self._stateful is None:
            codec, correction = self._codec_of("dense"), self._config.sparse().correction()
            self._stateful = CodecExchange(self._bucket, self._communicator, codec, correction=correction)
        return self._stateful

    def _codec_of(self, method: str) -> BaseCodec:
        if method not in self._codecs:
            config = self._config
            methods: dict[str, CodecMethod] = {"fp8": FP8(), "powersgd": config.low_rank(), "dgc": config.sparse()}
            make = methods[method].codec if method in methods else WholeCodec
            self._codecs[method] = make(self._bucket, self._communicator)
        return self._codecs[method]

    @property
    def transactional(self) -> bool:
        """Whether this step's exchange carries state, which a step that is not finite must not touch."""
        return self._now is self._stateful

    packs_apart = False

    @property
    def bytes_sent(self) -> int:
        stateless = sum(exchange.bytes_sent for exchange in self._stateless.values())
        return stateless + sum(codec.bytes_sent for codec in self._codecs.values())

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        self._monitor.tick(self._communicator)
        if self._round != self._monitor.round:
            self._round = self._monitor.round
            self.method = cheapest(self._costs, self._monitor.link, self.method)
        self._now = self._exchange_of(self.method)
        self._now.exchange(grads, scaling)

    def finite(self) -> Flag:
        return self._now.finite()

    def differing(self) -> torch.Tensor:
        return self._now.differing()

    def finish(self, finite: Flag) -> None:
        self._now.finish(finite)
        if self._now is self._stateful and self.method in STATELESS:
            self._holds_residual = not bool(finite)  # a finite step has sent all of it

    def used(self) -> list[bool]:
        return self._now.used()

    def nonfinite_source(self) -> str | None:
        return self._now.nonfinite_source()

    def measure_next(self) -> None:
        self._now.measure_next()

    def measured(self) -> tuple[float, float] | None:
        return None if self._stateful is None else self._stateful.measured()

    def squared_residual(self) -> float | None:
        return None if self._stateful is None else self._stateful.squared_residual()

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation] | None:
        return self._now.operations_among(size, per_host)

    def stats(self) -> dict[str, int]:
        stats = {f"buckets_{self.method}": 1}
        for codec in self._codecs.values():
            stats |= codec.stats()
        return stats

    def state(self) -> State:
        # Without the codecs' own state: which codecs there are depends on what was measured.
        state = self._stateful_exchange().state()
        return {
            name: {key: tensor for key, tensor in entry.items() if key in ("residual", "velocity")}
            for name, entry in state.items()
        }

    def load_state(self, state: State) -> None:
        self._stateful_exchange().load_state(state)
        self._holds_residual = True


STATELESS: dict[str, Compression] = {"dense": NoCompression(), "fp16": FP16()}
_MAKERS: dict[str, Callable[[Bucket, Communicator], Exchange]] = {name: m.make for name, m in STATELESS.items()}


def cheapest(costs: dict[str, Costs], link: MeasuredLink, current: str | None) -> str:
    """Return the method to take.

    Args:
        costs: of each method, those that lose less first.
        current: the method in use, if any.
    """
    seconds = {method: cost.seconds(link) for method, cost in costs.items()}
    best, *others = seconds
    for method in others:
        if seconds[method] < CLEARLY_FASTER * seconds[best]:
            best = method
    if current is None or seconds[best] < CLEARLY_FASTER * seconds[current]:
        return best
    return current


@dataclass(frozen=True)
class Auto(StatefulMethod):
    """For each bucket the fastest on this link: dense, FP16, FP8, PowerSGD(rank) or top-k (DGC without correction).

    ``attach`` times a few collectives, and runs every method on gradients of the bucket's size. Every 200
    reductions it measures the link again. All ranks use the slowest rank's figures, so they choose alike. A
    method must take 20 % less time than those that lose less, and than the one in use.

    Args:
        ratio: fraction of the entries that top-k sends, in (0, 1]. rank: PowerSGD's.
        momentum: DGC's momentum correction, for all methods; the optimizer must have none then.
        warmup_steps: DGC's, for top-k: a low density is bad for a model at the beginning.

    Raises:
        TypeError, ValueError: a setting is out of range.
    """

    ratio: float = 0.001
    rank: int = 4
    _: KW_ONLY
    momentum: float = 0.0
    warmup_steps: int = 0

    measures = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        checks.integer("rank", self.rank, 1)
        checks.real("momentum", self.momentum, 0.0, 1.0)
        checks.integer("warmup_steps", self.warmup_steps, 0)

    @property
    def otherwise(self) -> Compression | None:
        return self.sparse().otherwise if self.momentum else None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            self.sparse().check(optimizer)

    def sparse(self) -> DGC:
        """Return the top-k among the methods."""
        return DGC(self.ratio, self.momentum, warmup_steps=self.warmup_steps)

    def low_rank(self) -> PowerSGD:
        """Return the low-rank method among them."""
        return PowerSGD(self.rank)

    def make(self, bucket: Bucket, communicator: Communicator) -> AutoExchange:
        if communicator not in _monitors:
            _monitors[communicator] = _LinkMonitor(communicator, bucket.device)
        methods: dict[str, Compression] = {
            "dense": NoCompression(),
            "fp16": FP16(),
            "fp8": FP8(),
            "powersgd": self.low_rank(),
            "dgc": self.sparse(),
        }
        if self.momentum:
            del methods["fp16"]  # gradients travel with velocities then
            methods["dense"] = DGC(1.0, self.momentum).otherwise
        # Hosts of equally many ranks; ranks on GPUs count as hosts.
        hosts, size = communicator.hosts, communicator.size
        per_host = 1 if bucket.on_gpu or len({len(ranks) for ranks in hosts}) > 1 else size // len(hosts)
        costs = {name: rehearse(method, bucket.params(), size, per_host) for name, method in methods.items()}
        slowest = agreed(communicator, [cost.local for cost in costs.values()])
        for cost, local in zip(costs.values(), slowest, strict=True):
            cost.local = local
        return AutoExchange(bucket, communicator, self, costs)
