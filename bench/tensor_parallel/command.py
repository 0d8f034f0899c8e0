"""Steps of the byte-level GPT with its layers split over ranks, through "pycomm" and through Gloo.

    python -m bench.tensor_parallel [--ranks 2] [--rounds 9] [--steps 8] [--json FILE]

One group of processes per backend, each with the same model, split by ``pycomm.parallel.split(model, mesh, "auto")``,
one thread per rank; they have turns of a few steps, while the others wait without a core. A step (forward, backward,
AdamW) takes as long as its slowest rank's. Loss and gradients are compared in float64 with the whole model's
before anything is timed, and the two models' losses after.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from statistics import median

from bench.harness.arguments import make_parser, positive
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from bench.tensor_parallel.ranks import GLOO, PYCOMM, WAYS
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_SIZES = ("width", "layers", "context", "num_heads")


def main() -> None:
    arguments = _parse()
    print(headline())
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    ratios = []
    with contextlib.ExitStack() as stack:
        ranks = {way: stack.enter_context(_ranks(way, arguments, sizes)) for way in WAYS}
        split, _ = (group.call("verify")[0] for group in ranks.values())
        print(f"verified: loss and gradients are the whole model's; {split / 1e6:.2f} M parameters are split")
        for number in range(arguments.rounds):
            turns = {}
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                by_rank = ranks[way].call("turn", arguments.steps)
                turns[way] = [max(step) for step in zip(*by_rank, strict=True)]
                seconds[way] += turns[way]
            ratios.append(median(turns[GLOO]) / median(turns[PYCOMM]))
        losses = [group.call("loss")[0] for group in ranks.values()]
    if abs(losses[0] - losses[1]) > 0.01:
        raise AssertionError(f"after the same steps the losses are {losses}")
    ratio = Samples.of(ratios)
    rows = [[way, *Samples.of(seconds[way]).cells()] for way in WAYS]
    print_table(["backend", "step", "p10 - p90"], rows)
    spread = f"p10 - p90 over the rounds: {ratio.low:.2f} - {ratio.high:.2f}"
    print(f"pycomm is {times(ratio.median)} as fast as Gloo ({spread})")
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "steps", "batch")} | sizes
    figures = {way: Samples.of(seconds[way]).as_json() for way in WAYS} | {"ratio": ratio.as_json()}
    write_json(arguments.json, "tensor_parallel", settings, figures)


@contextlib.contextmanager
def _ranks(way: str, arguments: argparse.Namespace, sizes: dict[str, int]) -> Iterator[WorkerGroup]:
    setup = {"way": way, "sizes": sizes, "batch": arguments.batch}
    worker = "bench.tensor_parallel.ranks:SplitRank"
    with (
        rendezvous() as port,
        WorkerGroup(
            "tensor_parallel", worker, arguments.ranks, setup | {"port": port}, environment=KEEP_MEMORY
        ) as ranks,
    ):
        yield ranks


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.tensor_parallel", __doc__)
    parser.add_argument("--ranks", type=positive, default=2, help="that a layer is split over (default 2)")
    parser.add_argument("--steps", type=positive, default=8, help="steps per turn (default 8)")
    parser.add_argument("--batch", type=positive, default=2, help="windows of text (default 2)")
    parser.add_argument("--width", type=positive, default=256, help="of the model (default 256)")
    parser.add_argument("--layers", type=positive, default=2, help="of the model (default 2)")
    parser.add_argument("--context", type=positive, default=64, help="bytes of text that the model sees (default 64)")
    parser.add_argument("--heads", dest="num_heads", type=positive, default=4, help="of each attention (default 4)")
    return parser.parse_args()
