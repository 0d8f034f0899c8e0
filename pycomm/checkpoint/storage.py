"""Tensors in files of torch.distributed.checkpoint's format, with an index in JSON.

torch's own ``save`` and ``load`` of checkpoints are not called. They gather pickled plans over the default process
group, which is gone once ranks have been lost; and what they write last, ``.metadata``, is a pickle, as are values that
are no tensors. So the steps that they consist of are taken here, through the public interfaces of planners, writers
and readers, with this rank alone: what is where goes into JSON, and the reader loads tensors with
``weights_only=True``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pycomm.checkpoint.files import DamagedError, summed, sync_directory
from pycomm.checkpoint.values import dtype_called

Index = dict[str, Any]
"""What is in one directory: ``files``, each with its size and checksum, and ``tensors``, each with its place."""


@dataclass(frozen=True)
class _Place:
    """Place of a tensor, with the names that torch's reader looks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


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
    """Return the tensors ``names`` of the directory ``path``, in CPU memory."""
    entries = {name: index["tensors"][name] for name in names}
    if not entries:
        return {}
    state: dict[str, Any] = {
        name: torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype_called(entry["dtype"], name))
        for name, entry in entries.items()
    }
    metadata = Metadata({}, storage_data={})
    for name, entry in entries.items():
        if entry["file"] not in index["files"]:
            raise DamagedError(f"{path} has no checksum of the file of {name}")
        start = torch.Size([0] * len(entry["shape"]))
        chunk = ChunkStorageMetadata(start, torch.Size(entry["shape"]))
        properties = TensorProperties(dtype=state[name].dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, chunk.sizes, [chunk])
        place = _Place(entry["file"], entry["offset"], entry["length"])
        metadata.storage_data[MetadataIndex(name, start)] = place
    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plan)[0]), planner).wait()
    return cast(dict[str, torch.Tensor], state)
