"""The CUDA kernels, compiled for one GPU, and what their machine code asks of a multiprocessor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT
from bench.gpu.sass.machine_code import PACKET, Run, decode, runs, sections
from bench.gpu.sass.names import kernel_name

ARCHITECTURE = "sm_90"
SOURCES = ROOT / "csrc" / "kernels" / "cuda"
FLAGS = ("-std=c++17", "-O3", "-fmad=false", f"-arch={ARCHITECTURE}", f"-I{ROOT / 'csrc'}", "-cubin", "-Xptxas", "-v")

# A multiprocessor of sm_90.
MULTIPROCESSORS = 132  # of an H100 (SXM) or H200
THREADS = 256  # of a block, as csrc/device/launch.h starts them
_PARTITIONS = 4
_REGISTERS_OF_PARTITION = 16384
_REGISTERS_AT_ONCE = 256  # given to a warp
_MOST_THREADS = 2048
_SHARED_BYTES = 228 << 10
_SHARED_OF_SYSTEM = 1 << 10  # for each block

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\S+)'(?P<text>.*?Used \d+ registers[^\n]*)", re.DOTALL)


@dataclass(frozen=True)
class Resources:
    """Resources that ptxas reports for a kernel; sizes in bytes."""

    registers: int
    spilled: int
    """Stores and loads of values for which there was no register, per thread."""
    stack: int
    """Arrays that are indexed by what is known at run time only, and spilled values, per thread."""
    shared: int

    @property
    def blocks(self) -> int:
        """Number of blocks that run at once on a multiprocessor."""
        of_warp = _rounded_up(32 * self.registers, _REGISTERS_AT_ONCE)
        by_registers = _PARTITIONS * (_REGISTERS_OF_PARTITION // of_warp) // (THREADS // 32)
        by_shared = _SHARED_BYTES // (_SHARED_OF_SYSTEM + _rounded_up(self.shared, 128))
        return min(_MOST_THREADS // THREADS, by_registers, by_shared)


@dataclass(frozen=True)
class Kernel:
    """Machine code of a kernel: what it needs, and the loads of each of its innermost loops."""

    name: str
    resources: Resources
    runs: Sequence[Run]

    @property
    def packet_loads(self) -> int:
        """Number of loads of 16 bytes before the first wait, in the loop that has the fewest of those that have any."""
        return min((run.loads for run in self.runs if run.width == PACKET), default=0)

    @property
    def narrow_loads(self) -> str:
        """Loads of 2, 4 and 8 bytes before the first wait, for each width in the loop that has the most."""
        most = {width: max((r.loads for r in self.runs if r.width == width), default=0) for width in (2, 4, 8)}
        return " ".join(f"{loads}x{width}" for width, loads in most.items() if loads)

    @property
    def bytes_in_flight(self) -> int:
        """Number of bytes that these loads of all threads of a multiprocessor have under way."""
        return self.packet_loads * PACKET * THREADS * self.resources.blocks


def find_nvcc() -> Path | None:
    """Return nvcc, from PATH, CUDA_HOME or the toolkit's usual folders; ``None`` where there is none."""
    on_path = shutil.which("nvcc")
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    found = (home / "bin" / "nvcc" for home in homes if (home / "bin" / "nvcc").exists())
    return Path(on_path) if on_path else next(found, None)


def compile_kernels(nvcc: Path, sources: Sequence[Path], jobs: int = 2) -> list[Kernel]:
    """Compile ``sources``, ``jobs`` at a time; returns their kernels in the order of the files and names."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        # Those that take longest first, so that no processor waits in the end.
        order = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
        compiled = pool.map(lambda source: list(_compile(nvcc, source, Path(scratch))), order)
        return sorted((kernel for kernels in compiled for kernel in kernels), key=lambda kernel: kernel.name)


def _compile(nvcc: Path, source: Path, scratch: Path) -> Iterator[Kernel]:
    target = scratch / f"{source.stem}.cubin"
    done = subprocess.run([nvcc, *FLAGS, "-o", target, source], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{nvcc} cannot compile {source}:\n{done.stdout}{done.stderr}")
    resources = parse_resources(done.stdout + done.stderr)
    for section, code in sections(target.read_bytes()):
        symbol = section.removeprefix(".text.")
        if symbol in resources:
            yield Kernel(f"{source.stem}/{kernel_name(symbol)}", resources[symbol], runs(decode(code)))


def parse_resources(text: str) -> dict[str, Resources]:
    """Return what ``ptxas -v`` has said of each kernel, by its symbol."""

    def number(pattern: str, entry: str) -> int:
        return sum(int(found) for found in re.findall(pattern, entry))

    return {
        match["name"]: Resources(
            registers=number(r"Used (\d+) registers", match["text"]),
            spilled=number(r"(\d+) bytes spill", match["text"]),
            stack=number(r"(\d+) bytes stack frame", match["text"]),
            shared=number(r"(\d+) bytes smem", match["text"]),
        )
        for match in _ENTRY.finditer(text)
    }


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
