"""bench.slow_network: its arithmetic, and one small run of it between namespaces, where root may make them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.slow_network.command import main
from bench.slow_network.figures import (
    Curve,
    Failure,
    Figures,
    Link,
    Rate,
    Target,
    combined,
    first_at_most,
    loss_at,
    ring_bytes,
    seconds_to,
    target_loss,
    targets,
    wanted_speedup,
)
from bench.slow_network.methods import METHODS, MissingMethodError, check_present
from bench.slow_network.namespaces import available
from bench.slow_network.report import loss_table, rate_table, write_docs

ROOT = Path(__file__).parents[2]
_SETTINGS = {
    "batch": 1, "context": 16, "lr": 0.01, "momentum": 0.9, "warm_up": 6, "target_fraction": 0.5,
    "commands": ["python -m bench.slow_network"],
}  # fmt: skip


def _rate(method: str, seconds: float, link: Link = None, hosts: int = 4, wire_bytes: float = 1e6) -> Rate:
    return Rate(hosts, link, method, [seconds] * 3, wire_bytes)


def _curve(method: str, *losses: float, link: Link = None, hosts: int = 4) -> Curve:
    points = [(100 * i, loss) for i, loss in enumerate(losses)]
    return Curve(hosts, link, method, points, [0.5], [1e6] * (len(losses) - 1))


def _target(figures: Figures, *words: str) -> Target:
    (found,) = [target for target in targets(figures) if all(word in target.what for word in words)]
    return found


class TestCurves:
    def test_combination(self) -> None:
        found = combined(_curve("dense", 5.0, 4.0, 3.5), _rate("dense", 0.2, 0.1))
        assert found == [(0.0, 5.0), (20.0, 4.0), (40.0, 3.5)]

    @pytest.mark.parametrize(("link", "seconds"), [(None, 20.0), (1.0, 20.0 + 100 * 0.08), (0.1, 20.0 + 100 * 0.8)])
    def test_combination_while_a_method_warms_up(self, link: Link, seconds: float) -> None:
        curve = replace(_curve("dgc", 5.0, 4.0, 3.5), wire_bytes=[11e6, 0.9e6])
        found = combined(curve, _rate("dgc", 0.2, link))
        assert found == [(0.0, 5.0), (pytest.approx(seconds), 4.0), (pytest.approx(seconds + 20), 3.5)]

    @pytest.mark.parametrize(("target", "where"), [(5.5, 0), (5.0, 0), (4.5, 50), (4.0, 100), (3.0, 400), (2.9, None)])
    def test_first_at_most(self, target: float, where: float | None) -> None:
        points = [(0, 5.0), (100, 4.0), (200, 4.4), (300, 3.5), (400, 3.0)]
        assert first_at_most(points, target) == where

    def test_first_at_most_after_what_is_not_finite(self) -> None:
        assert first_at_most([(0, 5.0), (10, math.inf), (20, 2.0)], 3.0) == 20
        assert first_at_most([(0, 5.0), (10, math.nan)], 3.0) is None

    @pytest.mark.parametrize(("x", "loss"), [(0, 5.0), (50, 4.5), (100, 4.0), (150, 4.2)])
    def test_loss_at(self, x: float, loss: float) -> None:
        assert loss_at([(0, 5.0), (100, 4.0), (200, 4.4)], x) == pytest.approx(loss)

    def test_loss_beyond_the_curve(self) -> None:
        with pytest.raises(ValueError, match="201 is not within the curve"):
            loss_at([(0, 5.0), (200, 4.4)], 201)


class TestSecondsToTarget:
    figures = Figures(
        10,
        rates=[_rate("dense", 2.0, 0.1), _rate("dgc", 0.1, 0.1), _rate("auto", 0.1, 0.1), _rate("ddp", 0.3, 0.1)],
        curves=[_curve("dense", 5.0, 4.0, 3.0), _curve("dgc", 5.0, 4.5, 3.5), _curve("auto", 5.0, 4.0, 3.0)],
    )

    def test_target_is_of_the_dense_run(self) -> None:
        assert target_loss(self.figures, 4, 0.5) == 4.0
        assert target_loss(self.figures, 2, 0.5) is None

    def test_without_a_dense_run_it_is_of_ddp(self) -> None:
        assert target_loss(Figures(10, curves=[_curve("ddp", 5.0, 3.0)]), 4, 0.5) == 4.0

    def test_losses_of_one_link_times_step_of_another(self) -> None:
        assert seconds_to(self.figures, 4, 0.1, "dense", 4.0) == 200.0
        assert seconds_to(self.figures, 4, 0.1, "dgc", 4.0) == pytest.approx(15.0)
        assert seconds_to(self.figures, 4, 0.1, "dgc", 3.0) is None

    @pytest.mark.parametrize(("method", "link"), [("ddp", 0.1), ("dense", 1.0)])
    def test_not_measured(self, method: str, link: float) -> None:
        assert seconds_to(self.figures, 4, link, method, 4.0) is None

    def test_auto_is_another_on_another_link(self) -> None:
        assert seconds_to(self.figures, 4, 0.1, "auto", 4.0) is None
        trained = Figures(10, self.figures.rates, [*self.figures.curves, _curve("auto", 5.0, 4.5, 3.5, link=0.1)])
        assert seconds_to(trained, 4, 0.1, "auto", 4.0) == pytest.approx(15.0)


class TestTargets:
    def test_nothing_measured(self) -> None:
        found = targets(Figures(10))
        assert len(found) == 14
        assert {target.reached for target in found} == {None}

    def test_hosts_with_several_ranks(self) -> None:
        alone = [_rate("dense", 2.0, 1.0, hosts=2), _rate("ddp", 2.0, 1.0, hosts=2)]
        shared = [replace(rate, per_host=2, seconds=[3.0 if rate.method == "ddp" else 2.0]) for rate in alone]
        figures = Figures(10, [*alone, *shared])
        assert _target(figures, "2 hosts x 2 ranks, 1 Gbit/s").measured == pytest.approx(1.5)
        assert figures.cells() == [(2, 1, 1.0), (2, 2, 1.0)]
        assert figures.links(2) == [1.0]
        figures.replace(Figures(10, [replace(shared[0], seconds=[4.0])]))
        assert _target(figures, "2 hosts x 2 ranks, 1 Gbit/s").measured == pytest.approx(0.75)
        assert len(figures.rates) == 4

    @pytest.mark.parametrize(
        ("link", "peer", "factor"), [(1.0, "ddp", 4), (1.0, "ddp-fp16", 2), (0.1, "ddp", 12), (0.1, "ddp-fp16", 6)]
    )
    @pytest.mark.parametrize("better", [True, False])
    def test_speed(self, link: float, peer: str, factor: float, better: bool) -> None:
        seconds = 0.1 * factor * (1.01 if better else 0.99)
        figures = Figures(10, [_rate("dgc", 0.1, link), _rate(peer, seconds, link), _rate("compute", 0.1, link)])
        (target,) = [target for target in targets(figures) if target.measured is not None]
        assert target.wanted == factor
        assert target.reached is better

    def test_ring(self) -> None:
        assert ring_bytes(40e6, 4) == 60e6
        assert ring_bytes(40e6, 2) == 40e6
        assert ring_bytes(40e6, 1) == 0

    def test_wanted_where_computing_counts(self) -> None:
        # 60 MB take 0.48 s at 1 Gbit/s, 1 MB takes 8 ms.
        assert wanted_speedup(0.12, 60e6, 1e6, 1.0) == pytest.approx(0.9 * (0.12 + 0.48) / (0.12 + 0.008))

    def test_speed_where_computing_counts(self) -> None:
        rates = [
            _rate("dgc", 0.2, 1.0),
            _rate("compute", 0.12, 1.0),
            _rate("ddp", 0.9, 1.0),
            _rate("ddp-fp16", 0.5, 1.0),
        ]
        of_ddp, of_fp16 = [t for t in targets(Figures(10_000_000, rates)) if t.measured is not None]
        assert of_ddp.measured == pytest.approx(4.5)
        assert of_ddp.wanted == pytest.approx(0.9 * 0.6 / 0.128)
        assert of_fp16.wanted == pytest.approx(0.9 * 0.36 / 0.128)
        assert "computes 120 ms" in of_ddp.what
        assert of_ddp.reached
        assert not of_fp16.reached

    def test_auto_is_held_against_the_fastest_that_trains(self) -> None:
        others = [_rate("ddp", 0.3), _rate("dense", 0.2), _rate("control", 0.1), _rate("compute", 0.05)]
        assert _target(Figures(10, [*others, _rate("auto", 0.204)]), "auto").reached
        slow = _target(Figures(10, [*others, _rate("auto", 0.21)]), "auto")
        assert slow.measured == pytest.approx(1.05)
        assert not slow.reached

    def test_losses(self) -> None:
        curves = [_curve("dense", 5.0, 2.5), _curve("dgc", 5.0, 2.59), _curve("control", 5.0, 2.99)]
        figures = Figures(10, curves=curves)
        assert _target(figures, "DGC", "loss").reached
        assert not _target(figures, "control", "loss").reached

    def test_a_training_that_broke_down_is_worse_than_any(self) -> None:
        curves = [_curve("dense", 5.0, 2.5), _curve("dgc", 5.0, math.nan), _curve("control", 5.0, math.nan)]
        figures = Figures(10, curves=curves)
        assert _target(figures, "DGC", "loss").reached is False
        assert _target(figures, "control", "loss").reached


class TestFigures:
    failure = Failure("rate", 4, 1.0, "ddp-powersgd", "rank 1 ended with status -6:\nterminate called")
    figures = Figures(
        10_000_000, [_rate("ddp", 0.5, 1.0), _rate("dgc", 0.1, 1.0)], [_curve("dense", 5.0, 3.0)], [failure]
    )

    def test_json_and_back(self) -> None:
        assert Figures.from_json(json.loads(json.dumps(self.figures.as_json()))) == self.figures

    def test_what_is_measured_again_is_replaced(self) -> None:
        figures = Figures.from_json(self.figures.as_json())
        figures.replace(Figures(10, [_rate("ddp", 0.7, 1.0), _rate("ddp-powersgd", 0.2, 1.0)]))
        assert {rate.method: rate.step_seconds for rate in figures.rates} == {
            "ddp": 0.7, "dgc": 0.1, "ddp-powersgd": 0.2,
        }  # fmt: skip
        assert not figures.failures
        assert figures.curves == self.figures.curves

    def test_what_auto_chose_is_shown(self) -> None:
        auto = replace(_rate("auto", 0.1), stats={"buckets_dgc": 2, "buckets_dense": 1, "steps": 7})
        _, rows = rate_table(Figures(10, [auto]), 4, 1, None)
        assert rows[0][0] == "pycomm, auto (dgc x2, dense x1)"

    def test_tables(self) -> None:
        _, rows = rate_table(self.figures, 4, 1, 1.0)
        assert [row[3] for row in rows] == ["1.00x", "5.00x"]
        _, rows = loss_table(self.figures, 4, 0.5)
        assert rows == [["pycomm, dense", "3.000", "50", "500 ms", "-"]]

    def test_docs(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        figures = Figures.from_json(self.figures.as_json())
        figures.rates.append(_rate("dense", 0.5, 1.0))
        write_docs(tmp_path, figures, _SETTINGS, "some machine")
        page = (tmp_path / "slow_network.md").read_text()
        assert "    python -m bench.slow_network\n" in page
        assert "terminate called" in page
        assert "combined" in page
        assert "| DDP | 500 ms | 1.000 MB |" in page
        assert "| pycomm, DGC | 100 ms (5.00x) | 1.000 MB |" in page
        assert 0 < (tmp_path / "slow_network.png").stat().st_size < 200_000

    def test_commands_begin_from_nothing(self, tmp_path: Path) -> None:
        words = "python -m bench.slow_network --what rate --from a.json --out a.json --docs docs --hosts 4"
        write_docs(tmp_path, Figures(10, [_rate("dense", 0.5)]), {**_SETTINGS, "commands": [words]}, "some machine")
        assert "    python -m bench.slow_network --what rate --hosts 4\n" in (tmp_path / "slow_network.md").read_text()

    def test_goals_that_were_missed_are_named(self, tmp_path: Path) -> None:
        write_docs(tmp_path, Figures(10, [_rate("ddp", 0.5), _rate("dense", 1.0)]), _SETTINGS, "some machine")
        page = " ".join((tmp_path / "slow_network.md").read_text().split())
        assert "Of 1 goals set before measuring, 0 were reached. Not reached: 4 hosts, unlimited: " in page
        assert "is 0.500x, goal at least 1.00x." in page

    def test_the_page_is_that_of_the_report(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        report = str(ROOT / "bench" / "results" / "slow_network.json")
        assert main(["--what", "page", "--from", report, "--docs", str(tmp_path)]) == 0
        assert (tmp_path / "slow_network.md").read_text() == (ROOT / "docs" / "slow_network.md").read_text()
        assert main(["--what", "page", "--docs", str(tmp_path)]) == 1
        assert "--what page wants --from FILE and --docs DIR" in capsys.readouterr().err


class TestArguments:
    def test_a_method_that_pycomm_lacks_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lacks(name: str) -> None:
            raise AttributeError(name)

        monkeypatch.delattr("pycomm.TopK")
        monkeypatch.delattr("pycomm.compression.TopK")
        monkeypatch.setattr("pycomm.compression.__getattr__", lacks)  # by which it would be imported again
        check_present(["ddp", "fp16"])
        with pytest.raises(MissingMethodError, match="method 'control' needs pycomm.TopK, which this pycomm"):
            check_present(["ddp", "control"])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--methods", "ddp,best"], "no method 'best', wanted any of ddp, "),
            (["--links", "-1"], "-1, wanted a rate in Gbit/s or 0"),
            (["--target-fraction", "0"], "0, wanted 0 < fraction <= 1"),
        ],
    )
    def test_wrong(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err


@pytest.fixture
def namespaces_work() -> None:
    """Skips where they cannot be made, which takes trying."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)


_MARK = "PYCOMM_TEST_SLOW_NETWORK"
_TINY = ["--width", "64", "--layers", "1", "--context", "8", "--hosts", "2", "--links", "0", "--methods", "ddp,dense"]


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_work")
@pytest.mark.timeout(90)
def test_a_small_run(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    few = ["--rounds", "1", "--turn-steps", "2", "--warm-up", "3", "--steps", "6", "--every", "3", "--timeout", "50"]
    command = [sys.executable, "-m", "bench.slow_network", *_TINY, *few, "--out", str(report)]
    environment = {**os.environ, _MARK: str(tmp_path)}
    devices = sorted(os.listdir("/sys/class/net"))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=70)
    finally:
        process.terminate()  # in order, if it is still there
        process.communicate(timeout=15)
    assert process.returncode == 0, output + errors
    assert "2 hosts, unlimited" in output
    assert not _marked(str(tmp_path))
    assert not list(Path("/run/netns").glob(f"pycomm-{process.pid}-*"))
    assert sorted(os.listdir("/sys/class/net")) == devices
    figures = Figures.from_json(json.loads(report.read_text()))
    assert [rate.method for rate in figures.rates] == ["compute", "ddp", "dense"]
    for rate in figures.rates[1:]:  # two ranks send each gradient once
        assert 4 * figures.parameters < rate.wire_bytes < 5 * figures.parameters
        assert len(rate.seconds) == 8
    assert [curve.method for curve in figures.curves] == ["ddp", "dense"]
    ddp, dense = ([loss for _, loss in curve.points] for curve in figures.curves)
    assert len(ddp) == 3
    assert dense == pytest.approx(ddp, abs=1e-3)  # one computation, in another order
    assert not figures.unequal()


def _marked(mark: str) -> list[str]:
    """Processes that have inherited it: of the bench, and of what it started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found


def test_every_method_has_a_label() -> None:
    assert len({method.label for method in METHODS.values()}) == len(METHODS)
