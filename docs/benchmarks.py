"""Writes figures into README.md and docs/benchmarks.md, compression.md, growth.md, recommended_stack.md.

They are those in bench/results.

    python docs/benchmarks.py                # rewrites all
    python docs/benchmarks.py --check        # changes nothing; exits with 1 and says what is stale

Needs neither pycomm nor torch. What stands below the line `<!-- by hand from here -->` of docs/benchmarks.md stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark_page import between_hosts, gpu, growth, matrices, on_one_host, recommended_stack, training
from benchmark_page.headline import headline, sentence
from benchmark_page.reports import Reports, by_bench, load_reports
from rewriting import rewrite

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "results"
PAGE = Path(__file__).with_name("benchmarks.md")
README = ROOT / "README.md"
STACK = Path(__file__).with_name("recommended_stack.md")
GROWTH = Path(__file__).with_name("growth.md")
COMPRESSION = Path(__file__).with_name("compression.md")

SECTIONS: dict[str, Callable[[Reports], str]] = {
    "collectives": on_one_host.collectives,
    "between_hosts": between_hosts.between_hosts,
    "training": training.training,
    "training.losses": training.losses,
    "slow_network": training.slow_network,
    "sharding": training.sharding,
    "matrices": matrices.matrices,
    "matrices.losses": matrices.losses,
    "kernels": on_one_host.kernels,
    "asynchronous.experiment": training.asynchronous,
    "growth": growth.growth,
    "recommended_stack": recommended_stack.recommended_stack,
    "gpu": gpu.measured,
    "gpu_check": gpu.checked,
}
"""How the reports of a bench are shown, in the order of the page."""

_HEADLINE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.DOTALL)

_BY_HAND = "<!-- by hand from here -->\n"

_INTRODUCTION = """# Benchmarks

<!-- Written by python docs/benchmarks.py from bench/results: changes above "by hand from here" are lost. -->

![How many times as fast as its peer pycomm is, in each of five benchmarks](benchmarks.svg)
"""

_HOW = """
Most of these figures are held by a report in `bench/results`; CI compares them. Those at the
[end of the page](#without-a-committed-report) are not.

- Each bench verifies its results before it times them.
- What is compared takes turns in the same run. Figures are medians over the turns.
- The machines are small virtual ones, and noisy. Trust the ratios more than the times.
- A bench that ran on several processors has columns for each.

To get the figures of your machine, with their spread, run the command above the table, or [`pycomm bench`](bench.md).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages and the README's table, or say what is stale; return the exit code."""
    description = "the benchmarks in the documentation, from bench/results/*.json"
    return rewrite(description, "benchmarks.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    reports = load_reports(REPORTS, SECTIONS)
    benches = by_bench(reports)
    stack = benches.get("recommended_stack", {})
    filled = recommended_stack.filled(STACK.read_text(encoding="utf-8"), stack)
    texts = [path.read_text(encoding="utf-8") for path in (README, PAGE)]
    losses = training.loss_table(benches["training.losses"])
    compression = _HEADLINE.sub(lambda match: match[1] + losses + match[3], COMPRESSION.read_text(encoding="utf-8"))
    pages = {STACK: filled, GROWTH: growth.page(benches["growth"]), COMPRESSION: compression}
    return {**render(reports, *texts), **pages}


def render(reports: Reports, readme: str, page: str = "") -> dict[Path, str]:
    """Return what the page and the README should say; what was written by hand is kept."""
    benches = by_bench(reports)
    sections = [section(benches[bench]) for bench, section in SECTIONS.items() if bench in benches]
    if "gpu" not in benches:
        sections.append(gpu.NOTHING_YET)
    if not _HEADLINE.search(readme):
        raise ValueError("README.md has no <!-- figures --> ... <!-- end -->")
    table = headline(reports)
    filled = _HEADLINE.sub(lambda match: match[1] + table + match[3], readme)
    by_hand = page.partition(_BY_HAND)[2]
    return {
        PAGE: "\n".join([_INTRODUCTION, sentence(reports), table + _HOW, *sections, _BY_HAND]) + by_hand,
        README: filled,
    }


if __name__ == "__main__":
    sys.exit(main())
