"""Corpus: the source text of Python's standard library, present on every machine with CPython."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

_VALIDATION_EVERY = 10
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Corpus of bytes, as uint8 tensors of one dimension."""

    train: torch.Tensor
    validation: torch.Tensor


def source_files(root: Path | None = None) -> list[Path]:
    """Return all ``.py`` files below ``root`` (the standard library), sorted, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < _VALIDATION_EVERY:
        raise FileNotFoundError(f"{len(found)} .py files below {root}, wanted the standard library's source text")
    return sorted(found)


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus; every tenth file is for validation, so that no file is in both parts."""
    files = source_files(root)
    held_out = files[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    rest = [path for i, path in enumerate(files) if i % _VALIDATION_EVERY != _VALIDATION_EVERY - 1]
    return Corpus(_read(rest), _read(held_out))


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def random_starts(text: torch.Tensor, context: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Draw the first bytes of windows of ``context + 1`` bytes."""
    if len(text) <= context:
        raise ValueError(f"context is {context}, but this part of the text has only {len(text)} bytes")
    return torch.randint(len(text) - context, shape, generator=torch.Generator().manual_seed(seed))


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, ``(len(starts), context)`` each: targets are one byte later."""
    picked = text[starts[:, None] + torch.arange(context + 1)].long()
    return picked[:, :-1], picked[:, 1:]
