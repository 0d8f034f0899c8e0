"""Files of ``torch.save`` are read as torch reads them, without running anything and without believing any size."""

from __future__ import annotations

import collections
import io
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycomm.training.checkpoint.files import DamagedError
from pycomm.training.checkpoint.torch_files import load_values

BASE = torch.arange(24.0)
VALUES: dict[Any, Any] = {
    "tensors": [BASE, BASE[3:], BASE.view(4, 6).T, BASE[::2], torch.empty(0, 3), torch.tensor(3)],
    "dtypes": [
        torch.ones(3).to(getattr(torch, name)) for name in ("bool", "int16", "bfloat16", "float8_e5m2", "uint16")
    ],
    "layout": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(7),
    "parameter": nn.Parameter(torch.rand(3)),
    "module": nn.Linear(2, 3).state_dict(),
    "containers": ((), (1,), [2.5, {"a": None}], {1, "b"}, collections.Counter(a=2), torch.Size([1, 2])),
    "numbers": [2**100, -5, 70000, True, math.inf, 1j, torch.float16],
    "text": ["é\0", b"x\xff"],
    7: {None: 1, 1.5: 2},
}


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        kinds = [(type(x), x.dtype, x.shape, x.stride(), x.requires_grad) for x in (a, b)]
        return kinds[0] == kinds[1] and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("checksums", [True, False])
def test_plain_values_come_back(tmp_path: Path, checksums: bool) -> None:
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(VALUES, tmp_path / "file")
    finally:
        torch.serialization.set_crc32_options(True)
    found = load_values(tmp_path / "file")
    assert is_same(found, VALUES)
    first, second = found["tensors"][:2]
    first[3] = 100.0
    assert second[0] == 100.0  # in the same memory, as they were


def program_of(value: Any) -> tuple[bytes, dict[str, bytes]]:
    """Return the program of a saved value, and the other parts of its archive."""
    saved = io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    return parts.pop("archive/data.pkl"), parts


def write(path: Path, program: bytes, parts: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in {"archive/data.pkl": program, **parts}.items():
            archive.writestr(name, content)


class Evil:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.arguments[0], self.arguments[1:]


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def doubled(levels: int) -> list[Any]:
    """Return a list that has 2^levels parts, in a file of some levels."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: Evil(os.mkdir, str(folder / "made")), "posix.mkdir"),
        (lambda folder: Evil(bytearray, 10**10), "it calls '__builtin__ bytearray'"),
        (lambda folder: Evil(torch.Tensor, 10**10), "it calls 'torch Tensor'"),
        (lambda folder: {number * (2**61 - 1): 0 for number in range(2_000)}, "integers beyond 64 bits"),
        (lambda folder: [os.mkdir], "posix.mkdir"),
        (lambda folder: torch.ones(2).to_sparse(), "it calls"),
        (lambda folder: torch.empty(10, device="meta"), "it calls"),
        (lambda folder: torch.ones(1).expand(2**40), r"it has a tensor of shape \[1099511627776\] in 4 bytes"),
        (lambda folder: itself(), "it is nested more than 100 levels deep"),
        (lambda folder: nested(150), "it is nested more than 100 levels deep"),
        (lambda folder: doubled(60), "or has more than [0-9]+ parts"),
    ],
)
def test_what_is_no_plain_value(make: Callable[[Path], Any], says: str, tmp_path: Path) -> None:
    torch.save(make(tmp_path), tmp_path / "file")
    with pytest.raises(DamagedError, match=f"{tmp_path}/file is damaged, or holds more than plain values: .*{says}"):
        load_values(tmp_path / "file")
    assert not (tmp_path / "made").exists()


@pytest.mark.timeout(60)
def test_sizes_are_not_believed(tmp_path: Path) -> None:
    program, parts = program_of(torch.ones(4))
    assert program.count(b"K\x04") == 2  # elements of the memory, and the shape
    third = b"K\x04".join(program.split(b"K\x04")[:2]) + b"J\0\0\0\x10" + program.split(b"K\x04")[2]
    for lie in (program.replace(b"K\x04", b"J\0\0\0\x10"), program.replace(b"K\x04", b"J\0\0\0\x10", 1), third):
        write(tmp_path / "file", lie, parts)
        with pytest.raises(DamagedError, match="is damaged, or holds more than plain values: "):
            load_values(tmp_path / "file")
    # One part of memory is said to be of the other one's size.
    program, parts = program_of([torch.ones(4), torch.ones(300)])
    write(tmp_path / "file", program.replace(b"K\x04", b"M,\x01"), parts)
    with pytest.raises(DamagedError, match="is damaged, or holds more than plain values: "):
        load_values(tmp_path / "file")


@pytest.mark.timeout(60)
def test_parts_of_a_bomb_are_not_taken_apart(tmp_path: Path) -> None:
    program, parts = program_of(torch.zeros(1 << 20))
    write(tmp_path / "file", program, parts, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "file").stat().st_size < 1 << 16
    with pytest.raises(DamagedError, match="parts that are larger than the file"):
        load_values(tmp_path / "file")


@pytest.mark.timeout(60)
def test_every_part_is_compared_with_its_checksum(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file")
    content = bytearray((tmp_path / "file").read_bytes())
    content[content.index(torch.tensor(500.0).numpy().tobytes())] ^= 1
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DamagedError, match="Bad CRC-32 for file .*data/0"):
        load_values(tmp_path / "file")


@pytest.mark.timeout(60)
def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="file"):
        load_values(path)
    for content in (b"", b"PK\3\4", bytes(1 << 16)):
        path.write_bytes(content)
        with pytest.raises(DamagedError, match=f"{path} is damaged, or holds more"):
            load_values(path)
    with open(path, "wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(DamagedError, match=f"{path} is damaged, or holds more"):
        load_values(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedError, match=f"{path} is a FIFO"):
        load_values(path)
