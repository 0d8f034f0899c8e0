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
from rewriting import rewrite, wrapped

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
    "sharding": training.sharding,
    "matrices": matrices.matrices,
    "matrices.losses": matrices.losses,
    "kernels": on_one_host.kernels,
    "gpu": gpu.measured,
    "gpu_check": gpu.checked,
}
"""How the reports of a bench are shown, in the order of the page."""

ELSEWHERE = {
    "slow_network": "[Training over a slow network](slow_network.md): step time, bytes and loss of each method",
    "training.losses": "[What auto chooses](compression.md#what-auto-chooses): loss with each compression method",
    "recommended_stack": "[The recommended stack](recommended_stack.md): DGC, float16, LARS and warm-up together",
    "asynchronous.experiment": "[Asynchronous training and stragglers](asynchronous_experiment.md): loss with a slow "
    "or absent worker",
    "growth": "[Costs as work grows](growth.md): ranks, parameters, bytes and buckets",
}
"""Where the reports of a bench are shown that has its own page, and of what."""

BENCHES = (*SECTIONS, *ELSEWHERE)

_HEADLINE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.DOTALL)


_BY_HAND = "<!-- by hand from here -->\n"

_INTRODUCTION = """# Benchmarks

Compare pycomm with DDP, Gloo, MPI, DeepSpeed and torch, and repeat each measurement with the command above its table.

<!-- Written by python docs/benchmarks.py from bench/results: changes above "by hand from here" are lost. -->

![How many times as fast as its peer pycomm is, in each of five benchmarks](benchmarks.svg)
"""

_HOW = """\
- Each bench verifies its results before it times them. Figures are medians of turns that alternate with the peers'
  turns.
- The machines are small, noisy virtual ones. Trust ratios more than times.
- Most figures come from a report in `bench/results`, which CI compares with this page. A report has the spread of each
  figure, and more sizes, ranks and methods than the tables here. The figures at the
  [end of the page](#without-a-committed-report) have no report.
- To measure your machine, run the command above a table, or [`pycomm bench`](bench.md).

Reports on other pages:

{elsewhere}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages and the README's table, or say what is stale; return the exit code."""
    description = "the benchmarks in the documentation, from bench/results/*.json"
    return rewrite(description, "benchmarks.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    reports = load_reports(REPORTS, BENCHES)
    benches = by_bench(reports)
    stack = benches.get("recommended_stack", {})
    filled = recommended_stack.filled(STACK.read_text(encoding="utf-8"), stack)
    texts = [path.read_text(encoding="utf-8") for path in (README, PAGE)]
    losses = training.loss_table(benches["training.losses"])
    compression = _HEADLINE.sub(lambda match: match[1] + losses + match[3], COMPRESSION.read_text(encoding="utf-8"))
    pages = {STACK: filled, GROWTH: wrapped(growth.page(benches["growth"])), COMPRESSION: compression}
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
    how = _HOW.format(elsewhere="".join(f"- {text}\n" for bench, text in ELSEWHERE.items() if bench in benches))
    by_hand = page.partition(_BY_HAND)[2]
    return {
        PAGE: wrapped("\n".join([_INTRODUCTION, sentence(reports), how, *sections, _BY_HAND])) + by_hand,
        README: filled,
    }


if __name__ == "__main__":
    sys.exit(main())
