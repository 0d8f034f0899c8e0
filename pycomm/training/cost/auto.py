"""Automatic compression: for each bucket the method that is fastest on the link at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
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
    Int4,
    NoCompression,
    PowerSGD,
)
from pycomm.compression.base import Exchange, Flag, Operation, Scaling, State
from pycomm.compression.codec import BaseCodec
from pycomm.compression.feedback import CodecExchange, CodecMethod, StatefulMethod, check_ratio
from pycomm.compression.sparse.codec import WholeCodec
from pycomm.descriptions import size_text
from pycomm.training.cost.pricing import CLEARLY_FASTER, Costs, MeasuredLink, agreed, measure_link, rehearse

_INTERVAL = 200
"""Number of reductions after which the link is measured again."""
_VERDICTS = 3
"""Number of measurements in a row that must choose the same method."""
_SECONDS = 2.0
"""Time of all ranks' measurements at the beginning, after which gradients are sent dense."""
_SAMPLE_BYTES = 1 << 20
"""Most bytes of a bucket's parameters to measure methods with."""
_LOG = logging.getLogger("pycomm")


@dataclass
class _Kind:
    """Buckets of about the same size, which travel by the same method.

    Attributes:
        num_bytes: size of the first one.
        costs: costs of the methods, those that lose less first; empty if there was no time to measure any.
        seconds: time of each on the link.
        is_settled: whether enough verdicts in a row were equal.
    """

    num_bytes: int
    method: str = "dense"
    costs: dict[str, Costs] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    is_settled: bool = False

    def decide(self, link: MeasuredLink) -> str:
        """Return the verdict on ``link``; of two equally fast methods, the one in use."""
        self.seconds = {name: cost.seconds(link) for name, cost in self.costs.items()}
        return cheapest(self.costs, link, self.method)

    @property
    def ratios(self) -> dict[str, float]:
        """Time of each method as a multiple of the time of dense gradients."""
        return {name: seconds / self.seconds["dense"] for name, seconds in self.seconds.items()}

    def __str__(self) -> str:
        doubt = "" if self.is_settled else f"no {_VERDICTS} equal verdicts in a row; "
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.ratios.items() if name != "dense")
        times = f"{shown} times the {1e3 * self.seconds['dense']:.3g} ms of dense" if shown else "not measured"
        return f"{self.method} for buckets of {size_text(self.num_bytes)} ({doubt}{times})"


class _LinkMonitor:
    """Monitor of one communicator's link, which it measures at the same reductions on all ranks."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._device, self._is_first = device, communicator.rank == 0
        self._kinds: dict[object, _Kind] = {}
        self._spent = 0.0  # seconds of measuring on the slowest rank
        self._num_buckets = self._num_ticks = 0

    def join(self, communicator: Communicator, bucket: Bucket, config: Auto) -> _Kind:
        """Count one more bucket; return its kind. Collective."""
        self._num_buckets += 1
        num_bytes = bucket.memory.nbytes
        key = config, bucket.memory.dtype, min(num_bytes, _SAMPLE_BYTES).bit_length() // 2
        if key not in self._kinds:
            self._kinds[key] = self._settled(_Kind(num_bytes), communicator, bucket, config)
        return self._kinds[key]

    def _settled(self, kind: _Kind, communicator: Communicator, bucket: Bucket, config: Auto) -> _Kind:
        """Measure until enough verdicts in a row are equal, or until the time is up."""
        sample, last = _sample_of(bucket.params()), 0.0
        factor = kind.num_bytes / sum(param.nbytes for param in sample)
        verdicts: list[str] = []
        while not kind.is_settled and self._spent + last < _SECONDS:
            scaled, link, last = measured(config, sample, factor, communicator, self._device)
            self._spent += last
            # The least time of work is what is left of it without the noise of other processes.
            for name, cost in kind.costs.items():
                scaled[name].local = min(scaled[name].local, cost.local)
            kind.costs = scaled
            kind.method = kind.decide(link)
            verdicts = [*verdicts, kind.method][-_VERDICTS:]
            kind.is_settled = verdicts == _VERDICTS * verdicts[:1]
        if not kind.is_settled:
            kind.method = "dense"
        return kind

    def tick(self, communicator: Communicator) -> None:
        """Count the beginning of one bucket's reduction, and measure again after every interval."""
        self._num_ticks += 1
        if self._num_ticks % (_INTERVAL * self._num_buckets) == 0:
            links = [measure_link(communicator, self._device) for _ in range(_VERDICTS)]
            before = [kind.method for kind in self._kinds.values()]
            for kind in (kind for kind in self._kinds.values() if kind.costs):
                verdicts = {kind.decide(link) for link in links}
                kind.method = verdicts.pop() if len(verdicts) == 1 else kind.method
            if before != [kind.method for kind in self._kinds.values()]:
                self._tell()
        elif self._num_ticks == 1:
            self._tell()

    def _tell(self) -> None:
        level = logging.WARNING if self._is_first else logging.INFO  # all ranks say the same
        limit = f"a method must stay below {CLEARLY_FASTER:g}"
        _LOG.log(level, 'compression="auto" chose %s; %s', "; ".join(map(str, self._kinds.values())), limit)


_monitors: WeakKeyDictionary[Communicator, _LinkMonitor] = WeakKeyDictionary()
"""Monitors hold no reference to their communicators, so these can be freed."""


def _sample_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first of ``params``, or a part of the first one, that have few enough bytes to be measured often."""
    sample: list[torch.Tensor] = []
    left = _SAMPLE_BYTES
    for param in params:
        if param.nbytes > left and not sample:
            param = param[: max(1, left * len(param) // param.nbytes)]
        left -= param.nbytes
        if sample and left < 0:
            break
        sample.append(param)
    return sample


class AutoExchange:
    """Exchange of one bucket by the method that is fastest on the monitored link.

    Dense and half gradients have exchanges of their own, without state. The other methods are codecs of one
    exchange and share its residual, so switching between them loses nothing. Before a switch to a method
    without state, the residual is sent whole.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, config: Auto, monitor: _LinkMonitor) -> None:
        self._bucket, self._communicator, self._config = bucket, communicator, config
        self._monitor, self._kind = monitor, monitor.join(communicator, bucket, config)
        self._stateless: dict[str, Exchange] = {}
        self._codecs: dict[str, BaseCodec] = {}
        self._stateful: CodecExchange | None = None
        self._holds_residual = False
        self.method = self._kind.method
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
            methods: dict[str, CodecMethod] = {
                "fp8": FP8(),
                "int4": Int4(),
                "powersgd": PowerSGD(config.rank),
                "dgc": config.sparse(),
            }
            make = methods[method].codec if method in methods else WholeCodec
            self._codecs[method] = make(self._bucket, self._communicator)
        return self._codecs[method]

    @property
    def transactional(self) -> bool:
        """Whether this step's exchange carries state, which a step that is not finite must not touch."""
        return self._now is self._stateful

    @property
    def bytes_sent(self) -> int:
        stateless = sum(exchange.bytes_sent for exchange in self._stateless.values())
        return stateless + sum(codec.bytes_sent for codec in self._codecs.values())

    def lie_in(self, buffer: torch.Tensor) -> None:
        (self._bucket if self._stateful is None else self._stateful).lie_in(buffer)

    def pack(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        self._monitor.tick(self._communicator)
        self.method = self._kind.method
        self._now = self._exchange_of(self.method)
        self._now.pack(grads, scaling)

    def send(self) -> None:
        self._now.send()

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

    def stats(self) -> dict[str, Any]:
        kind = self._kind
        told = {"method": self.method, "bytes": self._bucket.memory.nbytes, "settled": kind.is_settled}
        stats: dict[str, Any] = {f"buckets_{self.method}": 1, "auto": [{**told, "ratios": kind.ratios}]}
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


def measured(
    config: Auto, sample: Sequence[torch.Tensor], factor: float, communicator: Communicator, device: torch.device
) -> tuple[dict[str, Costs], MeasuredLink, float]:
    """Return the slowest rank's costs of a bucket ``factor`` times as large as ``sample``, and the link. Collective.

    Returns:
        Costs by method, the link, and the seconds that measuring took.
    """
    start = time.perf_counter()
    costs = config.costs(sample, communicator, device.type != "cpu")
    link = measure_link(communicator, device)
    *slowest, seconds = agreed(communicator, [*(c.local for c in costs.values()), time.perf_counter() - start])
    for cost, local in zip(costs.values(), slowest, strict=True):
        cost.local = local
    return {name: cost.scaled(factor) for name, cost in costs.items()}, link, seconds


def cheapest(costs: dict[str, Costs], link: MeasuredLink, current: str | None) -> str:
    """Return the method to use.

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
    """For each bucket the fastest on this link: dense, FP16, FP8, Int4, PowerSGD(rank), or DGC if it can keep the loss.

    With the default settings, each of them has ended within 1 % of the dense loss (docs/compression.md, "What auto
    chooses"); DGC has with momentum correction and a warm-up, and is among them with both.

    ``attach`` times a few collectives, and runs every method on gradients of the bucket's size, until three verdicts in
    a row are equal; after 2 seconds without, the bucket stays dense. Every 200 reductions it measures the link three
    times again. All ranks use the slowest rank's figures, so they agree. A method must take 20 % less time than
    those that lose less, and than the one in use. Rank 0 logs the choice, and ``stats()["auto"]`` has it, with each
    method's time as a multiple of the time of dense gradients.

    Args:
        ratio: fraction of the entries that DGC sends, in (0, 1]. rank: PowerSGD's.
        momentum: DGC's momentum correction, for all methods; the optimizer must have none then.
        warmup_steps: DGC's: a low density is bad for a model at the beginning.

    Raises:
        TypeError, ValueError: a setting is out of range.
    """

    ratio: float = 0.01
    rank: int = 16
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
        """Return the DGC among the methods."""
        return DGC(self.ratio, self.momentum, warmup_steps=self.warmup_steps)

    def methods(self) -> dict[str, Compression]:
        """Return the methods to choose from by name, those that lose less first."""
        methods: dict[str, Compression] = {
            "dense": NoCompression(),
            "fp16": FP16(),
            "fp8": FP8(),
            "int4": Int4(),
            "powersgd": PowerSGD(self.rank),
        }
        if self.momentum:
            del methods["fp16"]  # gradients travel with velocities then
            methods["dense"] = DGC(1.0, self.momentum).otherwise
        if self.momentum and self.warmup_steps:
            methods["dgc"] = self.sparse()
        return methods

    def costs(self, params: Sequence[torch.Tensor], communicator: Communicator, on_gpu: bool) -> dict[str, Costs]:
        """Return what a bucket of ``params`` costs by each method, as measured on this rank."""
        # Hosts of equally many ranks; ranks on GPUs count as hosts.
        hosts, size = communicator.hosts, communicator.size
        per_host = 1 if on_gpu or len({len(ranks) for ranks in hosts}) > 1 else size // len(hosts)
        methods = self.methods().items()
        return {name: rehearse(method, params, size, per_host, repeats=1) for name, method in methods}

    def make(self, bucket: Bucket, communicator: Communicator) -> AutoExchange:
        if communicator not in _monitors:
            _monitors[communicator] = _LinkMonitor(communicator, bucket.device)
        return AutoExchange(bucket, communicator, self, _monitors[communicator])
