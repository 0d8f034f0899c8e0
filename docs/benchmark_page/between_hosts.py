"""Section on collectives between simulated hosts."""

from __future__ import annotations

from benchmark_page.reports import Report, Reports, by_processor, heading
from benchmark_page.tables import MISSING, Row, duration, link, size, table, times


def between_hosts(reports: Reports) -> str:
    """Show the all-reduce of every number of hosts and link, against the floor and the others."""
    parts = [
        heading("All-reduce between hosts", reports, ("hosts", "sizes", "repeats"), "bench.between_hosts"),
        "Sum of float32. Hosts are network namespaces that share the machine's cores. The floor is a program of bare "
        "sockets that adds while it receives, in the faster of two ways. `torch`: pycomm over the process group's own "
        'backend, `transport="torch"`. In brackets: how many times the time of pycomm.\n',
    ]
    found = by_processor(reports)
    for label, report in found.items():
        for cell in report["results"]:
            where = f", {label}" if len(found) > 1 else ""
            how = f"congestion control {cell['congestion_control']}, Linux {report['conditions']['kernel']}"
            parts += [f"{cell['hosts']} hosts, {link(cell['link_gbit'])}{where}; {how}:\n", table(_rows(cell))]
    return "\n".join(parts)


def _rows(cell: Report) -> list[Row]:
    rows: list[Row] = [["", "pycomm", "time / floor", "Gloo", "torch"]]
    for measured in cell["all_reduce"]:
        seconds, ratios = measured["seconds_per_call"], measured["ratios"]
        others = [
            f"{duration(seconds[name]['median'])} ({times(ratios[f'{name}/pycomm'])})" if name in seconds else MISSING
            for name in ("gloo", "torch")
        ]
        floor = f"{ratios['pycomm/floor']:.2f}" if "pycomm/floor" in ratios else MISSING
        rows.append([size(measured["bytes"]), duration(seconds["pycomm"]["median"]), floor, *others])
    return rows
