"""bench.recommended_stack and examples/recommended_stack.py run, say what is wrong, and agree on what was found."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.slow_network.namespaces import available
from tests.docs.scripts import load

pytest.importorskip("sklearn")

from bench.recommended_stack.command import chosen_rates, main
from bench.recommended_stack.experiment import measure, search

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/recommended_stack.py"
REPORT: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "recommended_stack.json").read_text())
LINE = re.compile(
    r"^(plain DDP|the stack|without [\w, ]+?) +([\d.]+) +([\d.]+)% +([\d.]+) ms +([\d.]+) KB", re.MULTILINE
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return sys.modules["recommended_stack"]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    load("docs/benchmarks.py")
    return sys.modules["benchmark_page.recommended_stack"]


def run(*words: str) -> str:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_script_starts_its_ranks() -> None:
    out = run(EXAMPLE, "--without", "float16", "--epochs", "3")
    name, loss, accuracy, _, sent = LINE.findall(out)[0]
    assert name == "without float16"
    assert float(loss) < 1.5, out  # 2.3 by chance
    assert float(accuracy) > 60
    assert float(sent) < 100  # 707 without DGC


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_script_under_torchrun() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", EXAMPLE)
    out = run(*launch, "--without", "lars", "blocks", "--epochs", "1")
    assert [line[0] for line in LINE.findall(out)] == ["without blocks, lars"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--without", "adam"], "invalid choice: 'adam'"),
        (["--without", "masters"], "--without masters: pycomm unscales no half-precision gradients; leave out scaling"),
        (["--plain", "--all"], "not allowed with argument --plain"),
        (["--ranks", "0"], "--ranks: 0, wanted at least 1"),
        (["--ranks", "5"], "--ranks: wanted a divisor of the batch, which is 96"),
    ],
)
def test_wrong_arguments_of_the_script(
    example: ModuleType,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["recommended_stack.py", *words])
    with pytest.raises(SystemExit):
        example.main()
    assert says in capsys.readouterr().err


def test_the_scripts_rates_are_those_that_the_search_chose(example: ModuleType) -> None:
    assert chosen_rates(REPORT["search"]) == example.RATES
    assert {recipe.name for recipe in example.RECIPES} == set(example.RATES)


def check_small_run(path: Path, wire: Callable[[dict[str, Any]], bool]) -> None:
    report = json.loads(path.read_text())
    assert [(row["name"], row["rate"]) for row in report["search"]] == [
        (name, rate) for name in ("plain DDP", "without float16") for rate in (0.1, 0.2)
    ]
    runs = report["runs"]
    assert [row["name"] for row in runs] == ["plain DDP", "without float16"]
    assert all(math.isfinite(row["loss"]) and row["difference"] is None for row in runs)
    assert all(wire(row) for row in runs)
    assert runs[1]["wire_bytes"] < 0.5 * runs[0]["wire_bytes"]


SMALL = [
    "--recipes",
    "plain DDP",
    "without float16",
    "--epochs",
    "1",
    "--seeds",
    "1",
    "--rates",
    "0.1,0.2",
    "--links",
    "1",
]


@pytest.mark.usefixtures("one_rank_group")
def test_one_rank_searches_and_trains() -> None:
    names = ["plain DDP", "without float16"]
    found = search(names, [0.2, 0.4], seeds=1, epochs=1)
    assert [(row["name"], row["rate"]) for row in found] == [(name, rate) for name in names for rate in (0.2, 0.4)]
    assert all(0 < row["loss"] < 3 for row in found)
    rows = measure(dict.fromkeys(names, 0.4), seeds=2, epochs=2, on_links=False)
    assert [(row["name"], row["seed"]) for row in rows] == [(name, seed) for seed in range(2) for name in names]
    for row in rows:
        (first, early), (last, late) = row["points"]
        assert 0 < first < last == row["seconds"]
        assert late < early
        assert late == row["test_loss"]
        assert row["difference"] is None


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_small_simulated_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run("-m", "bench.recommended_stack", *SMALL, "--simulate", "--json", str(path))
    assert json.loads(path.read_text())["simulated"] == "--simulate"
    check_small_run(path, lambda row: row["wire_bytes"] == pytest.approx(row["payload"] * 4 / 3))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_small_run_on_links(tmp_path: Path) -> None:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path / "report.json"
    run("-m", "bench.recommended_stack", *SMALL, "--json", str(path))
    assert json.loads(path.read_text())["simulated"] is None
    check_small_run(path, lambda row: row["wire_bytes"] > row["payload"])  # with headers, and in several messages


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--what", "links"], "--what links wants --from FILE"),
        (["--hosts", "5"], "--hosts: 5, wanted a divisor of the batch"),
        (["--links", "-1"], "-1, wanted numbers, none below 0"),
        (["--recipes", "with all"], "invalid choice: 'with all'"),
    ],
)
def test_wrong_arguments(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert says in capsys.readouterr().err


class TestPage:
    def test_every_part_is_there(self, page: ModuleType) -> None:
        text = (ROOT / "docs" / "recommended_stack.md").read_text()
        assert re.findall(r"<!-- stack: (\w+) -->", text) == ["results", "origin"]

    def test_results(self, page: ModuleType) -> None:
        def row(name: str, seed: int, loss: float, seconds: float) -> dict[str, Any]:
            spent = {"seconds": seconds, "wire_bytes": seconds * 1e6}
            return {"name": name, "link": 1.0, "seed": seed, "loss": loss, "accuracy": 0.9 + 0.1 * seed, **spent}

        runs = [row("the stack", 0, 0.1, 2.0), row("the stack", 1, 0.3, 4.0), row("without scaling", 0, 0.1, 2.0)]
        found = page.filled("<!-- stack: results -->\nold\n<!-- end -->\n", {"a.json": {"runs": runs}})
        assert "old" not in found
        assert "|  | training loss | test accuracy | on the wire, of a host | run, 1 Gbit/s |" in found
        assert "| the stack | 0.2000 ± 0.1414 | 95.00 ± 7.07 % | 3.00 MB | 2.0-4.0 s |" in found
        assert "scaling" not in found, "the report has it"

    def test_simulated_figures_are_called_so(self, page: ModuleType) -> None:
        report = copy.deepcopy(REPORT) | {"simulated": "network namespaces need root"}
        found = page.filled("<!-- stack: origin -->\n<!-- end -->", {"recommended_stack.json": report})
        assert "are **simulated** (network namespaces need root)." in found

    def test_markers_that_are_wrong(self, page: ModuleType) -> None:
        with pytest.raises(ValueError, match="has a part 'costs', wanted origin or results"):
            page.filled("<!-- stack: costs -->\n<!-- end -->", {"a.json": {}})
        with pytest.raises(ValueError, match="a.json, b.json: docs/recommended_stack.md shows one report"):
            page.filled("", {"a.json": {}, "b.json": {}})
