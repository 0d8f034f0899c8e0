"""Reports: which bench and which processor they are of, and what stands above their figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_page.tables import count

Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""Reports by their files' names."""


def load_reports(folder: Path, benches: Collection[str]) -> dict[str, Report]:
    """Return every report in ``folder`` by its file's name.

    Raises:
        ValueError: one is of a bench that is not among ``benches``, or its name names another processor.
    """
    reports = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):  # the one that has no processor's name first
        report = reports[path.name] = json.loads(path.read_text(encoding="utf-8"))
        if report.get("bench") not in benches:
            raise ValueError(f"{path.name} is of bench {report.get('bench')!r}, which has no section here")
        _, dash, named = path.stem.partition("-")
        wanted = re.sub(r"[^a-z0-9]+", "-", label_of(report).lower()).strip("-")
        if dash and named != wanted:
            raise ValueError(f"{path.name} is of {label_of(report)}: what follows the first dash must be {wanted}")
    return reports


def by_bench(reports: Reports) -> dict[str, dict[str, Report]]:
    """Return the reports of each bench, benches in the order of their first report."""
    return grouped(reports, lambda report: str(report["bench"]))


def grouped(reports: Reports, key: Callable[[Report], Hashable]) -> dict[Any, dict[str, Report]]:
    """Return the reports that have the same ``key``, by it."""
    groups: dict[Any, dict[str, Report]] = {}
    for name, report in reports.items():
        groups.setdefault(key(report), {})[name] = report
    return groups


def label_of(report: Report) -> str:
    """Return the name of a report's processor: reports from before there were labels have the brand alone."""
    found = report["environment"]
    return str((found.get("processor") or {}).get("label") or found.get("cpu"))


def by_processor(reports: Reports) -> dict[str, Report]:
    """Return the reports by labels that tell their processors apart.

    Raises:
        ValueError: two reports are of the same kind of processor.
    """
    for label in (_told_apart, lambda report: f"{_told_apart(report)}, {_cores(report)}"):
        labels = [label_of(report) if len(reports) == 1 else label(report) for report in reports.values()]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, reports.values(), strict=True))
    raise ValueError(f"{' and '.join(reports)} are of one bench, with the same settings and on one kind of processor")


def fullest(reports: Reports, amount: Callable[[Report], int]) -> str:
    """Return the name of the report of the largest ``amount``: the first of equals.

    Raises:
        ValueError: two reports are of the same kind of processor.
    """
    by_processor(reports)
    return max(reports, key=lambda name: amount(reports[name]))


def _told_apart(report: Report) -> str:
    known = "processor" in report["environment"]
    return label_of(report) if known else f"{label_of(report)}, model not recorded"


def _cores(report: Report) -> str:
    return count(report["environment"].get("cores"), "core")


def heading(
    title: str,
    reports: Reports,
    options: Sequence[str] = ("rounds",),
    module: str = "",
    rivals: Sequence[str] = (),
) -> str:
    """Return a section's title, the commands that made its reports, and where they ran.

    Args:
        title: of the section.
        reports: those that the section shows.
        options: settings that the command is given; those that are 0 or missing are left out.
        module: what to run.
        rivals: libraries whose versions are shown.
    """
    commands = dict.fromkeys(_command(module, name, report, options) for name, report in reports.items())
    origins = [origin(name, report, rivals) for name, report in reports.items()]
    shown = origins[0] if len(origins) == 1 else "".join(f"- {each}" for each in origins)
    return "\n".join([f"## {title}\n", "\n".join(["```sh", *commands, "```\n"]), shown])


def origin(name: str, report: Report, rivals: Sequence[str] = ()) -> str:
    """Return where a report was made, and with which versions."""
    found = report["environment"]
    build = found.get("pycomm") or {}
    versions = [f"{each} {found[key]}" for each in rivals if found.get(key := each.lower().replace(" ", ""))]
    words = [f"pycomm {build.get('version')} ({build.get('simd')})", f"torch {found.get('torch')}", *versions]
    date = f"; {report['date']}" if report.get("date") else ""
    return f"`bench/results/{name}`: {label_of(report)}, {_cores(report)}; {', '.join(words)}{date}.\n"


def _command(module: str, name: str, report: Report, options: Sequence[str]) -> str:
    settings = report.get("settings") or {}
    words = [f"python -m {module}"]
    for option in options:
        value = settings.get(option)
        if value:
            words.append(f"--{option} {','.join(map(str, value)) if isinstance(value, list) else value}")
    if not module.startswith("bench.gpu "):  # which names its own report
        words.append(f"--json bench/results/{name}")
    return " ".join(words)
