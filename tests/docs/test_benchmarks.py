"""The page of benchmarks and the README's table: every figure is a report's, of one processor or of several."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.docs.scripts import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
OLD, XEON = "AMD EPYC, model not recorded", "Intel Xeon, family 6 model 143"
SUFFIX = "-intel-xeon-family-6-model-143.json"

Report = dict[str, Any]


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    return load("docs/benchmarks.py")


@pytest.fixture(scope="module")
def tables(benchmarks: ModuleType) -> ModuleType:
    return sys.modules["benchmark_page.tables"]


@pytest.fixture
def reports(benchmarks: ModuleType) -> dict[str, Report]:
    """Reports from before processors were named, which have the brand alone."""
    folder = ROOT / "bench" / "results"
    names = ("asynchronous.json", "cpu_collectives.json", "cpu_kernels.json", "slow_network.json")
    found: dict[str, Report] = {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in names}
    for report in found.values():
        report.pop("date", None)
        report["environment"].pop("processor", None)
        report["environment"] |= {"cpu": "AMD EPYC", "cores": 2, "python": "3.11"}
    found["cpu_collectives.json"]["settings"]["rounds"] = 9
    return found


def on_xeon(report: Report) -> Report:
    """Return a copy that claims to be of another processor."""
    other = copy.deepcopy(report)
    caches = {"l2_bytes": 2 << 20, "l3_bytes": 105 << 20, "share_last_cache": True}
    other["environment"] |= {"cpu": "Intel(R) Xeon(R)", "processor": {"label": XEON, **caches}}
    return other | {"date": "2026-01-31"}


def section(page: str, title: str) -> str:
    assert page.count(f"## {title}\n") == 1
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def cells(text: str, row: str) -> list[str]:
    """Return the cells of the first row of that name."""
    (line, *_) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return line.strip("| ").split(" | ")[1:]


def render(benchmarks: ModuleType, reports: dict[str, Report]) -> tuple[str, str]:
    wanted = benchmarks.render(reports, README)
    return wanted[benchmarks.PAGE], wanted[benchmarks.README]


def test_not_stale(benchmarks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(["--check"]) == 0, capsys.readouterr().err


def test_the_home_page_has_the_same_figures(benchmarks: ModuleType) -> None:
    found = sys.modules["benchmark_page.headline"].compared(
        benchmarks.load_reports(benchmarks.REPORTS, benchmarks.BENCHES)
    )
    speedups = {row.what: row.speedups() for row in found}
    (dgc,), (dense,) = (
        speedups[f"training step, 4 hosts, {what}"] for what in ("100 Mbit/s, DGC(0.001)", "1 Gbit/s, no compression")
    )
    home = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    assert f"on 100 Mbit/s links, a step with gradient compression (DGC) was **{dgc:.0f} times** as fast" in home
    percent = round(100 * abs(dense - 1))
    change = f"{percent} % {'faster' if dense >= 1 else 'slower'}" if percent else "as fast"
    assert f"without compression it was {change}" in home


def test_the_readme_says_where_compression_pays(benchmarks: ModuleType) -> None:
    steps = sys.modules["benchmark_page.training"].step_times(
        benchmarks.load_reports(benchmarks.REPORTS, benchmarks.BENCHES)["slow_network.json"]
    )
    methods = ("fp16", "bf16", "fp8", "int8", "int4", "powersgd", "dgc", "auto")

    def speedups(gbit: float | None) -> dict[str, list[float]]:
        return {
            method: [steps[f"{hosts} hosts", gbit, "ddp"] / steps[f"{hosts} hosts", gbit, method] for hosts in (2, 4)]
            for method in methods
        }

    slow = [times for each in speedups(1.0).values() for times in each]
    said = " ".join(README.split())
    assert f"1 Gbit/s: steps there were {min(slow):.2f} to {max(slow):.2f} times as fast as with DDP" in said
    fast = speedups(None)
    assert min(fast.pop("dgc")) > 1.3
    assert max(times for each in fast.values() for times in each) < 1.2
    auto = steps["4 hosts", 0.1, "ddp"] / steps["4 hosts", 0.1, "auto"]
    assert f'with `compression="auto"`, for any optimizer, {auto:.0f} times' in said


def test_says_what_is_stale_and_mends_it(
    benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
    monkeypatch.setattr(benchmarks, "PAGE", page)
    monkeypatch.setattr(benchmarks, "README", readme)
    good = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    page.write_text(good.replace(" ms", " s", 1), encoding="utf-8")
    readme.write_text(README, encoding="utf-8")
    assert benchmarks.main(["--check"]) == 1
    assert capsys.readouterr().err == "benchmarks.md is stale; run: python docs/benchmarks.py\n"
    assert benchmarks.main([]) == 0
    assert page.read_text(encoding="utf-8") == good
    assert benchmarks.main(["--check"]) == 0
    begin = README.index("<!-- figures -->")
    readme.write_text(README[:begin] + README[begin:].replace("ms, torch", "s, torch", 1), encoding="utf-8")
    assert benchmarks.main(["--check"]) == 1
    assert "README.md is stale" in capsys.readouterr().err


class TestOneProcessor:
    def test_each_figure_has_its_rival(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        page, readme = render(benchmarks, reports)
        assert "|  | `empty` | `tensor` | strongest rival |" in page
        assert "`bench/results/cpu_kernels.json`: AMD EPYC, 2 cores; pycomm " in page
        assert "| kernel | pycomm | torch | faster | time / floor |" in page
        assert "| Benchmark (2 cores) | pycomm |" in readme
        assert "not recorded" not in page
        command = "python -m bench.collectives --peers gloo,gloo_shm,deepspeed,mpich,openmpi --rounds 9 --json"
        assert f"```sh\n{command} bench/results/cpu_collectives.json\n```" in page

    def test_new_reports_say_more(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        text = benchmarks.SECTIONS["kernels"]({"cpu_kernels.json": on_xeon(reports["cpu_kernels.json"])})
        assert f"cpu_kernels.json`: {XEON}, 2 cores; pycomm " in text
        assert "; 2026-01-31.\n" in text

    def test_kernels_that_are_slower_are_named(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        report = reports["cpu_kernels.json"]
        for row in report["rows"]:
            row["times_faster"] = 2.0
        text = benchmarks.SECTIONS["kernels"]({"cpu_kernels.json": report})
        assert f"Of all {len(report['rows'])} kernels in the report, none is slower than torch." in text
        report["rows"][-1] |= {"kernel": "one that the page does not show", "times_faster": 0.5}
        text = benchmarks.SECTIONS["kernels"]({"cpu_kernels.json": report})
        assert "slower than torch are one that the page does not show (0.50\N{MULTIPLICATION SIGN})." in text

    def test_libraries_that_did_not_take_part(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        report = reports["cpu_collectives.json"]
        for group in report["results"]:
            group["not_measured"] = {"Gloo": "no network"}
            for measured in group["all_reduce"]:
                for library in ("Gloo", "DeepSpeed", "MPICH", "Open MPI"):
                    del measured["seconds_per_call"][library]
        text = benchmarks.SECTIONS["collectives"]({"cpu_collectives.json": report})
        assert cells(text, "2 ranks, 1 KB")[-1] == "-"
        assert "\nNot measured: Gloo (no network).\n" in text
        with pytest.raises(ValueError, match="no report of bench 'collectives' has all-reduce of 100 MB, 2 ranks"):
            render(benchmarks, reports)

    def test_lines_are_wrapped_but_for_code_and_tables(self, benchmarks: ModuleType) -> None:
        words = "word " * 40
        text = benchmarks.wrapped(f"{words}\n- {words}\n| {words} |\n```sh\n{words}\n```\n{words}")
        lines = text.split("\n")
        assert [len(line) > 120 for line in lines] == [False] * 4 + [True, False, True, False, False, False]
        assert lines[2].startswith("- word")
        assert lines[3].startswith("  word")


class TestRivals:
    @pytest.fixture
    def report(self, reports: dict[str, Report]) -> Report:
        """One size, with figures that are easy to compare."""
        report = reports["cpu_collectives.json"]
        (group,) = report["results"] = report["results"][:1]
        group["not_measured"] = {}
        group["all_reduce"] = [row for row in group["all_reduce"] if row["bytes"] == 100 << 20]
        seconds = {"pycomm, empty": 1e-3, "pycomm, tensor": 3e-3, "Gloo": 8e-3, "DeepSpeed": 2e-3, "MPICH": 4e-3}
        group["all_reduce"][0]["seconds_per_call"] = {who: {"median": each} for who, each in seconds.items()}
        return report

    def test_the_strongest_is_named(self, benchmarks: ModuleType, report: Report) -> None:
        text = benchmarks.SECTIONS["collectives"]({"cpu_collectives.json": report})
        assert cells(text, "2 ranks, 100 MB") == [
            *("1 ms (2.00\N{MULTIPLICATION SIGN})", "3 ms (0.67\N{MULTIPLICATION SIGN})", "2 ms, DeepSpeed")
        ]
        assert "\n**Faster: DeepSpeed than `tensor` (100 MB, 2 ranks).** " in text
        assert "as fast as the strongest rival: 0.67\N{MULTIPLICATION SIGN} to 2.00\N{MULTIPLICATION SIGN} on" in text

    def test_none_is_faster(self, benchmarks: ModuleType, report: Report) -> None:
        report["results"][0]["all_reduce"][0]["seconds_per_call"]["DeepSpeed"]["median"] = 5e-3
        text = benchmarks.SECTIONS["collectives"]({"cpu_collectives.json": report})
        assert "\n**No rival is faster at any of the sizes measured.** " in text
        assert cells(text, "2 ranks, 100 MB")[-1] == "4 ms, MPICH"

    def test_reports_with_fewer_rivals_are_not_in_the_readme(
        self, benchmarks: ModuleType, reports: dict[str, Report], report: Report
    ) -> None:
        other = on_xeon(report)
        other["results"][0]["all_reduce"][0]["seconds_per_call"].pop("DeepSpeed")
        figure = next(sys.modules["benchmark_page.headline"].compared({**reports, "other.json": other}))
        assert [tuple(pair) for pair in figure.pairs] == [(1e-3, 2e-3, "DeepSpeed (tensor)", 3)]
        text = benchmarks.SECTIONS["collectives"]({"a.json": report, "b.json": other})
        assert f" on {OLD} (`a.json`); " in text
        assert f" on {XEON} (`b.json`, without DeepSpeed).\n" in text
        assert "`bench/results/a.json`: " in benchmarks.SECTIONS["collectives"]({"b.json": other, "a.json": report})


class TestTwoProcessors:
    @pytest.fixture
    def both(self, reports: dict[str, Report]) -> dict[str, Report]:
        """All reports but the last: of slow links there is none from the other processor."""
        others = {name.replace(".json", SUFFIX): on_xeon(report) for name, report in reports.items()}
        del others[f"slow_network{SUFFIX}"]
        return reports | others

    def test_one_is_shown_and_the_other_named(self, benchmarks: ModuleType, both: dict[str, Report]) -> None:
        page, _ = render(benchmarks, both)
        text = section(page, "All-reduce between processes of one host")
        assert "`bench/results/cpu_collectives.json`: AMD EPYC, 2 cores; " in text
        assert f"bench/results/cpu_collectives{SUFFIX}" not in text
        words = " ".join(text.split())
        assert f" on {OLD} (`cpu_collectives.json`); " in words
        assert f" on {XEON} (`cpu_collectives{SUFFIX}`)." in words

    def test_the_fullest_is_shown(self, benchmarks: ModuleType, both: dict[str, Report]) -> None:
        kernels = both["cpu_kernels.json"]
        kernels["rows"] = [row for row in kernels["rows"] if row["kernel"] == "topk, 0.1 %"]
        page, readme = render(benchmarks, both)
        text = section(page, "Kernels on a CPU")
        assert f"`bench/results/cpu_kernels{SUFFIX}`: {XEON}, 2 cores; " in text
        assert len(cells(text, "reduce, 4 arrays")) == 4
        assert f" On {OLD} (`cpu_kernels.json`, 1 kernel): " in " ".join(text.split())
        assert "-" not in cells(readme, "all-reduce of 64 KB, 4 ranks of a host")[0]

    def test_links_of_each(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        page, _ = render(benchmarks, reports)
        assert "\n- [Training over a slow network](slow_network.md): " in page
        assert "growth.md" not in page, "there is no report of it here"

    def test_the_readme_has_ranges(self, benchmarks: ModuleType, both: dict[str, Report]) -> None:
        for name, ours, theirs in (("cpu_kernels.json", 0.008, 0.32), (f"cpu_kernels{SUFFIX}", 0.01, 0.3)):
            (topk,) = (row for row in both[name]["rows"] if row["kernel"] == "topk, 0.1 %")
            topk["pycomm"]["median"], topk["torch"]["median"] = ours, theirs
        _, readme = render(benchmarks, both)
        assert "| Benchmark (2 cores, 2 machines) | pycomm |" in readme
        assert cells(readme, "the largest 0.1 % of 25.6 M elements, exact") == [
            *("8-10 ms", "300-320 ms, torch", "30-40\N{MULTIPLICATION SIGN}", "`bench.kernels`")
        ]
        assert len(readme.split()) <= 860

    def test_two_of_one_kind(self, benchmarks: ModuleType, reports: dict[str, Report]) -> None:
        one = on_xeon(reports["cpu_kernels.json"])
        other = copy.deepcopy(one)
        with pytest.raises(
            ValueError, match="a.json and b.json are of one bench, with the same settings and on one kind"
        ):
            benchmarks.SECTIONS["kernels"]({"a.json": one, "b.json": other})
        other["environment"]["cores"] = 8
        text = benchmarks.SECTIONS["kernels"]({"a.json": one, "b.json": other})
        assert f"{XEON}, 8 cores (`b.json`, " in text


def test_no_report_of_a_figure(benchmarks: ModuleType, reports: dict[str, Report]) -> None:
    del reports["cpu_kernels.json"]
    with pytest.raises(ValueError, match="no report of bench 'kernels' has the largest 0.1 %"):
        benchmarks.render(reports, README)


def test_a_report_that_has_no_section(benchmarks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"bench": "tennis"}')
    with pytest.raises(ValueError, match="x.json is of bench 'tennis', which has no section here"):
        benchmarks.load_reports(tmp_path, benchmarks.BENCHES)


def test_names_of_reports(benchmarks: ModuleType, tmp_path: Path, reports: dict[str, Report]) -> None:
    other = json.dumps(on_xeon(reports["cpu_kernels.json"]))
    (tmp_path / f"cpu_kernels{SUFFIX}").write_text(other)
    (tmp_path / "cpu_kernels.json").write_text(json.dumps(reports["cpu_kernels.json"]))
    assert list(benchmarks.load_reports(tmp_path, benchmarks.BENCHES)) == ["cpu_kernels.json", f"cpu_kernels{SUFFIX}"]
    (tmp_path / "cpu_kernels-xeon.json").write_text(other)
    with pytest.raises(ValueError, match=f"is of {XEON}: what follows the first dash must be {SUFFIX[1:-5]}"):
        benchmarks.load_reports(tmp_path, benchmarks.BENCHES)


class TestSharding:
    def report(self, ranks: int, whole: float) -> Report:
        ways = {
            "all_reduce, fused step": whole,
            'shard="optimizer"': whole / 2,
            "ZeroRedundancyOptimizer over Gloo": 0.1,
        }
        settings = {"ranks": ranks, "rounds": 9, "count": 3, "millions": 25.6, "busy": 0, "nice": 0}
        environment = {"cpu": "AMD EPYC", "cores": 2, "python": "3.11"}
        measured = {way: {"median": seconds, "samples": [seconds]} for way, seconds in ways.items()}
        return {"bench": "sharding", "environment": environment, "settings": settings, **measured}

    def test_a_column_for_each_number_of_ranks(self, benchmarks: ModuleType) -> None:
        reports = {"sharding.json": self.report(2, 0.02), "sharding_4_ranks.json": self.report(4, 0.05)}
        text = benchmarks.SECTIONS["sharding"](reports)
        command = "--rounds 9 --count 3 --millions 25.6 --json bench/results/"
        assert f"python -m bench.sharding --ranks 2 {command}sharding.json\n" in text
        assert f"python -m bench.sharding --ranks 4 {command}sharding_4_ranks.json\n" in text
        assert "\n|  | 2 ranks, 25.6 M parameters | 4 ranks, 25.6 M parameters |\n" in text
        times = "2.00\N{MULTIPLICATION SIGN}"
        assert cells(text, 'shard="optimizer"') == [f"10 ms ({times})", f"25 ms ({times})"]

    def test_two_processors(self, benchmarks: ModuleType) -> None:
        reports = {"a.json": self.report(2, 0.02), "b.json": on_xeon(self.report(2, 0.05))}
        text = benchmarks.SECTIONS["sharding"](reports)
        assert f"|  | 2 ranks, 25.6 M parameters, {OLD} | 2 ranks, 25.6 M parameters, {XEON} |" in text
        assert [cell.partition(" (")[0] for cell in cells(text, "all_reduce, fused step")] == ["20 ms", "50 ms"]


class TestTraining:
    def report(self, step: float, busy: int = 0) -> Report:
        seconds = {"no communication": step / 2, "DDP": step, "pycomm": step / 1.6}
        usual = {"ranks": 2, "rounds": 7, "steps": 8, "batch": 40, "nice": 0}
        one_rank = {"ratio": {"median": 1.004, "p10": 0.99, "p90": 1.021}}
        memory = {"way": "pycomm", "gradients": 4e7, "added": 4.6e6, "fixed": 1e6}
        return {
            "bench": "training",
            "environment": {"cpu": "AMD EPYC", "cores": 2},
            "settings": {**usual, "busy": busy, "widths": [784, 2048, 10], "parameters": 10_022_922},
            "steps": [
                {"way": way, "seconds": {"median": each}, "bytes_sent": 0 if way == "no communication" else 40e6}
                for way, each in seconds.items()
            ],
            "one_rank": one_rank,
            "memory": [memory],
        }

    def test_one_processor(self, benchmarks: ModuleType) -> None:
        text = benchmarks.SECTIONS["training"]({"training.json": self.report(0.112)})
        assert (
            "--ranks 2 --rounds 7 --steps 8 --batch 40 --widths 784,2048,10 --json bench/results/training.json" in text
        )
        assert cells(text, "2 ranks, 10.0 M parameters, batch 40") == ["step", "faster than DDP", "sent", "memory"]
        assert cells(text, "pycomm") == ["70 ms", "1.60\N{MULTIPLICATION SIGN}", "40.0 MB", "4.60 MB"]
        assert cells(text, "no communication")[2:] == ["-", "-"]
        assert "changes the time of a step by +0.4 % (p10 to p90: -1.0 % to +2.1 %)" in text

    def test_two_processors_and_a_busy_one(self, benchmarks: ModuleType) -> None:
        reports = {"a.json": self.report(0.1), "b.json": self.report(0.2, busy=1), "c.json": on_xeon(self.report(0.08))}
        text = benchmarks.SECTIONS["training"](reports)
        quiet, _, busy = text.partition("| 2 ranks beside another process that computes, ")
        assert [row.split(" | ")[1] for row in quiet.splitlines() if row.startswith("| DDP |")] == ["100 ms", "80 ms"]
        assert busy.startswith("10.0 M parameters, batch 40 | step |")
        assert cells(busy, "DDP")[0] == "200 ms"
        assert "--busy 1 --json bench/results/b.json" in text
        assert f"With one rank on {XEON}, `attach` changes the time of a step by +0.4 %" in quiet


def test_a_report_of_a_gpu(benchmarks: ModuleType) -> None:
    case = {"name": "pack", "elements": 25_600_000, "seconds": {"median": 1e-4}, "peer_seconds": {"median": 3e-4}}
    step = {"model": "ResNet-50", "name": "attach", "ranks": 1, "seconds": {"median": 0.02}, "overhead": 0.013}
    step |= {"host_seconds": 0.004, "exposed_seconds": 5e-5, "kernels": 700, "peak_bytes": 3 << 30}
    report = {
        "environment": {"device": "some GPU", "commit": "abc", "cpu": "some CPU", "cores": 8},
        "cases": [{**case, "times_faster": 3.0, "time_over_floor": 1.1}],
        "attach": [step, {**step, "name": "captured", "exposed_seconds": None, "peak_bytes": None}],
        "tests": {},
    }
    text = benchmarks.SECTIONS["gpu"]({"gpu_x.json": report, "gpu_y.json": report})
    assert "```sh\npython -m bench.gpu measure\n```" in text
    assert text.count("| pack | 25.6 M | 100 µs | 300 µs | 3.00") == 2
    assert "some GPU, commit abc" in text
    assert "| ResNet-50 | attach | 1 | 20 ms | +1.3 % | 4 ms | 50 µs | 700 | 3.00 GiB |" in text
    assert "| ResNet-50 | captured | 1 | 20 ms | +1.3 % | 4 ms | - | 700 | - |" in text
    assert "## Tests on a GPU" not in text


def test_a_check_on_a_gpu(benchmarks: ModuleType) -> None:
    tests = {"passed": 500, "failed": 1, "errors": 0, "skipped": 7}
    row = {"tool": "racecheck", "tests": {}, "summary": "RACECHECK SUMMARY: 0 hazards"}
    found = {"device": "some GPU", "commit": "abc"}
    report = {"environment": found, "tests": tests, "sanitizers": [row], "cases": [], "attach": []}
    text = benchmarks.SECTIONS["gpu_check"]({"gpu_check_x.json": report})
    assert "| tests | 500 | 1 | 0 | 7 |  |" in text
    assert "| racecheck | - | - | - | - | RACECHECK SUMMARY: 0 hazards |" in text
    assert "some GPU, commit abc: `bench/results/gpu_check_x.json`" in text
    measured_too = {**report, "environment": {**found, "cpu": "some CPU", "cores": 8}}
    assert "## Tests on a GPU" in benchmarks.SECTIONS["gpu"]({"gpu_x.json": measured_too})


class TestTables:
    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [(2.30e-6, "2.3 µs"), (9.996e-4, "1 ms"), (0.00731, "7.31 ms"), (5.2314, "5231 ms"), (12.34, "12.3 s")],
    )
    def test_durations(self, tables: ModuleType, seconds: float, shown: str) -> None:
        assert tables.duration(seconds) == shown

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [
            ([0.002, 0.0015], "1.5-2 ms"),
            ([0.0005, 0.002], "500 µs-2 ms"),
            ([0.002, 0.0020001], "2 ms"),
            ([0.1], "100 ms"),
        ],
    )
    def test_spans(self, tables: ModuleType, seconds: list[float], shown: str) -> None:
        assert tables.span(seconds, tables.duration) == shown
