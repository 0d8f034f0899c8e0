"""Training over a slow network: what compressing gradients gains there, in step time and in seconds to a loss.

    python -m bench.slow_network [--what all] [--hosts 2,4,2x2] [--links 0.1,1,0] [--methods ddp,dense,dgc,...]
                                 [--steps 1500] [--out FILE] [--docs DIR]

On hosts made of network namespaces (bench.slow_network.namespaces; Linux, root), one rank each (2x2: two hosts
with two ranks each, which share a link), links of so many Gbit/s, a byte-level language model is trained on the
Python standard library's source, the model and the text of `pycomm demo`. Every method trains by SGD with the
same learning rate and momentum.

--what rate: step times. All methods live side by side in the same processes and take turns of a few steps;
medians, of each step the slowest rank's. "no communication" is the same step on all ranks at once without
averaging. Bytes on the wire are what the interface of a host has counted, per step: with headers and
acknowledgments, though a segment that the device is given in one piece counts one header.
--what loss: every method trains for --steps steps, from the same parameters on the same text in the same order,
with as many ranks as --hosts has at most. Validation does not count as training time.
--what all: both.
--what page: neither; --docs DIR writes the page of the figures that --from FILE has.

What a method learns in a step does not depend on the link. So losses are measured once, on unlimited links,
and seconds to a loss are "combined": steps of that run times the step time measured on the link. DGC
sends more while it warms up (--dgc-warmup steps); the link's time for that is added.
"auto" chooses by the link, and is trained on each. The target loss is what the dense run reached at
--target-fraction of its steps. All ranks' parameters are compared after training.

--from FILE starts from the figures that an earlier run has written, and replaces what is measured again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.arguments import plain_parser, positive
from bench.harness.ranks import KEEP_MEMORY
from bench.harness.results import environment, headline, headline_of, write_json
from bench.slow_network.figures import Curve, Failure, Figures, Link, Rate, hosts_name, link_name
from bench.slow_network.methods import (
    COMPUTE,
    DDP_POWERSGD,
    METHODS,
    MissingMethodError,
    check_present,
    label_of,
)
from bench.slow_network.namespaces import available, hosts, run_ranks
from bench.slow_network.ranks import make_model
from bench.slow_network.report import print_report, write_docs
from pycomm.tools.launching import RankError

_MODULE = "bench.slow_network.ranks"
_UNLIMITED_ROUNDS = 4  # times as many: steps are short there, and so are the differences
_MODEL_SETTINGS = ("width", "layers", "context", "batch", "lr", "momentum", "seed", "steps", "every")
_KNOBS = ("momentum", "ratio", "rank", "dgc_warmup", "patience")
_Layout = tuple[int, int]  # hosts, and ranks of each
_FRAGILE = (DDP_POWERSGD,)  # seen to end the process; the others are measured without it then


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    if arguments.what == "page":
        return _write_page(arguments)
    reason = available()
    if reason is not None:
        print(f"no network namespaces here: {reason}", file=sys.stderr)
        return 1
    if arguments.docs is not None and importlib.util.find_spec("matplotlib") is None:
        print("--docs draws with matplotlib, which is not installed", file=sys.stderr)
        return 1
    try:
        check_present(arguments.methods)
        settings, figures = _begin(arguments, shlex.join(sys.argv[1:] if words is None else words))
    except (MissingMethodError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order, so that no namespace stays
    print(headline())
    print(
        f"{figures.parameters / 1e6:.2f} M parameters, {arguments.batch} x {arguments.context} bytes per rank and step"
    )
    try:
        for measure in _plan(arguments):
            figures.replace(measure(figures.parameters))
            if arguments.out is not None:  # what there is, should the rest not come to its end
                _save(arguments.out, settings, figures)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print_report(figures, settings)
    write_json(arguments.out, "slow_network", settings, figures.as_json())
    if arguments.docs is not None:
        write_docs(arguments.docs, figures, settings, headline_of(environment()))
    failed = any(failure.method not in _FRAGILE for failure in figures.failures)
    return 1 if failed or figures.unequal() else 0


def _write_page(arguments: argparse.Namespace) -> int:
    if arguments.earlier is None or arguments.docs is None:
        print("--what page wants --from FILE and --docs DIR", file=sys.stderr)
        return 1
    found = json.loads(arguments.earlier.read_text())
    write_docs(arguments.docs, Figures.from_json(found), found["settings"], headline_of(found["environment"]))
    return 0


def _begin(arguments: argparse.Namespace, words: str) -> tuple[dict[str, Any], Figures]:
    """Return the settings for the report, and what was measured earlier."""
    model = make_model(vars(arguments))
    figures = Figures(sum(parameter.numel() for parameter in model.parameters()))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "docs", "earlier")}
    settings["commands"] = [f"python -m bench.slow_network {words}".strip()]
    if arguments.earlier is not None:
        found = json.loads(arguments.earlier.read_text())
        for name in (*_MODEL_SETTINGS, *_KNOBS):
            if found["settings"][name] != settings[name]:
                earlier = found["settings"][name]
                raise ValueError(f"{arguments.earlier}: --{name} was {earlier}, which is now {settings[name]}")
        figures = Figures.from_json(found)
        settings["commands"] = [*found["settings"]["commands"], *settings["commands"]]
    return settings, figures


def _save(path: Path, settings: dict[str, Any], figures: Figures) -> None:
    """Save the figures in one piece, whenever this is interrupted."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps({"bench": "slow_network", "settings": settings, **figures.as_json()}) + "\n")
    draft.replace(path)


def _plan(arguments: argparse.Namespace) -> list[Callable[[int], Figures]]:
    """Return what to measure, a function of the number of parameters each, fast links first: errors show early."""
    links = sorted(arguments.links, key=lambda link: -(link or float("inf")))
    plan: list[Callable[[int], Figures]] = []
    if arguments.what in ("rate", "all"):
        for layout in arguments.hosts:
            plan += [_rate_job(arguments, layout, link) for link in links]
    if arguments.what in ("loss", "all"):
        count = max(hosts for hosts, _ in arguments.hosts)
        for name in arguments.methods:
            plan += [_curve_job(arguments, count, link, name) for link in (links if METHODS[name].varies else [None])]
    return plan


def _rate_job(arguments: argparse.Namespace, layout: _Layout, link: Link) -> Callable[[int], Figures]:
    def job(parameters: int) -> Figures:
        figures = Figures(parameters)
        names = [COMPUTE, *arguments.methods]
        try:
            found = _run(arguments, "rate", layout, link, names)
        except RankError as error:
            fragile = [name for name in names if name in _FRAGILE]
            if not fragile:
                raise
            hosts, per_host = layout
            figures.failures += [Failure("rate", hosts, link, name, str(error), per_host) for name in fragile]
            print(f"    failed; again without {', '.join(fragile)}", flush=True)
            found = _run(arguments, "rate", layout, link, [name for name in names if name not in fragile])
        figures.rates = [Rate(hosts=layout[0], per_host=layout[1], link=link, **row) for row in found]
        return figures

    return job


def _curve_job(arguments: argparse.Namespace, count: int, link: Link, name: str) -> Callable[[int], Figures]:
    def job(parameters: int) -> Figures:
        figures = Figures(parameters)
        try:
            found = _run(arguments, "loss", (count, 1), link, [name])
        except RankError as error:
            print(f"    failed: {error}", flush=True)
            figures.failures.append(Failure("loss", count, link, name, str(error)))
            return figures
        points = [(step, loss) for step, loss in found.pop("points")]
        figures.curves.append(Curve(hosts=count, link=link, points=points, **found))
        return figures

    return job


def _run(arguments: argparse.Namespace, what: str, layout: _Layout, link: Link, names: Sequence[str]) -> Any:
    """Run the ranks on hosts of that layout; returns what they found."""
    count, per_host = layout
    print(f"  {what}: {hosts_name(count, per_host)}, {link_name(link)}: {', '.join(map(label_of, names))}", flush=True)
    rounds = arguments.rounds * (_UNLIMITED_ROUNDS if link is None else 1)
    knobs = {name: getattr(arguments, name) for name in _KNOBS}
    if what == "rate":
        knobs["dgc_warmup"] = 0  # step times are those after it
    setup = {name: getattr(arguments, name) for name in (*_MODEL_SETTINGS, "warm_up", "turn_steps")}
    setup |= {"what": what, "methods": list(names), "rounds": rounds, "knobs": knobs}
    with hosts(count, link) as cluster:
        words = [json.dumps(setup)]
        outputs = run_ranks(cluster, _MODULE, words, per_host, arguments.timeout, KEEP_MEMORY)
    return json.loads(outputs[0].splitlines()[-1])


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = plain_parser("bench.slow_network", __doc__)
    add = parser.add_argument
    add(
        "--what",
        choices=("rate", "loss", "all", "page"),
        default="all",
        help="step times, losses, both (default), or neither",
    )
    add("--hosts", type=_list_of(_layout), default="2,4,2x2", help="hosts, or hosts x ranks (default 2,4,2x2)")
    add("--links", type=_list_of(_link), default="0.1,1,0", help="Gbit/s; 0: unlimited (default 0.1,1,0)")
    add("--methods", type=_list_of(_method), default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default all)")
    add("--rounds", type=positive, default=3, help=f"turns of a rate (default 3; unlimited x {_UNLIMITED_ROUNDS})")
    add("--turn-steps", type=positive, default=3, help="steps of a turn (default 3)")
    add("--warm-up", type=positive, default=6, help="steps of each method before the first turn (default 6)")
    add("--steps", type=positive, default=1500, help="of each training (default 1500)")
    add("--every", type=positive, default=50, help="steps between validations (default 50)")
    add("--target-fraction", type=_fraction, default=0.5, help="of the dense run's steps (default 0.5)")
    add("--timeout", type=float, default=1800.0, help="seconds for each start of the ranks (default 1800)")
    add("--patience", type=float, default=300.0, help="seconds for every wait of a rank (default 300)")
    add("--from", dest="earlier", type=Path, metavar="FILE", help="start from the figures in FILE")
    add("--out", type=Path, metavar="FILE", help="write the figures to FILE, as JSON")
    add("--docs", type=Path, metavar="DIR", help="write slow_network.md and its plot into DIR")
    _add_model_options(parser)
    return parser.parse_args(words)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and methods").add_argument
    add("--width", type=positive, default=640, help="of the model, a multiple of 64 (default 640)")
    add("--layers", type=positive, default=2, help="(default 2)")
    add("--context", type=positive, default=16, help="bytes that the model sees (default 16)")
    add("--batch", type=positive, default=1, help="windows of text per rank and step (default 1)")
    add("--lr", type=float, default=0.01, help="of SGD, after a ramp; then half a cosine (default 0.01)")
    add("--momentum", type=float, default=0.9, help="of SGD (default 0.9)")
    add("--seed", type=int, default=0, help="of the parameters and the text (default 0)")
    add("--ratio", type=float, default=0.001, help="that DGC and the control send (default 0.001)")
    add("--rank", type=positive, default=4, help="of PowerSGD (default 4)")
    add("--dgc-warmup", type=int, default=300, help="steps in which DGC comes down to its ratio (default 300)")


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_all(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(word) for word in text.split(",")))

    return parse_all


def _layout(text: str) -> _Layout:
    hosts, _, per_host = text.partition("x")
    return positive(hosts), positive(per_host or "1")


def _link(text: str) -> Link:
    value = float(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}, wanted a rate in Gbit/s or 0")
    return value or None


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(f"no method {text!r}, wanted any of {', '.join(METHODS)}")
    return text


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}, wanted 0 < fraction <= 1")
    return value
