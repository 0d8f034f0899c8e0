"""Printer of the reports that ``bench.gpu`` wrote, as tables; needs neither torch nor pycomm.

python -m bench.gpu.report [FILE...]        (default: all of bench/results/gpu_*.json)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.harness.arguments import plain_parser
from bench.harness.unbuilt import Samples, duration, print_table, times

_PER_STEP: dict[str, tuple[str, Callable[[Any], str]]] = {
    "host": ("host_seconds", duration),
    "exposed": ("exposed_seconds", duration),
    "kernels": ("kernels", str),
    "launches": ("launches", str),
    "peak": ("peak_bytes", lambda found: f"{found / 2**30:.2f} GiB"),
    "misses": ("miss_rate", lambda found: f"{100 * found:.1f} %"),
}
RESULTS = ROOT / "bench" / "results"
NOT_COVERED = {
    "NVLS, the sums of NVLink's switches": "several GPUs behind a switch",
    "symmetric windows between GPUs": "several GPUs",
    "an abort while a rank of another GPU is lost": "several GPUs",
    "links between hosts, and GPUDirect": "two hosts",
    "a topology in which NCCL chooses algorithms": "eight GPUs",
}
"""What one GPU cannot show, and what would."""


def main() -> int:
    parser = plain_parser("bench.gpu.report", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    files: list[Path] = parser.parse_args().files or sorted(RESULTS.glob("gpu_*.json"))
    if not files:
        print(f"not yet measured on a GPU: there is no {RESULTS.name}/gpu_*.json, `python -m bench.gpu` writes it")
        return 0
    for number, path in enumerate(files):
        try:
            report = _load(path)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        print(f"== {path}" if number == 0 else f"\n== {path}")
        print_report(report)
    return 0


def _load(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text())
    bench = report.get("bench") if isinstance(report, dict) else None
    if bench not in ("gpu", "gpu_check"):
        raise ValueError(f"a report of bench {bench!r}, wanted one of 'gpu' or 'gpu_check'")
    return dict(report)


def print_report(report: Mapping[str, Any]) -> None:
    """Print all that a report of ``bench.gpu`` holds, even if that is unfinished."""
    _print_environment(report["environment"])
    _print_tests("tests", report["tests"])
    for row in report.get("runs", []):
        _print_tests(row["name"], row)
    for row in report["sanitizers"]:
        _print_sanitizer(row)
    _print_bandwidth(report["bandwidth"])
    _print_cases(report["cases"])
    _print_nccl(report["nccl"])
    _print_attach(report["attach"])
    for row in report.get("peaks", []):
        peaks = (f"{row[key] / 2**30:.2f} GiB" for key in ("peak_bytes", "ddp_peak_bytes"))
        print(f"peak memory, {row['model']}: attach {next(peaks)}, DDP {next(peaks)}; {' '.join(_verdict(row))}")
    _print_targets([*report["cases"], *report["attach"], *report.get("peaks", [])])
    for step in report["steps"]:
        print(f"step {step['name']}: {step['seconds']:.0f} s, status {step['status']}")
    for skipped in report["skipped"]:
        print(f"skipped: {skipped['what']}: {skipped['why']}")
    for error in report["errors"]:
        print(f"error in {error['where']}:\n    " + error["error"].rstrip().replace("\n", "\n    "))
    for what, wanted in NOT_COVERED.items():
        print(f"not covered: {what}: {wanted} would be needed")
    print(f"took {report['seconds']:.0f} s")


def _print_environment(found: Mapping[str, Any]) -> None:
    build, nccl = found.get("pycomm") or {}, found.get("nccl") or {}
    dirty = {True: ", with changes", False: "", None: ", changes unknown"}[found.get("dirty")]
    facts = {
        "device": f"{found.get('device')}, compute capability {found.get('compute_capability')}",
        "driver": f"{found.get('driver')}, CUDA runtime of torch {found.get('cuda_runtime')}",
        "pycomm": f"{build.get('version')}, built with CUDA {build.get('cuda')} and {build.get('compiler')}",
        "NCCL": f"{nccl.get('version')} ({nccl.get('path')})",
        "others": f"torch {found.get('torch')}, cupy {found.get('cupy')}, Python {found.get('python')}",
        "host": f"{found.get('cpu')}, {found.get('cores')} cores",
        "commit": f"{found.get('commit')}{dirty}",
    }
    for name, fact in facts.items():
        print(f"{name:<8}{fact}")


def _print_tests(name: str, tests: Mapping[str, Any]) -> None:
    if not tests:
        return
    counts = ", ".join(f"{tests[outcome]} {outcome}" for outcome in ("passed", "failed", "errors", "skipped"))
    end = "" if tests["finished"] else ", not finished"
    print(f"{name:<10}{counts}, of {tests['selected']}, in {tests['seconds']:.0f} s{end}")
    for failure in tests["failures"]:
        print(f"  {failure['test']}: {failure['message']}")
    for why, count in tests["skips"].items():
        print(f"  {count} skipped: {why}")


def _print_sanitizer(row: Mapping[str, Any]) -> None:
    summary = row["summary"] or "no summary"
    _print_tests(row["tool"], row["tests"])
    print(f"  {summary}")
    if row["tests"].get("failed") or not summary.partition(":")[2].startswith(" 0 "):
        print("    " + row["log"].rstrip().replace("\n", "\n    "))


def _print_bandwidth(bandwidth: Mapping[str, Any]) -> None:
    ways = bandwidth.get("ways", [])
    if ways:
        speeds = "; ".join(f"{way['way']} {way['bytes_per_second'] / 1e9:.0f} GB/s" for way in ways)
        print(f"{'copy':<8}{speeds} (read + written)")


def _print_cases(cases: Sequence[Mapping[str, Any]]) -> None:
    if not cases:
        return
    print("\nkernels, by device events")
    header = ["", "elements", "pycomm", "p10 - p90", "torch", "faster", "of copy", "time / floor", "target", "reached"]
    print_table(header, [_case_cells(row) for row in cases])
    _print_states(cases)
    for row in cases:
        if row["note"]:
            print(f"{row['name']}: {row['note']}")


def _case_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['elements'] / 1e6:.1f} M",
        *_samples(row["seconds"]).cells(),
        duration(row["peer_seconds"]["median"]),
        times(row["times_faster"]),
        f"{100 * row['share_of_copy_bandwidth']:.1f} %",
        times(row["time_over_floor"]),
        *_verdict(row),
    ]


def _print_nccl(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    print("\nNCCL")
    header = ["", "bytes", "pycomm", "p10 - p90", "host", "torch.distributed", "host"]
    print_table(header, [_nccl_cells(row) for row in rows])
    _print_states(rows)


def _nccl_cells(row: Mapping[str, Any]) -> list[str]:
    peer = ["-", "-"]
    if row["peer"] is not None:
        peer = [duration(row["peer_seconds"]["median"]), duration(row["peer_host_seconds"])]
    return [row["name"], str(row["bytes"]), *_samples(row["seconds"]).cells(), duration(row["host_seconds"]), *peer]


def _print_attach(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    header = ["", "ranks", "step", "p10 - p90", "overhead", "p10 - p90", *_PER_STEP, "target", "reached"]
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"\ntraining step: {model}")
        print_table(header, [_attach_cells(row) for row in rows if row["model"] == model])
    _print_states(rows)
    print("exposed: from the last gradient until the stream may go on; host: until the first step is enqueued")
    if any(row["ranks"] == 1 for row in rows):
        print("one rank: alone it would install hooks for top-k only; here it does for all, and nothing travels")


def _attach_cells(row: Mapping[str, Any]) -> list[str]:
    low, high = (100 * (row["ratio"][key] - 1) for key in ("p10", "p90"))
    overhead = [f"{100 * row['overhead']:+.2f} %", f"{low:+.2f} - {high:+.2f} %"]
    shown = [("-" if row[key] is None else show(row[key])) for key, show in _PER_STEP.values()]
    return [row["name"], str(row["ranks"]), *_samples(row["seconds"]).cells(), *overhead, *shown, *_verdict(row)]


def _print_states(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print from where to where clocks, temperature and power were when the rows had been measured."""
    states = [row["gpu"] for row in rows if row["gpu"]]
    if states:
        print(
            ", ".join(
                f"{key} {min(s[key] for s in states):.0f} - {max(s[key] for s in states):.0f}" for key in states[0]
            )
        )


def _print_targets(rows: Sequence[Mapping[str, Any]]) -> None:
    judged = [row for row in rows if row["reached"] is not None]
    if judged:
        print(f"\ntargets: {sum(row['reached'] for row in judged)} of {len(judged)} reached")


def _verdict(row: Mapping[str, Any]) -> list[str]:
    return [row["target"] or "-", {True: "pass", False: "FAIL", None: "measured"}[row["reached"]]]


def _samples(found: Mapping[str, Any]) -> Samples:
    return Samples.of(found["samples"])


if __name__ == "__main__":
    sys.exit(main())
