"""Names of kernels, read from the symbols that the compiler makes of them (Itanium C++ ABI)."""

from __future__ import annotations

import re
from functools import cache

from bench import ROOT

_TYPES = {
    "a": "int8",
    "b": "bool",
    "c": "char",
    "d": "double",
    "f": "float",
    "h": "uint8",
    "i": "int",
    "j": "uint",
    "l": "int64",
    "m": "uint64",
    "s": "int16",
    "t": "uint16",
    "x": "long long",
    "y": "unsigned long long",
}
_LENGTH = re.compile(r"\d+")
_SUBSTITUTION = re.compile(r"S([0-9A-Z]*)_")
_ENUMERATION = re.compile(r"enum class (\w+)[^{;]*{ k([\w, ]+) }")


@cache
def enumerators() -> dict[str, list[str]]:
    """Return the enumerators, without their k, of each enumeration of the kernels: a symbol has only their numbers."""
    headers = (ROOT / "csrc" / "kernels").rglob("*.h")
    found = (match for header in headers for match in _ENUMERATION.finditer(header.read_text()))
    return {match[1]: match[2].split(", k") for match in found}


def kernel_name(symbol: str) -> str:
    """Return the last name of ``symbol`` with its template arguments: ``step_kernel<Adam,float>``."""
    return _Reader(symbol).name() if symbol.startswith("_Z") else symbol


class _Reader:
    """Reader of a symbol, from left to right."""

    def __init__(self, symbol: str) -> None:
        self._text = symbol
        self._at = len("_Z")
        self._known: list[str] = []  # what is not written out again

    def name(self) -> str:
        """Read a name, nested or not; returns its last part."""
        if not self._skip("N"):
            name = self._part()
            return self._with_arguments(name) if self._text.startswith("I", self._at) else name
        name = ""
        while not self._skip("E"):
            name = self._with_arguments(name) if self._text[self._at] == "I" else self._part()
        return name

    def _skip(self, letter: str) -> bool:
        found = self._text.startswith(letter, self._at)
        self._at += found
        return found

    def _part(self) -> str:
        if substitution := _SUBSTITUTION.match(self._text, self._at):
            self._at = substitution.end()
            return self._known[int(substitution[1], 36) + 1 if substitution[1] else 0]
        length = _LENGTH.match(self._text, self._at)
        assert length is not None, f"{self._text} at {self._at}"
        self._at = length.end() + int(length[0])
        return self._new(self._text[length.end() : self._at])

    def _new(self, name: str) -> str:
        self._known.append(name)
        return name

    def _with_arguments(self, name: str) -> str:
        self._skip("I")
        found = []
        while not self._skip("E"):
            found.append(self._argument())
        return self._new(f"{name}<{','.join(found)}>")

    def _argument(self) -> str:
        if self._skip("L"):  # a value, behind its type
            names = enumerators().get(self._argument())
            begin, self._at = self._at, self._text.index("E", self._at) + 1
            value = self._text[begin : self._at - 1].replace("n", "-")
            return names[int(value)] if names else value
        if (letter := self._text[self._at]) in _TYPES:
            self._at += 1
            return _TYPES[letter]
        return self.name()
