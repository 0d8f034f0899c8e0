"""Damage to files, as a disk, another program or an attacker may cause it."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEPEST = 20_000
HUGE = 1 << 40

OTHERS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e300, float("inf"), float("nan")),
    *("", "x", "\x1b]0;owned\x07\n", "\ud800", "a\0b", "../../x", "x" * 100_000),
    *([], {}, [[]], [None], {"": {}}, [1, "a"], {"a": 1}, [0] * 50),
]
"""Values of many types that replace a valid one."""


def nested(levels: int, value: Any = 1) -> Any:
    """Return ``value`` inside ``levels`` lists."""
    for _ in range(levels):
        value = [value]
    return value


def places_in(value: Any, deepest: int = 6) -> Iterator[tuple[Any, Any]]:
    """Yield every container in ``value`` with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        if deepest > 0:
            yield from places_in(value[key], deepest - 1)


def with_other_value(value: Any, chance: random.Random) -> Any:
    """Return a copy of ``value`` with one part replaced, removed or repeated."""
    if chance.random() < 0.05:
        return chance.choice(OTHERS)
    value = copy.deepcopy(value)
    places = list(places_in(value))
    if not places:
        return chance.choice(OTHERS)
    container, key = chance.choice(places)
    what = chance.random()
    if what < 0.15:
        del container[key]
    elif what < 0.2 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif what < 0.3:
        other, which = chance.choice(places)
        container[key] = copy.deepcopy(other[which]) if _has(other, which) else None
    elif what < 0.35:
        container[key] = nested(chance.choice([3, 50, 150]))
    else:
        container[key] = copy.deepcopy(chance.choice(OTHERS))
    return value


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return ``content`` cut short, with bytes flipped, replaced or inserted, or other content."""
    what = chance.random()
    if what < 0.25:
        return content[: chance.randrange(len(content) + 1)]
    if what < 0.3:
        return chance.choice([b"", b"\0", b"\xff\xfe", b"null", b"{}", b"[]", b"9" * 5000, b"\xef\xbb\xbf{}"])
    if what < 0.4:
        deep = chance.choice([b"[", b'{"a":', b"[{", b"(", b"\x00"]) * chance.choice([100, 1000, DEEPEST])
        at = chance.randrange(len(content) + 1)
        return chance.choice([deep, content[:at] + deep + content[at:]])
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 10])):
        at = chance.randrange(len(made) + 1)
        how = chance.random()
        if how < 0.6 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif how < 0.8 and at < len(made):
            made[at] = chance.randrange(256)
        elif how < 0.9:
            made[at:at] = chance.randbytes(chance.randrange(1, 9))
        else:
            del made[at : at + chance.randrange(1, 9)]
    return bytes(made)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(HUGE)


def _longer(path: Path) -> None:
    os.truncate(path, HUGE)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # as a path of a socket must be short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


KINDS: list[Callable[[Path], Any]] = [
    os.mkfifo,
    os.mkdir,
    _socket,
    _sparse,
    lambda path: path.symlink_to(path),
    lambda path: path.symlink_to(path.parent / "nowhere"),
    *(lambda path, at=at: path.symlink_to(at) for at in ("/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/")),
]
"""Functions that make something else in the place of a file."""


def remove(path: Path) -> None:
    """Remove whatever is at ``path``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(path: Path, chance: random.Random, remade: Callable[[random.Random], bytes] | None = None) -> None:
    """Damage the file at ``path``.

    Args:
        remade: returns well-formed content with another value in it.
    """
    what = chance.random()
    if what < 0.12:
        remove(path)
        chance.choice(KINDS)(path)
    elif what < 0.14:
        _longer(path)
    elif what < 0.16:
        remove(path)
    elif what < 0.6 and remade is not None:
        path.write_bytes(remade(chance))
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), chance))


def other_json(content: bytes) -> Callable[[random.Random], bytes]:
    """Return a function that makes the JSON, or lines of JSON, in ``content`` with another value in it."""
    try:
        lines = [json.loads(content)]
    except ValueError:
        lines = [json.loads(line) for line in content.splitlines()]

    def make(chance: random.Random) -> bytes:
        at = chance.randrange(len(lines))
        made = [*lines[:at], with_other_value(lines[at], chance), *lines[at + 1 :]]
        return "\n".join(map(json.dumps, made)).encode()

    return make
