"""Compression where it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from weakref import WeakKeyDictionary

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Compression, Exchange, Flag, Scaling, State
from pycomm.compression.dgc import DGC
from pycomm.compression.feedback import FeedbackExchange, FeedbackMethod, Wire
from pycomm.compression.half import FP16
from pycomm.compression.none import NoCompression
from pycomm.compression.powersgd import LowRankWire, PowerSGD
from pycomm.compression.pricing import Costs, MeasuredLink, agreed, measure_link, rehearse
from pycomm.compression.settings import require_integer, require_number, require_ratio
from pycomm.compression.sparse import SparseWire
from pycomm.compression.summed import WholeWire

_WORTH = 0.9
"""What loses more must take less than this of the time of what loses less: it changes the training."""

_SWITCH = 0.8
"""A method in use is given up for one that takes less than this of its time: measurements are noisy."""

_INTERVAL = 200
"""Reductions after which the link is measured again."""


class _Watch:
    """The link of one communicator, measured now and then, at the same reductions on all ranks."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._device = device
        self.link = measure_link(communicator, device)
        self.round = 0
        self._num_buckets = 0
        self._num_ticks = 0

    def join(self) -> None:
        self._num_buckets += 1

    def tick(self, communicator: Communicator) -> None:
        """One bucket's reduction begins."""
        self._num_ticks += 1
        if self._num_ticks % (_INTERVAL * self._num_buckets) == 0:
            self.link = measure_link(communicator, self._device)
            self.round += 1


_watches: WeakKeyDictionary[Communicator, _Watch] = WeakKeyDictionary()
"""They know nothing of their communicators, which go when nobody has them any more."""


class AutoExchange:
    """One bucket, by whichever method the watched link makes fastest.

    Dense and half gradients go their own short ways, without state. The others share one residual, so
    that changing between them loses nothing; before a way without state is taken, what is left is
    sent whole.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, how: Auto, costs: dict[str, Costs]) -> None:
        self._bucket, self._communicator, self._how = bucket, communicator, how
        self._costs = costs
        self._watch = _watches[communicator]
        self._watch.join()
        self._round = self._watch.round
        self._stateless: dict[str, Exchange] = {}
        self._wires: dict[str, Wire] = {}
        self._feedback: FeedbackExchange | None = None
        self._holds_residual = False
        self.method = cheapest(costs, self._watch.link, None)
        self._now: Exchange = self._way(self.method)

    def _way(self, method: str) -> Exchange:
        if method in STATELESS and not self._holds_residual and self._how.momentum == 0.0:
            if method not in self._stateless:
                self._stateless[method] = _MAKERS[method](self._bucket, self._communicator)
            return self._stateless[method]
        feedback = self._with_feedback()
        feedback.wire = self._wire("dense" if method in STATELESS else method)
        self._holds_residual = True
        return feedback

    def _with_feedback(self) -> FeedbackExchange:
        if self._feedback is None:
            correction = self._how.sparse().correction()
            wire = self._wire("dense")
            self._feedback = FeedbackExchange(self._bucket, self._communicator, wire, correction=correction)
        return self._feedback

    def _wire(self, method: str) -> Wire:
        if method not in self._wires:
            self._wires[method] = self._make_wire(method)
        return self._wires[method]

    def _make_wire(self, method: str) -> Wire:
        if method == "powersgd":
            return LowRankWire(self._bucket, self._communicator, self._how.rank, seed=0)
        if method == "dgc":
            return SparseWire(self._bucket, self._communicator, self._how.sparse().density, half_values=False)
        return WholeWire(self._bucket, self._communicator)

    @property
    def transactional(self) -> bool:
        """Of this step only: without state there is nothing to be left alone."""
        return self._now is self._feedback

    @property
    def bytes_sent(self) -> int:
        stateless = sum(exchange.bytes_sent for exchange in self._stateless.values())
        return stateless + sum(wire.bytes_sent for wire in self._wires.values())

    def exchange(self, grads: Sequence[torch.Tensor | None], scaling: Scaling) -> None:
        self._watch.tick(self._communicator)
        if self._round != self._watch.round:
            self._round = self._watch.round
            self.method = cheapest(self._costs, self._watch.link, self.method)
        self._now = self._way(self.method)
        self._now.exchange(grads, scaling)

    def finite(self) -> Flag:
        return self._now.finite()

    def differing(self) -> torch.Tensor:
        return self._now.differing()

    def finish(self, finite: Flag) -> None:
        self._now.finish(finite)
        if self._now is self._feedback and self.method in STATELESS:
            self._holds_residual = not bool(finite)  # what was left has gone, or else goes with the next step

    def used(self) -> list[bool]:
        return self._now.used()

    def blame(self) -> str | None:
        return None if self._feedback is None else self._feedback.blame()

    def stats(self) -> dict[str, int]:
        stats = {f"buckets_{self.method}": 1}
        for wire in self._wires.values():
            stats |= wire.stats()
        return stats

    def state(self) -> State:
        # Not the wires': which of them there are depends on what was measured.
        state = self._with_feedback().state()
        return {
            name: {key: tensor for key, tensor in entry.items() if key in ("residual", "velocity")}
            for name, entry in state.items()
        }

    def load_state(self, state: State) -> None:
        self._with_feedback().load_state(state)
        self._holds_residual = True


STATELESS: dict[str, Compression] = {"dense": NoCompression(), "fp16": FP16()}
_MAKERS: dict[str, Callable[[Bucket, Communicator], Exchange]] = {name: m.make for name, m in STATELESS.items()}


def cheapest(costs: dict[str, Costs], link: MeasuredLink, current: str | None) -> str:
    """The method to take, of those in ``costs``, which lists what loses less first; ``current`` is in use."""
    seconds = {method: cost.seconds(link) for method, cost in costs.items()}
    best, *others = seconds
    for method in others:
        if seconds[method] < _WORTH * seconds[best]:
            best = method
    if current is None or seconds[best] < _SWITCH * seconds[current]:
        return best
    return current


@dataclass(frozen=True)
class Auto(FeedbackMethod):
    """Per bucket what is fastest on this link: dense, FP16, PowerSGD(rank) or top-k (DGC without correction).

    ``attach`` measures the link by a few collectives and rehearses every method on gradients of the
    bucket's size, so both cost what they cost here. Every 200 reductions the link is measured again. All
    ranks take the slowest rank's figures, so they choose alike. Something that loses more must be 10 %
    faster than what loses less, and 20 % than what is in use.

    Args:
        ratio: of the entries that top-k sends, in (0, 1]. rank: PowerSGD's.
        momentum: DGC's momentum correction, for all methods; the optimizer must have none then.
        warmup_steps: DGC's, for top-k: a model at its beginning suffers from a low density.

    Raises:
        TypeError, ValueError: a setting is out of range.
    """

    ratio: float = 0.001
    rank: int = 4
    _: KW_ONLY
    momentum: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require_ratio(self.ratio)
        require_integer("rank", self.rank, 1)
        require_number("momentum", self.momentum, 0.0, 1.0)
        require_integer("warmup_steps", self.warmup_steps, 0)

    @property
    def otherwise(self) -> Compression | None:
        return self.sparse().otherwise if self.momentum else None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if self.momentum:
            self.sparse().check(optimizer)

    def sparse(self) -> DGC:
        """The top-k among the methods."""
        return DGC(self.ratio, self.momentum, warmup_steps=self.warmup_steps)

    def make(self, bucket: Bucket, communicator: Communicator) -> AutoExchange:
        if communicator not in _watches:
            _watches[communicator] = _Watch(communicator, bucket.device)
        methods: dict[str, Compression] = {
            "dense": NoCompression(),
            "fp16": FP16(),
            "powersgd": PowerSGD(self.rank),
            "dgc": self.sparse(),
        }
        if self.momentum:
            del methods["fp16"]  # gradients travel with velocities then
            methods["dense"] = DGC(1.0, self.momentum).otherwise
        costs = {name: rehearse(method, bucket.params(), communicator.size) for name, method in methods.items()}
        slowest = agreed(communicator, [cost.local for cost in costs.values()])
        for cost, local in zip(costs.values(), slowest, strict=True):
            cost.local = local
        return AutoExchange(bucket, communicator, self, costs)
