"""Tensors in files of torch.distributed.checkpoint's format, with an index in JSON.

torch's own ``save`` and ``load`` of checkpoints are not called. They gather pickled plans over the default process
group, which is unusable once ranks are lost; and they pickle ``.metadata`` and values that are not tensors. Instead,
this rank alone calls the public interfaces of planners and writers, and stores the index as JSON.
:mod:`pycomm.training.checkpoint.torch_files` reads the files: it runs nothing from them and trusts no size in them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from pycomm.training.checkpoint.files import summed, sync_directory
from pycomm.training.checkpoint.torch_files import Index


class _SummingFileSystem(FileSystem):
    """File system that computes the checksum of each file while writing it."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Any] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        with summed(Path(path), self.sums) as stream:
            yield stream


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Index:
    """Write ``tensors``, in CPU memory, to the new directory ``path`` and to disk; return their index."""
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
