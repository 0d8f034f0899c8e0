"""Sections on GPUs: kernels against torch's, and the tests that ran there; a table for each report, as for a device."""

from __future__ import annotations

from benchmark_page.reports import Report, Reports, heading
from benchmark_page.tables import Row, duration, table, times

NOTHING_YET = (
    "## On a GPU\n\nNo report has been committed yet. `python -m bench.gpu measure` writes one in under ten "
    "minutes; see [GPUs](gpus.md).\n"
)


def measured(reports: Reports) -> str:
    """Show every kernel on every device."""
    parts = [heading("On a GPU", reports, module="bench.gpu measure")]
    for report in reports.values():
        found = report["environment"]
        text = f"{found.get('device')}, commit {found.get('commit')}. `python -m bench.gpu.report` shows all of it.\n"
        parts += [text, table(_cases(report)), *([table(_steps(report))] if report["attach"] else [])]
    tested = {name: report for name, report in reports.items() if report["tests"]}
    return "\n".join([*parts, *([checked(tested)] if tested else [])])


def _steps(report: Report) -> list[Row]:
    rows: list[Row] = [
        ["training step", "way", "ranks", "step", "overhead", "host", "exposed", "kernels", "peak memory"]
    ]
    for row in report["attach"]:
        exposed = "-" if row["exposed_seconds"] is None else duration(row["exposed_seconds"])
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
        times_taken = [
            duration(row["seconds"]["median"]),
            f"{100 * row['overhead']:+.1f} %",
            duration(row["host_seconds"]),
        ]
        rows.append([row["model"], row["name"], str(row["ranks"]), *times_taken, exposed, str(row["kernels"]), peak])
    return rows


def _cases(report: Report) -> list[Row]:
    rows: list[Row] = [["kernel", "elements", "pycomm", "torch", "faster", "time / floor"]]
    for case in report["cases"]:
        rows.append(
            [
                case["name"],
                f"{case['elements'] / 1e6:.1f} M",
                duration(case["seconds"]["median"]),
                duration(case["peer_seconds"]["median"]),
                times(case["times_faster"]),
                f"{case['time_over_floor']:.2f}",
            ]
        )
    return rows


def checked(reports: Reports) -> str:
    """Show how many tests passed on every device, and what sanitizers said."""
    parts = ["## Tests on a GPU\n"]
    for name, report in reports.items():
        rows: list[Row] = [["run", "passed", "failed", "errors", "skipped", "says"]]
        runs = [("tests", report["tests"], ""), *((r["tool"], r["tests"], r["summary"]) for r in report["sanitizers"])]
        for what, tests, said in runs:
            counts = (str(tests.get(outcome, "-")) for outcome in ("passed", "failed", "errors", "skipped"))
            rows.append([what, *counts, said or ""])
        found = report["environment"]
        text = f"{found.get('device')}, commit {found.get('commit')}: `bench/results/{name}`.\n"
        parts += [text, table(rows)]
    return "\n".join(parts)
