"""Choice among all candidates of a task: their prices, and the reasons for refusing some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from pycomm.parallel.plan import Plan
from pycomm.parallel.planning.candidates import Candidate, Profile, Task, candidates, meshes
from pycomm.parallel.planning.price import Price, Pricer, Rows
from pycomm.parallel.planning.profile import shared_parameter
from pycomm.training.cost.planning import METHODS
from pycomm.training.cost.pricing import Costs, rehearse

ProfileBy = Callable[[Mapping[str, str]], Profile]
StylesBy = Callable[[int], dict[str, str]]

_CLEARLY_FASTER = 0.8
"""A compressed step must take less than this fraction of an uncompressed one: compression changes the training."""
_REHEARSED = 1 << 20  # parameters


@dataclass(frozen=True)
class Option:
    """Candidate that fits, with its price.

    Attributes:
        averaging: seconds of a step that averaging gradients adds.
        compression: method for the gradients, one of ``pycomm.training.cost.planning.METHODS``, or ``None``.
        split: style of each module that is split.
    """

    price: Price
    averaging: float
    compression: str | None
    split: Mapping[str, str]

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.price.times.passes + self.averaging + self.price.times.update

    @property
    def candidate(self) -> Candidate:
        return self.price.candidate

    @property
    def name(self) -> str:
        """The candidate in words."""
        candidate = self.candidate
        words = [candidate.name]
        if candidate.microbatches > 1:
            words.append(f"{candidate.microbatches} microbatches")
        words += ["recomputation"] * candidate.recompute + ["sharded optimizer"] * candidate.sharded_optimizer
        return ", ".join([*words, *([self.compression] if self.compression else [])])

    def plan(self) -> Plan:
        """Return the plan that ``split`` and ``pipeline`` take."""
        stages = self.price.stages
        return Plan(
            mesh=self.candidate.sizes,
            split=dict(self.split),
            stages=tuple(tuple(name for layer in stage for name in layer.modules) for stage in stages)
            if len(stages) > 1
            else (),
            microbatches=self.candidate.microbatches,
            recompute=self.candidate.recompute,
            sharded_optimizer=self.candidate.sharded_optimizer,
            compression=self.compression,
        )


@dataclass(frozen=True)
class Refusal:
    """Candidates that were refused for one reason.

    Attributes:
        what: the candidates in words. count: their number. reason: why.
        needed: bytes per device that would suffice, if memory was the reason, else ``nan``.
    """

    what: str
    count: int
    reason: str
    needed: float = math.nan


@dataclass(frozen=True)
class Ranking:
    """Options that fit, fastest first, and refusals."""

    options: tuple[Option, ...]
    refusals: tuple[Refusal, ...]

    @property
    def least(self) -> float:
        """Least bytes per device with which a candidate refused for memory would fit; ``inf`` if none was."""
        return min((each.needed for each in self.refusals if not math.isnan(each.needed)), default=math.inf)


def choose(task: Task, model: nn.Module, profile_of: ProfileBy, styles_of: StylesBy, compress: bool = True) -> Ranking:
    """Price all candidates and rank those that fit by the seconds of a step.

    Args:
        task: the task and its devices.
        model: the model; only its structure is used.
        profile_of: returns the profile for given split styles by module.
        styles_of: returns split styles by module for a number of devices.
        compress: whether gradients may be compressed.

    Raises:
        ValueError: as from ``profile_of``.
    """
    options: list[Option] = []
    refusals: list[Refusal] = []
    search = _PlanSearch(task, profile_of, styles_of, compress)
    tied = shared_parameter(model)
    for pp, tp, dp in meshes(task.devices):
        mesh = Candidate(pp, tp, dp).name
        if pp > 1 and tied is not None:
            reason = f"layers {tied[0]!r} and {tied[1]!r} use one parameter, which two stages cannot"
            refusals.append(Refusal(f"pp={pp}", 1, reason))
        elif task.batch % dp:
            refusals.append(Refusal(f"dp={dp}", 1, f"a batch of {task.batch} does not divide by {dp}"))
        elif reason := search.why_not_split(tp):
            refusals.append(Refusal(f"tp={tp}", 1, reason))
        else:
            found, refused = search.mesh(pp, tp, dp, mesh)
            options += found
            refusals += refused
    options.sort(key=lambda option: (option.seconds, option.compression is not None, option.candidate))
    return Ranking(tuple(options), tuple(_grouped(refusals)))


class _PlanSearch:
    """Search of one task's candidates; profiles and rehearsals are made once."""

    def __init__(self, task: Task, profile_of: ProfileBy, styles_of: StylesBy, compress: bool) -> None:
        self._task, self._profile_of, self._styles_of = task, profile_of, styles_of
        self._pricer = Pricer(task)
        self._profiles: dict[tuple[tuple[str, str], ...], Profile] = {}
        self._styles: dict[int, dict[str, str]] = {}
        self._compressor = _Compressor(self._pricer) if compress else None

    def _split(self, tp: int) -> dict[str, str]:
        if tp not in self._styles:
            self._styles[tp] = self._styles_of(tp) if tp > 1 else {}
        return self._styles[tp]

    def why_not_split(self, tp: int) -> str:
        """Return why no layer can be split ``tp`` ways; empty if one can."""
        return "" if tp == 1 or self._split(tp) else f"no layer can be split over {tp} devices"

    def mesh(self, pp: int, tp: int, dp: int, name: str) -> tuple[list[Option], list[Refusal]]:
        """Return the candidates on one mesh that fit, and one refusal for those that do not."""
        styles = self._split(tp)
        key = tuple(styles.items())
        if key not in self._profiles:
            self._profiles[key] = self._profile_of(styles)
        profile = self._profiles[key]
        if pp > len(profile.layers[0]):
            reason = f"the model has {len(profile.layers[0])} layers to make stages of"
            return [], [Refusal(f"pp={pp}", 1, reason)]
        options, needed = [], []
        for candidate in candidates(pp, tp, dp, self._task.batch):
            layers = profile.at(self._task.batch // dp // candidate.microbatches)
            rows = Rows(layers, tp, self._task.device, profile.measured, self._pricer.links)
            price = self._pricer.price(candidate, rows)
            if isinstance(price, float):
                needed.append(price)
                continue
            options.append(Option(price, price.times.averaging, None, styles))
            if self._compressor is not None and dp > 1 and not candidate.sharded_optimizer:
                options += self._compressor.options(options[-1])
        least = min(needed, default=math.nan)
        if math.isinf(least):
            return options, [Refusal(f"pp={pp}", len(needed), "not every stage would have parameters to train")]
        return options, [Refusal(name, len(needed), "does not fit", least)] if needed else []


class _Compressor:
    """Prices of compressed gradients: local work measured here, communication simulated."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self._costs: dict[tuple[str, int, int], Costs] = {}

    def options(self, dense: Option) -> list[Option]:
        """Return ``dense`` with the fastest compression method, or nothing if no method is clearly faster."""
        candidate, price = dense.candidate, dense.price
        best: list[Option] = []
        seconds = _CLEARLY_FASTER * dense.seconds
        for name in METHODS:
            if name == "dense":
                continue
            costs = self._rehearsed(name, candidate.dp, self._pricer.links.per_host(candidate.dp, candidate.tp))
            factor = price.gradient_bytes / (4.0 * _REHEARSED)
            link = sum(
                self._pricer.links.operation(
                    candidate.dp, candidate.tp, replace(operation, num_bytes=round(operation.num_bytes * factor))
                )
                for operation in costs.operations
            )
            option = replace(dense, averaging=costs.local * factor + link, compression=name)
            if option.seconds < seconds:
                best, seconds = [option], option.seconds
        return best

    def _rehearsed(self, name: str, ranks: int, per_host: int) -> Costs:
        key = name, ranks, per_host
        if key not in self._costs:
            width = math.isqrt(_REHEARSED)
            self._costs[key] = rehearse(METHODS[name], [torch.empty(width, width)], ranks, per_host)
        return self._costs[key]


def _grouped(refusals: list[Refusal]) -> list[Refusal]:
    """Merge refusals with the same words, in the order of their first."""
    counts: Counter[tuple[str, str]] = Counter()
    needed: dict[tuple[str, str], float] = {}
    for each in refusals:
        key = each.what, each.reason
        counts[key] += each.count
        needed[key] = min(needed.get(key, math.inf), each.needed) if not math.isnan(each.needed) else math.nan
    return [Refusal(what, count, reason, needed[what, reason]) for (what, reason), count in counts.items()]
