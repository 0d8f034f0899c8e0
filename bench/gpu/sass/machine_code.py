"""Machine code of a kernel, as far as its loads go: sections of a cubin, instructions, and what is under way at once.

An instruction of Volta and later takes 16 bytes, a little-endian number of 128 bits::

    0-11     opcode; 12-14 predicate (7: always), 15 negates it
    16-23    with 34-81, signed: a branch's distance from the next instruction, in units of 4 bytes
    73-75    width of a load: 4 is 32 bits, 5 is 64, 6 is 128; below, 8 and 16
    110-112  the scoreboard that counts down when a load's value is there; 7: none
    116-121  the scoreboards that must be empty before the instruction starts

NVIDIA documents none of it; tests/bench/test_sass.py compiles probes whose loads are known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_LOADS = {0x980, 0x981}  # LD and LDG: of generic addresses, which are memory here unless proven otherwise; of memory
_BRANCH = 0x947
_ENDS = {_BRANCH, 0x94D, 0x950}  # where execution does not go on behind them, unless they have a predicate: EXIT, RET
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 0)
_ALWAYS = 7
_NO_SCOREBOARD = 7
PACKET = 16  # bytes; the widest load there is


@dataclass(frozen=True)
class Instruction:
    """An instruction: what it loads, which scoreboards it sets and waits for, and where it may branch to."""

    address: int
    loads: int
    """Number of bytes that each thread loads from memory; 0 if it does something else."""
    sets: int
    """A bit, for its scoreboard, or none."""
    waits: int
    """A bit for each scoreboard."""
    target: int | None
    """Address that it branches to."""
    ends: bool
    """Whether execution never goes on behind it."""


@dataclass(frozen=True, order=True)
class Run:
    """Loads of one width, in bytes, that a thread issues before it waits for the first of them."""

    width: int
    loads: int


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and contents of the sections of an ELF file of 64 bits."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a file that begins with {cubin[:5]!r}; wanted an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + entry * i) for i in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, offset, size in headers:
        begin = names + name
        nobits = kind == 8  # it takes no place in the file
        yield cubin[begin : cubin.index(b"\0", begin)].decode(), b"" if nobits else cubin[offset : offset + size]


def decode(code: bytes) -> list[Instruction]:
    """Return the instructions of a ``.text`` section."""
    return [_decode(at, int.from_bytes(code[at : at + 16], "little")) for at in range(0, len(code), 16)]


def _decode(address: int, word: int) -> Instruction:
    opcode = _bits(word, 0, 12)
    scoreboard = _bits(word, 110, 3)
    target = None
    if opcode == _BRANCH:
        distance = _bits(word, 34, 48) << 8 | _bits(word, 16, 8)
        target = address + 16 + 4 * (distance - (1 << 56 if distance >> 55 else 0))
    return Instruction(
        address,
        loads=_WIDTHS[_bits(word, 73, 3)] if opcode in _LOADS else 0,
        sets=0 if scoreboard == _NO_SCOREBOARD else 1 << scoreboard,
        waits=_bits(word, 116, 6),
        target=target,
        ends=opcode in _ENDS and _bits(word, 12, 4) == _ALWAYS,
    )


def _bits(word: int, first: int, count: int) -> int:
    return word >> first & ((1 << count) - 1)


def loops(code: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Return the bodies of the innermost loops."""
    intervals = sorted({(i.target, i.address) for i in code if i.target is not None and i.target < i.address})
    inner = [a for a in intervals if not any(a[0] <= b[0] and b[1] <= a[1] for b in intervals if b != a)]
    return [code[begin // 16 : end // 16 + 1] for begin, end in inner]


def longest_runs(code: Iterable[Instruction]) -> list[Run]:
    """Return, for each width of loads in ``code``, the most of them that are under way at once; widest first.

    Follows the code in the order of addresses, as execution does where no branch is taken: a guarded
    load counts, what lies behind a jump is another piece.
    """
    most: dict[int, int] = {}
    under_way: list[Instruction] = []
    for instruction in code:
        under_way = [load for load in under_way if not load.sets & instruction.waits]
        if instruction.loads:
            under_way.append(instruction)
            same = sum(load.loads == instruction.loads for load in under_way)
            most[instruction.loads] = max(same, most.get(instruction.loads, 0))
        if instruction.ends:
            under_way = []
    return sorted((Run(width, loads) for width, loads in most.items()), reverse=True)


def runs(code: Sequence[Instruction]) -> list[Run]:
    """Return the longest runs of every innermost loop, widest first.

    If no loop loads packets (a kernel without a main loop), the runs of all of the code are included.
    """
    found = [run for body in loops(code) for run in longest_runs(body)]
    if all(run.width < PACKET for run in found):
        found += longest_runs(code)
    return sorted(found, reverse=True)
