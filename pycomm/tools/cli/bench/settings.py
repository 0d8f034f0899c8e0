"""Command line of a collective: nccl-tests' options, and further ones."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm.tools.cli.arguments import integer, load_package
from pycomm.tools.cli.bench.operations import COMMUNICATOR, DTYPES, OPERATIONS, REDUCTIONS, BenchOperation, Case

_DESCRIPTION = """\
Measures {name} between ranks: those that it starts here or, under torchrun, torchrun's. Results are verified
first. The table, the options of one letter and the keys of the report are those of nccl-tests. Comments below the
table give spread, floor, and the times of --peers, which are measured in turns with --backend.

Exit code: 0 success, 1 a rank failed, 2 wrong arguments, 7 wrong results or less bandwidth than --min-busbw.
"""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ALL = -1
_USUAL_CALLS = 20
_TURN_BYTES = 256 << 20  # by default a turn moves this much, with 2 to _USUAL_CALLS calls
_ARRAYS = 3  # as large as -e, on every rank: input, result, and scratch


class UsageError(ValueError):
    """An argument or a combination is invalid; the message says which, and what was wanted."""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one bench, checked.

    Attributes:
        sizes: bytes, ascending. step: their difference or ratio, as nccl-tests writes it.
        calls, warmups: of a turn; ``None``: by the size. checks: how often results are verified.
        launched: whether a launcher has started the ranks.
        min_busbw: required average in GB/s; ``None`` for no check.
    """

    operation: BenchOperation
    sizes: tuple[int, ...]
    step: str
    dtypes: tuple[str, ...]
    redops: tuple[str, ...]
    roots: tuple[int, ...]
    ranks: int
    launched: bool
    backend: str
    peers: tuple[str, ...]
    registered: bool
    calls: int | None
    warmups: int | None
    rounds: int
    checks: int
    timeout: float
    output: Path | None
    min_busbw: float | None

    @property
    def device(self) -> str:
        """The device type of all arrays."""
        return "cuda" if "nccl" in (self.backend, *self.peers) else "cpu"

    @property
    def cases(self) -> Iterator[Case]:
        """All cases, in the order of the table."""
        for dtype in self.dtypes:
            for redop in self.redops:
                for root in self.roots:
                    for size in self.sizes:
                        count = self.operation.count_of(size, DTYPES[dtype].itemsize, self.ranks)
                        yield Case(self.operation.name, count, dtype, redop, root, self.ranks)

    @property
    def largest(self) -> int:
        """Bytes of the largest array."""
        return max(case.size for case in self.cases)

    def calls_of(self, case: Case) -> int:
        """Return the number of timed calls of a turn."""
        if self.calls is not None:
            return self.calls
        return max(2, min(_USUAL_CALLS, _TURN_BYTES // max(1, case.size)))

    def warmups_of(self, case: Case) -> int:
        """Return the number of untimed calls before a turn."""
        return self.warmups if self.warmups is not None else max(1, self.calls_of(case) // 4)


def _above_zero(unit: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}, wanted {unit} above 0")
        return value

    return number


_bandwidth = _above_zero("GB/s")


def add_collectives(benches: Any) -> list[argparse.ArgumentParser]:
    """Add a parser for each collective to ``benches``; return them. :func:`settings_of` takes their results."""
    return [_collective(benches, operation) for operation in OPERATIONS.values()]


def _collective(benches: Any, operation: BenchOperation) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benches.add_parser(
        operation.name,
        help=f"{operation.name} between ranks",
        description=_DESCRIPTION.format(name=operation.name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    if operation.name != "barrier":
        add("-b", "--minbytes", type=_size, default=32 << 20, metavar="SIZE", help="smallest size (default 32M)")
        add("-e", "--maxbytes", type=_size, metavar="SIZE", help="largest size (default: that of -b)")
        add("-i", "--stepbytes", type=_size, metavar="SIZE", help="add this from line to line (default 1M)")
        add("-f", "--stepfactor", type=integer(2), metavar="N", help="multiply by this instead of adding -i")
        add("-d", "--datatype", choices=(*DTYPES, "all"), default="float", help="dtype (default float)")
    if operation.reduces:
        add("-o", "--op", choices=(*REDUCTIONS, "all"), default="sum", help="reduction (default sum)")
    if operation.rooted:
        add("-r", "--root", type=_root, default=0, metavar="RANK", help="root, or all (default 0)")
    seconds = _above_zero("seconds")
    add("-n", "--iters", type=integer(1), metavar="N", help="calls of a turn (default 20, fewer for large sizes)")
    add("-w", "--warmup_iters", type=integer(0), metavar="N", help="calls before a turn (default: a quarter of -n)")
    add("-c", "--check", type=integer(0), default=1, metavar="N", help="verify this many times first (default 1)")
    add("-R", "--local_register", type=integer(0, largest=1), default=0, metavar="0|1", help="1: Communicator.empty")
    add("-T", "--timeout", type=seconds, default=120.0, metavar="SECONDS", help="limit of every wait (default 120)")
    add("-J", "--output_file", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    add("--rounds", type=integer(1), default=5, help="turns of each library, interleaved (default 5)")
    add("--ranks", type=integer(1), help="processes to start (default 2); under torchrun: its processes")
    add("--backend", default="pycomm", metavar="NAME", help="a backend of torch, or communicator (default pycomm)")
    add("--peers", type=_names, default=(), metavar="NAMES", help="libraries to compare with: gloo,nccl,communicator")
    add("--min-busbw", type=_bandwidth, metavar="GB/S", help="fail if the average is more than 10 %% below this")
    parser.set_defaults(parser=parser, operation=operation)
    return parser


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks if a launcher has started this process, else ``None``."""
    size = environment.get("WORLD_SIZE")
    if size is None or "RANK" not in environment:
        return None
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"WORLD_SIZE is {size!r}, wanted a number of ranks")
    return int(size)


def why_not(name: str) -> str | None:
    """Return why the library ``name`` cannot be used here; ``None`` if it can."""
    if name == COMMUNICATOR:
        return None
    load_package()  # registers "pycomm" as a backend of torch
    import torch
    import torch.distributed as dist

    from pycomm.kernels import cuda_devices

    if name == "nccl":
        count, why_none = cuda_devices()
        if count == 0 or not dist.is_nccl_available() or not torch.cuda.is_available():
            return f"nccl requires GPUs: {why_none or 'this torch was built without them'}"
    elif not dist.is_backend_available(name):
        return f"{name!r}, wanted {COMMUNICATOR}, or a backend that torch.distributed knows here"
    return None


def settings_of(
    arguments: argparse.Namespace, launched: int | None, why_not: Callable[[str], str | None] = why_not
) -> BenchSettings:
    """Check the arguments and return them as settings.

    Args:
        launched: the number of ranks that a launcher has started.
        why_not: returns why a library cannot be used.
    """
    operation: BenchOperation = arguments.operation
    ranks = launched or arguments.ranks or 2
    if launched is not None and arguments.ranks not in (None, launched):
        raise UsageError(f"--ranks: {arguments.ranks}, but the launcher has started {launched}")
    if arguments.local_register and COMMUNICATOR not in (arguments.backend, *arguments.peers):
        raise UsageError(f"-R 1: only {COMMUNICATOR} has memory of its own, and it is neither --backend nor a peer")
    path: Path | None = arguments.output_file
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise UsageError(f"-J: {path} cannot be written")
    sizes, step = _sizes(arguments) if operation.name != "barrier" else ((0,), "0(bytes)")
    settings = BenchSettings(
        operation=operation,
        sizes=sizes,
        step=step,
        dtypes=_some(getattr(arguments, "datatype", "uint8"), tuple(DTYPES)),
        redops=_some(getattr(arguments, "op", "none"), REDUCTIONS),
        roots=_roots(getattr(arguments, "root", None), ranks),
        ranks=ranks,
        launched=launched is not None,
        registered=bool(arguments.local_register),
        min_busbw=_min_busbw(arguments.min_busbw),
        backend=arguments.backend,
        peers=arguments.peers,
        calls=arguments.iters,
        warmups=arguments.warmup_iters,
        rounds=arguments.rounds,
        checks=arguments.check,
        timeout=arguments.timeout,
        output=path,
    )
    _check_memory(settings)
    _check_libraries(settings, why_not)  # last, since it imports torch
    return settings


def _check_libraries(settings: BenchSettings, why_not: Callable[[str], str | None]) -> None:
    """Raise unless all libraries can be used here, once each."""
    backend, peers = settings.backend, settings.peers
    if backend in peers:
        raise UsageError(f"--peers: {backend} is what is measured (--backend)")
    if len(set(peers)) < len(peers):
        raise UsageError(f"--peers: {','.join(peers)} names one twice")
    for option, name in (("--backend", backend), *(("--peers", peer) for peer in peers)):
        problem = why_not(name)
        if problem is not None:
            raise UsageError(f"{option}: {problem}")


def _check_memory(settings: BenchSettings) -> None:
    """Raise if the local ranks would require more memory than is free."""
    wanted = _ARRAYS * settings.largest * (1 if settings.launched else settings.ranks)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), math.inf)
    if settings.device == "cpu" and wanted > found:
        arrays = f"{_ARRAYS} arrays of {settings.largest} bytes"
        raise UsageError(f"-e: {arrays} in {settings.ranks} ranks are {wanted} bytes of memory, and {found} are free")


def _sizes(arguments: argparse.Namespace) -> tuple[tuple[int, ...], str]:
    """Return the sizes, and the step between them as nccl-tests writes it."""
    smallest, factor, step = arguments.minbytes, arguments.stepfactor, arguments.stepbytes
    largest = smallest if arguments.maxbytes is None else arguments.maxbytes
    if largest < smallest:
        raise UsageError(f"-e: {largest} bytes, which is less than the {smallest} of -b")
    if factor is not None and step is not None:
        raise UsageError("-i and -f are both given, wanted one of them")
    step = step or 1 << 20
    sizes = [smallest]
    while (following := sizes[-1] * factor if factor else sizes[-1] + step) <= largest:
        sizes.append(following)
    return tuple(sizes), f"{factor}(factor)" if factor else f"{step}(bytes)"


def _some(chosen: str, every: tuple[str, ...]) -> tuple[str, ...]:
    return every if chosen == "all" else (chosen,)


def _roots(root: int | None, ranks: int) -> tuple[int, ...]:
    if root is None:
        return (-1,)
    if root >= ranks:
        raise UsageError(f"-r: {root}, wanted a rank below {ranks}, or all")
    return tuple(range(ranks)) if root == _ALL else (root,)


def _min_busbw(given: float | None) -> float | None:
    """Return the value of ``--min-busbw``, by default that of nccl-tests' environment variable."""
    variable = os.environ.get("NCCL_TESTS_MIN_BW")
    if given is not None or variable is None:
        return given
    try:
        return _bandwidth(variable)
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"NCCL_TESTS_MIN_BW is {variable!r}, wanted a bandwidth in GB/s") from None


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmg]?)(?:i?b)?", text.strip().lower())
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 4, 64K, 1.5M or 2G, at least 1")
    return value


def _root(text: str) -> int:
    return _ALL if text in ("all", "-1") else integer(0)(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted names separated by commas")
    return names
