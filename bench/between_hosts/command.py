"""all_reduce between hosts: pycomm, its peers and a floor in turns.

    python -m bench.between_hosts [--hosts 2] [--links 0] [--sizes 1K,64K,1M,10M,100M] [--peers floor,gloo,torch]
                                  [--repeats 9] [--output FILE]

On hosts made of network namespaces (bench.slow_network.namespaces; Linux, root), one rank of one thread each. Sum of
float32, in place, of ordinary memory. Everything measured lives side by side on the same hosts and has a turn in each
of the --repeats rounds: some calls that do not count, a barrier, calls back to back. The figure of a turn is its
slowest rank's time over its calls. Every element of a sum is verified before. Arrays that a link of --links would
carry for longer than a second are left out there. K and M are 2^10 and 2^20 bytes.

pycomm: a Communicator, which chooses its transport; the table says which.
gloo: torch.distributed over Gloo.
torch: a Communicator whose transport is torch.distributed over Gloo.
floor: floor.cpp, a program of plain sockets, one stream between every two hosts, that knows nothing of errors. It sums
around a ring, in which each host sends as little as it must, or, up to 256 KB, directly: all send all they have to
all. It sleeps while it waits, or tries again for 50 us before. The floor is the fastest of these.

All hosts share this machine's cores and memory. There must be no other work on it: it hits them differently. The
connections' congestion control is Reno: what comes out does not depend on what the machine prefers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.between_hosts.floor import WAYS, CompilerError, compile_floor
from bench.harness.arguments import plain_parser, positive, size_text, sizes
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from bench.slow_network.figures import Link, hosts_name, link_name
from bench.slow_network.namespaces import NamespaceError, available, hosts, run_ranks
from pycomm.tools.cli.table import print_table
from pycomm.tools.cli.timing import busy_note
from pycomm.tools.launching import RankError

PEERS = ("floor", "gloo", "torch")

_MODULE = "bench.between_hosts.ranks"
_SIZES = "1K,64K,1M,10M,100M"
_BLOCK_BYTES = 8 << 20  # calls of a turn are as many as move this
_MOST_CALLS = 40
_BLOCK_SECONDS = 0.1  # that a link needs for the calls of a turn
_MOST_SECONDS = 1.0  # that a link needs for one call
_MOST_HOSTS = 16  # that the floor can verify exactly


@dataclass(frozen=True)
class Measured:
    """Results for arrays of one size.

    Attributes:
        calls: of each turn.
        seconds: name -> seconds per call, of each turn.
    """

    num_bytes: int
    calls: int
    seconds: dict[str, Samples]

    @property
    def floor(self) -> str | None:
        """Return the name of the fastest way of the floor, if it was measured."""
        present = [way.label for way in WAYS if way.label in self.seconds]
        return min(present, key=lambda label: self.seconds[label].median, default=None)

    def ratio(self, name: str, to: str | None) -> float | None:
        """Return how many times as long as ``to`` it took, by medians; ``None`` if ``to`` was not measured."""
        return None if to is None else self.seconds[name].median / self.seconds[to].median

    def as_json(self) -> dict[str, Any]:
        floor = self.floor
        ratios = {"pycomm/floor": self.ratio("pycomm", floor)} if floor is not None else {}
        peers = {f"{name}/pycomm": self.ratio(name, "pycomm") for name in PEERS if name in self.seconds}
        return {
            "bytes": self.num_bytes,
            "calls_per_turn": self.calls,
            "floor": floor,
            "seconds_per_call": {name: samples.as_json() for name, samples in self.seconds.items()},
            "ratios": {**ratios, **peers},
        }


@dataclass(frozen=True)
class Cell:
    """Results with one number of hosts on one kind of link.

    Attributes:
        transport: that pycomm had chosen.
        congestion_control: of a connection between two of the hosts.
        busy: note on other work on the cores, just before or just after; "" if there was none.
    """

    hosts: int
    link: Link
    transport: str
    congestion_control: str
    busy: str
    measured: list[Measured]

    def as_json(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts,
            "link_gbit": self.link,
            "transport": self.transport,
            "congestion_control": self.congestion_control,
            "busy": self.busy,
            "all_reduce": [each.as_json() for each in self.measured],
        }


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parse(words)
    reason = available()
    if reason is not None:
        print(f"no network namespaces here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order, so that no namespace stays
    conditions = _conditions(max(arguments.hosts))
    print(headline())
    print(f"Linux {conditions['kernel']}")
    for note in conditions["notes"]:
        print(note)
    cells = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            floor = compile_floor(Path(folder)) if "floor" in arguments.peers else None
            for count in arguments.hosts:
                for link in arguments.links:
                    cells.append(_measure(arguments, count, link, floor))
                    _print(cells[-1], arguments.repeats)
    except (CompilerError, NamespaceError, RankError) as error:
        print(error, file=sys.stderr)
        return 1
    settings = {name: getattr(arguments, name) for name in ("hosts", "links", "sizes", "peers", "repeats")}
    figures = {"conditions": conditions, "results": [cell.as_json() for cell in cells]}
    write_json(arguments.output, "between_hosts", settings, figures)
    return 0


def _conditions(count: int) -> dict[str, Any]:
    """Return the kernel, and notes on the cores, for ``count`` hosts at most."""
    cores = len(os.sched_getaffinity(0))
    notes = [f"{count} hosts on {cores} cores take turns: waits last longer"] if count > cores else []
    return {"kernel": platform.release(), "notes": notes}


def _measure(arguments: argparse.Namespace, count: int, link: Link, floor: Path | None) -> Cell:
    before = busy_note(1)
    with hosts(count, link) as cluster:
        setup = {
            "sizes": [(num_bytes, _calls(num_bytes, link)) for num_bytes in _carried(arguments.sizes, link)],
            "peers": arguments.peers,
            "repeats": arguments.repeats,
            "floor": None if floor is None else str(floor),
            "addresses": [host.address for host in cluster],
        }
        outputs = run_ranks(cluster, _MODULE, [json.dumps(setup)], timeout=arguments.timeout)
    found = json.loads(outputs[0].splitlines()[-1])
    measured = [
        Measured(row["bytes"], row["calls"], {name: Samples.of(taken) for name, taken in row["seconds"].items()})
        for row in found["measured"]
    ]
    busy = before or busy_note(1)
    return Cell(count, link, found["transport"], found["congestion_control"], busy, measured)


def _link_seconds(num_bytes: int, link: Link) -> float:
    """Return how long a link is busy with an array."""
    return 0.0 if link is None else 8e-9 * num_bytes / link


def _carried(sizes: Sequence[int], link: Link) -> list[int]:
    """Return the sizes that are measured on a link; at least the smallest."""
    return [num_bytes for num_bytes in sizes if _link_seconds(num_bytes, link) <= _MOST_SECONDS] or [min(sizes)]


def _calls(num_bytes: int, link: Link) -> int:
    calls = min(_MOST_CALLS, _BLOCK_BYTES // num_bytes)
    if link is not None:
        calls = min(calls, int(_BLOCK_SECONDS / _link_seconds(num_bytes, link)))
    return max(1, calls)


def _print(cell: Cell, repeats: int) -> None:
    print(f"\nall_reduce, sum of float32, {hosts_name(cell.hosts, 1)}, {link_name(cell.link)}, {repeats} turns")
    print(f"pycomm's transport is {cell.transport}; congestion control: {cell.congestion_control}; sums verified")
    if cell.busy:
        print(cell.busy)
    rows = [row for measured in cell.measured for row in _rows(measured)]
    print_table(["", "median", "p10 - p90", "time / floor", "time / pycomm"], rows)
    sys.stdout.flush()


def _rows(measured: Measured) -> list[list[str]]:
    """Return the lines of one size, of the floor only the fastest way."""
    ways = {way.label for way in WAYS} - {measured.floor}
    return [
        [
            f"{size_text(measured.num_bytes):<8}{name}",
            *measured.seconds[name].cells(),
            *(_times(measured.ratio(name, to)) for to in (measured.floor, "pycomm")),
        ]
        for name in measured.seconds
        if name not in ways
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else times(ratio)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = plain_parser("bench.between_hosts", __doc__)
    add = parser.add_argument
    add("--hosts", type=_list_of(_hosts), default="2", help="numbers of hosts (default 2)")
    add("--links", type=_list_of(_link), default="0", help="Gbit/s; 0: no limit (default 0)")
    add("--sizes", type=sizes, default=_SIZES, help=f"bytes, with K or M (default {_SIZES})")
    add("--peers", type=_list_of(_peer), default=",".join(PEERS), help=f"of {', '.join(PEERS)} (default all)")
    add("--repeats", type=positive, default=9, help="turns that everything measured gets (default 9)")
    add("--timeout", type=float, default=600.0, help="seconds for each start of the ranks (default 600)")
    add("--output", "--json", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    return parser.parse_args(words)


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_all(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(word) for word in text.split(",")))

    return parse_all


def _hosts(text: str) -> int:
    value = int(text)
    if not 2 <= value <= _MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"{value}, wanted 2 to {_MOST_HOSTS} hosts")
    return value


def _link(text: str) -> Link:
    value = float(text)
    if value != 0 and not 1e-4 <= value <= 1e3:
        raise argparse.ArgumentTypeError(f"{text}, wanted 0.0001 to 1000 Gbit/s, or 0")
    return value or None


def _peer(text: str) -> str:
    if text not in PEERS:
        raise argparse.ArgumentTypeError(f"no peer {text!r}, wanted any of {', '.join(PEERS)}")
    return text
