"""Reports: which bench and which processor they are of, and what stands above their figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_page.tables import count, size

Report = Mapping[str, Any]
Reports = Mapping[str, Report]
"""Reports by their files' names."""


def load_reports(folder: Path, benches: Collection[str]) -> dict[str, Report]:
    """Return every report in ``folder`` by its file's name.

    Raises:
        ValueError: one is of a bench that is not among ``benches``, or its name is that of another processor.
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


def several(reports: Reports) -> bool:
    """Return whether the reports are of more than one kind of processor."""
    return len({(label_of(report), _cores(report)) for report in reports.values()}) > 1


def _told_apart(report: Report) -> str:
    known = "processor" in report["environment"]
    return label_of(report) if known else f"{label_of(report)}, model not recorded"


def _cores(report: Report) -> str:
    return count(report["environment"].get("cores"), "core")


def heading(title: str, reports: Reports, options: Sequence[str] = ("rounds",), module: str | None = None) -> str:
    """Return a section's title, the commands that made its reports, and where they ran.

    Args:
        title: of the section.
        reports: all reports of a bench.
        options: settings that the command is given; those that are 0 or missing are left out.
        module: what to run; if ``None``, no command is shown.
    """
    lines = [f"## {title}\n"]
    if module is not None:
        commands = dict.fromkeys(_command(module, name, report, options) for name, report in reports.items())
        lines.append("\n".join(["```sh", *commands, "```\n"]))
    origins = [f"`bench/results/{name}`: {_machine(report)}; {_facts(report)}." for name, report in reports.items()]
    lines.append(f"{origins[0]}\n" if len(origins) == 1 else "".join(f"- {origin}\n" for origin in origins))
    return "\n".join(lines)


def _command(module: str, name: str, report: Report, options: Sequence[str]) -> str:
    settings = report.get("settings") or {}
    words = [f"python -m {module}"]
    for option in options:
        value = settings.get(option)
        if value:
            words.append(f"--{option} {','.join(map(str, value)) if isinstance(value, list) else value}")
    if not module.startswith("bench.gpu "):  # which names its report by itself
        words.append(f"--json bench/results/{name}")
    return " ".join(words)


def _machine(report: Report) -> str:
    processor = report["environment"].get("processor") or {}
    levels = {"L2": processor.get("l2_bytes"), "L3": processor.get("l3_bytes")}
    caches = [f"{level} {size(found)}" for level, found in levels.items() if found]
    if caches and processor.get("share_last_cache") is not None:
        caches[-1] += " in common" if processor["share_last_cache"] else " not in common"
    return f"{label_of(report)}, {_cores(report)}" + (f" ({', '.join(caches)})" if caches else "")


def _facts(report: Report) -> str:
    found = report["environment"]
    build = found.get("pycomm") or {}
    names = ("torch", "NumPy", "MPICH", "Open MPI", "DeepSpeed")
    versions = [f"{name} {version}" for name in names if (version := found.get(name.lower().replace(" ", "")))]
    date = f"; {report['date']}" if report.get("date") else ""
    own = f"pycomm {build.get('version')} ({build.get('simd')})"
    return f"{', '.join([own, *versions])}, Python {found.get('python')}{date}"
