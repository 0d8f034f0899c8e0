"""What ranks of ``bench.recommended_stack`` do: search learning rates, and train with those that were found.

    python -m bench.recommended_stack.experiment SETUP        (JSON; started by the driver inside a namespace)

Rank 0 prints what was found as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from bench import ROOT
from bench.slow_network.ranks import bytes_sent, mean_over_ranks
from pycomm.tools.cli.demo.train import first_difference
from pycomm.tools.launching import progress

sys.path.append(str(ROOT / "examples"))
example: Any = importlib.import_module("recommended_stack")

_FIRST_TUNING_SEED = 1000  # apart from those that are measured with
_OVER_THE_NETWORK = ("tcp", "hierarchical")


def recipes(names: Sequence[str] | None = None) -> list[Any]:
    """Return the recipes of these names, or all."""
    return [recipe for recipe in example.RECIPES if names is None or recipe.name in names]


def search(names: Sequence[str], rates: Sequence[float], seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Return the loss on validation samples of every recipe at every rate, a mean over the seeds. Collective."""
    data = example.load_data()
    tries = list(product(recipes(names), rates))
    rows = []
    for number, (recipe, rate) in enumerate(tries, 1):
        losses = [_validation_loss(recipe, rate, _FIRST_TUNING_SEED + seed, epochs, data) for seed in range(seeds)]
        loss = sum(losses) / seeds
        rows.append({"name": recipe.name, "rate": rate, "loss": loss if math.isfinite(loss) else None})
        progress(number, len(tries), loss=loss)
    return rows


def _validation_loss(recipe: Any, rate: float, seed: int, epochs: int, data: Mapping[str, Any]) -> float:
    training = example.Training(recipe, data["tuning"], rate, seed, epochs)
    for _ in training.epochs():
        pass
    training.close()
    loss: float = training.evaluate(data["validation"])[0]
    return loss


def measure(chosen: Mapping[str, float], seeds: int, epochs: int, on_links: bool) -> list[dict[str, Any]]:
    """Train every recipe at its chosen rate, with every seed, in turns; return the results. Collective.

    Args:
        chosen: rates by the names of recipes.
        on_links: count what leaves by the interface of this host.
    """
    data = example.load_data()
    return [
        {"name": recipe.name, "seed": seed, **_train(recipe, chosen[recipe.name], seed, epochs, data, on_links)}
        for seed in range(seeds)
        for recipe in recipes(list(chosen))
    ]


def _train(recipe: Any, rate: float, seed: int, epochs: int, data: Mapping[str, Any], on_links: bool) -> dict[str, Any]:
    training = example.Training(recipe, data["train"], rate, seed, epochs)
    transport = training.reducer.stats()["transport"] if training.reducer is not None else None
    if on_links and transport not in (None, *_OVER_THE_NETWORK):
        raise RuntimeError(f"pycomm's transport is {transport}, wanted one over the network")
    row = _run(training, epochs, data["test"], on_links)
    model = training.model.module if recipe.plain else training.model
    return {**row, **example.outcome(training, data), "difference": first_difference(model)}


def _run(training: Any, epochs: int, samples: Any, on_links: bool) -> dict[str, Any]:
    """Train; return seconds and bytes of the steps, and the loss on ``samples`` after so many seconds of them."""
    seconds, sent, points = 0.0, 0, []
    going = training.epochs()
    for _ in range(epochs):
        dist.barrier()
        before, begin = bytes_sent() if on_links else 0, time.perf_counter()
        next(going)
        dist.barrier()
        seconds += time.perf_counter() - begin
        sent += bytes_sent() - before if on_links else 0
        points.append((seconds, training.evaluate(samples)[0]))
    return {"seconds": seconds, "wire_bytes": mean_over_ranks(sent) if on_links else None, "points": points}


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=setup.pop("patience")))
    found = measure(**setup, on_links=True)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()  # what one of them says while the others end would be lost
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in bench.slow_network.ranks


def start(function: Any, ranks: int, *arguments: Any) -> Any:
    """Run ``function`` on ranks of this host, and return what rank 0 returns."""
    return pycomm.launch(function, ranks, arguments, output=0, threads=1)[0]


if __name__ == "__main__":
    main()
