"""Building the driver: the transport's own sources, as they are or with a bug in one of them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pycomm import schedule
from pycomm.schedule.collective import Schedule
from pycomm.schedule.program import program_of
from pycomm.schedule.table import COPY, REDUCE, Round, Table

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_LOOPS = (
    "absmax",
    "accumulate",
    "collect",
    "convert",
    "hash",
    "indices",
    "quantize",
    "reduce",
    "signs",
    "squares",
    "step",
    "table",
)
SOURCES = (
    *(f"csrc/kernels/cpu/loops/{name}.cpp" for name in (*_LOOPS, "dispatch")),
    *(
        f"csrc/transport/{name}.cpp"
        for name in (
            *(
                f"shared_memory/{part}"
                for part in (
                    *("arena", "at_fork", "call", "collectives", "group", "incoming", "message_wait", "messages"),
                    *("outgoing", "parts", "shares", "staging", "texts", "wait"),
                )
            ),
            "control_groups",
            "cores",
            "memory",
            "process",
        )
    ),
    *("csrc/execute/program.cpp", "csrc/execute/run.cpp", "csrc/base/parallel.cpp", "csrc/kernels/cpu/reduce.cpp"),
    "csrc/kernels/cpu/absmax.cpp",
    "tests/tsan/driver.cpp",
    "tests/tsan/messages.cpp",
)
# Fences are no part of what ThreadSanitizer knows; nothing but giving up, and going to sleep, relies on one.
_FLAGS = ("-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-fno-access-control", "-Wno-tsan", "-ffp-contract=off")
_DEFINES = ("-DPYCOMM_ISA=baseline", "-DPYCOMM_ISA_BASELINE")
ALGORITHMS = ("ring", "halving_doubling", "recursive_doubling", "double_tree", "direct", "circulant", "binary_blocks")


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def why_not() -> str:
    """Why the driver cannot be built or run here; "" if it can."""
    if shutil.which(compiler()) is None:
        return f"no {compiler()}"
    library = subprocess.run([compiler(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    return "" if Path(library.stdout.strip()).is_absolute() else f"{compiler()} has no ThreadSanitizer"


def compile_source(source: str, target: Path, include: Path = ROOT / "csrc") -> None:
    """``source``, relative to the project or absolute, into the object ``target``."""
    command = [compiler(), *_FLAGS, *_DEFINES, f"-I{include}", f"-I{ROOT / 'csrc'}", "-c", str(ROOT / source)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=300)


def object_name(source: str) -> str:
    return source.replace("/", "_") + ".o"


def compile_all(directory: Path) -> dict[str, Path]:
    """The object of every source, in ``directory``."""
    objects = {source: directory / object_name(source) for source in SOURCES}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: compile_source(*item), objects.items()))
    return objects


def link(objects: list[Path], target: Path) -> Path:
    subprocess.run([compiler(), *_FLAGS, *map(str, objects), "-lpthread", "-o", str(target)], check=True, timeout=300)
    return target


def needs_the_order() -> Table:
    """An all-reduce of three ranks in which rank 0 adds to what rank 1 still has to read.

    What makes receiving in place wait until the same chunk, sent earlier, was taken: in the algorithms of
    the literature what is received follows from that taking anyway.
    """

    def generate() -> list[Round]:
        return [
            Round.of(np.array([0]), np.array([1]), np.array([0]), 1, REDUCE),
            Round.of(np.array([2, 2]), np.array([0, 1]), np.array([0, 0]), 1, REDUCE),
            Round.of(np.array([1, 1]), np.array([0, 2]), np.array([0, 0]), 1, COPY),
        ]

    return Schedule("needs the order", 3, 1, lambda: iter(generate()))


def with_bug(source: str, text: str, directory: Path) -> dict[str, Path]:
    """The objects of what ``text`` in place of ``source``, a file of csrc/, changes."""
    changed = directory / source
    changed.parent.mkdir(parents=True)
    changed.write_text(text)
    if source.endswith(".cpp"):
        target = directory / object_name(source)
        compile_source(str(changed), target)
        return {source: target}
    # A header is found before the right one where it is included from elsewhere.
    users = [user for user in SOURCES if source.removeprefix("csrc/") in (ROOT / user).read_text()]
    users += [user for user in SOURCES if user not in users and user.startswith(("csrc/transport", "csrc/execute"))]
    objects = {user: directory / object_name(user) for user in users}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: compile_source(item[0], item[1], include=directory / "csrc"), objects.items()))
    return objects


def write_programs(path: Path, sizes: tuple[int, ...]) -> None:
    """What the driver reads: every rank's part of every schedule."""
    words: list[np.ndarray] = []
    for size in sizes:
        tables: list[Table] = [schedule.by_name(name, size) for name in ALGORITHMS]
        if size == 3:
            tables.append(needs_the_order())
        for number, table in enumerate(tables):
            schedule.verify(table)
            for rank in range(size):
                program = program_of(table, rank)
                content = np.asarray(program.words(), np.int64)
                words += [np.array([size, number, rank, program.digest >> 1, len(content)], np.int64), content]
    path.write_bytes(np.concatenate(words).tobytes())


def run(
    driver: Path, programs: Path, size: int, rounds: int, seed: int, timeout: float
) -> subprocess.CompletedProcess[str]:
    """The driver's end: exit code 0 where all was right, 66 where ThreadSanitizer found something."""
    command = [str(driver), str(programs), str(size), str(rounds), str(seed)]
    if shutil.which("setarch") is not None:  # its shadow memory does not go with all layouts of the address space
        command = ["setarch", "-R", *command]
    environment = {**os.environ, "TSAN_OPTIONS": "exitcode=66 halt_on_error=1 history_size=4"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
