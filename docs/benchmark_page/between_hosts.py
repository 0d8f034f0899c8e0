"""Section on collectives between simulated hosts."""

from __future__ import annotations

from collections.abc import Iterator

from benchmark_page.reports import Report, Reports, fullest, heading
from benchmark_page.tables import KIB, MIB, MISSING, Row, duration, link, size, table, times

_SIZES = (KIB, MIB, 100 * MIB)
"""What the page shows."""


def between_hosts(reports: Reports) -> str:
    """Show the all-reduce of every number of hosts and link, against the floor and Gloo."""
    name = fullest(reports, lambda report: len(report["results"]))
    report = reports[name]
    controls = " or ".join(dict.fromkeys(cell["congestion_control"] for cell in report["results"]))
    rows: list[Row] = [["", "pycomm", "time / floor", "Gloo"]]
    return "\n".join(
        [
            heading("All-reduce between hosts", {name: report}, ("hosts", "sizes", "repeats"), "bench.between_hosts"),
            "Sum of float32. Hosts are network namespaces that share the machine's cores; congestion control "
            f"{controls}, Linux {report['conditions']['kernel']}. The floor is a program of bare sockets that adds "
            "while it receives. In brackets: how many times the time of pycomm. The gain "
            "over Gloo shrinks as arrays grow.\n",
            table([*rows, *_rows(report)]),
        ]
    )


def _rows(report: Report) -> Iterator[Row]:
    for cell in report["results"]:
        for measured in (each for each in cell["all_reduce"] if each["bytes"] in _SIZES):
            seconds, ratios = measured["seconds_per_call"], measured["ratios"]
            gloo = (
                f"{duration(seconds['gloo']['median'])} ({times(ratios['gloo/pycomm'])})"
                if "gloo" in seconds
                else MISSING
            )
            floor = f"{ratios['pycomm/floor']:.2f}" if "pycomm/floor" in ratios else MISSING
            what = f"{cell['hosts']} hosts, {link(cell['link_gbit'])}, {size(measured['bytes'])}"
            yield [what, duration(seconds["pycomm"]["median"]), floor, gloo]
