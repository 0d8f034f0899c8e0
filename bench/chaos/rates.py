"""What deaths cost: steps a second, averages a second, and the loss, beside the same without them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

from bench.chaos.faults import Fault
from bench.chaos.group import Group, Member, store_at
from bench.chaos.ranks import Setup

_PATIENCE = 60.0
_KILL_PLACES = ("forward", "hook", "exchange", "commit", "step")
_WARM_UP = 5  # steps


@dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        seconds: that it took, without its beginning.
        steps: that were committed in them.
        attempted: that were begun in them.
        rank_steps: sum over these steps of the ranks that took part.
        kills: ranks that were killed.
        loss: at the end.
        problems: what was wrong.
    """

    seconds: float
    steps: int
    attempted: int
    rank_steps: int
    kills: int
    loss: float
    problems: list[str]

    @property
    def rate(self) -> float:
        """Committed steps a second."""
        return self.steps / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "rate": self.rate}


def train(setup: Setup, size: int, steps: int, every: float, seed: int) -> Run:
    """Train ``steps`` steps; kill a rank each ``every`` of them on average, and start another one in its place.

    Args:
        every: mean number of steps between two deaths; 0 for none.
        seed: of which ranks die where.
    """
    chooser = random.Random(seed)
    with store_at() as address, Group(replace(setup, address=address, size=size), size) as group:
        group.until("the beginning", lambda: len(group.digests) > _WARM_UP, _PATIENCE)
        first, start = max(group.digests), time.monotonic()
        kills = _kill_until(group, first + steps, every, size, chooser) if every else 0
        group.until("the last step", lambda: max(group.digests) >= first + steps, 2 * _PATIENCE + steps * setup.pause)
        last, seconds = max(group.digests), time.monotonic() - start
        group.until("all ranks", lambda: all(m.step >= last for m in group.members if m.number >= 0), _PATIENCE)
        group.until("newcomers", lambda: all(m.step >= 0 for m in group.members), _PATIENCE)
        group.end(_PATIENCE)
    count = sum(first < step <= last for step in group.digests)
    begun = sum(first < step <= last for step in group.begun)
    took_part = sum(n for step, n in group.attendance.items() if first < step <= last)
    return Run(seconds, count, begun, took_part, kills, group.losses[-1], group.problems)


def _kill_until(group: Group, last: int, every: float, size: int, chooser: random.Random) -> int:
    """Kill ranks until step ``last``; return how many."""
    kills, due = 0, max(group.digests) + chooser.expovariate(1 / every)
    victims: list[Member] = []
    while True:
        group.until("a step", partial(_has_come, group, min(due, last)), _PATIENCE)
        for victim in [v for v in victims if v.end is not None]:
            victims.remove(victim)
            group.replace(victim)
        for member in [m for m in group.gone if m.number < 0]:  # a newcomer that was not let in
            group.gone.remove(member)
            group.replace(member)
        if max(group.digests) >= last:
            return kills
        if max(group.digests) < due:
            continue
        there = [m for m in group.members if m.step >= 0 and m not in victims]
        if len(there) <= 2:
            due += 1
            continue
        victim = chooser.choice(there)
        group.strike(victim, Fault("kill", chooser.choice(_KILL_PLACES), chooser.randrange(1 << 30), 0))
        victims.append(victim)
        kills += 1
        due += chooser.expovariate(1 / every)


def _has_come(group: Group, step: float) -> bool:
    return max(group.digests) >= step


def every(count: int, mean_steps: float, seed: int) -> dict[str, Any]:
    """Return steps a second with a death each ``mean_steps``, ``count`` in all, and without."""
    setup = Setup(0, 0, "", pause=0.1)
    steps = int(count * mean_steps)
    return _compare(setup, 4, steps, mean_steps, seed)


def averaging(count: int, seed: int) -> dict[str, Any]:
    """Return averages a second of 32 ranks, one each 50 of their own steps, with ``count`` deaths and without."""
    setup = Setup(0, 0, "", pause=0.02, local_steps=50, timeout=30.0)
    return _compare(setup, 32, 2 * count, 2.0, seed)


def _compare(setup: Setup, size: int, steps: int, mean_steps: float, seed: int) -> dict[str, Any]:
    undisturbed = train(setup, size, max(20, steps // 4), 0, seed)
    _print("undisturbed", undisturbed, size)
    disturbed = train(setup, size, steps, mean_steps, seed)
    _print(f"a death each {mean_steps:g} steps", disturbed, size)
    ratio = disturbed.rate / undisturbed.rate
    work = disturbed.rank_steps / disturbed.seconds / (undisturbed.rank_steps / undisturbed.seconds)
    print(f"{100 * ratio:.1f} % of the steps a second, {100 * work:.1f} % of the ranks' work", flush=True)
    runs = {"undisturbed": undisturbed.as_json(), "disturbed": disturbed.as_json()}
    return {**runs, "ratio": ratio, "work": work, "problems": undisturbed.problems + disturbed.problems}


def _print(what: str, run: Run, size: int) -> None:
    print(
        f"{what:28} {run.kills:3d} deaths, {run.steps} of {run.attempted} steps committed in {run.seconds:.1f} s, "
        f"{run.rate:.2f} a second, {run.rank_steps / run.steps:.2f} of {size} ranks, loss {run.loss:.4f}"
        f"{'; ' + '; '.join(run.problems) if run.problems else ''}",
        flush=True,
    )


def seeds(count: int, num_seeds: int, seed: int) -> dict[str, Any]:
    """Return the losses of runs of several seeds without deaths, and of as many with ``count`` deaths each."""
    losses: dict[str, list[float]] = {}
    problems: list[str] = []
    for what, interval in (("undisturbed", 0.0), (f"{count} deaths", 20.0)):
        for number in range(num_seeds):
            setup = Setup(0, 0, "", pause=0.02, seed=seed + number)
            run = train(setup, 4, 20 * count, interval, seed + number)
            _print(f"{what}, seed {seed + number}", run, 4)
            losses.setdefault(what, []).append(run.loss)
            problems += run.problems
    for what, values in losses.items():
        spread = f"{stdev(values):.5f}" if len(values) > 1 else "-"
        print(f"{what}: loss {mean(values):.5f}, spread of seeds {spread}", flush=True)
    return {"losses": losses, "problems": problems}
