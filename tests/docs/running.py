"""Runs the Python of a page on a rank."""

from __future__ import annotations

import ast
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import kernels, schedule
from tests.docs.pages import Block


class Net(nn.Sequential):
    """The model of every page."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def surroundings(folder: str) -> dict[str, Any]:
    """Return what a page may take for granted: imports, and a model, an optimizer and data that suit each other."""
    torch.manual_seed(dist.get_rank())
    model = Net()
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(6)]
    x, y = batches[0]
    return {
        "__name__": "docs",
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "pycomm": pycomm,
        "kernels": kernels,
        "schedule": schedule,
        "Net": Net,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loss_fn": nn.CrossEntropyLoss(),
        "batches": batches,
        "x": x,
        "y": y,
        "folder": folder,
    }


def run_blocks(blocks: Sequence[Block]) -> None:
    """Run ``blocks`` one after the other, each in surroundings of its own unless it continues the one before."""
    with _one_folder() as folder, _the_group_that_is_there():
        names: dict[str, Any] = {}
        for block in blocks:
            if not block.continued:
                _clean_up(names)
                names = surroundings(folder)
            try:
                exec(compile(_placed(block), block.page, "exec"), names)
            except Exception as error:
                raise AssertionError(f"{block.where}: {type(error).__name__}: {error}") from error
        _clean_up(names)


@contextmanager
def _one_folder() -> Iterator[str]:
    """Make a folder, the same for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()  # before rank 0 removes it


def _the_group_that_is_there() -> Any:
    """Let pages make and destroy a process group without doing so: the ranks that run them have one."""
    return patch.multiple(dist, init_process_group=_init_process_group, destroy_process_group=lambda: None)


def _init_process_group(backend: str) -> None:
    assert backend in ("gloo", "pycomm")  # the group that is there is on Gloo


def _placed(block: Block) -> ast.Module:
    """Return the block's code with the page's line numbers."""
    tree = ast.parse(block.code, block.page)
    ast.increment_lineno(tree, block.line - 1)
    return tree


def _clean_up(names: dict[str, Any]) -> None:
    """Detach and close what a block has made, on all ranks at the same place."""
    for value in names.values():
        if isinstance(value, pycomm.Reducer):
            value.detach()
        elif isinstance(value, pycomm.Communicator):
            value.close()
    names.clear()
    gc.collect()
