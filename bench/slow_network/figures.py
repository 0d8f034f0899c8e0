"""Figures of ``bench.slow_network``: what was measured, what follows from it, and what was wanted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.harness.timing import Samples
from bench.slow_network.methods import AUTO, COMPUTE, CONTROL, DDP, DDP_FP16, DENSE, DGC, FP16, METHODS

Link = float | None
"""Gbit/s; ``None``: unlimited."""

_TARGET_RANKS = 4
_WANTED_RATES = {
    (2, 2, 1.0, DENSE, DDP): 1.3,
    **{(4, 1, link, DENSE, DDP): 1.0 for link in (0.1, 1.0, None)},
    **{(4, 1, link, FP16, DDP_FP16): 1.0 for link in (0.1, 1.0, None)},
}
_WANTED_DGC_RATES = {(1.0, DDP): 4.0, (1.0, DDP_FP16): 2.0, (0.1, DDP): 12.0, (0.1, DDP_FP16): 6.0}
_MOST_COMPUTE = 0.1  # seconds; a step that computes for longer gains less, whatever is sent
_SHARE_OF_MODEL = 0.9
_AUTO_TOLERANCE = 1.03
_DGC_TOLERANCE = 0.1
_CONTROL_LOSS = 0.5


@dataclass(frozen=True)
class Rate:
    """Step times of one method on one link.

    Attributes:
        seconds: of each step, on the slowest rank.
        wire_bytes: that left a host per step, by its interface's counter.
        stats: what pycomm says of itself.
        difference: what is not equal on all ranks, in words.
        per_host: ranks of each host, which share its link.
    """

    hosts: int
    link: Link
    method: str
    seconds: list[float]
    wire_bytes: float
    stats: dict[str, Any] = field(default_factory=dict)
    difference: str | None = None
    per_host: int = 1

    @property
    def step_seconds(self) -> float:
        return Samples.of(self.seconds).median


@dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
        points: steps done, validation loss; the first before any step.
        seconds: of each step in this very run, on the slowest rank.
        wire_bytes: that left a host per step, between one point and the next.
    """

    hosts: int
    link: Link
    method: str
    points: list[tuple[int, float]]
    seconds: list[float]
    wire_bytes: list[float]
    stats: dict[str, Any] = field(default_factory=dict)
    difference: str | None = None

    @property
    def final_loss(self) -> float:
        return self.points[-1][1]

    @property
    def num_steps(self) -> int:
        return self.points[-1][0]


@dataclass(frozen=True)
class Failure:
    """Measurement that failed, and what was said."""

    what: str
    hosts: int
    link: Link
    method: str
    error: str
    per_host: int = 1


@dataclass
class Figures:
    """All that was measured."""

    parameters: int
    rates: list[Rate] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Figures:
        curves = [Curve(**{**row, "points": [(step, loss) for step, loss in row["points"]]}) for row in found["curves"]]
        rates = [Rate(**row) for row in found["rates"]]
        return cls(found["parameters"], rates, curves, [Failure(**row) for row in found["failures"]])

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rate(self, hosts: int, link: Link, method: str, per_host: int = 1) -> Rate | None:
        wanted = hosts, per_host, link, method
        return next((r for r in self.rates if (r.hosts, r.per_host, r.link, r.method) == wanted), None)

    def curve(self, hosts: int, link: Link, method: str) -> Curve | None:
        """Return how ``method`` learns on ``link``: measured on any link, unless what it sends depends on the link."""
        found = [c for c in self.curves if (c.hosts, c.method) == (hosts, method)]
        here = [c for c in found if c.link == link]
        return next(iter(here if here or METHODS[method].varies else found), None)

    def unequal(self) -> list[Rate | Curve]:
        """Return the runs after which the ranks did not hold the same parameters."""
        rows: list[Rate | Curve] = [*self.rates, *self.curves]
        return [row for row in rows if row.difference is not None]

    def cells(self) -> list[tuple[int, int, Link]]:
        """Return the hosts, ranks of each and links that rates were measured with."""
        found = {(r.hosts, r.per_host, r.link) for r in self.rates}
        return sorted(found, key=lambda each: (each[1], each[0], math.inf if each[2] is None else each[2]))

    def links(self, hosts: int) -> list[Link]:
        """Return the links that rates were measured with among so many hosts of one rank."""
        return [link for count, per_host, link in self.cells() if (count, per_host) == (hosts, 1)]

    def replace(self, new: Figures) -> None:
        """Take what ``new`` has, in place of older measurements of the same."""

        def key(row: Rate | Curve | Failure) -> tuple[int, int, Link, str]:
            return row.hosts, getattr(row, "per_host", 1), row.link, row.method

        rates, curves = {key(r) for r in new.rates}, {key(c) for c in new.curves}
        self.rates = [r for r in self.rates if key(r) not in rates] + new.rates
        self.curves = [c for c in self.curves if key(c) not in curves] + new.curves
        tried = {("rate", *k) for k in rates} | {("loss", *k) for k in curves}
        tried |= {(f.what, *key(f)) for f in new.failures}
        self.failures = [f for f in self.failures if (f.what, *key(f)) not in tried] + new.failures


def combined(curve: Curve, rate: Rate) -> list[tuple[float, float]]:
    """Combine the losses of one run with the time per step of another; returns seconds of training and losses.

    Where the training sent more in a step than was sent when the time was measured (a method that warms up), the link
    takes as much longer as it needs for the difference.
    """
    seconds, found = 0.0, [(0.0, curve.points[0][1])]
    for ((before, _), (step, loss)), sent in zip(pairwise(curve.points), curve.wire_bytes, strict=True):
        more = 0.0 if rate.link is None else 8e-9 * max(0.0, sent - rate.wire_bytes) / rate.link
        seconds += (step - before) * (rate.step_seconds + more)
        found.append((seconds, loss))
    return found


def loss_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return a curve's loss at ``x``, between its points on straight lines.

    Raises:
        ValueError: ``x`` is beyond its ends.
    """
    if points and x == points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 < x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(f"{x} is not within the curve")


def first_at_most(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Find where a curve first comes down to ``target``, between its points on straight lines; ``None``: never."""
    if points and points[0][1] <= target:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= target:
            # From something that is not finite nothing is known about the way.
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1) if math.isfinite(y0) else x1
    return None


def target_loss(figures: Figures, hosts: int, fraction: float) -> float | None:
    """Return the loss that the dense run (pycomm's, else DDP's) reached after ``fraction`` of its steps."""
    for method in (DENSE, DDP):
        curve = figures.curve(hosts, None, method)
        if curve is not None:
            return loss_at(curve.points, fraction * curve.num_steps)
    return None


def seconds_to(figures: Figures, hosts: int, link: Link, method: str, target: float) -> float | None:
    """Return the combined seconds of training until ``target``; ``None``: never, or not measured."""
    rate, curve = figures.rate(hosts, link, method), figures.curve(hosts, link, method)
    if rate is None or curve is None:
        return None
    return first_at_most(combined(curve, rate), target)


@dataclass(frozen=True)
class Target:
    """Figure that is wanted; ``measured`` is ``None`` where something that it takes was not measured."""

    what: str
    wanted: float
    measured: float | None
    at_least: bool
    unit: str = ""

    @property
    def reached(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


def targets(figures: Figures) -> list[Target]:
    """Return all targets, also those that nothing was measured for."""
    rows = [_speed_target(figures, link, peer, wanted) for (link, peer), wanted in _WANTED_DGC_RATES.items()]
    rows += [_rate_target(figures, *what, wanted) for what, wanted in _WANTED_RATES.items()]
    rows.append(_auto_target(figures))
    rows += [
        _loss_target(figures, DGC, _DGC_TOLERANCE, at_least=False),
        _loss_target(figures, CONTROL, _CONTROL_LOSS, at_least=True),
    ]
    return rows


def _speed_target(figures: Figures, link: float, peer: str, factor: float) -> Target:
    what = f"{link_name(link)}, {_TARGET_RANKS} ranks: step rate of {METHODS[DGC].label} over {METHODS[peer].label}"
    ours, theirs, compute = (figures.rate(_TARGET_RANKS, link, name) for name in (DGC, peer, COMPUTE))
    if ours is None or theirs is None:
        return Target(what, factor, None, at_least=True, unit="x")
    wanted = factor
    if compute is not None and compute.step_seconds > _MOST_COMPUTE:
        share = 0.5 if peer == DDP_FP16 else 1.0
        peer_bytes = share * ring_bytes(4 * figures.parameters, _TARGET_RANKS)
        wanted = wanted_speedup(compute.step_seconds, peer_bytes, ours.wire_bytes, link)
        computes = f"computes {1e3 * compute.step_seconds:.0f} ms"
        what += f" ({computes}: {_SHARE_OF_MODEL:g} of what that allows, in place of {factor:g}x)"
    return Target(what, wanted, theirs.step_seconds / ours.step_seconds, at_least=True, unit="x")


def _rate_target(
    figures: Figures, hosts: int, per_host: int, link: Link, method: str, peer: str, wanted: float
) -> Target:
    ours, theirs = (figures.rate(hosts, link, name, per_host) for name in (method, peer))
    where = f"{hosts_name(hosts, per_host)}, {link_name(link)}"
    measured = None if ours is None or theirs is None else theirs.step_seconds / ours.step_seconds
    what = f"{where}: step rate of {METHODS[method].label} over {METHODS[peer].label}"
    return Target(what, wanted, measured, at_least=True, unit="x")


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce that sends no more than it must."""
    return 2 * num_bytes * (ranks - 1) / ranks


def wanted_speedup(compute: float, peer_bytes: float, own_bytes: float, gigabits: float) -> float:
    """Return what is wanted where computing counts: a share of what computing and then sending allow."""
    peer, own = (8e-9 * sent / gigabits for sent in (peer_bytes, own_bytes))
    return _SHARE_OF_MODEL * (compute + peer) / (compute + own)


def _auto_target(figures: Figures) -> Target:
    what = f"unlimited, {_TARGET_RANKS} ranks: step time of {METHODS[AUTO].label} over the fastest method's"
    auto = figures.rate(_TARGET_RANKS, None, AUTO)
    there = [rate for rate in figures.rates if (rate.hosts, rate.per_host, rate.link) == (_TARGET_RANKS, 1, None)]
    others = [rate.step_seconds for rate in there if rate.method not in (AUTO, COMPUTE, CONTROL)]
    measured = None if auto is None or not others else auto.step_seconds / min(others)
    return Target(what, _AUTO_TOLERANCE, measured, at_least=False, unit="x")


def _loss_target(figures: Figures, method: str, wanted: float, at_least: bool) -> Target:
    what = f"{_TARGET_RANKS} ranks: final validation loss of {METHODS[method].label} minus {METHODS[DENSE].label}"
    curve, dense = (figures.curve(_TARGET_RANKS, None, name) for name in (method, DENSE))
    if curve is None or dense is None:
        return Target(what, wanted, None, at_least)
    difference = curve.final_loss - dense.final_loss
    if not math.isfinite(difference) and math.isfinite(dense.final_loss):
        difference = math.inf  # a training that broke down is worse than any
    return Target(what, wanted, difference, at_least)


def hosts_name(hosts: int, per_host: int) -> str:
    return f"{hosts} hosts" + (f" x {per_host} ranks" if per_host > 1 else "")


def link_name(link: Link) -> str:
    if link is None:
        return "unlimited"
    return f"{link:g} Gbit/s" if link >= 1 else f"{1000 * link:g} Mbit/s"
