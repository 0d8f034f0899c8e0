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
from pycomm.tools.cli.bench.operations import COMMUNICATOR, ITEMSIZES, OPERATIONS, REDUCTIONS, BenchOperation, Case

_DESCRIPTION = """\
Measures {name} between ranks: those that it starts here or, under torchrun, torchrun's. Results are verified
first. The table, the options of one letter and the keys of the report are those of nccl-tests. Comments below the
table give spread, floor, and the times of --peers, which are measured in turns with --backend.

Exit code: 0 success, 1 a rank failed, 2 wrong arguments, 7 wrong results.
"""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ALL = -2
_MOST_CALLS = 20
_TURN_BYTES = 256 << 20  # a turn moves this much, with 2 to _MOST_CALLS calls
_ARRAYS = 3  # as large as -e, on every rank: input, result, and scratch


class UsageError(ValueError):
    """An argument or a combination is invalid; the message says which, and what was wanted."""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one bench, checked.

    Attributes:
        sizes: bytes, ascending, each ``factor`` times the one before.
        launched: whether a launcher has started the ranks.
    """

    operation: BenchOperation
    sizes: tuple[int, ...]
    factor: int
    dtypes: tuple[str, ...]
    redops: tuple[str, ...]
    roots: tuple[int, ...]
    ranks: int
    launched: bool
    backend: str
    peers: tuple[str, ...]
    output: Path | None

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
                        count = self.operation.count_of(size, ITEMSIZES[dtype], self.ranks)
                        yield Case(self.operation.name, count, dtype, redop, root, self.ranks)


def calls_of(size: int) -> tuple[int, int]:
    """Return the numbers of untimed and of timed calls in a turn with arrays of ``size`` bytes."""
    calls = max(2, min(_MOST_CALLS, _TURN_BYTES // max(1, size)))
    return max(1, calls // 4), calls


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
    parser.set_defaults(parser=parser, operation=operation)
    parser.set_defaults(minbytes=0, maxbytes=None, stepfactor=2, datatype="uint8", op="none", root=-1)  # of others
    add = parser.add_argument
    if operation.name != "barrier":
        add("-b", "--minbytes", type=_size, default=32 << 20, metavar="SIZE", help="smallest size (default 32M)")
        add("-e", "--maxbytes", type=_size, metavar="SIZE", help="largest size (default: that of -b)")
        add("-f", "--stepfactor", type=integer(2), default=2, metavar="N", help="from line to line (default 2)")
        add("-d", "--datatype", choices=(*ITEMSIZES, "all"), default="float", help="dtype (default float)")
    if operation.reduces:
        add("-o", "--op", choices=(*REDUCTIONS, "all"), default="sum", help="reduction (default sum)")
    if operation.rooted:
        add("-r", "--root", type=_root, default=0, metavar="RANK", help="root, or all (default 0)")
    add("-J", "--output_file", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    add("--ranks", type=integer(1), help="processes to start (default 2); under torchrun: its processes")
    add("--backend", default="pycomm", metavar="NAME", help="a backend of torch, or communicator (default pycomm)")
    add("--peers", type=_names, default=(), metavar="NAMES", help="libraries to compare with: gloo,nccl,communicator")
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
    """Check the arguments and return them as settings, for the ``launched`` ranks if there are any.

    ``why_not`` returns why a library cannot be used.
    """
    ranks, path, root = launched or arguments.ranks or 2, arguments.output_file, arguments.root
    if launched is not None and arguments.ranks not in (None, launched):
        raise UsageError(f"--ranks: {arguments.ranks}, but the launcher has started {launched}")
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise UsageError(f"-J: {path} cannot be written")
    if root >= ranks:
        raise UsageError(f"-r: {root}, wanted a rank below {ranks}, or all")
    sizes, factor = [arguments.minbytes], arguments.stepfactor
    largest = arguments.maxbytes or sizes[0]
    if largest < sizes[0]:
        raise UsageError(f"-e: {largest} bytes, which is less than the {sizes[0]} of -b")
    while 0 < sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    settings = BenchSettings(
        operation=arguments.operation,
        sizes=tuple(sizes),
        factor=factor,
        dtypes=tuple(ITEMSIZES) if arguments.datatype == "all" else (arguments.datatype,),
        redops=REDUCTIONS if arguments.op == "all" else (arguments.op,),
        roots=tuple(range(ranks)) if root == _ALL else (root,),
        ranks=ranks,
        launched=launched is not None,
        backend=arguments.backend,
        peers=arguments.peers,
        output=path,
    )
    _check_memory(settings)
    if settings.backend in settings.peers:
        raise UsageError(f"--peers: {settings.backend} is what is measured (--backend)")
    if len(set(settings.peers)) < len(settings.peers):
        raise UsageError(f"--peers: {','.join(settings.peers)} names one twice")
    for option, name in (("--backend", settings.backend), *(("--peers", peer) for peer in settings.peers)):
        problem = why_not(name)  # last, since it imports torch
        if problem is not None:
            raise UsageError(f"{option}: {problem}")
    return settings


def _check_memory(settings: BenchSettings) -> None:
    """Raise if the local ranks would require more memory than is free."""
    largest = max(case.size for case in settings.cases)
    wanted = _ARRAYS * largest * (1 if settings.launched else settings.ranks)
    match = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    found = int(match[1]) << 10 if match else math.inf
    if settings.device == "cpu" and wanted > found:
        arrays = f"{_ARRAYS} arrays of {largest} bytes"
        raise UsageError(f"-e: {arrays} in {settings.ranks} ranks are {wanted} bytes of memory, and {found} are free")


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
