"""What the command line of a collective asks for: nccl-tests' options, and those that it does not have."""

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
Measures {name} between ranks: those that are started here or, under torchrun, those that it has started. Results
are verified first. The table, the options with one letter and the keys of the report are those of nccl-tests; below
the table stand, in comments, spread, floor, and the times of --peers, which take turns with what is measured.

Exit code: 0 all is well, 1 a rank failed, 2 wrong arguments, 7 wrong results or less bandwidth than --min-busbw.
"""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ALL = -1
_USUAL_CALLS = 20
_TURN_BYTES = 256 << 20  # by default a turn has as many calls as move this, at most the usual and at least two
_ARRAYS = 3  # as large as -e, in every rank: what is given, the result, and scratch


class UsageError(ValueError):
    """The arguments are wrong, each by itself or together; the message says which, and what was wanted."""


@dataclass(frozen=True)
class BenchSettings:
    """What is to be measured, checked.

    Attributes:
        sizes: bytes, ascending. step: what lies between them, in nccl-tests' words.
        calls, warmups: of a turn, ``None`` to let them go by the size. checks: how often results are verified.
        launched: whether the ranks are there already.
        min_busbw: average that is wanted, in GB/s; ``None`` for no check.
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
        """The kind of device that all arrays are on."""
        return "cuda" if "nccl" in (self.backend, *self.peers) else "cpu"

    @property
    def cases(self) -> Iterator[Case]:
        """What is measured, in the order of the table."""
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
        """Return how many calls a turn has."""
        if self.calls is not None:
            return self.calls
        return max(2, min(_USUAL_CALLS, _TURN_BYTES // max(1, case.size)))

    def warmups_of(self, case: Case) -> int:
        """Return how many calls go ahead of a turn's and do not count."""
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
    """Add to ``benches`` a parser for each collective, of what :func:`settings_of` takes; return them."""
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
        add("-i", "--stepbytes", type=_size, metavar="SIZE", help="add so much from line to line (default 1M)")
        add("-f", "--stepfactor", type=integer(2), metavar="N", help="multiply by this from line to line, instead")
        add("-d", "--datatype", choices=(*DTYPES, "all"), default="float", help="dtype (default float)")
    if operation.reduces:
        add("-o", "--op", choices=(*REDUCTIONS, "all"), default="sum", help="reduction (default sum)")
    if operation.rooted:
        add("-r", "--root", type=_root, default=0, metavar="RANK", help="root, or all (default 0)")
    seconds = _above_zero("seconds")
    add("-n", "--iters", type=integer(1), metavar="N", help="calls of a turn (default 20, fewer where they move much)")
    add("-w", "--warmup_iters", type=integer(0), metavar="N", help="calls before a turn (default: a quarter of -n)")
    add("-c", "--check", type=integer(0), default=1, metavar="N", help="verify so many times first (default 1)")
    add("-R", "--local_register", type=integer(0, largest=1), default=0, metavar="0|1", help="1: Communicator.empty")
    add("-T", "--timeout", type=seconds, default=120.0, metavar="SECONDS", help="of every wait (default 120)")
    add("-J", "--output_file", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    add("--rounds", type=integer(1), default=5, help="turns that everything gets, interleaved (default 5)")
    add("--ranks", type=integer(1), help="processes to start (default 2); under torchrun it has started them")
    add("--backend", default="pycomm", metavar="NAME", help="a backend of torch, or communicator (default pycomm)")
    add("--peers", type=_names, default=(), metavar="NAMES", help="what it is compared with: gloo,nccl,communicator")
    add("--min-busbw", type=_bandwidth, metavar="GB/S", help="fail if the average is more than 10 %% below this")
    parser.set_defaults(parser=parser, operation=operation)
    return parser


def launched_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks a launcher has started, of which this process is one; ``None`` if it is none.

    Raises:
        UsageError: the launcher has set WORLD_SIZE to no number.
    """
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
    load_package()  # which makes "pycomm" a backend of torch's
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
    """Return what the arguments ask for.

    Args:
        launched: the number of ranks that a launcher has started.
        why_not: says why a library cannot be used.

    Raises:
        UsageError: something is wrong, or cannot be had here.
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
    _check_libraries(settings, why_not)  # at last, as it takes torch
    return settings


def _check_libraries(settings: BenchSettings, why_not: Callable[[str], str | None]) -> None:
    """Raise unless all can be had here."""
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
    """Raise if the ranks that would be started here want more memory than there is."""
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
    """Return the sizes, and the step between them in nccl-tests' words."""
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
    """Return what ``--min-busbw`` says, or what nccl-tests would go by."""
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
