"""Types of ``pycomm plan``'s arguments."""

from __future__ import annotations

import argparse
import math
import re

_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"  # 12, 1.5, .5, 1e12
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def size(text: str) -> float:
    """Parse a number of bytes: 100MB, 64KiB, 10 G."""
    match = re.fullmatch(_NUMBER + r"\s*([kmg]i?)?b?", text.strip().lower())
    value = math.inf if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 100MB or 64KiB")
    return value


def positive_size(text: str) -> float:
    """Parse a number of bytes above 0."""
    value = size(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size above 0, such as 10GB")
    return value


def sizes(text: str) -> tuple[float, ...]:
    """Parse numbers of bytes above 0, separated by commas."""
    return tuple(positive_size(word) for word in text.split(","))


def seconds(text: str) -> float:
    """Parse a time above 0: 0.05, 50ms, 50us."""
    match = re.fullmatch(_NUMBER + r"\s*(s|ms|us)?", text.strip().lower())
    value = 0.0 if match is None else float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2] or "s"]
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a time above 0, such as 50ms")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number from 0 to 1")
    return value


def rate(text: str) -> float:
    """Parse a rate above 0: 19.5T, 300G, 1e12."""
    match = re.fullmatch(_NUMBER + r"\s*([kmgtp]?)", text.strip().lower())
    value = 0.0 if match is None else float(match[1]) * 1000.0 ** "_kmgtp".index(match[2] or "_")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number above 0, such as 19.5T")
    return value
