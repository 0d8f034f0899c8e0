"""Writes docs/benchmarks.md, and the table of figures in README.md, from the reports in bench/results.

    python docs/benchmarks.py                # rewrites both
    python docs/benchmarks.py --check        # changes nothing; exits with 1 and says what is stale

Needs neither pycomm nor torch: a figure on the page is one that a committed report holds, or it is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "bench" / "results"
PAGE = Path(__file__).with_name("benchmarks.md")
README = ROOT / "README.md"

Report = Mapping[str, Any]
Row = Sequence[str]

_HEADLINE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_KIB, _MIB = 1 << 10, 1 << 20
_TIMES = "\N{MULTIPLICATION SIGN}"

_INTRODUCTION = """# Benchmarks

Written by `python docs/benchmarks.py` from the reports in `bench/results`; do not edit. CI fails if a figure here is
not one that a committed report holds.

Every bench verifies its results before it times them. What is compared takes turns in the same run, and the figures are
medians over the turns. They were made on small virtual machines, which are noisy: look at the ratios, and run the
command that stands above each table to see them, with their spread, on yours. Figures that are older than these reports
are under [Other measurements](measurements.md).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page and the README's table, or say what is stale; return the exit code."""
    parser = argparse.ArgumentParser(description="the benchmarks in the documentation, from bench/results/*.json")
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    check = parser.parse_args(arguments).check
    wanted = render(load_reports(REPORTS), README.read_text(encoding="utf-8"))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.name} is stale; run: python docs/benchmarks.py", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"{path.name}: rewritten")
    return 1 if check and stale else 0


def load_reports(folder: Path) -> dict[str, Report]:
    """Return every report in ``folder`` by its file's name."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        reports[path.name] = json.loads(path.read_text(encoding="utf-8"))
        if reports[path.name].get("bench") not in SECTIONS:
            raise ValueError(f"{path.name} is of bench {reports[path.name].get('bench')!r}, which has no section here")
    return reports


def render(reports: Mapping[str, Report], readme: str) -> dict[Path, str]:
    """Return what the page and the README should say."""
    sections = [SECTIONS[report["bench"]](name, report) for name, report in reports.items()]
    if not any(report["bench"] == "gpu" for report in reports.values()):
        sections.append(
            "## On a GPU\n\nNo report has been committed yet. `python -m bench.gpu measure` writes one in under ten "
            "minutes; see [GPUs](gpus.md).\n"
        )
    if not _HEADLINE.search(readme):
        raise ValueError("README.md has no <!-- figures --> ... <!-- end -->")
    table = "".join(_table(_headline(reports)))
    filled = _HEADLINE.sub(lambda match: match[1] + table + match[3], readme)
    return {PAGE: "\n".join([_INTRODUCTION, *sections]), README: filled}


def _collectives(name: str, report: Report) -> str:
    parts = [
        _heading("All-reduce between processes of one host", "collectives", name, report),
        "Sum of float32, in place, one thread per rank, called from Python. `empty`: memory from `Communicator.empty`; "
        "`tensor`: an ordinary tensor. The last columns compare the first with Gloo, and with the faster of the two "
        "MPI libraries.\n",
    ]
    for group in report["results"]:
        libraries = list(group["all_reduce"][0]["seconds_per_call"])
        rows: list[Row] = [[f"{group['ranks']} ranks", *libraries, "faster than Gloo", "than MPI"]]
        for measured in group["all_reduce"]:
            seconds = {who: figures["median"] for who, figures in measured["seconds_per_call"].items()}
            rows.append(
                [
                    _bytes(measured["bytes"]),
                    *(_duration(seconds[who]) for who in libraries),
                    _times(seconds["Gloo"] / seconds["pycomm, empty"]),
                    _times(min(seconds[who] for who in ("MPICH", "Open MPI")) / seconds["pycomm, empty"]),
                ]
            )
        floor = group["memcpy"]
        parts.append("".join(_table(rows)))
        parts.append(
            f"All {group['ranks']} ranks copying {_bytes(floor['bytes'])} at once take "
            f"{_duration(floor['seconds']['median'])}: the floor for that size, as far as memcpy goes.\n"
        )
    return "\n".join(parts)


def _kernels(name: str, report: Report) -> str:
    settings = report["settings"]
    rows: list[Row] = [["kernel", "pycomm", "torch", "by", "faster", "time / floor"]]
    for row in report["rows"]:
        rows.append(
            [
                row["kernel"],
                _duration(row["pycomm"]["median"]),
                _duration(row["torch"]["median"]),
                f"`{row['peer']}`",
                _times(row["times_faster"]),
                f"{row['time_over_floor']:.2f} of a {row['floor']['kind']}",
            ]
        )
    text = (
        f"On {settings['elements'] / 1e6:.1f} M elements, the gradients of ResNet-50; "
        f"{_count(settings['threads'], 'thread')}. The floor is the time that the bytes which have to move take at "
        f"the speed of a copy ({report['bytes_per_second']['copy'] / 1e9:.1f} GB/s here, read and written) or of "
        f"reading alone ({report['bytes_per_second']['read'] / 1e9:.1f} GB/s), measured in the same run. A copy also "
        "reads the lines that it writes, which our kernels avoid: that is why some are below 1.\n"
    )
    return "\n".join([_heading("Kernels on a CPU", "kernels", name, report), text, "".join(_table(rows))])


_METHODS = {
    "compute": "no communication at all",
    "ddp": "DistributedDataParallel",
    "ddp-fp16": "DDP with its fp16 hook",
    "ddp-powersgd": "DDP with its PowerSGD hook",
    "dense": "pycomm, dense",
    "fp16": "pycomm, FP16",
    "powersgd": "pycomm, PowerSGD(4)",
    "dgc": "pycomm, DGC(0.001)",
    "auto": 'pycomm, "auto"',
}


def _slow_network(name: str, report: Report) -> str:
    text = (
        f"A byte-level language model of {report['parameters'] / 1e6:.1f} M parameters; hosts are network namespaces "
        "with one rank each, if it does not say otherwise, and a token bucket on their link. They share the machine's "
        "cores. In brackets: how many "
        "times the rate of DistributedDataParallel on the same link; below 1 is slower. [Slow networks]"
        "(slow_network.md) has every command that made this report, the bytes on the wire, the spread, the losses.\n"
    )
    parts = [_heading("Training steps over slow links", "slow_network", name, report, command=False), text]
    steps = _step_times(report)
    for hosts in sorted({key[0] for key in steps}, reverse=True):
        links = sorted({link for h, link, _ in steps if h == hosts}, key=lambda link: link or float("inf"))
        rows: list[Row] = [[hosts, *(_link(link) for link in links)]]
        for method, words in _METHODS.items():
            cells = [_against_ddp(steps, hosts, link, method) for link in links]
            if any(cells):
                rows.append([words, *cells])
        parts.append("".join(_table(rows)))
    return "\n".join(parts)


_Steps = dict[tuple[str, Any, str], float]


def _step_times(report: Report) -> _Steps:
    """Return the seconds of a step by layout, link and method."""
    return {(_layout(row), row["link"], row["method"]): median(row["seconds"]) for row in report["rates"]}


def _layout(row: Report) -> str:
    per_host = row.get("per_host", 1)  # reports from before there were layouts lack it
    return f"{row['hosts']} hosts" + (f" x {per_host} ranks" if per_host > 1 else "")


def _against_ddp(steps: _Steps, hosts: str, link: Any, method: str) -> str:
    seconds = steps.get((hosts, link, method))
    if seconds is None:
        return ""
    ratio = "" if method in ("ddp", "compute") else f" ({_times(steps[hosts, link, 'ddp'] / seconds)})"
    return _duration(seconds) + ratio


def _asynchronous(name: str, report: Report) -> str:
    settings = report["settings"]
    rows: list[Row] = [["last loss of", "all alike", "one slow", "one away"]]
    for method in dict.fromkeys(run["method"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["method"] == method and not run["tunes"]]
        cells = (
            [run["points"][-1][2] for run in runs if run["scenario"] == each] for each in ("alike", "slow", "away")
        )
        rows.append([method, *(f"{sum(losses) / len(losses):.3f}" for losses in cells)])
    text = (
        f"A byte-level language model on {settings['workers']} workers for {settings['seconds']:g} seconds: all alike, "
        "one ten times as slow, one away for a third of the time. [Training without lockstep]"
        "(asynchronous_experiment.md) says what these methods are, and has plots, spreads, samples and bytes.\n"
    )
    heading = _heading("Training without lockstep", "asynchronous.experiment", name, report, command=False)
    return "\n".join([heading, text, "".join(_table(rows))])


def _gpu(name: str, report: Report) -> str:
    rows: list[Row] = [["kernel", "elements", "pycomm", "torch", "faster", "time / floor"]]
    for case in report["cases"]:
        rows.append(
            [
                case["name"],
                f"{case['elements'] / 1e6:.1f} M",
                _duration(case["seconds"]["median"]),
                _duration(case["peer_seconds"]["median"]),
                _times(case["times_faster"]),
                f"{case['time_over_floor']:.2f}",
            ]
        )
    found = report["environment"]
    text = f"{found.get('device')}, commit {found.get('commit')}. `python -m bench.gpu.report` shows all of it.\n"
    return "\n".join([_heading("On a GPU", "gpu", name, report), text, "".join(_table(rows))])


def _gpu_check(name: str, report: Report) -> str:
    rows: list[Row] = [["run", "passed", "failed", "errors", "skipped", "says"]]
    runs = [("tests", report["tests"], ""), *((r["tool"], r["tests"], r["summary"]) for r in report["sanitizers"])]
    for what, tests, said in runs:
        counts = (str(tests.get(outcome, "-")) for outcome in ("passed", "failed", "errors", "skipped"))
        rows.append([what, *counts, said or ""])
    found = report["environment"]
    text = f"{found.get('device')}, commit {found.get('commit')}: `bench/results/{name}`.\n"
    return "\n".join(["## Tests on a GPU\n", text, "".join(_table(rows))])


SECTIONS: dict[str, Callable[[str, Report], str]] = {
    "collectives": _collectives,
    "kernels": _kernels,
    "slow_network": _slow_network,
    "asynchronous.experiment": _asynchronous,
    "gpu": _gpu,
    "gpu_check": _gpu_check,
}
"""How a report is shown, by the bench that wrote it."""


def _headline(reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the five figures of the README; the last is one where nothing is gained."""
    collectives, kernels, network = (
        reports[f"{name}.json"] for name in ("cpu_collectives", "cpu_kernels", "slow_network")
    )
    yield "what, on two cores", "pycomm", "the other", "faster", "by"
    for ranks, num_bytes in ((2, 100 * _MIB), (4, 64 * _KIB)):
        (group,) = (group for group in collectives["results"] if group["ranks"] == ranks)
        (measured,) = (one for one in group["all_reduce"] if one["bytes"] == num_bytes)
        seconds = {who: figures["median"] for who, figures in measured["seconds_per_call"].items()}
        what = f"all-reduce of {_bytes(num_bytes)}, {ranks} ranks of a host"
        yield _compared(what, seconds["pycomm, empty"], seconds["Gloo"], "Gloo", "python -m bench.collectives")
    (topk,) = (row for row in kernels["rows"] if row["kernel"] == "topk, 0.1 %")
    what = f"the largest 0.1 % of {kernels['settings']['elements'] / 1e6:.1f} M elements, exact"
    yield _compared(what, topk["pycomm"]["median"], topk["torch"]["median"], "torch", "python -m bench.kernels")
    steps = _step_times(network)
    for method, link, words in ((*("dgc", 0.1), "DGC(0.001)"), (*("dense", 1.0), "no compression")):
        what = f"training step, 4 hosts, {_link(link)}, {words}"
        ours, theirs = steps["4 hosts", link, method], steps["4 hosts", link, "ddp"]
        yield _compared(what, ours, theirs, "DDP", "python -m bench.slow_network")


def _compared(what: str, ours: float, theirs: float, whose: str, command: str) -> Row:
    return what, _duration(ours), f"{_duration(theirs)}, {whose}", _times(theirs / ours), f"`{command}`"


def _heading(title: str, bench: str, name: str, report: Report, command: bool = True) -> str:
    found, settings = report["environment"], report.get("settings") or {}
    build = found.get("pycomm") or {}
    versions = [
        f"{package} {found[key]}"
        for package, key in (("torch", "torch"), ("NumPy", "numpy"), ("MPICH", "mpich"), ("Open MPI", "openmpi"))
        if found.get(key)
    ]
    machine = f"{found.get('cpu')}, {_count(found.get('cores'), 'core')}"
    facts = f"pycomm {build.get('version')} ({build.get('simd')}), {', '.join(versions)}, Python {found.get('python')}"
    lines = [f"## {title}\n"]
    if command:
        option = f" --rounds {settings['rounds']}" if "rounds" in settings else ""
        output = "" if bench == "gpu" else f" --json bench/results/{name}"
        lines.append(f"```sh\npython -m bench.{bench}{option}{output}\n```\n")
    lines.append(f"`bench/results/{name}`: {machine}; {facts}.\n")
    return "\n".join(lines)


def _table(rows: Iterator[Row] | Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table whose first row is its header; all columns but the first are figures."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |\n"
        if number == 0:
            yield f"| --- |{' ---: |' * (len(row) - 1)}\n"


def _bytes(count: int) -> str:
    return f"{count // _MIB} MB" if count >= _MIB else f"{count // _KIB} KB"


def _duration(seconds: float) -> str:
    """Return three digits, in the unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 9.995 or unit == "µs" or (unit == "ms" and seconds * scale >= 0.9995):
            value = seconds * scale
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError("the last unit takes everything")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}{_TIMES}" if ratio < 9.995 else f"{ratio:.0f}{_TIMES}"


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _link(gbit: float | None) -> str:
    if gbit is None:
        return "as fast as it goes"
    return f"{gbit:g} Gbit/s" if gbit >= 1 else f"{gbit * 1000:g} Mbit/s"


if __name__ == "__main__":
    sys.exit(main())
