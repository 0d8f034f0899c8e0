"""Ranks of ``bench.slow_network``: one process on each host, which trains in the ways that it is told to.

    python -m bench.slow_network.ranks SETUP        (JSON; started by the driver inside a namespace)

Rank 0 prints what was found as one line of JSON.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.learning_rate import learning_rate_rule
from bench.slow_network.methods import COMPUTE, Knobs, Synchronized
from pycomm.tools.cli.demo.model import ByteGPT, Corpus, loss_of, random_starts, read_corpus, windows
from pycomm.tools.cli.demo.settings import HEAD_WIDTH
from pycomm.tools.cli.demo.train import first_difference, validate

_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def make_model(setup: Mapping[str, Any]) -> ByteGPT:
    """Return the model, which has the same parameters for the same seed."""
    torch.manual_seed(setup["seed"])
    width, context = setup["width"], setup["context"]
    return ByteGPT(width, setup["layers"], context, width // HEAD_WIDTH)


class Trainee:
    """Model of its own that is trained by one method."""

    def __init__(self, name: str, setup: Mapping[str, Any], corpus: Corpus, model: ByteGPT, steps: int) -> None:
        self.name = name
        self.model = model
        self._text = corpus.train
        self._context = setup["context"]
        self._synchronized = Synchronized(name, model, setup["lr"], Knobs(**setup["knobs"]))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._synchronized.optimizer, learning_rate_rule(setup["steps"])
        )
        # A rank's seed is apart from every other's, also of the next --seed. Methods see the same text.
        seed = setup["seed"] * dist.get_world_size() + dist.get_rank()
        self._starts = iter(random_starts(self._text, self._context, (steps, setup["batch"]), seed))

    def step(self) -> float:
        """Take one training step; returns its seconds."""
        inputs, targets = windows(self._text, next(self._starts), self._context)
        if self.name == COMPUTE:
            dist.barrier()  # all ranks at once on their cores, as where they wait for each other
        optimizer = self._synchronized.optimizer
        start = time.perf_counter()
        loss_of(self._synchronized.forward(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self._schedule.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def stats(self) -> dict[str, Any]:
        return self._synchronized.stats()

    def close(self) -> str | None:
        """Stop averaging; returns what differs between the ranks' models, in words, ``None`` if nothing. Collective."""
        self._synchronized.close()
        return None if self.name == COMPUTE else first_difference(self.model)


def measure_rates(setup: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure all methods in turns of a few steps: seconds of each step, bytes on the wire. Collective."""
    corpus, model = read_corpus(), make_model(setup)
    rounds, turn_steps, warm_up = setup["rounds"], setup["turn_steps"], setup["warm_up"]
    steps = warm_up + rounds * turn_steps
    trainees = [Trainee(name, setup, corpus, copy.deepcopy(model), steps) for name in setup["methods"]]
    turns: dict[str, list[Turn]] = {trainee.name: [] for trainee in trainees}
    for trainee in trainees:
        for _ in range(warm_up):
            trainee.step()
    for number in range(rounds):
        for trainee in trainees if number % 2 == 0 else reversed(trainees):
            turns[trainee.name].append(Turn(trainee, turn_steps))
    return [_rate_of(trainee, turns[trainee.name]) for trainee in trainees]


class Turn:
    """Some steps of one method. Collective.

    Attributes:
        seconds: of each step, on the slowest rank.
        wire_bytes: per step that left this host; mean over the hosts.
    """

    def __init__(self, trainee: Trainee, steps: int) -> None:
        dist.barrier()
        sent = bytes_sent()
        seconds = [trainee.step() for _ in range(steps)]
        dist.barrier()  # what a rank sent may still be in its queue when its step is done
        sent = bytes_sent() - sent
        self.seconds = slowest(seconds)
        self.wire_bytes = mean_over_ranks(sent / steps)


def _rate_of(trainee: Trainee, turns: Sequence[Turn]) -> dict[str, Any]:
    stats = trainee.stats()
    return {
        "method": trainee.name,
        "seconds": [second for turn in turns for second in turn.seconds],
        "wire_bytes": statistics.median(turn.wire_bytes for turn in turns),
        "stats": stats,
        "difference": trainee.close(),
    }


def measure_curve(setup: Mapping[str, Any]) -> dict[str, Any]:
    """Train by one method: validation loss after so many steps, and the seconds of the training steps. Collective."""
    corpus, model = read_corpus(), make_model(setup)
    (name,), steps, every = setup["methods"], setup["steps"], setup["every"]
    trainee = Trainee(name, setup, corpus, model, steps)
    points = [(0, validate(model, corpus, setup["context"]))]
    seconds: list[float] = []
    wire_bytes: list[float] = []
    while len(seconds) < steps:
        stretch = Turn(trainee, min(every, steps - len(seconds)))
        seconds += stretch.seconds
        wire_bytes.append(stretch.wire_bytes)
        points.append((len(seconds), validate(model, corpus, setup["context"])))
    return {"method": name, "points": points, "seconds": seconds, "wire_bytes": wire_bytes, **_end_of(trainee)}


def _end_of(trainee: Trainee) -> dict[str, Any]:
    return {"stats": trainee.stats(), "difference": trainee.close()}


def slowest(seconds: Sequence[float]) -> list[float]:
    """Return each step's seconds on its slowest rank. Collective."""
    table = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    found: list[float] = table.tolist()
    return found


def mean_over_ranks(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def bytes_sent() -> int:
    """Return the bytes that this host's interface has sent: with headers, acknowledgments, and all else."""
    return int(_COUNTER.read_text())


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=setup["knobs"]["patience"]))
    found = measure_rates(setup) if setup["what"] == "rate" else measure_curve(setup)
    if dist.get_rank() == 0:
        print(json.dumps(found, default=str), flush=True)
    dist.barrier()  # what one of them says while the others end would be lost
    dist.destroy_process_group()
    # Not by way of the interpreter's end: there a thread of the process group aborts the process now and then, when
    # all is done and said.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
