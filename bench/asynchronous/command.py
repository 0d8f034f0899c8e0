"""Parameter servers: what a push and a pull cost, and whom a slow worker delays.

    python -m bench.asynchronous [--ranks 3] [--megabytes 40] [--rounds 9] [--json FILE]
    python -m bench.asynchronous --losses [--ranks 2] [--steps 4000] [--seeds 3] [--json FILE]

(a) Push and pull of a model by all workers at once, one server: until a worker has the parameters after its push was
an update (of SGD). Beside it, the same bytes by Gloo's send and recv, without any update, and an all_reduce of as
many bytes over all ranks in ``Communicator.empty`` memory. All live in the same processes and have turns. A turn's
figure is its slowest worker's.
(b) Steps a second of the other workers, where one sleeps ten times as long in each step: in every mode, beside the same
without a slow one. Steps sleep, so that cores are no resource.
(c) With --losses, instead: the loss of a small byte-level language model, on text that was not trained on, after as
many steps of each rank with gradients averaged in each, with parameters averaged every 100 steps, and with nothing
averaged.
Learning rates, and DiLoCo's outer ones, are the best of three runs each with another seed (a narrower search for local
SGD and for one rank alone, which have DiLoCo's and the first one's). The model and the batch are such that the noise of
gradients is not what limits the loss; where it is, averaging in each step gains more.
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev
from typing import Any

from bench.asynchronous.ranks import GLOO, MODES, OURS, REDUCE, WAYS
from bench.harness.arguments import make_parser, positive
from bench.harness.ranks import WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous


def main() -> None:
    arguments = _parse()
    print(headline())
    setup = {"megabytes": arguments.megabytes}
    with (
        rendezvous() as port,
        WorkerGroup(
            "asynchronous", "bench.asynchronous.ranks:ServerRank", arguments.ranks, {"port": port, **setup}
        ) as ranks,
    ):
        if arguments.losses:
            figures = {"losses": _measure_losses(ranks, arguments)}
        else:
            figures = {"exchanges": _measure_exchanges(ranks, arguments), "rates": _measure_rates(ranks)}
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "megabytes", "steps", "seeds")}
    write_json(arguments.json, "asynchronous", settings, figures)


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.asynchronous", __doc__)
    parser.add_argument("--ranks", type=positive, default=3, help="one of which serves (default 3)")
    parser.add_argument("--megabytes", type=positive, default=40, help="of the model in (a) (default 40)")
    parser.add_argument("--losses", action="store_true", help="train a language model")
    parser.add_argument("--steps", type=positive, default=4000, help="of each training (default 4000)")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings of each kind (default 3)")
    return parser.parse_args()


def _measure_exchanges(ranks: WorkerGroup, arguments: argparse.Namespace) -> dict[str, Any]:
    taken: dict[str, list[float]] = {way: [] for way in (OURS, GLOO, REDUCE)}
    for number in range(arguments.rounds):
        ways = list(taken) if number % 2 == 0 else list(taken)[::-1]
        for way in ways:
            taken[way].append(max(ranks.call("exchange", way)))
    print(f"\n(a) push and pull of {arguments.megabytes} MB by {arguments.ranks - 1} workers, one server")
    found = {way: Samples.of(seconds) for way, seconds in taken.items()}
    ours = found[OURS].median
    rows = [[way, *samples.cells(), times(samples.median / ours)] for way, samples in found.items()]
    print_table(["", "seconds", "p10 - p90", "vs pycomm"], rows)
    return {way: samples.as_json() for way, samples in found.items()}


def _measure_rates(ranks: WorkerGroup) -> dict[str, Any]:
    print("\n(b) steps a second of the other workers while one is ten times as slow")
    rows, figures = [], {}
    for mode in MODES:
        alike, slow = ([rate for rate in ranks.call("rate", mode, factor) if rate] for factor in (1, 10))
        undisturbed, disturbed = sum(alike[:-1]) / len(alike[:-1]), sum(slow[:-1]) / len(slow[:-1])
        rows.append([mode, f"{undisturbed:.1f}", f"{disturbed:.1f}", f"{100 * disturbed / undisturbed:.1f} %"])
        figures[mode] = {"undisturbed": undisturbed, "disturbed": disturbed}
    print_table(["mode", "none slow", "one slow", "ratio"], rows)
    return figures


def _measure_losses(ranks: WorkerGroup, arguments: argparse.Namespace) -> dict[str, Any]:
    print(
        f"\n(c) language model, {arguments.ranks} ranks, {arguments.steps} steps, {arguments.seeds} seeds", flush=True
    )
    rows, figures, first = [], {}, 0.0
    for way in WAYS:
        found = [ranks.call("train", way, arguments.steps, seed)[0] for seed in range(arguments.seeds)]
        losses = [loss for loss, _ in found]
        first = first or mean(losses)
        spread = f"{stdev(losses):.4f}" if len(losses) > 1 else "-"
        rows.append([way, f"{mean(losses):.4f}", spread, f"{mean(losses) / first:.3f}", f"{found[0][1] / 1e6:.1f} MB"])
        figures[way] = {"losses": losses, "bytes": found[0][1]}
    print_table(["", "loss", "spread", "of the first", "sent"], rows)
    return figures
