"""A byte-level language model on four workers, by every method of training without lockstep.

    python -m bench.asynchronous.experiment --json bench/results/asynchronous.json --docs docs
    python -m bench.asynchronous.experiment --from bench/results/asynchronous.json --docs docs
    python -m bench.asynchronous.experiment --from FILE --methods easgd,gossip --json FILE

Three scenarios: no worker is slow; the last one is ten times as slow; the last one is away for the middle third of
the time. A worker's step takes ``--pace`` seconds at least, for the rest of which it sleeps, as if it computed on a
device of its own: so cores are no resource, and the loss against seconds says who waits for whom. Every method gets
its own learning rate of AdamW, the best of ``--rates`` in the second scenario with the first seed; all else is as the
papers have it, or as ``methods.py`` says. Where ranks make equally many steps, their number is what the slowest can
make in the time.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.asynchronous.experiment.methods import METHODS, SCENARIOS, TUNED_IN, Run
from bench.asynchronous.experiment.report import print_report, write_docs
from bench.harness.arguments import plain_parser, positive
from bench.harness.ranks import WorkerGroup
from bench.harness.results import headline, write_json
from pycomm.tools.launching import rendezvous


def main() -> None:
    arguments = _parse()
    content = None if arguments.source is None else json.loads(arguments.source.read_text())
    if content is None or arguments.methods:
        content = _measure(arguments, content)
    print_report(content)
    if arguments.docs is not None:
        write_docs(arguments.docs, content)


def _measure(arguments: argparse.Namespace, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train; methods that are not asked for stay as they were ``earlier``."""
    print(headline(), flush=True)
    settings = {name: getattr(arguments, name) for name in ("workers", "seconds", "pace", "rates", "seeds")}
    if earlier is not None and {name: earlier["settings"][name] for name in settings} != settings:
        raise SystemExit(f"--from has settings {earlier['settings']}, others than these: {settings}")
    arguments.methods = arguments.methods or list(METHODS)
    kept = [] if earlier is None else [run for run in earlier["runs"] if run["method"] not in arguments.methods]
    figures = {"runs": [*kept, *_Experiment(arguments).run()], "headline": headline()}
    write_json(arguments.json, "asynchronous.experiment", settings, figures)
    return {"settings": settings, **figures}


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.asynchronous.experiment", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="source", help="read these figures, of methods that are not named"
    )
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write a page and its plot to FOLDER")
    parser.add_argument("--workers", type=positive, default=4, help="of each training (default 4)")
    parser.add_argument("--seconds", type=float, default=24.0, help="of each training (default 24)")
    parser.add_argument("--pace", type=float, default=0.06, help="seconds of a worker's step (default 0.06)")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings of each kind (default 3)")
    rates = [3e-4, 1e-3, 3e-3, 1e-2]
    parser.add_argument("--rates", type=_numbers, default=rates, help="learning rates (default 3e-4,1e-3,3e-3,1e-2)")
    parser.add_argument("--methods", type=_methods, default=[], help=f"of {', '.join(METHODS)} (all)")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _methods(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name}, wanted of {', '.join(METHODS)}")
    return names


class _Experiment:
    """All trainings: those with a server and those without take place side by side, as each mostly sleeps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._runs: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._error: BaseException | None = None

    def run(self) -> list[dict[str, Any]]:
        """Return every run with its outcome."""
        lanes = [threading.Thread(target=self._run_lane, args=(has_server,)) for has_server in (False, True)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if self._error is not None:
            raise self._error
        return self._runs

    def _run_lane(self, has_server: bool) -> None:
        names = [name for name in self._arguments.methods if (METHODS[name].served is not None) == has_server]
        if not names:
            return
        worker = "bench.asynchronous.experiment.trainee:Trainee"
        size = self._arguments.workers + has_server
        try:
            with (
                rendezvous() as port,
                WorkerGroup("experiment", worker, size, {"port": port, "has_server": has_server}) as ranks,
            ):
                for name in names:
                    self._run_method(ranks, name)
        except BaseException as error:
            self._error = error

    def _run_method(self, ranks: WorkerGroup, name: str) -> None:
        rates = {rate: self._train(ranks, name, TUNED_IN, rate, 0, tunes=True) for rate in self._arguments.rates}
        best = min(rates, key=lambda rate: rates[rate])
        for scenario in SCENARIOS:
            for seed in range(self._arguments.seeds):
                self._train(ranks, name, scenario, best, seed)

    def _train(self, ranks: WorkerGroup, name: str, scenario: str, lr: float, seed: int, tunes: bool = False) -> float:
        """Train; return the last loss."""
        run = Run(name, scenario, lr, seed, self._arguments.seconds, self._arguments.pace)
        outcomes = ranks.call("train", asdict(run))
        worker = next(outcome for outcome in outcomes if outcome["points"])
        times = sorted(at for outcome in outcomes for at in outcome["times"])
        loss = float(worker["points"][-1][1])
        found = {**asdict(run), "tunes": tunes, "points": _with_steps(worker["points"], times), "steps": len(times)}
        found["bytes"] = sum(outcome["bytes_sent"] for outcome in outcomes)
        with self._lock:
            self._runs.append(found)
            elapsed = time.monotonic() - self._begun
            print(f"{elapsed:6.0f} s  {name:10} {scenario:6} rate {lr:g} seed {seed}: {loss:.4f}", flush=True)
        return loss if loss == loss else float("inf")


def _with_steps(points: Sequence[Sequence[float]], times: list[float]) -> list[list[float]]:
    """Return seconds, steps of all workers until then, and loss."""
    return [[at, sum(time <= at for time in times), loss] for at, loss in points]
