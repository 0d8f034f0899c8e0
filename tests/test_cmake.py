"""What CMake finds, as far as it can be tried without building."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CMAKE = shutil.which("cmake")


def configure(build: Path, path: str, **variables: str) -> str:
    """Return what CMake says when it is to build with CUDA, in one line."""
    pybind11 = pytest.importorskip("pybind11")
    assert CMAKE is not None
    version = {f"SKBUILD_PROJECT_{name}": value for name, value in {"NAME": "pycomm", "VERSION": "0.1.0"}.items()}
    settings = {**version, "pybind11_DIR": pybind11.get_cmake_dir(), "PYCOMM_CUDA": "ON"}
    command = [CMAKE, "-S", str(ROOT), "-B", str(build), *(f"-D{name}={value}" for name, value in settings.items())]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "CUDACXX"))}
    done = subprocess.run(
        command, env={**kept, "PATH": path, **variables}, capture_output=True, text=True, timeout=100, check=False
    )
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"])
def test_a_compiler_that_is_not_on_path(variable: str, tmp_path: Path) -> None:
    """One that does nothing but note that it was called, and is therefore refused."""
    asked = tmp_path / "asked"
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n: > {asked}\nexit 1\n")
    nvcc.chmod(0o755)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists())
    said = configure(tmp_path / "build", path, **{variable: str(tmp_path / "toolkit")})
    assert asked.exists(), said
    assert f"by {nvcc}, for 75-virtual (other GPUs: CUDAARCHS; none: PYCOMM_CUDA=OFF)" in said


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
def test_no_compiler_and_an_old_one(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ninja", "make", "uname", "sh"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    said = configure(tmp_path / "none", str(tools))
    assert "no C++ compiler on PATH, wanted g++ 11, clang 14 or newer. Debian and Ubuntu: apt install g++" in said
    real = shutil.which("c++")
    old = tools / "old-c++"  # says of itself what g++ 10 says
    old.write_text(f'#!/bin/sh\nexec {real} -U__GNUC__ -D__GNUC__=10 "$@"\n')
    old.chmod(0o755)
    said = configure(tmp_path / "old", os.environ["PATH"], CXX=str(old))
    assert re.search(r"old-c\+\+ is GNU 10\.[\d.]+, wanted g\+\+ 11, clang 14 or newer", said), said


def architectures(folder: Path, gpus: str, known: str) -> str:
    """Return what is compiled for where nvidia-smi, unless that is empty, says ``gpus``, and nvcc knows ``known``."""
    assert CMAKE is not None
    for name, says in {"nvidia-smi": gpus, "nvcc": known}.items():
        program = folder / name
        program.unlink(missing_ok=True)
        if says:
            program.write_text(f"#!/bin/sh\nprintf '{says}'\n")
            program.chmod(0o755)
    script = folder / "script.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.24)\ninclude({ROOT}/csrc/device/architectures.cmake)\n"
        f'pycomm_architectures(found "{folder}/nvcc")\nmessage(STATUS "${{found}}")\n'
    )
    done = subprocess.run(
        [CMAKE, "-P", str(script)], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.removeprefix("-- ").strip()


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
def test_what_is_compiled_for(tmp_path: Path) -> None:
    known = "compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n"
    assert architectures(tmp_path, "9.0\\n", known) == "90-real"
    assert architectures(tmp_path, "8.0\\n9.0\\n8.0\\n", known) == "80-real;90-real"
    assert architectures(tmp_path, "12.0\\n", known) == "100-virtual", "newer than the compiler"
    assert architectures(tmp_path, "8.9\\n", known) == "80-virtual"
    assert architectures(tmp_path, "", known) == "75-virtual", "there is no nvidia-smi"
    assert architectures(tmp_path, "No devices were found\\n", known) == "75-virtual"
