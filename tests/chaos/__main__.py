"""``python -m tests.chaos --faults 200 --seed 0``: faults one after another, a line for each, and a summary."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter

from tests.chaos.faults import Fault, fault_of, short_faults
from tests.chaos.judge import Verdict, judge, prepare

_LAST_LINES = 40


def main() -> int:
    options = _options()
    faults = _chosen(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # not at once: there is what has to be cleaned up
    prepare()
    started = time.monotonic()
    verdicts = []
    for place, fault in enumerate(faults, 1):
        verdicts.append(judge(fault))
        print(f"[{place}/{len(faults)}] {verdicts[-1]}", flush=True)
        _print_logs(verdicts[-1], options.logs)
    _summarize(verdicts, options.seed, time.monotonic() - started)
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Loses ranks and judges the others.")
    parser.add_argument("--faults", type=int, default=200, help="how many; 28 cover the table (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--only", type=int, metavar="N", help="the fault with this number alone")
    parser.add_argument("--kind", help="only faults whose line has this in it, such as 'stop raw torch'")
    parser.add_argument("--short", action="store_true", help="the dozen of the test suite; numbered from -1 down")
    parser.add_argument("--logs", action="store_true", help="print all that the ranks wrote")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Fault]:
    if options.only is not None:
        short = short_faults(options.seed)
        return [short[-1 - options.only] if options.only < 0 else fault_of(options.seed, options.only)]
    faults = short_faults(options.seed) if options.short else []
    faults = faults or [fault_of(options.seed, number) for number in range(options.faults)]
    return [fault for fault in faults if not options.kind or options.kind in str(fault)]


def _print_logs(verdict: Verdict, in_full: bool) -> None:
    """Print what the ranks wrote that ended in a strange way or got stuck; or what all of them wrote."""
    for rank, text in enumerate(verdict.logs):
        if in_full or rank in verdict.strange:
            lines = text.rstrip().splitlines()
            shown = lines if in_full else lines[-_LAST_LINES:]
            print("\n".join([f"---- rank {rank} wrote, last:", *shown]), flush=True)


def _summarize(verdicts: list[Verdict], seed: int, seconds: float) -> None:
    rows: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        fault = verdict.fault
        rows.setdefault(f"{fault.kind:<8}{fault.workload:<7} {fault.transport}", []).append(verdict)
    print()
    for row, found in sorted(rows.items()):
        wrong = Counter(what for verdict in found for what in {what for what, _ in verdict.problems})
        good = sum(not verdict.problems for verdict in found)
        details = ", ".join(f"{what} in {count}" for what, count in sorted(wrong.items()))
        print(f"{row:<30} {good} of {len(found)} right{'; ' + details if details else ''}")
    bad = [verdict.fault.number for verdict in verdicts if verdict.problems]
    pace = seconds / max(1, len(verdicts))
    print(f"{len(verdicts)} faults in {seconds:.0f} s, {pace:.1f} s each; {len(bad)} were not as they should be")
    if bad:
        print(f"again: python -m tests.chaos --seed {seed} --only N, for N in {', '.join(map(str, bad))}")


if __name__ == "__main__":
    sys.exit(main())
