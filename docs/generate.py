"""Writes pictures of schedules, and tables of their cost, into docs/algorithms.md and docs/algorithm_catalogue.md.

    python docs/generate.py                          # rewrites what stands between the markers
    python docs/generate.py --check                  # changes nothing; exits with 1 and says what is stale
    python docs/generate.py --picture circulant 6    # prints a picture; any name that schedule.by_name knows

Markers: <!-- picture: NAME RANKS --> or <!-- table: NAME -->, and <!-- end -->.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from pycomm import schedule
from pycomm.schedule.picture import picture

DOCUMENTS = [Path(__file__).with_name(name) for name in ("algorithms.md", "algorithm_catalogue.md")]
HOSTS_OF = 8
NETWORK = "ethernet-10g"
COSTS = ("steps", "\N{GREEK SMALL LETTER ALPHA}", "bytes / n")
SIZES = {"4 KB": 4e3, "1 MB": 1e6, "256 MB": 256e6}

_PART = re.compile(r"(<!-- (picture|table): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:picture|table): .+? -->|<!-- end -->")

Row = Sequence[object]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the computed parts of the pages on algorithms")
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    parser.add_argument("--picture", nargs=2, metavar=("NAME", "RANKS"), help="print one picture")
    chosen = parser.parse_args(arguments)
    if chosen.picture:
        name, ranks = chosen.picture
        print(picture(schedule.by_name(name, int(ranks))), end="")
        return 0
    stale = [(document, name) for document in DOCUMENTS for name in stale_parts(document.read_text(encoding="utf-8"))]
    if chosen.check:
        for document, name in stale:
            print(f"{document.name}: {name} is stale; run: python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for document in DOCUMENTS:
        document.write_text(render(document.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"rewritten: {', '.join(name for _, name in stale)}" if stale else "nothing was stale")
    return 0


def render(text: str) -> str:
    """``text`` with every computed part as it should be."""
    return _PART.sub(lambda match: match[1] + compute(match[2], match[3]) + match[5], _with_pairs(text))


def stale_parts(text: str) -> list[str]:
    """Which parts are not as they should be."""
    return [f"{m[2]}: {m[3]}" for m in _PART.finditer(_with_pairs(text)) if m[4] != compute(m[2], m[3])]


@cache
def compute(kind: str, what: str) -> str:
    """What belongs between the markers."""
    if kind == "picture":
        name, ranks = what.rsplit(" ", 1)
        return f"```text\n{picture(schedule.by_name(name, int(ranks)))}```\n"
    if what not in TABLES:
        raise ValueError(f"table is {what!r}, wanted one of {', '.join(TABLES)}")
    return "".join(f"| {' | '.join(str(cell) for cell in row)} |\n" for row in TABLES[what]())


def _with_pairs(text: str) -> str:
    for number, marker in enumerate(_MARKER.findall(text)):
        if (marker == "<!-- end -->") != (number % 2 == 1):
            raise ValueError(f"{marker} comes where {'its' if number % 2 == 0 else 'no'} start is")
    if len(_MARKER.findall(text)) % 2:
        raise ValueError("the last marker has no <!-- end -->")
    return text


def _header(*titles: str, left: int = 1) -> list[Row]:
    return [titles, ["---"] * left + ["---:"] * (len(titles) - left)]


def _cost(s: schedule.Schedule) -> list[str]:
    """``COSTS``: steps, messages on the critical path, bytes on it."""
    second_a_message = schedule.Link(alpha=1, beta=0, gamma=0)
    network = schedule.Network(name="alpha", within_host=second_a_message, between_hosts=second_a_message)
    stats = s.stats()
    return [str(stats.steps), f"{schedule.simulate(s, 0, network):.0f}", f"{stats.critical:.4g}"]


def _summary() -> Iterator[Row]:
    yield from _header("P = 600", *COSTS)
    for name in schedule.names():
        yield f"`{name}`", *_cost(schedule.by_name(name, 600))


def _winners() -> Iterator[Row]:
    yield from _header("ranks", *SIZES)
    for num_ranks, per_host in ((6, 1), (12, 1), (127, 1), *((P, HOSTS_OF) for P in (8, 64, 600))):
        network = schedule.load(NETWORK).with_hosts_of(per_host)
        ranking = schedule.rank_algorithms(num_ranks, network, list(SIZES.values()))
        cells = []
        for size in SIZES.values():
            # To the nanosecond, so that the first of equal ones is chosen everywhere.
            seconds, name = min(((round(t, 9), name) for name, t in ranking.at(size)), key=lambda pair: pair[0])
            cells.append(f"`{name}` {seconds * 1e3:.3g} ms")
        yield f"{num_ranks}, {per_host} per host", *cells


def _binary_blocks() -> Iterator[Row]:
    compared = {"blocks": "binary_blocks", "folding": "halving_doubling", "circulant": "circulant"}
    costs = [f"{name}: {title}" for name in compared for title in COSTS[1:]]
    yield from _header("P", "blocks", *costs, left=2)
    for num_ranks in (6, 12, 15, 17, 600, 1023):
        digits = [1 << i for i in reversed(range(num_ranks.bit_length())) if num_ranks >> i & 1]
        cells = (cell for name in compared.values() for cell in _cost(schedule.by_name(name, num_ranks))[1:])
        shown = digits if len(digits) < 6 else [digits[0], "...", digits[-1]]
        yield num_ranks, " + ".join(map(str, shown)), *cells


def _far() -> Iterator[Row]:
    num_ranks = 600
    yield from _header("", "by a host, on average")
    schedules = [schedule.by_name(name, num_ranks, HOSTS_OF) for name in schedule.names()]
    for s in [*schedules, schedule.circulant(num_ranks, HOSTS_OF)]:
        sent = 0.0
        for r in s.rounds():
            leaves = r.src // HOSTS_OF != r.dst // HOSTS_OF
            sent += r.count[leaves].sum() / s.num_chunks
        yield f"`{s.name}`", f"{sent * HOSTS_OF / num_ranks:.3g}"


def _double_tree() -> Iterator[Row]:
    yield from _header("pieces", "sent by a rank / n", *COSTS)
    for pieces in (1, 16, 256):
        s = schedule.double_tree(600, pieces)
        yield pieces, f"{s.stats().max_sent:.4g}", *_cost(s)


def _hierarchical() -> Iterator[Row]:
    yield from _header("P = 1024", "sent by a master / n", *COSTS)
    masters = [schedule.hierarchical(1024 // k, k) for k in (2, 16, 32, 128)]
    for s in [*masters, schedule.ring(1024)]:
        yield f"`{s.name}`", f"{s.stats().max_sent:.4g}", *_cost(s)


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "summary": _summary,
    "winners": _winners,
    "binary_blocks": _binary_blocks,
    "far": _far,
    "double_tree": _double_tree,
    "hierarchical": _hierarchical,
}


if __name__ == "__main__":
    sys.exit(main())
