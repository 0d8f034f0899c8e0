"""Floor of ``bench.between_hosts``: a C++ program of plain sockets, compiled for this processor, beside each rank."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("floor.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native")
_COMPILE_SECONDS = 120.0
_END_SECONDS = 10.0
_PORT = 29600  # nobody else is there


@dataclass(frozen=True)
class Way:
    """One way to sum.

    Attributes:
        label: its name in tables.
        algorithm: as the program calls it.
        spin: microseconds for which a wait tries again before it sleeps.
        most_bytes: of an array; ``None``: no limit.
    """

    label: str
    algorithm: str
    spin: int
    most_bytes: int | None = None

    def takes(self, num_bytes: int) -> bool:
        return self.most_bytes is None or num_bytes <= self.most_bytes


_SPIN = 50
_DIRECT_BYTES = 256 << 10  # an array of more is faster around the ring
WAYS = (
    Way("floor, ring", "ring", 0),
    Way("floor, ring, spins", "ring", _SPIN),
    Way("floor, direct", "direct", 0, _DIRECT_BYTES),
    Way("floor, direct, spins", "direct", _SPIN, _DIRECT_BYTES),
)


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it failed; the message says which, and how."""


def compile_floor(folder: Path) -> Path:
    """Compile the program by ``CXX`` or else c++ or g++; returns its path in ``folder``.

    Raises:
        CompilerError: it could not be compiled.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise CompilerError("the floor needs a C++ compiler: none is in CXX, and there is neither c++ nor g++")
    program = folder / "floor"
    command = [*shlex.split(compiler), *_FLAGS, "-o", str(program), str(_SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        raise CompilerError(f"{shlex.join(command)}:\n{done.stderr.strip()}")
    return program


class Floor:
    """The program on the host of this rank. It sleeps between turns."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def turn(self, way: Way, num_bytes: int, calls: int) -> float:
        """Sum ``calls`` times back to back, as the other ranks do; returns the seconds per call on this rank.

        Raises:
            RuntimeError: the program has ended. It has said why on the standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{way.algorithm} {way.spin} {num_bytes // 4} {calls}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the floor ended with status {self._process.wait(_END_SECONDS)}")
        return float(answer)


@contextlib.contextmanager
def running(program: str, rank: int, addresses: Sequence[str]) -> Iterator[Floor]:
    """Run the program as ``rank`` among hosts with these addresses; it ends with the block."""
    command = [program, str(rank), str(_PORT), *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Floor(process)
        except BaseException:
            process.kill()
            raise
