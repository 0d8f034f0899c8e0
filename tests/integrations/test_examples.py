"""The scripts under examples/trainers: on two ranks they come to what one process without pycomm comes to."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.scripts import PAGE, TRAINERS, on_one, on_two, run

SCRIPTS = sorted(path.name for path in TRAINERS.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_lines_at_most(script: str) -> None:
    """All that is pycomm's is marked; without it the script is one that knows nothing of pycomm."""
    plain, ours = PAGE.without_pycomm(script), PAGE.source(script)
    assert 1 <= PAGE.num_changed(script) <= 3
    code = re.sub(r'""".*?"""', "", plain, count=1, flags=re.DOTALL)
    assert not re.findall(r"^.*\bpycomm\b.*$", code.replace("/tmp/pycomm", ""), re.MULTILINE | re.IGNORECASE)
    compile(plain, script, "exec")
    added = [line for line in difflib.ndiff(plain.splitlines(), ours.splitlines()) if line.startswith("+ ")]
    assert len(added) == PAGE.num_changed(script)
    assert f"<!-- diff: {script} -->" in PAGE.PAGE.read_text(encoding="utf-8"), "the documentation leaves it out"


def test_the_page_is_not_stale() -> None:
    assert PAGE.main(["--check"]) == 0


def losses_of(out: str) -> list[float]:
    """Return what the script says of its losses, whichever way its trainer prints them."""
    return [float(loss) for loss in re.findall(r"(?:^epoch \d+  loss |\{'loss': ')([\d.]+)", out, re.MULTILINE)]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The script that the test is about, without pycomm."""
    path = tmp_path / "plain.py"
    path.write_text(PAGE.without_pycomm(request.param))
    return path


@pytest.mark.timeout(200)
@pytest.mark.parametrize("plain", ["accelerate_loop.py"], indirect=True)
@pytest.mark.parametrize("how", [(), ("--unwrapped",)], ids=["prepared", "unwrapped"])
def test_accelerate(plain: Path, how: tuple[str, ...], tmp_path: Path) -> None:
    """Windows of three passes, of which the last is ragged, and clipping by the averages."""
    pytest.importorskip("accelerate")
    one = on_one(plain, "--batch", "16", "--folder", str(tmp_path / "one"))
    two = on_two(TRAINERS / "accelerate_loop.py", "--ratio", "1", "--folder", str(tmp_path / "two"), *how)
    assert losses_of(one) == pytest.approx(losses_of(two), abs=2e-9)
    assert len(losses_of(one)) == 2
    ends = {name: torch.load(tmp_path / name / "end.pt", weights_only=True) for name in ("one", "two")}
    same(ends["one"], ends["two"], 1e-14)
    if how:  # the same script in one process, where there is nothing to average
        alone = on_one(TRAINERS / "accelerate_loop.py", "--batch", "16", "--folder", str(tmp_path / "alone"))
        assert losses_of(alone) == losses_of(one)
    saved = {path.name for path in (tmp_path / "two" / "epoch-1").iterdir()}
    assert {"pycomm-0-of-2.pt", "pycomm-1-of-2.pt", "model.safetensors", "optimizer.bin"} < saved


@pytest.mark.timeout(200)
@pytest.mark.parametrize("plain", ["transformers_trainer.py"], indirect=True)
def test_transformers(plain: Path, tmp_path: Path) -> None:
    """Windows of three passes, ragged ones at the ends of epochs; Adam amplifies roundings of float32."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    one = on_one(plain, "--batch", "16", "--folder", str(tmp_path / "one"))
    two = on_two(TRAINERS / "transformers_trainer.py", "--ratio", "1", "--folder", str(tmp_path / "two"))
    assert losses_of(one) == pytest.approx(losses_of(two), abs=0.0011)  # it prints three decimals
    assert len(losses_of(one)) == 20
    ends = {name: load_file(tmp_path / name / "end" / "model.safetensors") for name in ("one", "two")}
    same(ends["one"], ends["two"], 5e-4)
    alone = on_one(
        TRAINERS / "transformers_trainer.py", "--batch", "16", "--steps", "2", "--folder", str(tmp_path / "a")
    )
    assert losses_of(alone) == pytest.approx(losses_of(one)[:2], abs=0.5), "in one process there is nothing to average"
    saved = {path.name for path in (tmp_path / "two" / "checkpoint-20").iterdir()}
    assert {"pycomm-0-of-2.pt", "pycomm-1-of-2.pt", "rng_state_1.pth"} < saved


def lightnings(path: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, Any] = torch.load(path / "end.ckpt", weights_only=False)
    weights: dict[str, torch.Tensor] = saved.get("state_dict") or saved["model"]
    return weights


@pytest.mark.timeout(200)
@pytest.mark.parametrize("plain", ["lightning_trainer.py", "fabric_loop.py"], indirect=True)
def test_lightning(plain: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("lightning")
    script = request.node.callspec.params["plain"]
    one = on_one(plain, "--devices", "1", "--batch", "16", "--folder", str(tmp_path / "one"))
    two = on_two(TRAINERS / script, "--ratio", "1", "--folder", str(tmp_path / "two"))
    assert losses_of(one) == pytest.approx(losses_of(two), abs=2e-6)
    assert len(losses_of(one)) == 2
    same(lightnings(tmp_path / "one"), lightnings(tmp_path / "two"), 1e-14)
    assert (tmp_path / "two" / "epoch=1.ckpt.pycomm-1-of-2.pt").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plain", ["ray_train.py"], indirect=True)
def test_ray(plain: Path, tmp_path: Path) -> None:
    """Two local workers; and two of which one fails, which go on from the checkpoint to the same bits."""
    pytest.importorskip("ray.train")
    script = str(TRAINERS / "ray_train.py")
    runs = {
        "one": [str(plain), "--workers", "1", "--batch", "16"],
        "two": [script, "--ratio", "1"],
        "compressed": [script, "--ratio", "0.1"],
        "failed": [script, "--ratio", "0.1", "--fail-after", "0"],
    }
    ends = {}
    for name, command in runs.items():
        run([sys.executable, *command, "--folder", str(tmp_path / name)], timeout=150)
        ends[name] = torch.load(tmp_path / name / "end.pt", weights_only=True)
    same(ends["one"], ends["two"], 1e-14)
    same(ends["compressed"], ends["failed"], 0.0)
    assert any(not torch.equal(ends["two"][name], value) for name, value in ends["compressed"].items())
