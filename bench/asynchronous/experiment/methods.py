"""Methods of the experiment, and what happens to the last worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import pycomm

EVERY = 10
"""Steps between two meetings of ranks that average less often."""

OUTER = 0.8, 0.5
"""Rate and momentum of outer optimizers: the best of those tried for ``bench.asynchronous --losses``."""

SCENARIOS = {
    "alike": "all workers are equally fast",
    "slow": "the last worker is ten times as slow",
    "away": "the last worker is away for the middle third of the time",
}
TUNED_IN = "slow"
"""Scenario in which learning rates are chosen."""

SLOWNESS = 10


@dataclass(frozen=True)
class Method:
    """Method of training.

    Attributes:
        label: a name for people.
        served: arguments of ``parameter_server``, if there is one.
        attach: makes the handle of ranks that have their own optimizers, otherwise.
        is_mixed: whether what counts is the mean of the workers' parameters.
    """

    label: str
    served: Mapping[str, Any] | None = None
    attach: Callable[[torch.optim.Optimizer, torch.nn.Module], Any] | None = None
    is_mixed: bool = False


def _served(label: str, **options: Any) -> Method:
    return Method(label, served=options)


def _local(label: str, **options: Any) -> Method:
    return Method(label, attach=lambda optimizer, model: pycomm.local_sgd(optimizer, model, **options))


METHODS = {
    "sync": Method("synchronous", attach=pycomm.attach),
    "backup": _served("synchronous, 1 backup worker", mode=pycomm.Sync(backup=1)),
    "ssp": _served("stale synchronous, bound 100", mode=pycomm.StaleSynchronous(100)),
    "async": _served("asynchronous"),
    "async-lr": _served("asynchronous, rate / staleness", mode=pycomm.Async("lr")),
    "async-dc": _served("asynchronous, delay-compensated", mode=pycomm.Async("dc")),
    "softsync": _served("softsync, 4", mode=pycomm.Sync(quorum=4)),
    "local": _local("local SGD", every=EVERY),
    "diloco": _local("DiLoCo", every=EVERY, outer=pycomm.Nesterov(*OUTER)),
    "easgd": _local("elastic averaging", every=EVERY, outer=pycomm.Elastic()),
    "gossip": Method("gossip, exponential", attach=lambda o, m: pycomm.gossip(o, m), is_mixed=True),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        seconds: for how long workers begin new steps.
        pace: seconds that a worker's step takes at least: it sleeps for what is left, as if it used another device.
        points: number of times that the loss is measured.
    """

    method: str
    scenario: str
    lr: float
    seed: int
    seconds: float
    pace: float
    points: int = 10

    def steps_in_step(self) -> int:
        """Return how many steps each worker takes if all take equally many and no absent one is waited for."""
        share = {"alike": 1.0, "slow": 1 / SLOWNESS, "away": 2 / 3}[self.scenario]
        return max(self.points, int(self.seconds / self.pace * share))


@dataclass
class Outcome:
    """Results that a worker reports of a run.

    Attributes:
        times: when each of its steps ended, in seconds.
        points: moments at which what counts was kept, and the losses there, if it measured them.
        bytes_sent: gradients or parameters that it has handed over.
    """

    times: list[float] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)
    bytes_sent: int = 0
