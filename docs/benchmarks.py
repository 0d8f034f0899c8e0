"""Writes docs/benchmarks.md, and figures in README.md and docs/recommended_stack.md, from the reports in bench/results.

    python docs/benchmarks.py                # rewrites all
    python docs/benchmarks.py --check        # changes nothing; exits with 1 and says what is stale

Needs neither pycomm nor torch: a figure on the page is one that a committed report holds, or it is not there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark_page import gpu, on_one_host, recommended_stack, training
from benchmark_page.headline import headline
from benchmark_page.reports import Reports, by_bench, load_reports
from rewriting import rewrite

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "results"
PAGE = Path(__file__).with_name("benchmarks.md")
README = ROOT / "README.md"
STACK = Path(__file__).with_name("recommended_stack.md")

SECTIONS: dict[str, Callable[[Reports], str]] = {
    "collectives": on_one_host.collectives,
    "kernels": on_one_host.kernels,
    "training": training.training,
    "sharding": training.sharding,
    "slow_network": training.slow_network,
    "asynchronous.experiment": training.asynchronous,
    "recommended_stack": recommended_stack.recommended_stack,
    "gpu": gpu.measured,
    "gpu_check": gpu.checked,
}
"""How the reports of a bench are shown."""

_HEADLINE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.DOTALL)

_INTRODUCTION = """# Benchmarks

Written by `python docs/benchmarks.py` from the reports in `bench/results`; do not edit. CI fails if a figure here is
not one that a committed report holds.

Every bench verifies its results before it times them. What is compared takes turns in the same run, and the figures are
medians over the turns. They were made on small virtual machines, which are noisy: look at the ratios, and run the
command that stands above each table to see them, with their spread, on yours. A bench that was run on several kinds of
processor has columns for each of them. Figures that are older than these reports are under
[Other measurements](measurements.md).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages and the README's table, or say what is stale; return the exit code."""
    description = "the benchmarks in the documentation, from bench/results/*.json"
    return rewrite(description, "benchmarks.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    reports = load_reports(REPORTS, SECTIONS)
    stack = by_bench(reports).get("recommended_stack", {})
    filled = recommended_stack.filled(STACK.read_text(encoding="utf-8"), stack)
    return {**render(reports, README.read_text(encoding="utf-8")), STACK: filled}


def render(reports: Reports, readme: str) -> dict[Path, str]:
    """Return what the page and the README should say."""
    benches = by_bench(reports)
    sections = [SECTIONS[bench](found) for bench, found in benches.items()]
    if "gpu" not in benches:
        sections.append(gpu.NOTHING_YET)
    if not _HEADLINE.search(readme):
        raise ValueError("README.md has no <!-- figures --> ... <!-- end -->")
    table = headline(reports)
    filled = _HEADLINE.sub(lambda match: match[1] + table + match[3], readme)
    return {PAGE: "\n".join([_INTRODUCTION, *sections]), README: filled}


if __name__ == "__main__":
    sys.exit(main())
