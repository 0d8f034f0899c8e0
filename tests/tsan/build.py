"""Building the driver: the transport's own sources, as they are or with a bug in one of them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pycomm import schedule
from pycomm.schedule.collective import Schedule
from pycomm.schedule.program import program_of
from pycomm.schedule.table import COPY, REDUCE, Round, Table

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent


def _below(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.cpp" for name in names)


def _inner_loops() -> dict[str, tuple[str, ...]]:
    """Return the groups of CMakeLists.txt whose last file is a table of all loops: each of them has to be linked."""
    lines = re.findall(r"^add_group\(LOOP_SOURCES (\w+) (\S+) ([^)]+)\)", (ROOT / "CMakeLists.txt").read_text(), re.M)
    return {group: _below(folder, *names.split()) for group, folder, names in lines}


GROUPS = {
    **_inner_loops(),
    "kernels": _below("csrc/kernels/cpu", "absmax", "reduce", "loops/dispatch"),
    "transport": (
        *_below("csrc", "base/parallel"),
        *_below("csrc/transport", "at_fork", "control_groups", "cores", "memory", "process", "program", "texts"),
        *_below("csrc/transport/shared_memory", "arena", "group", "run", "staging", "wait"),
    ),
    "tcp": (
        *_below("csrc/transport", "hierarchical/group"),
        *_below("csrc/transport/tcp", "call", "collectives", "group", "link", "messages", "post", "run", "watch"),
    ),
    "operations": _below(
        *("csrc/transport/shared_memory", "call", "collectives", "incoming", "message_wait", "messages", "outgoing"),
        *("parts", "shares"),
    ),
    "driver": _below("tests/tsan", "driver", "messages", "tcp"),
}
"""Sources that are compiled as one, as CMakeLists.txt has them: most of a file's time goes to headers."""
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


def compile_groups(
    names: Iterable[str], directory: Path, changed: Mapping[str, Path] | None = None, include: Path = ROOT / "csrc"
) -> dict[str, Path]:
    """Return the objects of groups, which are put into ``directory``, with ``changed`` files in place of sources."""

    def compiled(name: str) -> Path:
        text, target = directory / f"{name}.cpp", directory / f"{name}.o"
        files = [(changed or {}).get(source, ROOT / source) for source in GROUPS[name]]
        text.write_text("".join(f'#include "{file}"\n' for file in files))
        command = [compiler(), *_FLAGS, *_DEFINES, f"-I{include}", f"-I{ROOT / 'csrc'}", "-c", str(text)]
        subprocess.run([*command, "-o", str(target)], check=True, timeout=300)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chosen = list(names)
        return dict(zip(chosen, pool.map(compiled, chosen), strict=True))


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
        return compile_groups([name for name in GROUPS if source in GROUPS[name]], directory, {source: changed})
    # A header is found before the right one where it is included from elsewhere.
    header = source.removeprefix("csrc/")
    users = [
        name
        for name, sources in GROUPS.items()
        if any(file.startswith("csrc/transport") or header in (ROOT / file).read_text() for file in sources)
    ]
    return compile_groups(users, directory, include=directory / "csrc")


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
