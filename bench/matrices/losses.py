"""Loss against bytes: a byte-level language model by AdamW, Muon, and Muon with fewer bytes.

    python -m bench.matrices.losses [--ranks 2] [--steps 240] [--seeds 3] [--json FILE]
    python -m bench.matrices.losses --methods "AdamW;Muon"                  # at equal steps, and at equal seconds
    python -m bench.matrices.losses --from FILE --methods "Muon, PowerSGD(4)" --json FILE

The byte-level GPT of ``pycomm demo``, 2 layers of width 64, on the standard library's source text; 8 windows of 64
bytes per rank and step. Each method gets the best of four learning rates, which is chosen with the first seed. All make
equally many steps; AdamW is trained a second time for the processor seconds that Muon took, with a rate chosen for
that. After each training, all ranks must have the same parameters. "bytes" is what a rank sends per step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.harness.arguments import make_parser, positive
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.matrices.trainee import METHODS
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_LONGER = "AdamW, for Muon's seconds"


def main() -> None:
    parser = make_parser("bench.matrices.losses", __doc__)
    parser.add_argument("--ranks", type=positive, default=2, help="(default 2)")
    parser.add_argument("--steps", type=positive, default=240, help="of each training (default 240)")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings by each method (default 3)")
    parser.add_argument("--methods", default=";".join(METHODS), help=f"of {'; '.join(METHODS)}, joined by ';' (all)")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="read these figures of other methods")
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in ("ranks", "steps", "seeds")}
    earlier: dict[str, Any] = {} if arguments.source is None else json.loads(arguments.source.read_text())
    if earlier and earlier["settings"] != settings:
        raise SystemExit(f"--from has settings {earlier['settings']}, others than these: {settings}")
    print(headline(), flush=True)
    found = earlier.get("methods", {}) | _measure(arguments)
    _print(found)
    write_json(arguments.json, "matrices.losses", settings, {"methods": found})


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with (
        rendezvous() as port,
        WorkerGroup(
            *("matrices", "bench.matrices.trainee:Trainee", arguments.ranks, {"port": port}), environment=KEEP_MEMORY
        ) as ranks,
    ):

        def train(method: str, rate: float, seed: int, steps: int) -> dict[str, float]:
            outcome: dict[str, float] = ranks.call("train", method, rate, seed, steps)[0]
            print(f"{method}, lr {rate:g}, seed {seed}, {steps} steps: {outcome['loss']:.3f}", flush=True)
            return outcome

        def tuned(method: str, steps: int) -> dict[str, Any]:
            tried = {rate: train(method, rate, 0, steps) for rate in METHODS[method].rates}
            rate = min(tried, key=lambda rate: tried[rate]["loss"])
            runs = [tried[rate], *(train(method, rate, seed, steps) for seed in range(1, arguments.seeds))]
            return {"rate": rate, "runs": runs, "steps": steps}

        for method in arguments.methods.split(";"):
            found[method] = tuned(method, arguments.steps)
        if {"AdamW", "Muon"} <= found.keys():
            ratio = _mean(found["Muon"], "cpu") / _mean(found["AdamW"], "cpu")
            found[_LONGER] = tuned("AdamW", round(arguments.steps * ratio))
    return found


def _mean(found: dict[str, Any], key: str) -> float:
    return float(mean(run[key] for run in found["runs"]))


def _print(found: dict[str, Any]) -> None:
    rows = []
    for method, each in found.items():
        losses = [run["loss"] for run in each["runs"]]
        spread = stdev(losses) if len(losses) > 1 else 0.0
        numbers = f"{each['rate']:g}", str(each["steps"]), f"{mean(losses):.3f} ± {spread:.3f}"
        rows.append([method, *numbers, f"{_mean(each, 'bytes'):.0f}", f"{1e3 * _mean(each, 'cpu'):.1f}"])
    print("\nverified: after each training all ranks have the same parameters\n")
    print_table(["method", "lr", "steps", "loss", "bytes per step", "CPU ms per step"], rows)


if __name__ == "__main__":
    main()
