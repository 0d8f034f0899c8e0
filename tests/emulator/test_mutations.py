"""Whether the emulator notices when a barrier is missing: each one is taken away in turn.

That also shows that none of them is there for nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = ROOT / "csrc" / "kernels" / "cuda"
BARRIER = re.compile(r"device::block_barrier\(\);|dismiss\(team, last\);")
KERNELS_CHECKED = [
    *("topk", "scatter_add", "table", "faults", "accumulate", "sparsify", "quantize", "chunks", "norms", "step"),
    "entries",
]
USERS = {"sums": ("norms", "step"), "grid": ("topk", "sparsify", "chunks", "norms", "entries")}
"""Kernels that use a header; of the others topk and sparsify do."""
FLAGS = ["-std=c++20", "-O1", "-Wno-unknown-pragmas", "-ffp-contract=off"]

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
    pytest.mark.slow,
    pytest.mark.timeout(500),
]


@dataclass(frozen=True)
class Barrier:
    """One call in one file."""

    file: str
    number: int

    @cached_property
    def place(self) -> re.Match[str]:
        return list(BARRIER.finditer((KERNELS / self.file).read_text()))[self.number]

    def __str__(self) -> str:
        line = (KERNELS / self.file).read_text()[: self.place.start()].count("\n") + 1
        return f"{self.file}:{line}"

    def removed(self) -> str:
        text = (KERNELS / self.file).read_text()
        return text[: self.place.start()] + ";" + text[self.place.end() :]


def barriers() -> list[Barrier]:
    selection = ["team.h", "topk_digits.h", "topk_candidates.h", "topk_select.h"]
    files = ["grid.h", *selection, "scatter_add.cu", "quantize.cu", "chunks.cu", "sums.h", "entries.cu"]
    return [
        Barrier(file, number) for file in files for number in range(len(BARRIER.findall((KERNELS / file).read_text())))
    ]


def compile_object(source: Path, target: Path, *includes: Path) -> Path:
    paths = [f"-I{path}" for path in (*includes, ROOT / "tests" / "emulator", ROOT / "csrc")]
    language = ["-xc++"] if source.suffix == ".cu" else []
    subprocess.run(["c++", *FLAGS, *paths, *language, "-c", source, "-o", target], check=True, timeout=200)
    return target


def link_and_run(objects: list[Path], program: Path) -> subprocess.CompletedProcess[str]:
    subprocess.run(["c++", *objects, "-o", program], check=True, timeout=60)
    return subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Everything as it is, compiled."""
    where = tmp_path_factory.mktemp("objects")
    emulator = ROOT / "tests" / "emulator"
    sources = [
        *(KERNELS / f"{name}.cu" for name in KERNELS_CHECKED),
        *(
            emulator / name
            for name in ("emulator.cpp", "device/runtime.cpp", "device/capture.cpp", "check_kernels.cpp")
        ),
    ]
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda source: compile_object(source, where / f"{source.stem}.o"), sources)
        return {source.stem: target for source, target in zip(sources, compiled, strict=True)}


def test_the_kernels_as_they_are(objects: dict[str, Path], tmp_path: Path) -> None:
    run = link_and_run(list(objects.values()), tmp_path / "check")
    assert run.returncode == 0, run.stdout
    assert "all as it should be" in run.stdout


def test_every_barrier_is_missed(objects: dict[str, Path], tmp_path: Path) -> None:
    def run_without(barrier: Barrier) -> bool:
        """Whether something went wrong."""
        where = tmp_path / str(barrier).replace(":", "_")
        changed = where / "kernels" / "cuda" / barrier.file
        changed.parent.mkdir(parents=True)
        changed.write_text(barrier.removed())
        kept = dict(objects)
        # A header is found in the directory of changed files first, from wherever it is included.
        for stem in USERS.get(changed.stem, ("topk", "sparsify")) if changed.suffix == ".h" else (changed.stem,):
            source = changed if changed.suffix == ".cu" else KERNELS / f"{stem}.cu"
            kept[stem] = compile_object(source, where / f"{stem}.o", where)
        return link_and_run(list(kept.values()), where / "check").returncode != 0

    found = barriers()
    assert len(found) > 12
    with ThreadPoolExecutor(2) as pool:
        missed = [str(barrier) for barrier, wrong in zip(found, pool.map(run_without, found), strict=True) if not wrong]
    assert not missed, f"nobody notices when these are gone: {missed}"
