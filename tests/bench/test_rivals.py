"""The rivals of ``bench.collectives``: which take part, what the others lack, and who is named the strongest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import ROOT
from bench.collectives import command, rivals
from bench.collectives.rivals import RIVALS, build_deepspeed, find_gloo_shared_memory
from bench.harness import installed
from bench.harness.installed import UnavailableError, installed_version
from bench.harness.timing import Samples

BUILDER = """
class ShareMemCommBuilder:
    def load(self, verbose):
        {body}
"""

# Sums over the group that the ranks have joined anyway, and says so.
WORKING = """from types import SimpleNamespace

        import torch
        import torch.distributed as dist
        from torch import library as operators

        def all_reduce(tensor):
            dist.all_reduce(tensor)
            return tensor

        def initialize(size, rank):
            print("initialize", size, rank)

        global library
        library = operators.Library("deepspeed", "DEF")
        library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
        library.impl("inference_all_reduce_", all_reduce, "CPU")
        return SimpleNamespace(initialize=initialize)
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Have processes that are started find a package in place of DeepSpeed, and this one believe that it is there."""
    package = folder / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    for parent in (package, *package.parents[:2]):
        (parent / "__init__.py").touch()
    (package / "cpu.py").write_text(BUILDER.format(body=body))
    about = folder / "deepspeed-0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    monkeypatch.syspath_prepend(folder)


def torch_with(folder: Path, monkeypatch: pytest.MonkeyPatch, symbols: bytes) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "libtorch_cpu.so").write_bytes(symbols)
    monkeypatch.setattr(rivals, "torch", SimpleNamespace(__file__=str(folder / "__init__.py")))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "bench.collectives", "--ranks", "2", "--sizes", "1K,2M", "--rounds", "1", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], list(RIVALS)),
        (["--peers"], list(RIVALS)),
        (["--peers", "mpi,gloo,mpich"], ["mpich", "openmpi", "gloo"]),
    ],
)
def test_names(words: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.collectives", *words])
    assert command._parse().peers == names


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.collectives", "--peers", "gloo,smoke"])
    with pytest.raises(SystemExit):
        command._parse()
    assert "--peers: 'smoke', wanted any of gloo, gloo_shm, deepspeed, mpich, openmpi, all, mpi" in (
        capsys.readouterr().err
    )


def test_gloo_has_shared_memory_in_some_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(tmp_path, monkeypatch, b"\0_ZN4gloo25AllreduceSharedMemoryData10initializeEv\0")
    find_gloo_shared_memory()


def test_gloo_lacks_shared_memory_in_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(tmp_path, monkeypatch, b"\0_ZN4gloo9allreduceERKNS_6detail20AllreduceOptionsImplE\0")
    with pytest.raises(UnavailableError, match=r"^not in this torch$"):
        find_gloo_shared_memory()


def test_deepspeed_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda _: None)
    with pytest.raises(UnavailableError, match=r"^not installed: pip install deepspeed$"):
        build_deepspeed()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        # In pieces, as the traceback also shows the line that raises.
        ("raise RuntimeError('c++\\nshm.cpp:3:5: err' 'or: no shm\\nninja: stopped')", "shm.cpp:3:5: error: no shm"),
        ("raise RuntimeError('ninja is missing')", "RuntimeError: ninja is missing"),
        (
            "from types import SimpleNamespace; return SimpleNamespace(vector_kernel_level=lambda: 0)",
            "the processor has no AVX2",
        ),
    ],
)
def test_deepspeed_that_cannot_be_built(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, body)
    with pytest.raises(UnavailableError) as caught:
        build_deepspeed()
    assert str(caught.value) == f"not built: {reason}"


def test_sizes_that_deepspeed_cannot_sum() -> None:
    line = command.Line("DeepSpeed", SimpleNamespace(), "tensor", RIVALS["deepspeed"].most_bytes)  # type: ignore[arg-type]
    assert line.takes(1 << 30)
    assert not line.takes(1 << 31)


def test_the_strongest_rival_is_none_of_ours() -> None:
    row = {"pycomm, empty": 1.0, "Gloo": 4.0, "DeepSpeed": 2.0, "MPICH": 3.0}
    assert command._strongest({label: Samples.of([seconds]) for label, seconds in row.items()}) == "DeepSpeed"
    assert command._strongest({"pycomm, empty": Samples.of([1.0])}) is None


@pytest.mark.slow
def test_a_rival_that_cannot_take_part_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "raise RuntimeError('ninja is missing')")
    report = tmp_path / "report.json"
    done = run("--peers", "gloo,deepspeed", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "\nDeepSpeed: not built: RuntimeError: ninja is missing\n" in done.stdout
    (group,) = json.loads(report.read_text())["results"]
    assert group["not_measured"] == {"DeepSpeed": "not built: RuntimeError: ninja is missing"}
    assert [measured["strongest_rival"] for measured in group["all_reduce"]] == ["Gloo", "Gloo"]


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True])
def test_deepspeed_takes_part(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not real:
        stand_in(tmp_path, monkeypatch, WORKING)
    elif installed_version("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    report = tmp_path / "report.json"
    done = run("--peers", "deepspeed", "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "vs DeepSpeed" in done.stdout
    assert not [*Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")]
    (group,) = json.loads(report.read_text())["results"]
    assert group["memory"] == {"pycomm, empty": "empty", "pycomm, tensor": "tensor", "DeepSpeed": "tensor"}
    assert group["not_measured"] == {}
