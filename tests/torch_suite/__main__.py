"""Runs torch's suite on a backend and prints what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.torch_suite import faults, suite
from tests.torch_suite.ranks import FAILED, PASSED, SKIPPED, Report, Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("--backend", default="pycomm", help="by its name in torch (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tests")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="the first, and then every Nth test")
    parser.add_argument("--at-once", type=int, default=3, help="tests side by side (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=60.0, metavar="S", help="for a test (default: %(default)s)")
    parser.add_argument("--faults", action="store_true", help="one test, without and with each fault, to see it fail")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each test came to")
    chosen = parser.parse_args()
    whole = not chosen.only and not chosen.faults and chosen.every == 1
    reports = [Report(case.name, SKIPPED, case.left_out) for case in suite.cases() if case.left_out and whole]
    for report in run(_tests(chosen), chosen.at_once):
        reports.append(report)
        print(f"{report.outcome:8}{report.seconds:6.1f} s  {report.name} {report.fault or ''}".rstrip(), flush=True)
        if report.outcome == FAILED:
            print(report.text, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(report) for report in reports]))
    print(", ".join(f"{sum(r.outcome == outcome for r in reports)} {outcome}" for outcome in (PASSED, FAILED, SKIPPED)))
    return int(any(report.outcome == FAILED for report in reports))


def _tests(chosen: argparse.Namespace) -> list[tuple[str, Settings]]:
    if chosen.faults:
        return [(faults.TEST, Settings(chosen.backend, chosen.patience, fault)) for fault in (None, *faults.FAULTS)]
    names = chosen.only or [case.name for case in suite.cases() if case.left_out is None][:: chosen.every]
    return [(name, Settings(chosen.backend, chosen.patience)) for name in names]


if __name__ == "__main__":
    sys.exit(main())
