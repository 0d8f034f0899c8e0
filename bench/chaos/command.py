"""Training that goes on whatever happens to its ranks: ``pycomm.Survive`` and ``pycomm.join`` under random faults.

    python -m bench.chaos [--faults 200] [--seed 0] [--ranks 3,4,5,6] [--methods dense,topk,dgc,powersgd]
                          [--hosts one|two] [--json FILE]
    python -m bench.chaos --every 5.5 | --averaging | --seeds | --residuals | --cuts [--json FILE]

Faults, one after the other, at random moments of training: a rank is killed, stopped for 0.1 s (which it may survive)
or for 2 s (which on one host it must not, and learns), loses all its connections, has no more memory, or its script
raises. They happen in forward, in a hook of backward, on the communication thread within an exchange, at the commit of
a step, in optimizer.step, while ranks recover from another one's death, and while they let a newcomer in. After each,
the ranks that are left must go on, equal to the bit after every step; newcomers take the places of the lost, and nobody
may hold more memory, descriptors, mappings or threads than at first. "went on": from the fault until the slowest of
them has ended its next step; "noticed": until the last of them knew. With two hosts, which are invented, there is no
memory that all ranks share.

--every: steps a second where a rank is killed each so many steps on average and another one is started in its place,
beside the same without deaths. Steps sleep, so that cores are no resource. --averaging: likewise, 32 ranks that train
alone and average their parameters every 50 steps, through 60 deaths. --seeds: the loss after 20 deaths, beside
the spread of the seeds without. --residuals: a simulation in one process of what it is worth to keep the residuals of
ranks that die, and what that takes. --cuts: the link is cut between two hosts made of network namespaces (root), the
store on the first one's side.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.chaos import rates
from bench.chaos.campaign import Result, cases_of, plan, run_all
from bench.chaos.cuts import cut_links
from bench.chaos.faults import KINDS
from bench.chaos.ranks import METHODS
from bench.chaos.residuals import compare_fates
from bench.harness.arguments import counts, plain_parser, positive
from bench.harness.results import headline, write_json
from bench.harness.timing import duration
from bench.slow_network.namespaces import available
from pycomm.tools.cli.table import print_table


def main() -> None:
    arguments = _parse()
    print(headline(), flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    if arguments.cuts:
        figures, is_right = _cuts(arguments)
    elif arguments.residuals:
        figures, is_right = compare_fates(arguments.seed), True
    elif arguments.every or arguments.averaging or arguments.seeds:
        figures = _rates(arguments)
        is_right = not figures["problems"]
    else:
        figures, is_right = _campaign(arguments)
    write_json(arguments.json, "chaos", settings, figures)
    sys.exit(0 if is_right else 1)


def _rates(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.every:
        return rates.every(arguments.faults or 60, arguments.every, arguments.seed)
    if arguments.averaging:
        return rates.averaging(arguments.faults or 60, arguments.seed)
    return rates.seeds(arguments.faults or 20, 5, arguments.seed)


def _cuts(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    reason = available()
    if reason is not None:
        print(f"no links were cut, as no network namespaces can be made here: {reason}")
        return {"faults": []}, True
    results = cut_links(arguments.faults or 6, 4)
    return {"faults": [r.as_json() for r in results]}, not any(r.problems for r in results)


def _campaign(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    start, count = time.monotonic(), arguments.faults or 200
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        print(result.line(), flush=True)

    cases = cases_of(arguments.methods, arguments.ranks, arguments.hosts)
    totals = run_all(cases, plan(count, arguments.seed), arguments.seed, report)
    wrong = [result for result in results if result.problems]
    kinds = _kinds(results)
    print(f"\n{len(results)} faults in {time.monotonic() - start:.0f} s, {len(wrong)} with something wrong")
    print(
        f"{totals.committed} of {totals.attempted} steps committed; left behind: {'; '.join(totals.leaks) or 'nothing'}"
    )
    for growth in totals.growth:
        print("a rank that lived on holds more by " + ", ".join(f"{value} {key}" for key, value in growth.items()))
    lost = totals.attempted - totals.committed
    figures = {"faults": [r.as_json() for r in results], "kinds": kinds, "totals": vars(totals)}
    return figures, not wrong and not totals.leaks and not lost and len(results) == count


def _kinds(results: list[Result]) -> dict[str, Any]:
    """Print and return what the faults of each kind came to."""
    rows, found = [], {}
    for kind in KINDS:
        these = [result for result in results if result.kind == kind]
        went_on = [r.went_on for r in these if r.went_on is not None]
        detected = [r.detected for r in these if r.detected is not None]
        rows.append([kind, str(len(these)), *_cells(went_on), *_cells(detected)])
        found[kind] = {"faults": len(these), "went_on": _figures(went_on), "detected": _figures(detected)}
    print()
    print_table(["", "faults", "went on", "longest", "noticed", "longest"], rows)
    return found


def _figures(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "max": max(values)} if values else {}


def _cells(values: list[float]) -> list[str]:
    return [duration(median(values)), duration(max(values))] if values else ["-", "-"]


def _words(text: str) -> list[str]:
    for word in text.split(","):
        if word not in METHODS:
            raise argparse.ArgumentTypeError(f"{word!r}, wanted any of {', '.join(METHODS)}")
    return text.split(",")


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.chaos", __doc__)
    parser.add_argument(
        "--faults", type=positive, help="(default 200; 60 with --every and --averaging, 20 with --seeds, 6 with --cuts)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    parser.add_argument("--ranks", type=counts, default="3,4,5,6", help="of groups, in turns (default 3,4,5,6)")
    parser.add_argument("--methods", type=_words, default=",".join(METHODS), help="of compression, in turns")
    parser.add_argument("--hosts", choices=("one", "two"), default="one", help="two are invented (default one)")
    parser.add_argument("--json", type=Path, help="also write the figures to FILE", metavar="FILE")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--every", type=float, metavar="STEPS", help="steps a second with a death each so many steps")
    modes.add_argument("--residuals", action="store_true", help="simulate what residuals of the dead are worth")
    modes.add_argument("--averaging", action="store_true", help="averages a second of 32 ranks with deaths")
    modes.add_argument("--seeds", action="store_true", help="loss after deaths beside the spread of seeds")
    modes.add_argument("--cuts", action="store_true", help="cut the link between two hosts (root)")
    return parser.parse_args()
