"""Tensors in files of torch.distributed.checkpoint's format, with an index in JSON.

torch's own ``save`` and ``load`` of checkpoints are not called. They gather pickled plans over the default process
group, which is gone once ranks have been lost; and what they write last, ``.metadata``, is a pickle, as are values that
are no tensors. So the steps that writing consists of are taken here, through the public interfaces of planners and
writers, with this rank alone. What is where goes into JSON; and files are read by
:mod:`pycomm.checkpoint.torch_files`, which runs nothing and believes no size.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from pycomm.checkpoint.files import DamagedError, opened, summed, sync_directory
from pycomm.checkpoint.torch_files import read_values
from pycomm.checkpoint.values import dtype_called

Index = dict[str, Any]
"""What is in one directory: ``files``, each with its size and checksum, and ``tensors``, each with its place."""


class _SummingFileSystem(FileSystem):
    """File system that notes the checksum of each file while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Any] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        with summed(Path(path), self.sums) as stream:
            yield stream


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """Write ``tensors``, in CPU memory, to the new directory ``path``, and have them on disk; return their index."""
    writer = FileSystemWriter(path, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files = _SummingFileSystem()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    written = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
    written.wait()
    sync_directory(path)
    places = {result.index.fqn: result.storage_data for result in written.value()}
    return {
        "files": files.sums,
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "file": places[name].relative_path,
                "offset": places[name].offset,
                "length": places[name].length,
            }
            for name, tensor in tensors.items()
        },
    }


def read_tensors(path: Path, index: Index, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors ``names`` of the directory ``path``, in CPU memory.

    Raises DamagedError if they are not what ``index`` says.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        entry = index["tensors"].get(name)
        if entry is None:
            raise DamagedError(f"{path} has no place of {name}")
        if entry["file"] not in index["files"]:
            raise DamagedError(f"{path} has no checksum of the file of {name}")
        found[name] = _read(path / entry["file"], entry, name)
    return found


def _read(path: Path, entry: dict[str, Any], name: str) -> torch.Tensor:
    what, dtype = f"{path}: {name}", dtype_called(entry["dtype"], name)
    with opened(path) as stream:
        if entry["offset"] + entry["length"] > os.fstat(stream.fileno()).st_size:
            raise DamagedError(f"{what} is beyond the file's end")
        value = read_values(stream, entry["offset"], entry["length"], what)
    if not isinstance(value, torch.Tensor) or value.dtype != dtype or list(value.shape) != entry["shape"]:
        raise DamagedError(f"{what} is not of the shape and dtype that were saved")
    if value.numel() * dtype.itemsize > entry["length"]:
        raise DamagedError(f"{what} has more elements than its file has room for")
    if list(value.stride()) == entry["stride"] or not _is_dense(entry["shape"], entry["stride"]):
        return value.detach()
    return torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype).copy_(value)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements lie one after the other, in some order of the dimensions."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True
