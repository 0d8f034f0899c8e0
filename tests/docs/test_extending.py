"""The pages under docs/extending, followed in a copy of the project: what they add works, and passes what they name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.guides import Guide
from tests.docs.pages import PAGES, ROOT, blocks_of

COMPILER = shutil.which("c++")
FIRST = {
    "algorithm": "pycomm/schedule/algorithms/star.py",
    "compression_method": "pycomm/compression/methods/bf16_feedback.py",
}
"""Files that the first blocks of pages are."""
BOTH_VERSIONS = r"""
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
#include "kernels/clamp.h"

int main() {
    for (int64_t size : {0, 1, 17, 4095, 4096, 4097, 30011}) {
        std::vector<float> host, device;
        for (int64_t i = 0; i < size; ++i) host.push_back(i % 7 == 3 ? NAN : static_cast<float>(i % 31 - 15) / 4.0f);
        device = host;
        auto buffer = [&](std::vector<float>& x) { return pycomm::Buffer{x.data(), size, pycomm::DType::kF32}; };
        pycomm::clamp(buffer(host), 0.5f, 2);
        pycomm::cuda::clamp(buffer(device), 0.5f, {});
        if (std::memcmp(host.data(), device.data(), sizeof(float) * host.size()) != 0) return 1;
        for (float each : host) {
            if (std::fabs(each) > 0.5f) return 2;  // false for NaN
        }
    }
    std::puts("the same bits");
}
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        any("editable" in type(finder).__module__ for finder in sys.meta_path),
        reason="an editable install is imported in place of the guide's copy",
    ),
]


def test_an_algorithm(tmp_path: Path) -> None:
    guide = Guide("docs/extending/algorithm.md", tmp_path, FIRST["algorithm"])
    assert "star: 4 ranks, 1 chunk" in guide.run("python docs/generate.py --picture star 4", 60)
    guide.run("python docs/generate.py", 90)
    for command in guide.commands("pytest"):
        assert " passed" in guide.run(command, 250)


def test_a_compression_method(tmp_path: Path) -> None:
    guide = Guide("docs/extending/compression_method.md", tmp_path, FIRST["compression_method"])
    (command,) = guide.commands("pytest")
    assert " passed" in guide.run(command, 250)
    (command,) = guide.commands("pycomm")
    assert "bf16 feedback" in guide.run(command, 60)


def test_a_transport(tmp_path: Path) -> None:
    guide = Guide("docs/extending/transport.md", tmp_path)
    for command in guide.commands("pytest"):  # on two ranks, as on others the store only takes longer
        assert " passed" in guide.run(command.replace("collectives.py -k store", "collectives.py -k store-2"), 250)


def test_parts_of_files_on_pages_are_those_of_the_files() -> None:
    parts = [each for page in PAGES for each in blocks_of(page) if each.fragment.startswith("a part of docs/")]
    assert len(parts) >= 3
    for part in parts:
        text = (ROOT / part.fragment.removeprefix("a part of ")).read_text(encoding="utf-8")
        assert textwrap.indent(part.code, "    ") in text, part.where


@pytest.mark.skipif(shutil.which("ruff") is None, reason="no ruff")
@pytest.mark.parametrize("page", ["algorithm", "compression_method", "kernel", "transport"])
def test_the_linter_accepts_what_they_add(page: str, tmp_path: Path) -> None:
    Guide(f"docs/extending/{page}.md", tmp_path, FIRST.get(page, ""))
    for command in ("check", "format --check"):
        done = subprocess.run(
            ["ruff", *command.split(), "."], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_both_versions_of_a_kernel(tmp_path: Path) -> None:
    """The CUDA version on the emulator."""
    assert COMPILER is not None
    Guide("docs/extending/kernel.md", tmp_path)
    (tmp_path / "main.cpp").write_text(BOTH_VERSIONS)
    emulator = [f"tests/emulator/{name}.cpp" for name in ("emulator", "device/runtime", "device/capture")]
    sources = ["main.cpp", "csrc/kernels/cpu/clamp.cpp", "csrc/base/parallel.cpp", *emulator]
    flags = ["-std=c++20", "-O1", "-Werror", "-Wno-unknown-pragmas", "-Itests/emulator", "-Icsrc", "-pthread"]
    command = [COMPILER, *flags, *sources, "-xc++", "csrc/kernels/cuda/clamp.cu", "-o", "clamp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "clamp"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "the same bits\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_kernel(tmp_path: Path) -> None:
    """Builds the whole extension, with the emulator, which takes minutes."""
    guide = Guide("docs/extending/kernel.md", tmp_path)
    settings = [f"--config-settings=cmake.define.PYCOMM_EMULATOR={tmp_path}/tests/emulator"]
    settings += ["--config-settings=cmake.define.PYCOMM_WERROR=ON", f"--config-settings=build-dir={tmp_path}/build"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "built")]
    done = subprocess.run(
        [*install, *settings, str(tmp_path)], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    guide.use_package_in(tmp_path / "built")
    variables = {"PYCOMM_TEST_EMULATOR": "1", "PYCOMM_TEST_EXAMPLES": "8"}
    assert " skipped" not in guide.run("pytest tests/kernels/test_clamp.py", 200, **variables)
    for command in guide.commands("pytest"):
        assert " passed" in guide.run(command, 250, **variables)
