"""What CMake finds, as far as it can be tried without building."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CMAKE = shutil.which("cmake")
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="needs cmake")
needs_compiler = pytest.mark.skipif(None in (CMAKE, shutil.which("c++")), reason="needs cmake and a C++ compiler")


def run(*command: str, **environment: str) -> str:
    """Run CMake; return its output."""
    assert CMAKE is not None
    done = subprocess.run([CMAKE, *command], env=environment, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout + done.stderr


def configure(build: Path, path: str, cuda: str = "ON", **variables: str) -> str:
    """Configure a build; return CMake's output in one line. Nothing is built, so pybind11 needs no headers."""
    pybind11 = build.with_name("pybind11")
    pybind11.mkdir(parents=True)
    (pybind11 / "pybind11Config.cmake").write_text(
        "function(pybind11_add_module name)\n  list(REMOVE_ITEM ARGN NO_EXTRAS)\n"
        "  add_library(${name} MODULE ${ARGN})\nendfunction()\n"
    )
    version = {f"SKBUILD_PROJECT_{name}": value for name, value in {"NAME": "pycomm", "VERSION": "0.1.0"}.items()}
    settings = {**version, "pybind11_DIR": pybind11, "PYCOMM_CUDA": cuda, "Python_EXECUTABLE": sys.executable}
    settings["CMAKE_IGNORE_PATH"] = "/usr/local/cuda/bin;/opt/cuda/bin"  # this machine may have a toolkit there
    options = [f"-D{name}={value}" for name, value in settings.items()]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "CUDACXX"))}
    said = run("-S", str(ROOT), "-B", str(build), *options, **{**kept, "PATH": path, **variables})
    return " ".join(said.split())


def path_without_nvcc() -> str:
    return os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists())


@needs_compiler
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"])
def test_a_compiler_that_is_not_on_path(variable: str, tmp_path: Path) -> None:
    """It only records that it was called, and is therefore refused."""
    asked = tmp_path / "asked"
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n: > {asked}\nexit 1\n")
    nvcc.chmod(0o755)
    said = configure(tmp_path / "build", path_without_nvcc(), **{variable: str(tmp_path / "toolkit")})
    assert asked.exists(), said
    assert f"by {nvcc}, for 75-virtual;80-code;90-code (other GPUs: CUDAARCHS; none: PYCOMM_CUDA=OFF)" in said


@needs_compiler
def test_no_compiler_and_an_old_one(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("ninja", "make", "uname", "sh"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    said = configure(tmp_path / "none" / "build", str(tools))
    assert "no C++ compiler on PATH, wanted g++ 11, clang 14 or newer. Debian and Ubuntu: apt install g++" in said
    real = shutil.which("c++")
    old = tools / "old-c++"  # says of itself what g++ 10 says
    old.write_text(f'#!/bin/sh\nexec {real} -U__GNUC__ -D__GNUC__=10 "$@"\n')
    old.chmod(0o755)
    said = configure(tmp_path / "old" / "build", os.environ["PATH"], CXX=str(old))
    assert re.search(r"old-c\+\+ is GNU 10\.[\d.]+, wanted g\+\+ 11, clang 14 or newer", said), said


def architectures(folder: Path, gpus: str, known: str) -> str:
    """Return the architectures chosen if nvidia-smi prints ``gpus`` (empty: there is none) and nvcc knows ``known``."""
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


@needs_compiler
@pytest.mark.parametrize(
    ("cuda", "says"),
    [
        ("OFF", "CUDA kernels: none (PYCOMM_CUDA=OFF)"),
        ("AUTO", "CUDA kernels: none, as no nvcc was found: put it on PATH, or set CUDA_HOME or CUDACXX"),
    ],
)
def test_a_build_without_cuda_ends_with_a_line_that_says_so(cuda: str, says: str, tmp_path: Path) -> None:
    said = configure(tmp_path / "build", path_without_nvcc(), cuda)
    assert "Generating done" in said
    rules = [*(tmp_path / "build").glob("build.ninja"), *(tmp_path / "build").rglob("_native.dir/build.make")]
    assert [says in rule.read_text() for rule in rules] == [True]


@needs_compiler
def test_the_last_line_of_a_build_names_every_architecture(tmp_path: Path) -> None:
    says = "CUDA kernels: by /opt/cuda 13/nvcc, for 80-real;90-virtual (other GPUs: CUDAARCHS; none: PYCOMM_CUDA=OFF)"
    (tmp_path / "native.cpp").write_text("int answer() { return 42; }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(small LANGUAGES CXX)\n"
        f"include({ROOT}/csrc/device/architectures.cmake)\nadd_library(native MODULE native.cpp)\n"
        f'pycomm_say_last(native "{says}")\n'
    )
    run("-S", str(tmp_path), "-B", str(tmp_path / "build"), **os.environ)
    lines = run("--build", str(tmp_path / "build"), **os.environ).splitlines()
    assert says in lines[-2:]  # make has one more, that the target is built


@needs_cmake
def test_what_is_compiled_for(tmp_path: Path) -> None:
    known = "compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n"
    assert architectures(tmp_path, "9.0\\n", known) == "90-real"
    assert architectures(tmp_path, "8.0\\n9.0\\n8.0\\n", known) == "80-real;90-real"
    assert architectures(tmp_path, "12.0\\n", known) == "100-virtual", "newer than the compiler"
    assert architectures(tmp_path, "8.9\\n", known) == "80-virtual"
    assert architectures(tmp_path, "", known) == "75-virtual;80-code;90-code", "there is no nvidia-smi"
    assert architectures(tmp_path, "No devices were found\\n", known) == "75-virtual;80-code;90-code"


@needs_cmake
@pytest.mark.parametrize(
    ("given", "rest", "flag"),
    [
        ("75-virtual;80-code;90-code", "75-virtual", "--generate-code=arch=compute_75,code=[sm_80,sm_90]"),
        ("80-real;90-real", "80-real;90-real", ""),
    ],
)
def test_machine_code_is_made_of_the_same_ptx(given: str, rest: str, flag: str, tmp_path: Path) -> None:
    script = tmp_path / "script.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.24)\ninclude({ROOT}/csrc/device/architectures.cmake)\n"
        f'set(archs "{given}")\npycomm_code_of(archs flag)\nmessage(STATUS "${{archs}}|${{flag}}")\n'
    )
    assert run("-P", str(script)).removeprefix("-- ").strip() == f"{rest}|{flag}"
