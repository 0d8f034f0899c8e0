"""``pycomm bench``: a command for each collective, with nccl-tests' options, and further ones."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycomm.tools.cli.arguments import integer, load_package
from pycomm.tools.cli.bench.operations import (
    COMMUNICATOR,
    ITEMSIZES,
    OPERATIONS,
    REDUCING,
    REDUCTIONS,
    ROOTED,
    BenchSettings,
    Case,
    count_of,
)

_DESCRIPTION = """\
Measures {name} between ranks: those that it starts here or, under torchrun, torchrun's. Results are verified
first. The table, the options of one letter and the keys of the report are as in nccl-tests. Comments below the
table give spread, floor, and the times of --peers, which are measured in turns with --backend.
"""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ALL = -2
_ARRAYS = 3  # as large as -e, on every rank: input, result, and scratch


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure a collective against other libraries")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for operation in OPERATIONS:
        add_collective(benches, operation)


def add_collective(benches: Any, operation: str) -> argparse.ArgumentParser:
    """Add the parser of a collective to ``benches``; return it. :func:`settings_of` takes its results."""
    parser: argparse.ArgumentParser = benches.add_parser(
        operation,
        help=f"{operation} between ranks",
        description=_DESCRIPTION.format(name=operation),
        epilog="Exit code: 0 success, 1 a rank failed, 2 wrong arguments, 7 wrong results.",
    )
    parser.set_defaults(run=_measure, parser=parser, operation=operation)
    parser.set_defaults(minbytes=0, maxbytes=None, stepfactor=2, datatype="uint8", op="none", root=-1)  # of others
    add = parser.add_argument
    if operation != "barrier":
        add("-b", "--minbytes", type=_size, default=32 << 20, metavar="SIZE", help="smallest size (default 32M)")
        add("-e", "--maxbytes", type=_size, metavar="SIZE", help="largest size (default: the size of -b)")
        add("-f", "--stepfactor", type=integer(2), default=2, metavar="N", help="from line to line (default 2)")
        add("-d", "--datatype", choices=(*ITEMSIZES, "all"), default="float", help="dtype (default float)")
    if operation in REDUCING:
        add("-o", "--op", choices=(*REDUCTIONS, "all"), default="sum", help="reduction (default sum)")
    if operation in ROOTED:
        add("-r", "--root", type=_root, default=0, metavar="RANK", help="root, or all (default 0)")
    add("-J", "--output_file", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    ranks = os.environ["WORLD_SIZE"] if launched() else "2"  # checked as if it had been given
    add("--ranks", type=integer(1), default=ranks, help="processes to start (default 2); under torchrun: its processes")
    add("--backend", default="pycomm", metavar="NAME", help="a backend of torch, or communicator (default pycomm)")
    add("--peers", metavar="NAMES", help="libraries to compare with, such as gloo,nccl,communicator")
    return parser


def launched() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def why_not(name: str) -> str | None:
    """Return why the library ``name`` cannot be used here; ``None`` if it can."""
    load_package()  # registers "pycomm" as a backend of torch
    import torch
    import torch.distributed as dist

    from pycomm.kernels import cuda_devices

    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        return f"nccl requires GPUs: {cuda_devices()[1] or 'this torch was built without them'}"
    if name != COMMUNICATOR and not dist.is_backend_available(name):
        return f"{name!r}, wanted {COMMUNICATOR}, or a backend that torch.distributed knows here"
    return None


def settings_of(arguments: argparse.Namespace, why_not: Callable[[str], str | None] = why_not) -> BenchSettings:
    """Check the arguments and return them as settings, or end with the parser's error.

    ``why_not`` returns why a library cannot be used.
    """
    operation, ranks, path, root = arguments.operation, arguments.ranks, arguments.output_file, arguments.root
    backend, peers = arguments.backend, tuple(arguments.peers.split(",")) if arguments.peers is not None else ()
    sizes, factor = [arguments.minbytes], arguments.stepfactor
    largest = arguments.maxbytes or sizes[0]
    while 0 < sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    dtypes = list(ITEMSIZES) if arguments.datatype == "all" else [arguments.datatype]
    redops = REDUCTIONS if arguments.op == "all" else [arguments.op]
    roots = range(ranks) if root == _ALL else [root]
    cases = tuple(
        Case(operation, count_of(operation, size, ITEMSIZES[dtype], ranks), dtype, redop, root, ranks)
        for dtype, redop, root, size in itertools.product(dtypes, redops, roots, sizes)
    )
    num_bytes, device = max(case.size for case in cases), "cuda" if "nccl" in (backend, *peers) else "cpu"
    wanted, arrays = _ARRAYS * num_bytes * (1 if launched() else ranks), f"{_ARRAYS} arrays of {num_bytes} bytes"
    free = int(re.findall(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[0]) << 10
    is_lost = path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK))
    found = os.environ.get("WORLD_SIZE")
    for is_wrong, problem in (
        (launched() and str(ranks) != found, f"--ranks: {ranks}, but the launcher has started {found}"),
        (is_lost, f"-J: {path} cannot be written"),
        (root >= ranks, f"-r: {root}, wanted a rank below {ranks}, or all"),
        (largest < sizes[0], f"-e: {largest} bytes, which is less than the {sizes[0]} of -b"),
        (wanted > free and device == "cpu", f"-e: {arrays} in {ranks} ranks are {wanted} bytes, and {free} are free"),
        (not all(peers), f"--peers: {arguments.peers!r}, wanted names separated by commas"),
        (backend in peers, f"--peers: {backend} is what is measured (--backend)"),
        (len(set(peers)) < len(peers), f"--peers: {arguments.peers} names one twice"),
    ):
        if is_wrong:
            arguments.parser.error(problem)
    for option, name in (("--backend", backend), *(("--peers", peer) for peer in peers)):
        if reason := why_not(name):  # last, since it imports torch
            arguments.parser.error(f"{option}: {reason}")
    return BenchSettings(tuple(sizes), factor, cases, ranks, launched(), backend, peers, path, num_bytes, device)


def _measure(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    load_package()
    from pycomm.tools.cli.bench import measure

    return measure.run(settings, {})


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmg]?)(?:i?b)?", text.strip().lower())
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 4, 64K, 1.5M or 2G, at least 1")
    return value


def _root(text: str) -> int:
    return _ALL if text in ("all", "-1") else integer(0)(text)
