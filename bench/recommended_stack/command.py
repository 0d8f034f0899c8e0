"""The recommended stack on slow links: what each ingredient buys, and which of them do not combine well.

    python -m bench.recommended_stack [--links 0.1,1] [--seeds 3] [--epochs 8] [--json FILE] [--from FILE]

Trains examples/recommended_stack.py: the stack, what is left of it without one ingredient in turn and without some
pairs, and DistributedDataParallel with SGD. First every one of them gets the same search for a learning rate, over
--rates, by the loss on validation samples (on this host, as what is learnt does not depend on links). Then each trains
at its rate, with --seeds seeds, on three hosts made of network namespaces with a link of so many Gbit/s each
(bench.slow_network.namespaces; Linux, root). Seconds are spent in the training loop, on the slowest rank; bytes are
what the interface of a host has counted, a mean over the hosts. All ranks' parameters are compared afterwards.

Where namespaces cannot be made, or with --simulate, seconds on links are simulated: the time of ranks on one host, and
what an all-reduce of the bytes that were handed to the transport takes on the link. The report says so.

--from FILE takes the search from an earlier report, with --what search or --what links one part is done alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.arguments import plain_parser, positive
from bench.harness.results import headline, write_json
from bench.recommended_stack.experiment import example, measure, recipes, search, start
from bench.slow_network.figures import Link, link_name, ring_bytes
from bench.slow_network.namespaces import available, hosts, run_ranks
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import RankError

_MODULE = "bench.recommended_stack.experiment"
_RATES = "0.05,0.1,0.2,0.4,0.8,1.6"
Rows = list[dict[str, Any]]


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order, so that no namespace stays
    reason = "--simulate" if arguments.simulate else available()
    print(headline())
    figures: dict[str, Any] = {"search": [], "runs": [], "simulated": reason}
    try:
        figures["search"] = _searched(arguments)
        if arguments.what != "search":
            for link in arguments.links:
                figures["runs"] += _trained(arguments, link, chosen_rates(figures["search"]), reason is not None)
    except (RankError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(figures["runs"])
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "earlier", "simulate")}
    write_json(arguments.json, "recommended_stack", settings, figures)
    return 1 if any(row["difference"] for row in figures["runs"]) else 0


def chosen_rates(rows: Rows) -> dict[str, float]:
    """Return the rate with the least loss, by recipe."""
    return {row["name"]: row["rate"] for row in sorted(rows, key=_loss_of, reverse=True)}


def _loss_of(row: dict[str, Any]) -> float:
    return float("inf") if row["loss"] is None else row["loss"]


def _searched(arguments: argparse.Namespace) -> Rows:
    if arguments.earlier is not None:
        rows: Rows = json.loads(arguments.earlier.read_text())["search"]
        missing = set(arguments.recipes) - {row["name"] for row in rows}
        if missing:
            raise ValueError(f"{arguments.earlier} has no search of {', '.join(sorted(missing))}")
        return [row for row in rows if row["name"] in arguments.recipes]
    found: Rows = start(
        search, arguments.hosts, arguments.recipes, arguments.rates, arguments.tuning_seeds, arguments.epochs
    )
    return found


def _trained(arguments: argparse.Namespace, link: Link, chosen: dict[str, float], simulated: bool) -> Rows:
    """Return what came of all trainings on one kind of link."""
    print(f"  {arguments.hosts} hosts, {link_name(link)}{', simulated' if simulated else ''}", flush=True)
    if simulated:
        rows: Rows = start(measure, arguments.hosts, chosen, arguments.seeds, arguments.epochs, False)
        for row in rows:
            row["wire_bytes"] = ring_bytes(row["payload"], arguments.hosts)
            added = 0.0 if link is None else 8e-9 * row["wire_bytes"] / link / row["seconds"]
            row["points"] = [(seconds * (1 + added), loss) for seconds, loss in row["points"]]
            row["seconds"] *= 1 + added
    else:
        setup = {"chosen": chosen, "seeds": arguments.seeds, "epochs": arguments.epochs, "patience": 300.0}
        with hosts(arguments.hosts, link) as cluster:
            outputs = run_ranks(cluster, _MODULE, [json.dumps(setup)], timeout=arguments.timeout)
        rows = json.loads(outputs[0].splitlines()[-1])
    return [{"link": link, **row} for row in rows]


def _print(runs: Rows) -> None:
    """Print a line for every recipe on every link: means over the seeds."""
    rows = []
    for link, name in dict.fromkeys((row["link"], row["name"]) for row in runs):
        found = [row for row in runs if (row["link"], row["name"]) == (link, name)]
        mean = {
            key: sum(row[key] for row in found) / len(found) for key in ("loss", "accuracy", "seconds", "wire_bytes")
        }
        cells = [f"{mean['loss']:.4f}", f"{mean['accuracy']:.2%}", f"{mean['seconds']:.1f} s"]
        rows.append([name, link_name(link), *cells, f"{mean['wire_bytes'] / 1e6:.2f} MB"])
    if rows:
        print_table(["", "link", "training loss", "test accuracy", "seconds", "on the wire, of a host"], rows)
    for row in runs:
        if row["difference"]:
            print(f"{row['name']}, seed {row['seed']}: {row['difference']}")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = plain_parser("bench.recommended_stack", __doc__)
    add = parser.add_argument
    names = [recipe.name for recipe in recipes()]
    add("--what", choices=("search", "links", "all"), default="all", help="one part alone (default all)")
    add("--links", type=_links, default="0.1,1", help="Gbit/s; 0: unlimited (default 0.1,1)")
    add("--hosts", type=positive, default=3, help="of one rank each (default 3)")
    add("--recipes", nargs="+", choices=names, default=names, metavar="NAME", help="(default all)")
    add("--seeds", type=positive, default=3, help="to measure with (default 3)")
    add("--epochs", type=positive, default=example.EPOCHS, help=f"of every training (default {example.EPOCHS})")
    add("--rates", type=_rates, default=_RATES, help=f"to choose from (default {_RATES})")
    add("--tuning-seeds", type=positive, default=2, help="of the search (default 2)")
    add("--timeout", type=float, default=1800.0, help="seconds for all trainings on a link (default 1800)")
    add("--simulate", action="store_true", help="make no namespaces")
    add("--from", dest="earlier", type=Path, metavar="FILE", help="take the search from FILE")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args(words)
    if arguments.what == "links" and arguments.earlier is None:
        parser.error("--what links wants --from FILE, with the search")
    if example.BATCH % arguments.hosts:
        parser.error(f"--hosts: {arguments.hosts}, wanted a divisor of the batch, which is {example.BATCH}")
    return arguments


def _links(text: str) -> list[Link]:
    return [value or None for value in _numbers(text)]


def _rates(text: str) -> list[float]:
    return [value for value in _numbers(text) if value]


def _numbers(text: str) -> list[float]:
    values = [float(word) for word in text.split(",")]
    if not all(value >= 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text}, wanted numbers, none below 0")
    return values
