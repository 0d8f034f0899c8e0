"""Cost of synchronizing gradients in whole training steps, in time and in memory.

    python -m bench.training [--ranks 2] [--rounds 9] [--steps 8] [--busy 1 [--nice 10]] [--json FILE]
    python -m bench.training --small | --methods

(a) Step time of a perceptron with 10 million parameters, one thread per rank: without communication,
DistributedDataParallel over Gloo, and pycomm, also with steps that the ranks take together
(shard="optimizer"). All ways live side by side in the same processes,
start from the same parameters, see the same data, and have turns of a few steps. Freed memory is kept for all of them
(docs/performance.md), so DDP gains by that too. A barrier after
backward, with no data, shows what meeting alone costs: ranks wait for the later one, and then step
at the same time. With --busy, so many other processes compute meanwhile. A step's figure is its slowest
rank's. "exposed" is the median beyond that without communication; "host" is the processor's time of the
thread that trains, which many small parameters take (--widths 64,64,64,...); "waiting" is what
Reducer.stats() says backward() was held up; "sent" is the payload a rank hands to its transport.
(b) attach with one rank: the same model attached and detached in turns; the overhead is the median
over the rounds of the ratio of the two turns' medians.
(c) Memory between steps beyond the model, its gradients and its optimizer's state, over the bytes of
the gradients: growth of the rank's own pages and of its shared memory, as reserved. "fixed" is the
part that a tiny model has as well: control pages, mailboxes, staging.
(d) What rows of pycomm.monitor every 50 steps, and the notes of the flight recorder, take of a step.

Gradients are verified before anything is timed, and replicas compared after.

With --small instead: step times of models with 160, 1,000 and 5,000 small parameters, without communication, under DDP
and with attach. With --methods: steps of 12 layers of 2,048 x 2,048 with each method of compression, a few at a time
beside dense gradients, as all would not fit in memory; "x dense" is a ratio of two medians of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.harness.arguments import counts, make_parser, positive
from bench.harness.busy import add_arguments, busy
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration, times
from bench.training.monitoring import EVERY, share
from bench.training.ranks import DDP, DDP_VIEWS, DENSE, NONE, TOPK, WAYS, make_model
from bench.training.shapes import measure_methods, measure_small
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_WIDTHS = (784, 2048, 2048, 2048, 10)
_MONITORED = (DENSE, TOPK)
_MEMORY_WAYS = (DDP, DDP_VIEWS, DENSE, TOPK)

# Where memory is counted, the opposite of KEEP_MEMORY: a fixed threshold, so that whatever is freed is really gone.
_GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def main() -> None:
    arguments = _parse()
    model = make_model(arguments.widths)
    count = sum(p.numel() for p in model.parameters())
    shape = " x ".join(str(width) for width in arguments.widths)
    if arguments.small or arguments.methods:
        (measure_small if arguments.small else measure_methods)(arguments)
        return
    print(f"{headline()}\nperceptron {shape}: {count / 1e6:.2f} M parameters, batch {arguments.batch} per rank")
    with busy(arguments.busy, arguments.nice):
        steps, looks = _measure_steps(arguments)
    _print_steps(steps, arguments)
    overhead = _measure_overhead(arguments)
    _print_overhead(overhead)
    memory = _measure_memory(arguments)
    _print_memory(memory)
    _print_monitoring(looks)
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "steps", "batch", "busy", "nice")}
    settings |= {"widths": arguments.widths, "parameters": count}
    figures = {
        "steps": [_step_json(way, found) for way, found in steps.items()],
        "one_rank": overhead,
        "memory": memory,
        "monitoring": [{"way": way, "share": share(cost), **cost} for way, cost in looks.items()],
    }
    write_json(arguments.json, "training", settings, figures)


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.training", __doc__)
    parser.add_argument("--ranks", type=positive, default=2, help="for step time and memory (default 2)")
    parser.add_argument("--steps", type=positive, default=8, help="steps per turn (default 8)")
    parser.add_argument("--batch", type=positive, default=40, help="samples per rank (default 40)")
    parser.add_argument(
        "--widths", type=counts, default=list(_WIDTHS), help="of the perceptron's layers, first and last included"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--small", action="store_true", help="step times of models with many small parameters")
    chosen.add_argument("--methods", action="store_true", help="step times with each method of compression")
    add_arguments(parser)
    return parser.parse_args()


def _ranks(
    worker: str, size: int, port: int, arguments: argparse.Namespace, environment: dict[str, str]
) -> WorkerGroup:
    setup = {"port": port, "widths": arguments.widths, "batch": arguments.batch}
    return WorkerGroup("training", f"bench.training.ranks:{worker}", size, setup, environment=environment)


class Steps:
    """Measurements from the turns of one way."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.wait: list[float] = []
        self.sent: list[float] = []
        self.host: list[float] = []

    def add(self, by_rank: Sequence[dict[str, Any]]) -> None:
        """Add one turn: of each step and of the waiting, the slowest rank's."""
        self.seconds += [max(step) for step in zip(*(found["seconds"] for found in by_rank), strict=True)]
        self.wait.append(max(found["wait"] for found in by_rank))
        self.sent.append(max(found["sent"] for found in by_rank))
        self.host.append(max(found["host"] for found in by_rank))


def _measure_steps(arguments: argparse.Namespace) -> tuple[dict[str, Steps], dict[str, dict[str, float]]]:
    """Return the steps of all ways, and what looking at some of them costs: the slowest rank's figures."""
    found = {way: Steps() for way in WAYS}
    with rendezvous() as port, _ranks("StepRank", arguments.ranks, port, arguments, KEEP_MEMORY) as ranks:
        ranks.call("verify")
        for number in range(arguments.rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                found[way].add(ranks.call("turn", way, arguments.steps))
        looks = {}
        for way in _MONITORED:
            by_rank = ranks.call("monitoring", way, arguments.steps)
            looks[way] = max(by_rank, key=share)
        ranks.call("check_replicas")
    return found, looks


def _print_steps(found: dict[str, Steps], arguments: argparse.Namespace) -> None:
    print(f"\n(a) step time, {arguments.ranks} ranks, {arguments.rounds} rounds of {arguments.steps} steps")
    none, ddp = (Samples.of(found[way].seconds).median for way in (NONE, DDP))
    rows = []
    for way, steps in found.items():
        step = Samples.of(steps.seconds)
        exposed = "-" if way == NONE else duration(max(0.0, step.median - none))
        sent = median(steps.sent)
        reported = [duration(median(steps.wait)), f"{sent / 1e6:.2f} MB"] if sent else ["-", "-"]
        host = duration(median(steps.host))
        rows.append([way, *step.cells(), times(ddp / step.median), exposed, host, *reported])
    print_table(["", "step", "p10 - p90", "vs DDP", "exposed", "host", "waiting", "sent"], rows)


def _step_json(way: str, found: Steps) -> dict[str, Any]:
    return {
        "way": way,
        "seconds": Samples.of(found.seconds).as_json(),
        "wait_seconds": median(found.wait),
        "host_seconds": median(found.host),
        "bytes_sent": median(found.sent),
    }


def _measure_overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {NONE: [], DENSE: []}
    ratios = []
    with rendezvous() as port, _ranks("OverheadRank", 1, port, arguments, KEEP_MEMORY) as ranks:
        ranks.call("verify")
        for number in range(3 * arguments.rounds):  # a difference of a few per cent takes more of them
            turns = {}
            for way in (NONE, DENSE) if number % 2 == 0 else (DENSE, NONE):
                turns[way] = ranks.call("turn", way, arguments.steps)[0]
                seconds[way] += turns[way]
            ratios.append(median(turns[DENSE]) / median(turns[NONE]))
    return {
        "without": Samples.of(seconds[NONE]).as_json(),
        "with": Samples.of(seconds[DENSE]).as_json(),
        "ratio": Samples.of(ratios).as_json(),
    }


def _print_overhead(found: dict[str, Any]) -> None:
    print("\n(b) attach with one rank")
    rows = [[f"{side} attach", *Samples.of(found[side]["samples"]).cells()] for side in ("without", "with")]
    print_table(["", "step", "p10 - p90"], rows)
    low, middle, high = (100 * (found["ratio"][key] - 1) for key in ("p10", "median", "p90"))
    print(f"overhead {middle:+.2f} % of a step (p10 - p90 over the rounds: {low:+.2f} - {high:+.2f} %)")


def _measure_memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for way in _MEMORY_WAYS:
        with (
            rendezvous() as port,
            _ranks("MemoryRank", arguments.ranks, port, arguments, _GIVE_MEMORY_BACK) as ranks,
        ):
            by_rank = ranks.call("measure", way)
        mean = {key: sum(rank[key] for rank in by_rank) / len(by_rank) for key in by_rank[0]}
        found.append({"way": way, **mean})
    return found


def _print_memory(found: list[dict[str, Any]]) -> None:
    print("\n(c) memory per rank beyond model, gradients and optimizer state")
    rows = []
    for row in found:
        gradients, added, fixed = row["gradients"], row["added"], row["fixed"]
        sizes = [f"{number / 1e6:.1f} MB" for number in (gradients, added, fixed)]
        rows.append([row["way"], *sizes, f"{(added - fixed) / gradients:.2f}", f"{added / gradients:.2f}"])
    header = ["", "gradients", "added", "of it fixed", "(added - fixed) / gradients", "added / gradients"]
    print_table(header, rows)


def _print_monitoring(looks: dict[str, dict[str, float]]) -> None:
    print(f"\n(d) monitoring: a row every {EVERY} steps, and operations that are noted")
    rows = [
        [way, duration(cost["row"]), f"{cost['operations']:.0f}", duration(cost["note"]), f"{100 * share(cost):.2f} %"]
        for way, cost in looks.items()
    ]
    print_table(["", "a row", "operations per step", "noting one", "of a step"], rows)
