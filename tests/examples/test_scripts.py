"""The experiments, and the examples of whole models over devices: they run, and what they print is sound."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from types import ModuleType
from typing import NamedTuple

import pytest

from pycomm import schedule
from tests.examples.running import EXAMPLES, run, run_on, torchrun_on

EXAMPLE = EXAMPLES / "large_batch.py"
STATS = re.compile(r"transport (\w+)  storages_moved (\d+)  bytes_direct (\d+)  bytes_staged (\d+)  bytes_small \d+")
ROW = re.compile(r" *(\d+) +(\d+)  (\w+, \w+) +(\S+) +(\d+)%  *(\S+) ± +(\S+) %  *(\S+) ± +(\S+)  (.+)")


class Row(NamedTuple):
    batch: int
    name: str
    accuracy: float
    loss: float
    remark: str


def rows_of(out: str) -> list[Row]:
    found = [match for line in out.splitlines() if (match := ROW.fullmatch(line))]
    return [Row(int(m[1]), m[3], float(m[6]), float(m[8]), m[10]) for m in found]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_large_batch_under_torchrun() -> None:
    pytest.importorskip("sklearn")
    out = run([*torchrun_on(2), str(EXAMPLE), "--quick"])
    rows = rows_of(out)
    names = ["Nesterov, float32"] * 3 + ["LARS, float16", "LARS, float32"]
    assert [(row.batch, row.name) for row in rows] == list(zip([128] + [256] * 4, names, strict=True)), out
    assert out.count("training loss\n") == 1, "one rank prints"
    small, tuned, scaled, recipe, in_float32 = rows
    assert [row.remark.partition(";")[0] for row in (small, tuned, recipe)] == ["tuned"] * 3
    assert scaled.remark == "linear scaling"  # whatever comes of that
    for row in (small, tuned, recipe, in_float32):
        assert math.isfinite(row.loss)
        assert row.loss < 0.5, out  # 2.3 by chance
    assert small.accuracy > 90.0
    for row in (tuned, recipe, in_float32):
        assert row.accuracy > small.accuracy - 8.0, out
    assert recipe.accuracy == pytest.approx(in_float32.accuracy, abs=5.0)
    difference = re.search(r"batch 256, LARS .*: accuracy ([+-][\d.]+) \((within|beyond) the deviations\)", out)
    assert difference is not None, out
    assert float(difference[1]) == pytest.approx(recipe.accuracy - tuned.accuracy, abs=0.011)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_large_batch_starts_ranks_by_itself() -> None:
    pytest.importorskip("sklearn")
    out = run([sys.executable, str(EXAMPLE), "--ranks", "2", "--quick", "--epochs", "1", "--batches", "255"])
    assert [row.batch for row in rows_of(out)] == [128, 255, 255, 255, 255], out
    assert re.search(r"took \d+ s with 2 ranks", out)


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported, in a process that torchrun did not start."""
    monkeypatch.delenv("RANK", raising=False)
    return imported("large_batch", monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "1"], "--batches: 1, wanted 2 (one sample for each rank) to 1150"),
        (["--batches", "384", "3", "--ranks", "4"], "--batches: 3, wanted 4 (one"),
        (["--batches", "1151"], "--batches: 1151, wanted 2"),
        (["--batches", "many"], "--batches: invalid int value: 'many'"),
        (["--ranks", "0"], "--ranks: 0, wanted 1 to 64"),
        (["--seeds", "1"], "--seeds: 1, wanted at least 2"),
        (["--epochs", "0"], "--epochs: 0, wanted at least 1"),
        (["--batch", "64", "--adam"], "unrecognized arguments: --adam"),
    ],
)
def test_wrong_arguments_are_refused(
    example: ModuleType,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["large_batch.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        example.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_ranks_that_torchrun_did_not_start(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["large_batch.py", "--ranks", "3"])
    with pytest.raises(SystemExit):
        example.main()
    assert "--ranks: 3, but 2 were started" in capsys.readouterr().err


def test_says_what_to_install(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["large_batch.py"])
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^examples/large_batch.py needs scikit-learn: pip install scikit-learn$"):
        example.main()


def losses_of(out: str) -> list[float]:
    lines = re.findall(r"^(?:epoch|step) \d+  loss (\S+)  [1-9]\d* samples/s$", out, re.MULTILINE)
    return [float(loss) for loss in lines]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["pycomm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ddp(backend: str) -> None:
    """The script, unchanged but for the backend's name, learns the same."""
    options = ["--epochs", "2", "--samples", "1024", "--width", "128", "--backend", backend]
    out = run_on(2, "ddp.py", *options)
    first, second = losses_of(out)
    assert second < first < 2.6, out
    assert second == pytest.approx(2.0, abs=0.3), out
    stats = STATS.search(out)
    assert (stats is not None) == (backend == "pycomm"), out
    if stats is not None:
        assert stats[1] == "shared_memory"
        assert int(stats[2]) > 0, "no bucket was moved"
        assert int(stats[3]) > 10 * int(stats[4]), out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fsdp2() -> None:
    out = run_on(2, "fsdp2.py", "--steps", "40", "--width", "64", "--layers", "2")
    losses = losses_of(out)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True), out
    assert losses[-1] < 0.8 * losses[0], out
    stats = STATS.search(out)
    assert stats is not None, out
    assert int(stats[3]) > 0, out
    assert int(stats[4]) == 0, "FSDP2's buffers were not the group's"


@pytest.mark.parametrize("script", ["ddp.py", "fsdp2.py"])
def test_the_only_words_of_ours(script: str) -> None:
    """An import, the default of --backend, and the counters at the end."""
    code = re.sub(r'""".*?"""', "", (EXAMPLES / script).read_text(), count=1, flags=re.DOTALL)
    lines = [line.strip() for line in code.splitlines() if "pycomm" in line]
    assert len(lines) == 4, lines
    assert lines[0].startswith("import pycomm  #")
    assert 'default="pycomm"' in lines[1]
    assert lines[2] == 'if dist.get_rank() == 0 and arguments.backend == "pycomm":'
    assert "pycomm.backend.stats()" in lines[3]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("style", ["columns", pytest.param("rows", marks=pytest.mark.slow)])
def test_split_layer(style: str) -> None:
    out = run_on(2, "split_layer.py", "--width", "256", "--style", style)
    held = [int(count.replace(",", "")) for count in re.findall(r"^rank \d: ([\d,]+) parameters", out, re.MULTILINE)]
    assert len(held) == 2, out
    assert sum(held) == 256 * 256 + (256 if style == "columns" else 512), out  # biases are split with the columns
    far = re.search(r"output (\S+), gradient of x (\S+), of the weights (\S+)$", out, re.MULTILINE)
    assert far is not None, out
    assert max(map(float, far.groups())) < 1e-5, out


@pytest.mark.timeout(400)
def test_pipeline() -> None:
    options = ["--schedule", "zero_bubble_v", "--width", "64", "--batch", "64", "--steps", "20"]
    out = run_on(2, "pipeline.py", *options)
    assert "4 stages on 2 ranks, 8 microbatches" in out
    assert "rank 0: stages [0, 3]" in out
    assert "rank 1: stages [1, 2]" in out
    first, last = losses_of(out)
    assert last < first < 2.4, out
    shown = run([sys.executable, str(EXAMPLES / "pipeline.py"), "--show", "one_f_one_b", "--ranks", "3"])
    assert "proven; microbatches held at once, by rank: [3, 2, 1]" in shown


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hybrid() -> None:
    options = ["--pp", "2", "--dp", "2", "--tp", "1", "--width", "64", "--steps", "20", "--compression", "topk"]
    out = run_on(4, "hybrid.py", *options)
    first, last = losses_of(out)
    assert last < first < 2.4, out
    assert len(re.findall(r"^rank \d: \d+ KB sent per step$", out, re.MULTILINE)) == 4, out


def test_im2col() -> None:
    options = ["--threads", "1", "2", "--channels", "16", "--size", "12", "--batch", "1", "--rounds", "2"]
    out = run([sys.executable, str(EXAMPLES / "im2col.py"), *options])  # which compares with torch's convolution
    assert re.search(r"^2 threads, 8 rows each: .* ms", out, re.MULTILINE), out


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("scaling", monkeypatch)


def test_published_speedups(scaling: ModuleType) -> None:
    """Gustafson's 1,024 processors, whose serial parts of 0.4 to 0.8 % make speedups of 1,016 to 1,020."""
    for serial, speedup in ((0.004, 1020), (0.005, 1019), (0.008, 1016)):
        assert 1024 * scaling.gustafson(1024, serial) == pytest.approx(speedup, abs=0.5)
        points = {1: 1.0, 1024: float(speedup)}
        assert scaling.fit(points, scaling.gustafson).serial == pytest.approx(serial, abs=0.0005)
    assert 1024 * scaling.amdahl(1024, 0.004) == pytest.approx(201, abs=0.5)
    assert 10 * scaling.amdahl(10, 0.5) == pytest.approx(1 / (0.5 + 0.5 / 10), rel=1e-14)


@pytest.mark.parametrize(("form", "serial"), [("amdahl", 0.03), ("amdahl", 0.0), ("amdahl", 1.0), ("gustafson", 0.25)])
def test_a_form_is_found_again(form: str, serial: float, scaling: ModuleType) -> None:
    efficiency = getattr(scaling, form)
    points = {count: 123.0 * count * efficiency(count, serial) for count in (1, 2, 4, 7, 16)}
    found = scaling.fit(points, efficiency)
    assert found.serial == pytest.approx(serial, rel=1e-6, abs=1e-9)
    assert found.throughput == pytest.approx(123.0, rel=1e-7)
    assert found.residual < 1e-7
    assert found.total(4096) == pytest.approx(123.0 * 4096 * efficiency(4096, serial), rel=1e-5)


def test_scaling_on_a_network(scaling: ModuleType) -> None:
    link = schedule.Link(alpha=0, beta=1e-9, gamma=0)
    network = schedule.Network(name="n", within_host=link, between_hosts=link)
    # 2 (P - 1) / P of 0.1 s, by an algorithm that has the fewest bytes.
    assert scaling.by_network(4, 0.3, 1e8, network) == pytest.approx(0.3 / 0.45, rel=1e-9)
    assert scaling.by_network(1, 0.3, 1e8, network) == 1


@pytest.mark.parametrize("points", [{}, {1: 100.0}, {0: 100.0, 1: 1.0}, {1: 100.0, 2: 0.0}, {1: 100.0, 2: math.nan}])
def test_points_that_make_no_sense(points: dict[int, float], scaling: ModuleType) -> None:
    with pytest.raises(ValueError, match="points are"):
        scaling.fit(points, scaling.amdahl)


def test_scaling_prints_fits(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--points", "1:100", "2:190", "4:350"])
    scaling.main()
    out = capsys.readouterr().out
    assert re.search(r"^amdahl: S = 99.8, s = 0.0473, ", out, re.MULTILINE), out
    for devices, measured in ((1, "100"), (2, "190"), (4, "350")):
        assert re.search(rf"^ +{devices} +{measured}.0 ", out, re.MULTILINE), out
    assert re.search(r"^ +4096  ", out, re.MULTILINE), out
    assert out.endswith("Beyond 4 devices nothing was measured.\n")
