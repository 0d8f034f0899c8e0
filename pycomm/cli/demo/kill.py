"""Training in which a rank is killed, and the others go on."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import torch.distributed as dist

import pycomm
from pycomm.cli.demo.corpus import random_starts, read_corpus, windows
from pycomm.cli.demo.model import loss_of
from pycomm.cli.demo.results import Death
from pycomm.cli.demo.settings import DemoSettings
from pycomm.cli.demo.train import Tell, make_model
from pycomm.cli.demo.trainee import make_optimizer
from pycomm.launching import PATIENCE
from pycomm.launching.reporting import Progress

_STEPS = 120


def train_with_a_death(settings: DemoSettings, tell: Tell) -> None:
    """Train; the last rank is killed in the middle of a backward pass, half-way. Collective, for those that are left.

    Raises:
        RuntimeError: the others did not go on as they should.
    """
    corpus, model = read_corpus(), make_model(settings)
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        logging.getLogger("pycomm").setLevel(logging.ERROR)  # rank 0 says that one died, and how long it took
    optimizer = make_optimizer(model, None)
    reducer = pycomm.attach(
        optimizer, model, survive=pycomm.Survive(), tuning=pycomm.Tuning(check_replicas=10, timeout=PATIENCE)
    )
    seconds, losses = [], []
    for step in range(1, _STEPS + 1):
        if rank == size - 1 and step == _STEPS // 2:
            middle = list(model.parameters())[len(list(model.parameters())) // 2]
            middle.register_post_accumulate_grad_hook(_die)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        starts = random_starts(
            corpus.train, settings.context, (settings.batch,), (settings.seed << 40) + (step << 16) + rank
        )
        inputs, targets = windows(corpus.train, starts, settings.context)
        loss = loss_of(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if rank == 0:
            tell(Progress(step, _STEPS, {"loss": losses[-1], "ranks": len(reducer.world)}))
    if tuple(reducer.world) != tuple(range(size - 1)):
        raise RuntimeError(f"the ranks that go on are {reducer.world}, wanted all of {size} but the last")
    if rank == 0:
        tell(Death(size, _STEPS // 2, seconds, losses))


def _die(_parameter: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
